"""Measures what measuring costs a training loop, and what failures cost it.

    python benchmarks/training_cost.py [--front F ...] [--step MS ...] [--loop sleep|compute ...]
        [--gpus N ...] [--node zeusd|process ...] [--seconds S] [--peers FOLDER]
    python benchmarks/training_cost.py --failures [--front F ...] [--node ...] [--event E ...]
    python benchmarks/training_cost.py --search

1. Each row is a process: a bare loop, then the same loop with one way to measure (front). It shows
   the ratio of the two mean step times, the processor time that it adds (of one core; beside other
   work this says more than the ratio), the longest step of both beyond the bare loop's mean, and
   how long the end of training takes. Without options: steps of 10 ms, sleeping and computing, 1
   GPU, with and without zeusd. GPUs are the C stand-in for libnvidia-ml (update period 100 ms).
   Hugging Face's and Lightning's trainers and ZeusDataLoader are real ones; `vllm` is the probe on
   a scheduler like vLLM's.
2. `--failures`: the driver or zeusd fails in the middle of a step of a loop of 10 ms steps. Shows
   the longest delay of a step, the longest time between two steps (a busy machine makes steps
   longer, too), the delay of all steps in the first second and after it, of the end of training
   and of the process, and the warnings.
3. `--search`: the power limit optimizer on a simulated A100, alone and with windows, callbacks
   and reads on its own monitor: steps to the choice, the choice, the longest time that the
   optimizer and the windows take in a step, and how often that is over 20 ms.

`--peers` is a folder with ml-energy/zeus, codecarbon and nvitop (`pip install --target FOLDER zeus
codecarbon nvitop`), which run as rows if they can be imported. It needs gcc.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.training_failures import EVENTS, failures
from benchmarks.training_fronts import FRONTS, PEERS
from benchmarks.training_rows import Row, node, run


def costs(options: argparse.Namespace) -> None:
    """Prints the cost of each front."""
    print(
        f"{'node':8} {'GPUs':>4} {'loop':8} {'step':>6} {'front':15} {'ratio':>6} {'CPU':>6} "
        f"{'longest':>9} {'(bare)':>9} {'end':>9}"
    )
    fronts = [*options.front, *(PEERS if options.peers else [])]
    rows = product(options.node, options.gpus, fronts, options.loop, options.step)
    for kind, gpus, front, loop, step in rows:
        if front in PEERS and kind != "process":
            continue
        with node(kind, gpus) as opened:
            if front in PEERS:
                opened.env["PYTHONPATH"] = options.peers
            seen = run(Row(front, gpus, step, loop, options.seconds), opened.env)
        row = f"{kind:8} {gpus:4} {loop:8} {step:3g} ms {front:15} "
        if not seen:
            print(f"{row} does not run here", flush=True)
            continue
        ms = [seen[name] * 1000 for name in ("longest", "bare_longest", "end")]
        figures = " ".join(f"{one:6.1f} ms" for one in ms)
        print(f"{row}{seen['ratio']:6.3f} {seen['cpu']:6.1%} {figures}", flush=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--front", nargs="+", choices=[*FRONTS, *PEERS], default=list(FRONTS), metavar="F")
    add("--step", nargs="+", type=float, default=[10.0], metavar="MS")
    add("--loop", nargs="+", choices=["sleep", "compute"], default=["sleep", "compute"])
    add("--gpus", nargs="+", type=int, default=[1], metavar="N")
    add("--node", nargs="+", choices=["zeusd", "process"], default=["zeusd", "process"])
    add("--seconds", type=float, default=1.5, help="of each loop")
    add("--peers", metavar="FOLDER")
    add("--failures", action="store_true")
    add("--event", nargs="+", choices=list(EVENTS), default=list(EVENTS), metavar="E")
    add("--search", action="store_true")
    options = parser.parse_args()
    if options.search:
        from benchmarks.training_search import search  # imports what tests need

        search()
    elif options.failures:
        failures(options)
    else:
        costs(options)


if __name__ == "__main__":
    main()

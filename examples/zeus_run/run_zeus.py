"""Trains a recurring job again and again, each time with the batch size that a policy chooses.

    python run_zeus.py --simulate v100          # on a simulated GPU, without one of your own
    python run_zeus.py                          # on this node's first GPU

The job is `train.py`. Its files, and the history of all runs, are in a folder below --log_base.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeus.analyze import HistoryEntry
from zeus.exceptions import ZeusBaseError
from zeus.job import Job
from zeus.policy import make_policy
from zeus.run import ZeusMaster
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Runs the job as often as it recurs. Returns the exit code."""
    options = parse()
    sizes = powers_of_two(options.b_min, options.b_max)
    job = Job(
        dataset="synthetic",
        network="small",
        optimizer="adam",
        target_metric=options.target_metric,
        max_epochs=options.max_epochs,
        default_bs=options.b_0,
        default_lr=options.lr_0,
        workdir=str(FOLDER),
        command=[
            *(sys.executable, "train.py", "--batch_size", "{bs}", "--lr", "{lr}"),
            *("--seed", "{seed}", "--epochs", "{epochs}", "--samples", str(options.samples)),
        ],
    )
    try:
        policy = make_policy(options.policy, seed=options.seed, window_size=options.window_size)
        with simulated_node(options.simulate):
            master = ZeusMaster(
                policy,
                log_base=os.path.abspath(options.log_base),
                seed=options.seed,
                observer_mode=options.observer_mode,
                profile_warmup_iters=options.profile_iters[0],
                profile_measure_iters=options.profile_iters[1],
            )
            history = master.run(
                job, options.num_recurrence, sizes, options.beta_knob, options.eta_knob
            )
    except (ValueError, RuntimeError, OSError, ZeusBaseError) as error:
        print(f"run_zeus.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    tell(history)
    return 0


def tell(history: Sequence[HistoryEntry]) -> None:
    """Prints all runs, and what the last cost beside the first."""
    print("\n   run  batch size  time (s)  energy (J)")
    for number, run in enumerate(history, 1):
        end = "" if run.reached else "  given up"
        print(f"{number:6} {run.bs:11} {run.time:9.1f} {run.energy:11.0f}{end}")
    first, last = history[0], history[-1]
    print(
        f"The last run took {last.energy / first.energy - 1:+.0%} energy and "
        f"{last.time / first.time - 1:+.0%} time of the first."
    )


def powers_of_two(low: int, high: int) -> list[int]:
    """The powers of two from one to another."""
    return [1 << power for power in range(31) if low <= 1 << power <= high]


@contextlib.contextmanager
def simulated_node(spec: str | None) -> Iterator[None]:
    """Has this process and its children find a zeusd of their own on simulated GPUs.

    Raises:
        RuntimeError: It does not start; the message is what it says.
    """
    if spec is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zeus-run-") as folder:
        socket, log_path = f"{folder}/zeusd.sock", Path(folder, "zeusd.log")
        command = [sys.executable, "-m", "zeusd", "serve", "--simulate", spec]
        command += ["--socket", socket, "--state-dir", f"{folder}/state"]
        with log_path.open("wb") as log:
            daemon = subprocess.Popen(command, stderr=log)
        try:
            while not answers(socket):
                if daemon.poll() is not None:
                    raise RuntimeError(f"zeusd did not start: {log_path.read_text().strip()}")
                time.sleep(0.1)
            os.environ["ZEUSD_SOCK_PATH"] = socket
            yield
        finally:
            daemon.terminate()
            daemon.wait()


def answers(socket: str) -> bool:
    """Whether a zeusd listens there."""
    try:
        with Client(socket, timeout_s=1.0) as client:
            client.node()
    except ZeusIpcError:
        return False
    return True


def two_numbers(text: str) -> tuple[int, int]:
    """Two whole numbers with a comma between them."""
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not as 3,12 is") from None
    return first, second


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--simulate", metavar="SPEC", help="run on simulated GPUs, such as v100 or a40")
    add("--log_base", default="zeus_logs", help="folder for the job's files (zeus_logs)")
    add("--seed", type=int, default=1, help="of the first run and of the policy (1)")
    add("--b_0", type=int, default=64, help="batch size of the first run (64)")
    add("--lr_0", type=float, default=0.001, help="learning rate that belongs to it (0.001)")
    add("--b_min", type=int, default=32, help="smallest batch size (32)")
    add("--b_max", type=int, default=512, help="largest batch size (512)")
    add("--num_recurrence", type=int, default=10, help="how many times the job recurs (10)")
    add("--eta_knob", type=float, default=0.5, help="1: energy only, 0: time only (0.5)")
    add("--beta_knob", type=float, default=2.0, help="give up at so many times the best cost (2)")
    add("--target_metric", type=float, default=0.7, help="accuracy to reach (0.7)")
    add("--max_epochs", type=int, default=30, help="give up after so many epochs (30)")
    add("--window_size", type=int, default=0, help="of each size count so many runs (0: all)")
    add("--policy", default="gp", help="gp, pruning-gts or gts (gp)")
    add(
        "--observer_mode", action="store_true", help="measure power limits, but stay at the highest"
    )
    add(
        "--profile_iters",
        type=two_numbers,
        default=(3, 12),
        metavar="WARMUP,MEASURE",
        help="iterations at each power limit (3,12)",
    )
    add("--samples", type=int, default=2048, help="of an epoch (2048)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

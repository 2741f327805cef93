"""Trains a pipeline of `torch.distributed.pipelining`, first at full clocks, then under a plan.

    torchrun --nnodes 1 --nproc_per_node 4 train_pipeline.py --server-url http://127.0.0.1:7787

measures some iterations of each, and prints time and energy side by side. Each process is a stage
of the model on its own GPU. Simulated GPUs (--simulate PROFILE.csv) replay the profile's
instructions while the model is trained on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from simulated import Instructions, node_is_simulated
from trainer import SCHEDULES, Phase, Trainer

from zeus.callback import Callback
from zeus.exceptions import ZeusBaseError
from zeus.monitor import ZeusMonitor
from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer
from zeus.optimizer.pipeline_frequency.online_profiler import ProfilerSettings
from zeus.optimizer.pipeline_frequency.plans import Plan, read_plan
from zeus_ipc.errors import ZeusIpcError

PLAN_TIMEOUT_S = 120.0


def main() -> None:
    options = parse()
    rank, world, gpu = place()
    if options.num_mbs < world:
        fail(f"--num-mbs must be at least {world}, one for each stage, not {options.num_mbs}")
    device = torch.device("cuda", gpu) if options.device == "cuda" else torch.device("cpu")
    if node_is_simulated() and options.simulate is None:
        fail("the GPUs are simulated; name the profile that they run with --simulate PROFILE.csv")
    torch.set_num_threads(1)
    # Errors are found before the processes wait for each other.
    with told_in_a_sentence():
        monitor = ZeusMonitor(gpu_indices=[gpu], cpu_indices=[])
        kernels = Instructions(monitor.gpus[gpu], f"profile:{options.simulate}#stage={rank}")
        expected = None if options.plan is None else read_plan(options.plan)

    with kernels, process_group(device):
        trainer = Trainer(options.schedule, options.num_mbs, device, monitor)
        full = trainer.train([kernels], options.warmup, options.iterations)
        if options.server_url is None:
            say(f"full clocks: {full}")
            return
        # From here on, each instruction runs at its clock in the server's plan.
        with told_in_a_sentence():
            pfo = PipelineFrequencyOptimizer(
                rank=rank,
                dp_rank=0,
                pp_rank=rank,
                tp_rank=0,
                device_id=gpu,
                dp_degree=1,
                pp_degree=world,
                tp_degree=1,
                world_size=world,
                server_url=options.server_url,
                # The rest is for a server without a plan, which makes one from the measurements.
                schedule=options.schedule,
                num_microbatches=options.num_mbs,
                profile=options.profile and ProfilerSettings(every=options.profile),
            )
        with pfo:
            if options.profile:
                profile(trainer, [kernels, pfo], pfo)
            under_plan = trainer.train([kernels, pfo], options.warmup, options.iterations)
        if rank == 0:
            report(full, under_plan, expected, options)


def profile(
    trainer: Trainer, callbacks: Sequence[Callback], pfo: PipelineFrequencyOptimizer
) -> None:
    """Trains while instructions are measured at each clock, until there is a plan."""
    begun = last_measured = time.monotonic()

    def ready() -> bool:
        nonlocal last_measured
        if pfo.profiling:
            last_measured = time.monotonic()
        # If a rank cannot measure, there will be no plan; its warning says why.
        return pfo.plan_version > 0 or time.monotonic() - last_measured > PLAN_TIMEOUT_S

    count = trainer.train_until(callbacks, ready)
    what = "profiled and planned" if pfo.plan_version else "profiled, and no plan came,"
    say(f"{what} in {count} iterations, {time.monotonic() - begun:.0f} s")


def report(
    full: Phase, under_plan: Phase, expected: Plan | None, options: argparse.Namespace
) -> None:
    """Prints time and energy of an iteration, and writes them to a file if requested."""
    rows = [("full clocks", full.time_s, full.energy_j)]
    rows.append(("under the plan", under_plan.time_s, under_plan.energy_j))
    if expected is not None:
        rows.append(("as planned", expected.time_s, expected.energy_j))
    print("one iteration    time (s)   energy (J)")
    for name, time_s, energy_j in rows:
        slower, saved = time_s / full.time_s - 1, energy_j / full.energy_j - 1
        print(f"{name:15} {time_s:9.3f} {energy_j:12.1f}", end="")
        print("" if name == "full clocks" else f"   {slower:+.1%} time, {saved:+.1%} energy")
    print(f"loss {full.first_loss:.2f} -> {under_plan.last_loss:.2f}, ", end="")
    print(f"accuracy {under_plan.accuracy:.1%}", flush=True)
    if options.output is not None:
        found = {"full_clocks": asdict(full), "under_the_plan": asdict(under_plan)}
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add(
        "--server-url",
        help="URL of the server with the plan; without it, train only at full clocks",
    )
    add("--num-mbs", type=positive_integer, default=8, help="microbatches per iteration (8)")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="1f1b")
    add("--warmup", type=positive_integer, default=2, help="warm-up iterations (2)")
    add(
        "--iterations",
        type=positive_integer,
        default=8,
        help="iterations to measure in each case (8)",
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cuda", "cpu"], default=default, help="default: cuda if available")
    add("--simulate", type=Path, metavar="PROFILE.csv", help="profile that simulated GPUs replay")
    profile_help = "first measure instructions at every N-th clock, for a server without a plan"
    add("--profile", type=positive_integer, default=0, metavar="N", help=profile_help)
    add("--plan", type=Path, help="plan file, to print its prediction beside the rest")
    add("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    if options.profile and options.server_url is None:
        fail("--profile needs a server that makes the plan: add --server-url")
    return options


def place() -> tuple[int, int, int]:
    """Returns this process's rank, the world size, and the local rank, which is its GPU."""
    try:
        rank, world, local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
    except KeyError:
        rank, world, local_rank = 0, 1, 0
    if world < 2:
        fail(
            "a pipeline has several stages, each a process: start it with torchrun --nnodes 1 "
            "--nproc_per_node 4"
        )
    return rank, world, local_rank


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initializes torch.distributed: over NCCL if it trains on GPUs, else over gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def say(line: str) -> None:
    """Prints on one process only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


@contextlib.contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Exits with the message of an error that the user can fix."""
    try:
        yield
    except (ZeusBaseError, ZeusIpcError, ImportError, ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Exits as argparse does for invalid options."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def positive_integer(text: str) -> int:
    """Type of a command line option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


if __name__ == "__main__":
    main()

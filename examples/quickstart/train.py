"""Trains while the power limit optimizer finds the best limit, then prints the result.

    python train.py [--steps N] [--max-slowdown F] [--output DIR]

The loop in `train` is all that a training script needs. It is a client of the zeusd that
ZEUSD_SOCK_PATH names, on a simulated GPU or on a real one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import report
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from work import ReplayedResNet50, TorchResNet50, TrainingWork

from zeus.device import GPU
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import (
    Done,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    ZeusCost,
)
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

MOST_SEARCHES = 3
"""The search may take this many times the steps it has planned."""
LIMITS = 9
"""About so many limits are tried."""
CHOSEN_STEPS = 20
"""Steps at the chosen limit."""


def train(optimizer: GlobalPowerLimitOptimizer, work: TrainingWork, steps: Iterable[int]) -> None:
    """An ordinary training loop with the optimizer's callbacks in it."""
    optimizer.on_epoch_begin()
    for _ in steps:
        optimizer.on_step_begin()
        work.step()
        optimizer.on_step_end()
    work.finish()
    optimizer.on_epoch_end()


def steps_to_choose(optimizer: GlobalPowerLimitOptimizer) -> Iterator[int]:
    """Yields steps until a limit is chosen, and some at that limit.

    There are usually as many as the search has planned. There are more if zeusd was slow to answer:
    a measurement that it interrupted is repeated.
    """
    for step in range(MOST_SEARCHES * optimizer.progress[1]):
        yield step
        if isinstance(optimizer.state, Done):
            break
    yield from range(CHOSEN_STEPS)


def limit_step_w(gpu: GPU) -> int:
    """Difference between two limits: 25 W, or more if the GPU's range is wide."""
    low_mw, high_mw = gpu.get_power_management_limit_constraints()
    return max(1, round((high_mw - low_mw) / 25_000 / LIMITS)) * 25


def show_progress(progress: Progress, optimizer: GlobalPowerLimitOptimizer) -> None:
    """Shows a progress bar while the optimizer tries each limit."""
    done, total = optimizer.progress
    task = progress.add_task("", total=total, completed=done)

    def update(optimizer: GlobalPowerLimitOptimizer) -> None:
        done, _ = optimizer.progress
        state = optimizer.state
        what, limit = "trying", optimizer.current_power_limit
        if isinstance(state, Done):
            what, limit = "chosen", state.optimal_power_limit
        progress.update(task, completed=done, description=f"{what} {limit / 1000:g} W")

    optimizer.on_progress = update
    update(optimizer)


def main() -> int:
    """Runs the quickstart. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Find the best power limit during training.")
    parser.add_argument("--steps", type=int, help="training steps (enough to try every limit)")
    parser.add_argument("--warmup-steps", type=int, default=5, help="at each limit (5)")
    parser.add_argument("--profile-steps", type=int, default=20, help="at each limit (20)")
    parser.add_argument(
        "--max-slowdown",
        type=float,
        help="lowest limit that costs at most this factor in time, such as 1.1; "
        "without, the least energy-time cost",
    )
    parser.add_argument("--output", type=Path, default=Path("quickstart-results"))
    options = parser.parse_args()
    console = Console()

    try:
        node = Client().node()
    except ZeusIpcError as error:
        console.print(f"[red]{error}[/]")
        return 1
    selector: OptimumSelector = ZeusCost(eta_knob=0.5)
    if options.max_slowdown is not None:
        selector = MaxSlowdownConstraint(options.max_slowdown)
    profile_path = options.output / "power_limit_profile.json"
    profile_path.unlink(missing_ok=True)

    monitor = ZeusMonitor(gpu_indices=[0])
    gpu = monitor.gpus[0]
    simulated = node.simulated is not None
    # Before the optimizer: a site may let only users who compute on a GPU set its limits.
    work: TrainingWork = ReplayedResNet50(node, gpu.uuid) if simulated else TorchResNet50()
    optimizer = GlobalPowerLimitOptimizer(
        monitor,
        selector,
        warmup_steps=options.warmup_steps,
        profile_steps=options.profile_steps,
        pl_step=limit_step_w(gpu),
        profile_path=profile_path,
        search="exhaustive",  # to show the cost of every limit; a job does not need this
    )
    console.print(f"Training: {work.name}")
    console.print(f"on {'a simulated ' if simulated else ''}{gpu.get_name()}, as a client of zeusd")

    bar = (
        TextColumn("{task.description:>12}"),
        BarColumn(40),
        TextColumn("{task.percentage:>3.0f} %"),
    )
    with Progress(*bar, TimeElapsedColumn(), console=console) as progress:
        show_progress(progress, optimizer)
        steps = range(options.steps) if options.steps else steps_to_choose(optimizer)
        with monitor.window("training") as window:
            train(optimizer, work, steps)
    state = optimizer.state
    if optimizer.disabled or not isinstance(state, Done) or not optimizer.measurements:
        console.print(
            "[red]No limit was chosen: the run was too short, or the warning above says why.[/]"
        )
        return 1
    chosen_w = state.optimal_power_limit / 1000
    optimizer.on_train_end()

    console.print()
    report.print_table(console, optimizer.measurements, chosen_w, options.profile_steps)
    report.print_saving(console, optimizer.measurements, chosen_w)
    console.print(f"The whole run took {window.time:.0f} s and {window.total_energy:.0f} J.")
    right = True
    if isinstance(work, ReplayedResNet50):
        right = report.check_against_truth(
            console,
            optimizer.measurements,
            chosen_w,
            options.profile_steps,
            selector,
            report.truth_of(work.workload, gpu.get_name(), optimizer.power_limits),
        )
    picture = options.output / "time_energy.png"
    report.draw(picture, optimizer.measurements, chosen_w, work.name)
    console.print(f"Wrote {profile_path} and {picture}.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

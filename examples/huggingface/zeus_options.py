"""Command line options for the power limit optimizer, shared by both examples."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from simulated import simulated_steps
from transformers import Trainer, TrainingArguments

from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import (
    Energy,
    HFGlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    Time,
    ZeusCost,
)


@dataclass
class ZeusArguments:
    """Options of the power limit optimizer. Those that are not set keep its defaults."""

    selector: str | None = field(
        default=None,
        metadata={
            "help": "what is best: zeus-cost, energy, time or max-slowdown; the last if a slowdown "
            "is given, else zeus-cost",
            "choices": ["zeus-cost", "energy", "time", "max-slowdown"],
        },
    )
    max_slowdown: float | None = field(
        default=None,
        metadata={
            "help": "lowest limit that costs at most this factor in time, such as 1.1 "
            "(default: ZEUS_MAX_SLOWDOWN, if it is set)"
        },
    )
    eta_knob: float = field(
        default=0.5, metadata={"help": "for zeus-cost: 1 counts only energy, 0 only time"}
    )
    zeus_search: str | None = field(
        default=None,
        metadata={
            "help": "adaptive, or exhaustive, which measures every limit",
            "choices": ["adaptive", "exhaustive"],
        },
    )
    zeus_warmup_steps: int | None = field(
        default=None, metadata={"help": "unmeasured steps at each limit"}
    )
    zeus_profile_steps: int | None = field(
        default=None, metadata={"help": "measured steps at each limit"}
    )
    zeus_pl_step: int | None = field(default=None, metadata={"help": "distance between limits, W"})
    zeus_profile_path: str | None = field(
        default=None, metadata={"help": "JSON file that stores the measurements for the next run"}
    )

    def __post_init__(self) -> None:
        if self.max_slowdown is None and os.environ.get("ZEUS_MAX_SLOWDOWN"):
            try:
                self.max_slowdown = float(os.environ["ZEUS_MAX_SLOWDOWN"])
            except ValueError:
                raise ValueError("ZEUS_MAX_SLOWDOWN must be a number, such as 1.1") from None
        if self.selector is None:
            self.selector = "zeus-cost" if self.max_slowdown is None else "max-slowdown"
        if self.selector == "max-slowdown" and self.max_slowdown is None:
            raise ValueError("--selector max-slowdown needs --max_slowdown, such as 1.1")


def make_selector(options: ZeusArguments) -> OptimumSelector:
    """Returns the selector that the options name."""
    if options.selector == "energy":
        return Energy()
    if options.selector == "time":
        return Time()
    if options.selector == "max-slowdown":
        assert options.max_slowdown is not None
        return MaxSlowdownConstraint(options.max_slowdown)
    return ZeusCost(options.eta_knob)


def attach_optimizer(
    trainer: Trainer, args: TrainingArguments, options: ZeusArguments
) -> HFGlobalPowerLimitOptimizer:
    """Adds the power limit optimizer to a trainer, and logs its figures through the trainer.

    With several processes, each has its own GPU; a single process has all GPUs that it sees.
    """
    own_gpu = [args.local_process_index] if args.world_size > 1 else None
    monitor = ZeusMonitor(gpu_indices=own_gpu, cpu_indices=[])
    steps = simulated_steps(monitor)
    if steps is not None:
        trainer.add_callback(steps)
    given: dict[str, Any] = {
        "search": options.zeus_search,
        "warmup_steps": options.zeus_warmup_steps,
        "profile_steps": options.zeus_profile_steps,
        "pl_step": options.zeus_pl_step,
        "profile_path": options.zeus_profile_path,
    }
    optimizer = HFGlobalPowerLimitOptimizer(
        monitor,
        make_selector(options),
        **{name: value for name, value in given.items() if value is not None},
    )
    optimizer.attach(trainer)
    return optimizer


def print_result(optimizer: HFGlobalPowerLimitOptimizer, args: TrainingArguments) -> None:
    """Prints the measurements and the choice."""
    if args.process_index != 0:
        return
    print(optimizer.report())

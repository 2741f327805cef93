"""Profiles of pipelines, and their planners."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.profile import INSTRUCTIONS, InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b

DATA = Path(__file__).parents[3] / "zeusd/devices/simulated/data/perseus"
P2P_W = {"a100": 83.64, "a40": 70.38}


@functools.cache
def measured(gpu: str, stages: int = 8) -> InstructionProfile:
    """The shipped profile of GPT-3 175B; the last stage is always its last."""
    profile = InstructionProfile.read(DATA / f"gpt3-175b+{gpu}.columns.csv.xz")
    return profile if stages == 8 else profile.pick([*range(stages - 1), 7])


def usual(gpu: str = "a100", stages: int = 4, microbatches: int = 8, **options: Any) -> Planner:
    """A planner of that profile under 1F1B."""
    pipeline = one_f_one_b(stages, microbatches)
    return Planner(measured(gpu, stages), pipeline, p2p_power_w=P2P_W[gpu], **options)


def changed(
    profile: InstructionProfile, change: Callable[[Sequence[Option]], Sequence[Option]]
) -> InstructionProfile:
    """A profile with other options of each instruction."""
    return InstructionProfile(
        {
            (stage, name, 0): list(change(profile.options(stage, name)))
            for stage in range(profile.num_stages)
            for name in INSTRUCTIONS
        }
    )


def same_options(
    options: Sequence[Option], stages: int = 1, names: Sequence[str] = INSTRUCTIONS
) -> InstructionProfile:
    """A profile in which all instructions have the same options."""
    return InstructionProfile(
        {(n, name, 0): list(options) for n in range(stages) for name in names}
    )


def random_profile(
    rnd: random.Random, stages: int, most: int, *, time: float = 1.0, power: float = 1.0
) -> InstructionProfile:
    """Stages that differ, with one to `most` clocks; slower ones mostly take less energy."""
    options = {}
    for stage in range(stages):
        for name in INSTRUCTIONS:
            time_s = rnd.uniform(0.5, 2) * (2 if name == "backward" else 1)
            energy_j = time_s * rnd.uniform(200, 300)
            rows = []
            for number in range(rnd.randint(1, most)):
                rows.append(Option(1400 - 15 * number, time_s * time, energy_j * time * power))
                time_s *= rnd.uniform(1.02, 1.3)
                energy_j *= rnd.uniform(0.7, 1.02)
            options[stage, name, 0] = rows
    return InstructionProfile(options)

"""Small pipelines, and every plan they have."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

from tests.zeus.pipeline_frequency.timeline import timeline, totals
from zeus.optimizer.pipeline_frequency.profile import INSTRUCTIONS, InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import Pipeline

DATA = Path(__file__).parents[3] / "zeusd/devices/simulated/data/perseus"
P2P_W = {"a100": 83.64, "a40": 70.38}


@functools.cache
def measured(gpu: str, stages: int = 8) -> InstructionProfile:
    """The shipped profile of GPT-3 175B; the last stage is always its last."""
    profile = InstructionProfile.read(DATA / f"gpt3-175b+{gpu}.columns.csv.xz")
    return profile if stages == 8 else profile.pick([*range(stages - 1), 7])


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


def every_plan(
    profile: InstructionProfile, pipeline: Pipeline, p2p_power_w: float
) -> list[tuple[float, float, float]]:
    """Time, effective energy and energy of each possible plan."""
    found = []
    choices = [profile.options(one.stage, one.name) for one in pipeline.instructions]
    for chosen in itertools.product(*choices):
        stages = [
            [(pipeline.instructions[place].name, chosen[place].frequency) for place in order]
            for order in pipeline.stages
        ]
        runs = timeline(profile, pipeline, stages)
        time_s, energy_j = totals(runs, pipeline.num_stages, p2p_power_w)
        blocking_j = p2p_power_w * pipeline.num_stages * time_s
        found.append((time_s, energy_j - blocking_j, energy_j))
    return found

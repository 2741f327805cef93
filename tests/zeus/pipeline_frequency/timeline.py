"""Computes when each instruction of an iteration runs, along the schedule's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeus.optimizer.pipeline_frequency.plans import Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Setting
from zeus.optimizer.pipeline_frequency.schedules import Instruction, Pipeline


@dataclass(frozen=True)
class Execution:
    """One instruction: its setting, its start and end, s, and the energy of one GPU, J."""

    instruction: Instruction
    frequency: Setting
    start_s: float
    end_s: float
    energy_j: float


def timeline(
    profile: InstructionProfile,
    pipeline: Pipeline,
    stages: Sequence[Sequence[Step]] | None = None,
    *,
    change_time_s: float = 0.0,
) -> list[Execution]:
    """The instructions of an iteration with their times.

    Args:
        stages: Of a plan of this pipeline and profile; None: all at the highest clocks.
        change_time_s: Delay of a stage by a change of its clock, s.
    """
    waits: list[list[int]] = [[] for _ in pipeline.instructions]
    for tail, head in pipeline.arcs:
        waits[head].append(tail)
    clocks: dict[int, Setting] = {}
    delayed: set[int] = set()
    runs: dict[int, Execution] = {}
    for number, places in enumerate(pipeline.stages):
        before: Setting | None = None
        for step, place in enumerate(places):
            one = pipeline.instructions[place]
            highest = profile.options(one.stage, one.name, one.chunk)[0].frequency
            clocks[place] = highest if stages is None else stages[number][step][1] or highest
            if not clocks[place]:
                continue
            if before is not None and clocks[place] != before:
                delayed.add(place)
            before = clocks[place]
    for level in pipeline.levels:
        for place in level:
            one = pipeline.instructions[place]
            options = profile.options(one.stage, one.name, one.chunk)
            option = next(option for option in options if option.frequency == clocks[place])
            start = max((runs[tail].end_s for tail in waits[place]), default=0.0)
            start += change_time_s * (place in delayed)
            runs[place] = Execution(
                one, clocks[place], start, start + option.time_s, option.energy_j
            )
    return [runs[place] for place in range(len(pipeline.instructions))]


def totals(runs: Sequence[Execution], num_stages: int, p2p_power_w: float) -> tuple[float, float]:
    """Time, s, and energy, J, of an iteration with one GPU for each stage."""
    time_s = max(run.end_s for run in runs)
    busy_s = math.fsum(run.end_s - run.start_s for run in runs)
    energy_j = math.fsum(run.energy_j for run in runs)
    return time_s, energy_j + p2p_power_w * (num_stages * time_s - busy_s)

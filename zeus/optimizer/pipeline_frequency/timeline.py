"""Computes when each instruction of an iteration runs, along the schedule's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import Setting, Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
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
        stages: The plan's stages; None: every instruction at its highest clock.
        change_time_s: Delay of a stage by a change of its clock, s.

    Raises:
        PipelineFrequencyError: The plan is for another pipeline, or has clocks that are not in the
            profile.
    """
    if stages is not None:
        _check(pipeline, stages)
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
            option = next(
                (
                    option
                    for option in profile.options(one.stage, one.name, one.chunk)
                    if option.frequency == clocks[place]
                ),
                None,
            )
            if option is None:
                raise PipelineFrequencyError(
                    f"the plan runs {one.name} of stage {one.stage} at {clocks[place]}, which "
                    "the profile does not have; use the profile that the plan was made from"
                )
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


def _check(pipeline: Pipeline, stages: Sequence[Sequence[Step]]) -> None:
    expected = [len(places) for places in pipeline.stages]
    found = [len(steps) for steps in stages]
    if found != expected:
        raise PipelineFrequencyError(
            f"the plan has {found} instructions on its stages, and the schedule {expected}; give "
            "the schedule, stages and microbatches that the plan was made for"
        )
    for number, (places, steps) in enumerate(zip(pipeline.stages, stages, strict=True)):
        for place, (name, _) in zip(places, steps, strict=True):
            one = pipeline.instructions[place]
            if one.name != name:
                raise PipelineFrequencyError(
                    f"the plan has {name} on stage {number}, but the schedule has {one.name} there"
                )

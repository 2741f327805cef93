"""What a plan's stages draw together, and plans whose power stays within bounds: for the budget
of a rack, and for a grid that must not see a training job's swings.

An instruction draws its mean power from its beginning to its end, and a stage between two of them
the blocking power. Iterations follow one another without a pause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import baselines
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, PipelineProblem, fits
from zeus.optimizer.pipeline_frequency.plans import Plan
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency.planner.planner import Planner

_SLACK = 1e-9
"""A bound is kept up to this share of it: powers are quotients of what was measured."""

_LEVELS = 24
"""Limits on an instruction's power that are tried at most."""


@dataclass(frozen=True)
class PowerBound:
    """A bound on what some stages draw together.

    Attributes:
        peak_w: At any time, W.
        ramp_w_per_s: Change of the mean over one window to the mean over the next, W/s.
        window_s: The window: how fast a change matters, s. Within it, supplies buffer.
        stages: Those that share a supply, such as the stages of one node; None: all.
    """

    peak_w: float = math.inf
    ramp_w_per_s: float = math.inf
    window_s: float = 1.0
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for what, value in (
            ("a bound on power must be watts", self.peak_w),
            ("a bound on a ramp must be watts per second", self.ramp_w_per_s),
            ("the window of a ramp must be seconds", self.window_s),
        ):
            if not value > 0:
                raise PipelineFrequencyError(f"{what} above 0, not {value}")

    def kept_by(self, draw: Draw) -> bool:
        """Whether an iteration keeps the bound."""
        if draw.peak_w > self.peak_w * (1 + _SLACK):
            return False
        ramp_w_per_s = self.ramp_w_per_s * (1 + _SLACK)
        return math.isinf(ramp_w_per_s) or draw.ramp_w_per_s(self.window_s) <= ramp_w_per_s


@dataclass(frozen=True)
class Draw:
    """Power over one iteration."""

    at_s: Floats
    watts: Floats

    @classmethod
    def of(
        cls,
        problem: PipelineProblem,
        plan: Ints,
        stages: tuple[int, ...] | None = None,
        runs: Floats | None = None,
    ) -> Draw:
        """Power of a plan's iteration.

        Args:
            stages: Those that count; None: all.
            runs: When each instruction begins and ends, s, if it is known.
        """
        starts, ends = problem.runs(plan[:, None])[:, :, 0] if runs is None else runs
        extra_w = problem.costs[problem.kind, plan] / (ends - starts)
        until_s = float(ends.max())
        inside = _rows(problem, stages)
        starts, ends, extra_w = starts[inside], ends[inside], extra_w[inside]
        count = problem.pipeline.num_stages if stages is None else len(stages)
        # One stage's instructions meet exactly, but for rounding: they never overlap.
        grid_s = max(1e-12 * problem.max_time_s, 1e-15)
        edges = np.rint(np.concatenate([ends, starts, [0.0, until_s]]) / grid_s)
        at, place = np.unique(edges, return_inverse=True)
        steps = np.zeros(len(at))
        np.add.at(steps, place.ravel(), np.concatenate([-extra_w, extra_w, [0.0, 0.0]]))
        return cls(at * grid_s, count * problem.blocked_w + np.cumsum(steps)[:-1])

    @property
    def peak_w(self) -> float:
        """The highest power, W."""
        return float(self.watts.max())

    def ramp_w_per_s(self, window_s: float) -> float:
        """Largest difference of the means of two windows one after the other, over their length.

        The energy until an instant is piecewise linear, so the largest lies where a window begins
        or ends with a change of power.
        """
        period_s = float(self.at_s[-1])
        energy_j = np.concatenate([[0.0], np.cumsum(self.watts * np.diff(self.at_s))])

        def until(t_s: Floats) -> Floats:
            rounds = np.floor(t_s / period_s)
            part = np.interp(t_s - rounds * period_s, self.at_s, energy_j)
            return np.asarray(rounds * energy_j[-1] + part)

        begins = np.concatenate([self.at_s - part * window_s for part in range(3)])
        first, middle, last = (until(begins + part * window_s) for part in range(3))
        return float(np.abs(last - 2 * middle + first).max()) / window_s**2


def plan_within_power(
    planner: Planner, problem: PipelineProblem, bounds: Sequence[PowerBound], time_s: float | None
) -> Plan:
    """The best plan that was found within bounds on power; it is not proven to be the best.

    Which of the stages that run at the same time gives way is not known beforehand. So plans are
    made for a series of limits on a single instruction's power, each the best plan without faster
    settings; those that pass a bound are repaired, one instruction after the other, where that
    delays least for the power it saves. One clock and one power limit for all GPUs are tried, too,
    so no plan that is returned is worse.

    Raises:
        PipelineFrequencyError: No such plan was found.
    """
    for bound in bounds:
        wrong = set(bound.stages or ()) - set(range(problem.pipeline.num_stages))
        if wrong or bound.stages == ():
            raise PipelineFrequencyError(
                f"a bound on power names stages 0 to {problem.pipeline.num_stages - 1}, not "
                f"{sorted(wrong) or 'none'}"
            )
    limit_s = math.inf if time_s is None else time_s
    plans = list(_candidates(planner, problem, bounds, time_s))
    if time_s is not None and not any(fits(plan.time_s, limit_s) for plan in plans):
        # Plans that use a time up come out elsewhere than those that hurry.
        plans += _candidates(planner, problem, bounds, None)
    fit = [plan for plan in plans if fits(plan.time_s, limit_s)]
    if fit:
        return min(fit, key=lambda plan: (plan.time_s if time_s is None else 0.0, plan.energy_j))
    if plans:
        raise PipelineFrequencyError(
            f"no plan within {limit_s:.6g} s keeps the bounds on power; one that keeps them "
            f"takes {min(plan.time_s for plan in plans):.6g} s: allow more time or power"
        )
    slowest = np.array([curve.settings[-1] for curve in problem.curves])[problem.kind]
    for bound in _passed(problem, slowest, bounds):
        draw = Draw.of(problem, slowest, bound.stages)
        ramp = draw.ramp_w_per_s(bound.window_s)
        draws = f"changes its power by up to {ramp:.0f} W/s over {bound.window_s:g} s"
        if draw.peak_w > bound.peak_w:
            draws = f"draws up to {draw.peak_w:.0f} W"
        raise PipelineFrequencyError(
            f"no plan keeps the bounds on power: at its lowest settings the pipeline {draws}; "
            "allow more, or use fewer GPUs"
        )
    raise planner.too_few(" within the bounds on power", ", or more power")


def _candidates(
    planner: Planner, problem: PipelineProblem, bounds: Sequence[PowerBound], time_s: float | None
) -> Iterator[Plan]:
    """Plans that keep the bounds, for a time or as fast as possible; some may take longer."""
    for level_plan in _by_level(planner, problem, bounds, time_s):
        repaired = _repaired(problem, level_plan, bounds)
        if repaired is not None:
            yield planner.plan_of(problem.written(repaired))
    # Those settings and no others: what is as fast and cheaper may draw more.
    for plan in baselines.uniform(problem).T:
        if problem.allowed(plan[:, None])[0] and not _passed(problem, plan, bounds):
            yield planner.plan_of(problem.written(plan))


def _by_level(
    planner: Planner, problem: PipelineProblem, bounds: Sequence[PowerBound], time_s: float | None
) -> list[Ints]:
    """The best plans without settings above a limit, for limits around the highest one whose plan
    keeps the bounds.
    """
    profile = problem.profile
    options = (one for key in problem.kinds for one in profile.options(*key))
    powers = np.unique([_watts(one) for one in options])
    if len(powers) > _LEVELS:
        powers = np.quantile(powers, np.linspace(0, 1, _LEVELS))
    levels = [math.inf, *reversed(powers.tolist())]
    made: dict[float, Ints | None] = {}

    def at(place: int) -> Ints | None:
        watts = levels[place]
        if watts not in made:
            fewer = planner.limited(_below(problem, watts))
            made[watts] = None
            with suppress(PipelineFrequencyError):  # no plan is that fast
                plan = fewer.deadline(fewer.shortest_time_s if time_s is None else time_s)
                made[watts] = problem.read(plan.plans[0].stages)
        return made[watts]

    # A lower limit on each instruction lowers the peak, but for rare ties: halve, then look at
    # the neighbours.
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        plan = at(middle)
        if plan is None or not _passed(problem, plan, bounds):
            high = middle
        else:
            low = middle + 1
    # Plans that are repaired: of the limits above the first whose plan keeps the bounds.
    for place in range(max(0, low - 3), min(len(levels), low + 2)):
        at(place)
    return [plan for plan in made.values() if plan is not None]


def _watts(option: Option) -> float:
    return option.energy_j / option.time_s


def _below(problem: PipelineProblem, watts: float) -> InstructionProfile:
    """The profile without settings that draw more, but for each instruction's lowest."""
    kept: dict[tuple[int, str, int], Sequence[Option]] = {}
    for key in problem.kinds:
        options = problem.profile.options(*key)
        below = [one for one in options if _watts(one) <= watts * (1 + _SLACK)]
        kept[key] = below or [min(options, key=_watts)]
    return InstructionProfile(kept, problem.profile.tensor_parallel)


def _rows(problem: PipelineProblem, stages: tuple[int, ...] | None) -> Ints:
    return np.concatenate([problem.stages[one] for one in stages or range(len(problem.stages))])


def _passed(problem: PipelineProblem, plan: Ints, bounds: Sequence[PowerBound]) -> list[PowerBound]:
    return [one for one in bounds if not one.kept_by(Draw.of(problem, plan, one.stages))]


def _repaired(problem: PipelineProblem, plan: Ints, bounds: Sequence[PowerBound]) -> Ints | None:
    """Slows instructions down where a peak is too high; None: a bound is passed all the same."""
    plan = plan.copy()
    for _ in range(2 * problem.count):
        passed = _passed(problem, plan, bounds)
        if not passed:
            return plan if problem.allowed(plan[:, None])[0] else None
        draw = Draw.of(problem, plan, passed[0].stages)
        if draw.peak_w <= passed[0].peak_w:
            return None
        peak = int(draw.watts.argmax())
        at_s = float(draw.at_s[peak : peak + 2].mean())
        starts, ends = problem.runs(plan[:, None])[:, :, 0]
        rows = _rows(problem, passed[0].stages)
        active = rows[(starts[rows] <= at_s) & (at_s < ends[rows])]
        slower = [(row, one) for row in active if (one := _slower(problem, plan, row)) is not None]
        if not slower:
            return None
        row, setting = slower[int(_delays(problem, plan, slower).argmin())]
        plan[row] = setting
    return None


def _slower(problem: PipelineProblem, plan: Ints, row: int) -> int | None:
    """The next slower setting of an instruction's curve; None: there is none."""
    kind = problem.kind[row]
    curve, now_s = problem.curves[kind], problem.times[kind, plan[row]]
    place = int(np.searchsorted(curve.time_s, now_s, side="right"))
    return int(curve.settings[place]) if place < len(curve.settings) else None


def _delays(problem: PipelineProblem, plan: Ints, slower: Sequence[tuple[int, int]]) -> Floats:
    """What slowing each of some instructions down delays for a watt that it saves, s/W."""
    rows, settings = np.array(slower, dtype=np.intp).T
    kinds, now = problem.kind[rows], plan[rows]
    durations = problem.durations(plan[:, None])
    ends = problem.finishes(durations)[:-1, 0]
    rest = problem.finishes(durations, problem.reverse)[:-1, 0]
    slack_s = ends.max() - (ends + rest - durations[:, 0])[rows]
    longer_s = problem.times[kinds, settings] - problem.times[kinds, now]
    before_w, after_w = (
        problem.costs[kinds, one] / problem.times[kinds, one] for one in (now, settings)
    )
    delay_s = np.maximum(longer_s - slack_s, 0.0) + 1e-3 * longer_s
    return np.asarray(delay_s / np.maximum(before_w - after_w, 1e-9))

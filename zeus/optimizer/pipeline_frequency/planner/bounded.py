"""Plans whose power stays within bounds: for the budget of a rack, and for a grid that must not see
a training job's swings.

Stages that run at the same time must together stay below a bound. Which of them gives way is not
known beforehand, so plans are made for a series of limits on a single instruction's power, each the
best plan without faster settings; those that pass a bound are repaired, one instruction after the
other, where that delays least for the power it saves. One clock and one power limit for all GPUs
are tried, too, so no plan that is returned is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.baselines import uniform_settings
from zeus.optimizer.pipeline_frequency.planner.power import PlanPower, PowerBound
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem
from zeus.optimizer.pipeline_frequency.plans import Plan

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency.planner.planner import Planner

_LEVELS = 24
"""Limits on an instruction's power that are tried at most."""

_REPAIRED = 3
"""Of the limits above the first whose plan keeps the bounds: how many plans are repaired."""


class Bounded:
    """Finds plans within bounds on power.

    Args:
        planner: Of the pipeline.
        problem: The same as arrays.
        meter: Tells what plans draw.
        bounds: All of which are kept.
    """

    def __init__(
        self, planner: Planner, problem: Problem, meter: PlanPower, bounds: Sequence[PowerBound]
    ) -> None:
        self._planner = planner
        self._problem = problem
        self._meter = meter
        self._bounds = tuple(bounds)
        for bound in self._bounds:
            wrong = set(bound.stages or ()) - set(range(problem.pipeline.num_stages))
            if wrong or bound.stages == ():
                raise PipelineFrequencyError(
                    f"a bound on power names stages 0 to {problem.pipeline.num_stages - 1}, not "
                    f"{sorted(wrong) or 'none'}"
                )

    def fastest(self) -> Plan:
        """The fastest plan that was found; PipelineFrequencyError: none keeps the bounds."""
        return self._best(None, lambda one: one.time_s)

    def within(self, time_s: float) -> Plan:
        """The plan with the least energy of those that were found and take at most so long;
        PipelineFrequencyError: there is none."""
        return self._best(time_s, lambda one: one.energy_j)

    # ------------------------------------------------------------------------------ internals

    def _best(self, time_s: float | None, cost: Callable[[Plan], float]) -> Plan:
        limit_s = math.inf if time_s is None else time_s * (1 + 1e-9)
        found = [plan for plan in self._candidates(time_s) if self._keeps(plan)]
        if time_s is not None and all(plan.time_s > limit_s for plan in found):
            # Plans that use a time up come out elsewhere than those that hurry.
            found += filter(self._keeps, self._candidates(None))
        fit = [plan for plan in found if plan.time_s <= limit_s]
        if fit:
            return min(fit, key=lambda plan: (cost(plan), plan.energy_j))
        if found:
            raise PipelineFrequencyError(
                f"no plan within {limit_s:.6g} s keeps the bounds on power; one that keeps them "
                f"takes {min(plan.time_s for plan in found):.6g} s: allow more time or power"
            )
        clocks = self._problem.clocks(self._problem.num_options[self._problem.kind] - 1)
        for bound in self._passed(clocks):
            raise PipelineFrequencyError(
                "no plan keeps the bounds on power: at its lowest settings the pipeline "
                f"{self._draws(clocks, bound)}; allow more, or use fewer GPUs"
            )
        raise self._planner.too_few(" within the bounds on power", ", or more power")

    def _draws(self, clocks: Ints, bound: PowerBound) -> str:
        draw = self._meter.draw(clocks, bound.stages)
        if draw.peak_w > bound.peak_w:
            return f"draws up to {draw.peak_w:.0f} W"
        ramp = draw.ramp_w_per_s(bound.window_s)
        return f"changes its power by up to {ramp:.0f} W/s over {bound.window_s:g} s"

    def _candidates(self, time_s: float | None) -> Iterator[Plan]:
        """Plans for a time, or as fast as possible; some of them pass a bound, or take longer."""
        levels = self._levels()
        made: dict[int, Plan | None] = {}

        def at(place: int) -> Plan | None:
            if place not in made:
                planner = self._planner.within_power(levels[place])
                wanted_s = planner.shortest_time_s if time_s is None else time_s
                made[place] = None
                if planner.shortest_time_s <= wanted_s * (1 + 1e-9) < math.inf:
                    stages = planner.deadline(wanted_s).plans[0].stages
                    made[place] = self._planner.plan_of(stages)
            return made[place]

        # A lower limit on each instruction lowers the peak, but for rare ties: halve, then look
        # at the neighbours.
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            plan = at(middle)
            if plan is None or self._keeps(plan):
                high = middle
            else:
                low = middle + 1
        near = range(max(0, low - _REPAIRED), min(len(levels), low + 2))
        for place in near:
            at(place)
        for plan in list(made.values()):
            if plan is not None:
                yield plan
                if not self._keeps(plan):
                    repaired = self._repaired(plan, time_s)
                    if repaired is not None:
                        yield repaired
        yield from self._uniform()

    def _levels(self) -> list[float]:
        """Limits on an instruction's power, W of one GPU or stage, falling; none, first."""
        profile = self._problem.profile
        options = (one for key in self._problem.kinds for one in profile.options(*key))
        powers = np.unique([one.energy_j / one.time_s for one in options])
        if len(powers) > _LEVELS:
            powers = np.quantile(powers, np.linspace(0, 1, _LEVELS))
        return [math.inf, *reversed(powers.tolist())]

    def _uniform(self) -> Iterator[Plan]:
        """Plans with one clock, or one power limit, for all: those settings and no others, since
        what is as fast and cheaper may draw more."""
        for clocks in uniform_settings(self._problem).T:
            if not self._passed(clocks):
                yield self._planner.plan_of(self._problem.stages(clocks))

    def _keeps(self, plan: Plan) -> bool:
        most = self._planner.changes.most
        if most is not None and plan.clock_changes > most:
            return False
        return not self._passed(self._planner.clocks_of(plan.stages))

    def _passed(self, clocks: Ints) -> list[PowerBound]:
        return [
            bound
            for bound in self._bounds
            if bound.excess(self._meter.draw(clocks, bound.stages)) > 0
        ]

    def _repaired(self, plan: Plan, time_s: float | None) -> Plan | None:
        """Slows instructions down where a peak is too high; None: another bound is passed, or the
        time."""
        problem = self._problem
        clocks = self._planner.clocks_of(plan.stages)
        options = np.array(
            [
                min(
                    int(np.searchsorted(problem.times[kind, :size], duration_s * (1 - 1e-12))),
                    size - 1,
                )
                for kind, size, duration_s in zip(
                    problem.kind,
                    problem.num_options[problem.kind],
                    self._planner.durations_of(clocks),
                    strict=True,
                )
            ]
        )
        for _ in range(2 * problem.count):
            clocks = problem.clocks(options)
            passed = self._passed(clocks)
            if not passed:
                found = self._planner.plan_of(problem.stages(clocks))
                late = time_s is not None and found.time_s > time_s * (1 + 1e-9)
                return None if late else found
            draw = self._meter.draw(clocks, passed[0].stages)
            if draw.peak_w <= passed[0].peak_w:
                return None
            at_s = float(draw.at_s[draw.watts.argmax()])
            at_s += float(np.diff(draw.at_s)[draw.watts.argmax()]) / 2
            active = self._meter.active(clocks, at_s, passed[0].stages)
            slower = active[options[active] + 1 < problem.num_options[problem.kind[active]]]
            if not len(slower):
                return None
            options[slower[self._delays(options, slower).argmin()]] += 1
        return None

    def _delays(self, options: Ints, places: Ints) -> Floats:
        """What slowing each of some instructions down delays for a watt that it saves, s/W."""
        problem = self._problem
        kind, now = problem.kind[places], options[places]
        durations = problem.durations(options[:, None])
        ends = problem.finishes(durations)[:-1, 0]
        rest = problem.finishes(durations, problem.reverse)[:-1, 0]
        slack_s = ends.max() - (ends + rest - durations[:, 0])[places]
        longer_s = problem.times[kind, now + 1] - problem.times[kind, now]
        before_w = problem.costs[kind, now] / problem.times[kind, now]
        after_w = problem.costs[kind, now + 1] / problem.times[kind, now + 1]
        delay_s = np.maximum(longer_s - slack_s, 0.0) + 1e-3 * longer_s
        return np.asarray(delay_s / np.maximum(before_w - after_w, 1e-9))

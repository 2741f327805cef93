"""Simpler policies than a plan: one clock for all, one power limit for all, or full clocks on the
critical path and one clock for the rest of each stage.

They are also where the search begins, so no plan is worse than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem


@dataclass(frozen=True)
class Policies:
    """Several ways to run a pipeline by one simple rule.

    Attributes:
        options: For each way the option of every instruction (instructions, ways), or a faster and
            cheaper one where the profile has it.
        time_s: Iteration time of each way as the rule has it.
        cost_j: Its effective energy.
    """

    options: Ints
    time_s: Floats
    cost_j: Floats

    def ways(self, problem: Problem) -> list[tuple[float, float]]:
        """Time, s, and energy, J, of those ways whose effective energy no faster one has, the
        fastest first.
        """
        kept: list[tuple[float, float]] = []
        least_j = np.inf
        for way in np.lexsort((self.cost_j, self.time_s)).tolist():
            if self.cost_j[way] < least_j:
                least_j, time_s = self.cost_j[way], float(self.time_s[way])
                kept.append((time_s, float(problem.energy(least_j, time_s))))
        return kept


def one_clock(problem: Problem) -> Policies:
    """Every instruction at the same clock.

    An instruction that was not measured at a clock takes its next higher one.
    """
    kinds = range(len(problem.offered))
    return _policies(problem, np.array(_at_one_clock(problem, kinds)))


def uniform_settings(problem: Problem) -> Ints:
    """The setting of each instruction (instructions, ways) with one clock for all, and with the
    clocks that one power limit for all leads to.
    """
    clocks = _at_one_clock(problem, range(len(problem.offered)))
    settings = [
        np.array([option.setting for option in options])[np.concatenate(own)]
        for options, *own in zip(problem.offered, clocks, _under_one_limit(problem), strict=True)
    ]
    return np.asarray(np.unique(np.array(settings), axis=1)[problem.kind])


def one_power_limit(problem: Problem) -> Policies:
    """Every GPU under the same power limit.

    An instruction then runs at its highest clock whose mean power is within the limit, or at its
    lowest clock.
    """
    return _policies(problem, np.array(_under_one_limit(problem)))


def envelope(problem: Problem) -> Policies:
    """Instructions on the critical path at their highest clock; in each stage one clock for all
    others: the one that saves most of those that do not make the iteration longer. One way.

    Source: the idea is that of EnvPipe (Choi et al., ATC 2023), which takes the pipeline's outer
    envelope for the critical path, as it is where stages are equal.
    """
    figures = [problem.offered_figures(kind) for kind in range(len(problem.offered))]
    durations = np.array([figures[kind][0][0] for kind in problem.kind])[:, None]
    costs = np.array([figures[kind][1][0] for kind in problem.kind])[:, None]
    before = problem.finishes(durations)[:-1]
    after = problem.finishes(durations, problem.reverse)[:-1]
    length_s = float(before.max()) * (1 + 1e-9)
    slack = (before + after - durations)[:, 0] < (1 - 1e-9) * before.max()
    for stage in range(problem.pipeline.num_stages):
        kinds = [row for row, name in enumerate(problem.kinds) if name[0] == stage]
        chosen = dict(zip(kinds, _at_one_clock(problem, kinds), strict=True))
        places = [place for place in problem.pipeline.stages[stage] if slack[place]]
        ways = max(len(one) for one in chosen.values())
        tried, tried_cost = durations.repeat(ways, axis=1), costs.repeat(ways, axis=1)
        for place in places:
            kind = int(problem.kind[place])
            tried[place] = figures[kind][0][chosen[kind]]
            tried_cost[place] = figures[kind][1][chosen[kind]]
        late = problem.longest(tried) > length_s
        best = int(np.where(late, np.inf, tried_cost.sum(axis=0)).argmin())
        durations, costs = tried[:, best, None], tried_cost[:, best, None]
    options = np.array(
        [
            np.searchsorted(problem.curves[kind].time_s, time_s, side="right") - 1
            for kind, time_s in zip(problem.kind.tolist(), durations[:, 0], strict=True)
        ],
        dtype=np.intp,
    )
    return Policies(options[:, None], problem.longest(durations), costs.sum(axis=0))


POLICIES = {
    "one clock": one_clock,
    "one power limit": one_power_limit,
    "critical path": envelope,
}
"""By the name under which they stand beside plans."""


def _at_one_clock(problem: Problem, kinds: Sequence[int]) -> list[Ints]:
    """For each of these kinds, its setting at each of their clocks, counted from the highest: the
    next higher one where it was not measured at a clock.
    """
    own = [np.array([option.setting for option in problem.offered[kind]]) for kind in kinds]
    clocks = np.unique(np.concatenate(own))
    return [np.maximum((one[:, None] >= clocks).sum(axis=0) - 1, 0) for one in own]


def _under_one_limit(problem: Problem) -> list[Ints]:
    """The same for all kinds, under each power limit."""
    powers = [
        np.array([option.energy_j / option.time_s for option in options])
        for options in problem.offered
    ]
    limits = np.unique(np.concatenate(powers))
    chosen = []
    for own in powers:
        within = own[:, None] <= limits
        chosen.append(np.where(within.any(axis=0), within.argmax(axis=0), len(own) - 1))
    return chosen


def _policies(problem: Problem, chosen: Ints) -> Policies:
    """Of (kinds, ways): which of a kind's settings each way takes, counted from the highest."""
    chosen = np.unique(chosen, axis=1)
    times, costs = np.empty(chosen.shape), np.empty(chosen.shape)
    options = np.empty(chosen.shape, dtype=np.intp)
    for row, curve in enumerate(problem.curves):
        time_s, cost_j = problem.offered_figures(row)
        times[row], costs[row] = time_s[chosen[row]], cost_j[chosen[row]]
        options[row] = np.searchsorted(curve.time_s, times[row], side="right") - 1
    return Policies(
        options[problem.kind], problem.longest(times[problem.kind]), costs[problem.kind].sum(axis=0)
    )

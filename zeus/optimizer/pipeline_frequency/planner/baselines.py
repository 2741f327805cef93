"""Simpler policies than a plan: one clock for all, one power limit for all, or full clocks on the
critical path and one clock for the rest of each stage.

They are also where the search begins, so no plan is worse than they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import TOLERANCE, Ints, PipelineProblem, fits


def policies(problem: PipelineProblem) -> dict[str, Ints]:
    """Plans (instructions, ways) of each policy, by the name that stands beside plans."""
    return {
        "one clock": _at_one_clock(problem, range(len(problem.kinds)))[problem.kind],
        "one power limit": _under_one_limit(problem)[problem.kind],
        "critical path": _envelope(problem),
    }


def uniform(problem: PipelineProblem) -> Ints:
    """Plans (instructions, ways) with one clock, or one power limit, for all."""
    plans = policies(problem)
    return np.unique(np.hstack([plans["one clock"], plans["one power limit"]]), axis=1)


def figures(problem: PipelineProblem, plans: Ints) -> list[tuple[float, float]]:
    """Time, s, and energy, J, of plans, without those that a faster plan beats; fastest first.

    Clock changes take no time here: a policy is what an ideal GPU would do.
    """
    durations = problem.times[problem.kind[:, None], plans]
    time_s, cost_j = problem.finishes(durations).max(axis=0), problem.cost(plans)
    kept: list[tuple[float, float]] = []
    least_j = np.inf
    for way in np.lexsort((cost_j, time_s)).tolist():
        if cost_j[way] < least_j:
            least_j = cost_j[way]
            kept.append((float(time_s[way]), float(problem.energy(least_j, time_s[way]))))
    return kept


def _at_one_clock(problem: PipelineProblem, kinds: Sequence[int]) -> Ints:
    """Settings (kinds, ways) at each of their clocks; where an instruction was not measured at a
    clock, the next higher one that it has.
    """
    offered = problem.offered[list(kinds)]
    columns = np.arange(offered.shape[1])
    at_or_above = np.maximum.accumulate(np.where(offered, columns, -1), axis=1)
    highest = offered.argmax(axis=1)[:, None]
    return np.asarray(np.maximum(at_or_above, highest)[:, offered.any(axis=0)])


def _under_one_limit(problem: PipelineProblem) -> Ints:
    """Settings (kinds, ways) under each power limit: the highest clock whose mean power is within
    the limit, or the lowest clock.
    """
    watts = np.full(problem.times.shape, np.inf)
    np.divide(problem.costs, problem.times, out=watts, where=problem.offered)
    lowest = problem.offered.shape[1] - 1 - problem.offered[:, ::-1].argmax(axis=1)
    limits = np.unique(watts[problem.offered])
    within = watts[:, :, None] <= limits * (1 + TOLERANCE)
    return np.asarray(np.where(within.any(axis=1), within.argmax(axis=1), lowest[:, None]))


def _envelope(problem: PipelineProblem) -> Ints:
    """Instructions on the critical path at their highest clock; in each stage one clock for all
    others: the one that saves most of those that do not make the iteration longer. One way.

    Source: the idea is that of EnvPipe (Choi et al., ATC 2023), which takes the pipeline's outer
    envelope for the critical path, as it is where stages are equal.
    """
    plan: Ints = problem.highest[:, None]
    durations = problem.times[problem.kind[:, None], plan]
    before = problem.finishes(durations)[:-1]
    ways_s = (before + problem.finishes(durations, problem.reverse)[:-1] - durations)[:, 0]
    slack = ~fits(before.max(), ways_s)
    for stage, rows in enumerate(problem.stages):
        kinds = [number for number, name in enumerate(problem.kinds) if name[0] == stage]
        chosen = dict(zip(kinds, _at_one_clock(problem, kinds), strict=True))
        ways = max(map(len, chosen.values()))
        tried = plan.repeat(ways, axis=1)
        for row in rows[slack[rows]]:
            tried[row] = chosen[int(problem.kind[row])]
        times_s = problem.finishes(problem.times[problem.kind[:, None], tried]).max(axis=0)
        cost_j = np.where(fits(times_s, before.max()), problem.cost(tried), np.inf)
        plan = tried[:, [int(cost_j.argmin())]]
    return plan

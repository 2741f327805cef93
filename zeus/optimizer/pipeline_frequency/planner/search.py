"""Looks for good plans where clock changes cost nothing: rounds the linear program's optima.

Where a clock just fits, a plan is almost as good as the bound; between two such deadlines every
rounding wastes a little in every instruction. A plan that runs the first part of the iteration as
the one and the rest as the other wastes only at the seam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from zeus.optimizer.pipeline_frequency.planner import baselines
from zeus.optimizer.pipeline_frequency.planner.linear import Optimum, Program, tangents
from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem, lower_hull
from zeus.optimizer.pipeline_frequency.planner.rounding import Rounding

Progress = Callable[[int, int], None]
"""Progress callback: (done, total)."""

_DEADLINES = 89
"""For which the linear program is solved. With 25, plans take 0.01 % more energy in the mean."""

_PER_DEADLINE = 8
"""Durations between two optima that are rounded."""

_SEAMS = 16
"""Places at which two plans are joined. With 8, or with neighbours alone, plans take 0.01 % more
energy in the mean."""

_CHUNK = 400_000
"""Entries of an array of plans that are evaluated together: bounds the memory."""


class PlanSearch:
    """Finds plans for one problem, and bounds on what any plan takes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.program = Program(problem)
        self.policies = baselines.policies(problem)
        self.pool = Pool(problem)
        self._rounding = Rounding(problem)
        self._complete = False
        self._optima: dict[float, Optimum] = {}
        for plans in self.policies.values():
            self.pool.add(plans)
            self.pool.add(self._rounding.fill(plans))

    def solve(self, deadline_s: float, price_w: float = 0.0) -> Optimum:
        """The linear program's optimum, which also makes the bound tighter."""
        problem = self.problem
        deadline_s = min(max(deadline_s, problem.min_time_s), problem.max_time_s)
        if price_w or deadline_s not in self._optima:
            found = self.program.solve(deadline_s, price_w)
            self._optima[found.deadline_s] = found
            return found
        return self._optima[deadline_s]

    def bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J."""
        return tangents(list(self._optima.values()), time_s)

    def everywhere(self, tell: Progress) -> None:
        """Looks for plans of all times, once."""
        if self._complete:
            return
        problem = self.problem
        share = np.linspace(1.0, 0.0, _DEADLINES) ** 1.5
        grid_s = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
        solved = []
        for number, deadline_s in enumerate(grid_s.tolist()):
            solved.append(self.solve(deadline_s))
            tell(number + 1, _DEADLINES)
        solved = solved[::-1]
        known_s = np.array([one.deadline_s for one in solved])
        durations = np.stack([one.durations_s for one in solved], axis=1)
        at = np.linspace(0, len(solved) - 1, (len(solved) - 1) * _PER_DEADLINE + 1)
        left = np.minimum(at.astype(np.intp), max(0, len(solved) - 2))
        right = np.minimum(left + 1, len(solved) - 1)
        part = at - left
        for some in self._chunks(len(at), 4):
            a, b, share = left[some], right[some], part[some]
            mixed_s = durations[:, a] * (1 - share) + durations[:, b] * share
            limits_s = known_s[a] * (1 - share) + known_s[b] * share
            self.pool.add(self._rounding.round(mixed_s, limits_s))
        self._join(0, len(self.pool.time_s))
        self._complete = True

    def near(self, deadline_s: float, price_w: float = 0.0) -> None:
        """Looks for plans of one time."""
        found = self.solve(deadline_s, price_w)
        self.pool.add(
            self._rounding.round(found.durations_s[:, None], np.array([found.deadline_s]))
        )
        fit = self.pool.fitting(found.deadline_s)
        self._join(max(0, fit - 2), fit + 1)

    def _chunks(self, columns: int, each: int) -> Iterator[slice]:
        size = max(1, _CHUNK // self.problem.count // each)
        return (slice(first, first + size) for first in range(0, columns, size))

    def _join(self, first: int, last: int) -> None:
        """Joins each plan on the hull of some of the pool's with the next two, either way round:
        the first part of an iteration as one plan of a pair has it, the rest as the other.
        """
        pool = self.pool
        hull = np.array(lower_hull(pool.time_s[first:last], pool.cost_j[first:last]), dtype=np.intp)
        chosen = pool.plans(hull + first)
        for apart in (1, 2):
            for some in self._chunks(len(hull) - apart, 2 * _SEAMS):
                self._join_pairs(chosen[:, :-apart][:, some], chosen[:, apart:][:, some])

    def _join_pairs(self, fast: Ints, slow: Ints) -> None:
        problem = self.problem
        durations = problem.durations(fast)
        middle = problem.finishes(durations)[:-1] - durations / 2
        seams = np.linspace(np.zeros(fast.shape[1]), middle.max(axis=0), _SEAMS + 2)[1:-1]
        # The seams of a pair side by side.
        early = (middle[:, :, None] < seams.T).reshape(problem.count, -1)
        a, b = (np.repeat(one, _SEAMS, axis=1) for one in (fast, slow))
        joined = [np.where(early, a, b), np.where(early, b, a)]
        self.pool.add(self._rounding.fill(np.concatenate(joined, axis=1)))


def wanted_times(
    problem: Problem, bound: Callable[[Floats], Floats], ends_s: Floats, points: int | None
) -> Floats:
    """Times between which a frontier has a plan, rising.

    Neighbours are at most `STEP` of the energy apart, and within `NEAR` of the fastest time at most
    `STEP` of that time. Where `points` are too few for that, both are scaled, and the plans near
    the fastest keep a share of them.
    """
    near_s = min(float(ends_s[1]), (1 + NEAR) * problem.min_time_s)
    dense = np.unique(
        np.concatenate([np.linspace(ends_s[0], near_s, 500), np.linspace(near_s, ends_s[1], 1500)])
    )
    energy_j = np.abs(problem.energy(bound(dense), dense))
    near = dense[1:] <= near_s
    by_energy = np.maximum(-np.diff(bound(dense)), 0.0) / np.maximum(energy_j[1:], 1e-300)
    by_time = np.where(near, np.diff(dense) / problem.min_time_s, 0.0)
    wanted = np.maximum(by_energy, by_time) / STEP
    total, of_near = wanted.sum(), wanted[near].sum()
    if points is None:
        points = 1 + min(MAX_PLANS, max(1, int(np.ceil(total))))
    elif 0 < points - 1 < total and 0 < of_near < total:
        kept = max((points - 1) * of_near / total, min(of_near, MIN_NEAR, (points - 1) / 2))
        wanted *= np.where(near, kept / of_near, (points - 1 - kept) / (total - of_near))
    grown = np.concatenate([[0.0], np.cumsum(wanted)])
    if grown[-1] <= 0:
        return ends_s
    return np.asarray(np.interp(np.linspace(0.0, grown[-1], max(2, points)), grown, dense))


STEP = 0.001
"""Share of the energy by which neighbours of a frontier differ at most."""

NEAR = 0.05
"""Slowdown from the fastest plan within which most pipelines are run."""

MIN_NEAR = 32
"""Plans of that region that even a short frontier has, as long as that is half of them."""

MAX_PLANS = 2000

"""Looks for good plans: rounds the linear program's optima, and joins plans in time.

Where a clock just fits, a plan is almost as good as the bound; between two such deadlines every
rounding wastes a little in every instruction. A plan that runs the first part of the iteration as
the one and the rest as the other wastes only at the seam.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem
from zeus.optimizer.pipeline_frequency.planner.relaxation import Relaxation, Relaxed
from zeus.optimizer.pipeline_frequency.planner.rounding import Rounding

_CHUNK = 150_000
"""Entries of an array of plans that are worked on together: bounds the memory."""

_GRID = 25
"""Deadlines that the linear program is solved for; between them it is interpolated."""

_PER_STEP = 6
"""Deadlines rounded between two of those."""

_VARIED = 600
"""Instructions up to which other optima are looked at, too."""

_VARIANTS = 12

_NEAR = 0.006
"""Of the frontier's width: how far around one deadline plans are looked for."""

_SEAMS = 12
"""Places at which two plans are joined."""


class Search:
    """Finds plans for one problem.

    Args:
        problem: The problem.

    Attributes:
        steps: Of `frontier`, for who shows how far it is.
    """

    steps = _GRID + 5

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.relaxation = Relaxation(problem)
        self._rounding = Rounding(problem)
        self._solved: list[Relaxed] = []
        self._improved: set[int] = set()
        self._joined: set[tuple[int, int]] = set()

    # ------------------------------------------------------------------------------- bounds

    def solve(self, deadline_s: float) -> Relaxed:
        """The linear program's optimum, which also makes the bound tighter."""
        for known in self._solved:
            if known.deadline_s == deadline_s:
                return known
        found = self.relaxation.solve(deadline_s)
        self._solved.append(found)
        return found

    def bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J.

        The optimum as a function of the deadline is convex: its tangents lie below it.
        """
        tangents = [one.bound_j + one.price_w * (one.deadline_s - time_s) for one in self._solved]
        return np.asarray(np.maximum.reduce(tangents))

    # -------------------------------------------------------------------------------- plans

    def solve_cheapest(self) -> Relaxed:
        """The optimum where every second costs the power of blocking: the least energy of all."""
        return self.relaxation.solve(self.problem.max_time_s, self.problem.blocking_w)

    def frontier(self, intervals: int, tell: Callable[[int, int], None]) -> Pool:
        """Plans of all times, from the fastest to the slowest that saves energy.

        Args:
            intervals: How finely times are told apart.
            tell: Is told how many of `steps` are done.
        """
        problem = self.problem
        share = np.linspace(1.0, 0.0, _GRID) ** 1.5
        deadlines = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
        solved = []
        for number, deadline in enumerate(deadlines):
            solved.append(self.solve(deadline))
            tell(number + 1, self.steps)
        durations = np.stack([one.durations_s for one in solved], axis=1)
        steps = max(_PER_STEP, -(-intervals // (_GRID - 1)))
        self._improved, self._joined = set(), set()
        pool = Pool(problem, self.bound, problem.min_time_s, problem.max_time_s, intervals)
        self._round_between(pool, deadlines, durations, steps)
        self._vary(pool, problem.min_time_s)
        for number, work in enumerate((self._improve, self._join, self._improve, self._join)):
            tell(_GRID + number + 1, self.steps)
            work(pool)
        tell(self.steps, self.steps)
        return pool

    def near(self, deadline_s: float, *, floor_s: float = 0.0) -> Pool:
        """Plans of one time and a little less.

        Args:
            deadline_s: What they keep within; more than the slowest plan needs is as good as none.
            floor_s: They need not be faster than this.
        """
        problem = self.problem
        spread = _NEAR * (problem.max_time_s - problem.min_time_s)
        deadline_s = min(deadline_s, problem.max_time_s)
        low = max(problem.min_time_s, floor_s, deadline_s - spread)
        high = min(problem.max_time_s, deadline_s + spread)
        deadlines = np.array(sorted({high, deadline_s, low}, reverse=True))
        durations = np.stack([self.solve(one).durations_s for one in deadlines], axis=1)
        self._improved, self._joined = set(), set()
        pool = Pool(problem, self.bound, low, max(high, low), 16)
        self._round_between(pool, deadlines, durations, 8)
        self._vary(pool, deadline_s)
        for work in (self._improve, self._join, self._improve):
            work(pool)
        return pool

    def _round_between(
        self, pool: Pool, deadlines: Floats, durations: Floats, per_step: int
    ) -> None:
        """Rounds the optima, and what lies between them: that keeps deadlines between theirs."""
        places = np.linspace(0.0, len(deadlines) - 1, (len(deadlines) - 1) * per_step + 1)
        left = np.minimum(places.astype(np.intp), max(0, len(deadlines) - 2))
        right = np.minimum(left + 1, len(deadlines) - 1)
        share = places - left
        size = max(1, _CHUNK // (6 * self.problem.count))
        for first in range(0, len(places), size):
            part = slice(first, first + size)
            weight = share[part]
            pool.add(
                self._rounding.round(
                    durations[:, left[part]] * (1 - weight) + durations[:, right[part]] * weight,
                    deadlines[left[part]] * (1 - weight) + deadlines[right[part]] * weight,
                )
            )

    def _vary(self, pool: Pool, deadline_s: float) -> None:
        """Other optima of one deadline, where that takes milliseconds."""
        if self.problem.count > _VARIED:
            return
        durations = self.relaxation.variants(deadline_s, _VARIANTS)
        deadlines = np.full(_VARIANTS, deadline_s)
        options = self._rounding.round(durations, deadlines)
        best = np.argsort(self.problem.cost(options))[:_VARIANTS]
        pool.add(self._rounding.improve(options[:, best], np.full(len(best), deadline_s)))

    def _improve(self, pool: Pool) -> None:
        chosen = np.union1d(pool.best_of_each(), np.array(pool.hull(), dtype=np.intp))
        chosen = np.array([one for one in chosen if pool.number[one] not in self._improved])
        if not len(chosen):
            return
        self._improved.update(pool.number[chosen].tolist())
        size = max(1, _CHUNK // self.problem.count)
        options, times = pool.options[:, chosen], pool.time_s[chosen]
        for first in range(0, len(chosen), size):
            part = slice(first, first + size)
            pool.add(self._rounding.improve(options[:, part].copy(), times[part]))

    def _join(self, pool: Pool) -> None:
        """Joins neighbours on the hull, either way round."""
        problem = self.problem
        hull = pool.hull()
        options = pool.options
        number = pool.number.tolist()
        pairs = [
            (a, b)
            for a, b in itertools.pairwise(hull)
            if (number[a], number[b]) not in self._joined
        ]
        self._joined.update((number[a], number[b]) for a, b in pairs)
        size = max(1, _CHUNK // (2 * _SEAMS * problem.count))
        for first in range(0, len(pairs), size):
            joined = []
            for a, b in pairs[first : first + size]:
                durations = problem.durations(options[:, [a]])
                middle = (problem.finishes(durations)[:-1] - durations / 2)[:, 0]
                seams = np.linspace(0.0, middle.max(), _SEAMS + 2)[1:-1]
                early = middle[:, None] < seams
                joined.append(np.where(early, options[:, [a]], options[:, [b]]))
                joined.append(np.where(early, options[:, [b]], options[:, [a]]))
            pool.add(self._rounding.fill(np.concatenate(joined, axis=1)))


def fitting(pool: Pool, deadline_s: float) -> Ints:
    """Plans that keep a deadline."""
    return np.flatnonzero(pool.time_s <= deadline_s * (1 + 1e-11))

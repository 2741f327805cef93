"""Looks for good plans: rounds the linear program's optima, and joins plans in time.

Where a clock just fits, a plan is almost as good as the bound; between two such deadlines every
rounding wastes a little in every instruction. A plan that runs the first part of the iteration as
the one and the rest as the other wastes only at the seam.

All plans that were found go to one pool, so a later question never gets a worse answer than an
earlier one had. It begins with what one clock or one power limit for all instructions gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.baselines import POLICIES
from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Problem
from zeus.optimizer.pipeline_frequency.planner.relaxation import Relaxation, Relaxed
from zeus.optimizer.pipeline_frequency.planner.rounding import MODES, Rounding

_CHUNK = 150_000
"""Entries of an array of plans that are evaluated together: bounds the memory."""

_COLUMNS = 256
"""Plans that are evaluated together at least: a graph has many levels, and each takes a call."""

_GRID = 25
"""Deadlines that the linear program is solved for; between them it is interpolated."""

_ROUNDED = 150
"""Deadlines that are rounded for a frontier, at least."""

_VARIED = 600
"""Instructions up to which other optima are looked at, too."""

_VARIANTS = 12

_NEAR = 0.006
"""Of the frontier's width: how far around one deadline plans are looked for."""

_NEAR_INTERVALS = 16

_GAPS = 64
"""Steps between neighbours that are looked into together; each takes a linear program."""

_SEAMS = 12
"""Places at which two plans are joined."""


class Search:
    """Finds plans for one problem.

    Args:
        problem: The problem.

    Attributes:
        policies: What simpler policies take.
        pool: Plans that were found so far.
        steps: How many steps `frontier` reports.
    """

    steps = _GRID + 4

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.relaxation = Relaxation(problem)
        self.pool = Pool(problem)
        self._rounding = Rounding(problem)
        self._solved: list[Relaxed] = []
        self._improved: set[int] = set()
        self._joined: set[tuple[int, int]] = set()
        self.policies = {name: make(problem) for name, make in POLICIES.items()}
        for one in self.policies.values():
            self.pool.add(one.options)

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

    def solve_cheapest(self) -> Relaxed:
        """The optimum where every second costs the power of blocking: the least energy of all."""
        return self.relaxation.solve(self.problem.max_time_s, self.problem.blocking_w)

    # -------------------------------------------------------------------------------- plans

    def survey(self, tell: Callable[[int, int], None]) -> None:
        """Solves the linear program from the slowest deadline to the fastest."""
        problem = self.problem
        share = np.linspace(1.0, 0.0, _GRID) ** 1.5
        for number, one in enumerate(share):
            self.solve(problem.min_time_s + one * (problem.max_time_s - problem.min_time_s))
            tell(number + 1, self.steps)

    def frontier(self, edges_s: Floats, tell: Callable[[int, int], None]) -> None:
        """Looks for plans of all times, after `survey`.

        Args:
            edges_s: Times, rising: between each and the next a plan is wanted.
            tell: Is told how many of `steps` are done.
        """
        solved = sorted(self._solved, key=lambda one: -one.deadline_s)
        # Where fewer plans are asked for, rounding still needs many tries.
        times = len(edges_s) - 1
        finer = -(-_ROUNDED // max(times, 1))
        places = np.linspace(0, times, times * finer + 1)
        self._round_between(solved, np.interp(places, np.arange(times + 1), edges_s))
        self._vary(self.problem.min_time_s)
        for number, work in enumerate((self._improve, self._join, self._improve, self._join)):
            tell(_GRID + number + 1, self.steps)
            work(edges_s)

    def fill(self, step_j: float) -> None:
        """Looks for plans between neighbours whose costs are more than a step apart."""
        pool = self.pool
        wide = np.flatnonzero(-np.diff(pool.cost_j) > step_j)[:_GAPS]
        if not len(wide):
            return
        fast, slow = pool.time_s[wide], pool.time_s[wide + 1]
        deadlines = np.maximum(fast, slow - 1e-9 * (slow - fast))
        solved = [self.solve(float(one)) for one in deadlines]
        durations = np.stack([one.durations_s for one in solved], axis=1)
        for part in self._parts(len(wide), 2 * len(MODES)):
            options = self._rounding.round(durations[:, part], deadlines[part])
            limits = np.tile(deadlines[part], 2 * len(MODES))
            pool.add(options)
            pool.add(self._rounding.improve(options.copy(), limits))

    def near(self, deadline_s: float) -> None:
        """Looks for plans of one time and a little less.

        Args:
            deadline_s: At least `Problem.min_time_s`.
        """
        problem = self.problem
        spread = _NEAR * (problem.max_time_s - problem.min_time_s)
        deadline_s = min(deadline_s, problem.max_time_s)
        low = max(problem.min_time_s, deadline_s - spread)
        high = min(problem.max_time_s, deadline_s + spread)
        solved = [self.solve(one) for one in sorted({high, deadline_s, low}, reverse=True)]
        edges_s = np.linspace(low, high, _NEAR_INTERVALS + 1, dtype=np.float64)
        self._round_between(solved, edges_s)
        self._vary(deadline_s)
        for work in (self._improve, self._join, self._improve):
            work(edges_s)

    def _round_between(self, solved: list[Relaxed], deadlines: Floats) -> None:
        """Rounds the optima, and what lies between them: that keeps deadlines between theirs."""
        known = np.array([one.deadline_s for one in solved[::-1]])
        durations = np.stack([one.durations_s for one in solved[::-1]], axis=1)
        right = np.clip(np.searchsorted(known, deadlines), 1, max(1, len(known) - 1))
        right = np.minimum(right, len(known) - 1)
        left = np.maximum(right - 1, 0)
        span = known[right] - known[left]
        share = (deadlines - known[left]) / np.where(span > 0, span, 1.0)
        share = np.clip(share, 0.0, 1.0)
        for part in self._parts(len(deadlines), 2 * len(MODES)):
            weight = share[part]
            mixed = durations[:, left[part]] * (1 - weight) + durations[:, right[part]] * weight
            kept = known[left[part]] * (1 - weight) + known[right[part]] * weight
            self.pool.add(self._rounding.round(mixed, kept))

    def _vary(self, deadline_s: float) -> None:
        """Other optima of one deadline, where that takes milliseconds."""
        if self.problem.count > _VARIED:
            return
        durations = self.relaxation.variants(deadline_s, _VARIANTS)
        deadlines = np.full(_VARIANTS, deadline_s)
        options = self._rounding.round(durations, deadlines)
        best = np.argsort(self.problem.cost(options))[:_VARIANTS]
        self.pool.add(self._rounding.improve(options[:, best], np.full(len(best), deadline_s)))

    def _improve(self, edges_s: Floats) -> None:
        pool = self.pool
        hull = np.array(pool.hull(edges_s[0], edges_s[-1]), dtype=np.intp)
        chosen = np.union1d(pool.nearest(edges_s, self.bound(pool.time_s)), hull)
        new = ~np.isin(pool.number[chosen], list(self._improved))
        chosen = chosen[new].astype(np.intp)
        if not len(chosen):
            return
        self._improved.update(pool.number[chosen].tolist())
        options, times = pool.options(chosen), pool.time_s[chosen]
        for part in self._parts(len(chosen)):
            pool.add(self._rounding.improve(options[:, part].copy(), times[part]))

    def _join(self, edges_s: Floats) -> None:
        """Joins neighbours on the hull, either way round."""
        problem, pool = self.problem, self.pool
        number = pool.number.tolist()
        pairs = [
            (a, b)
            for a, b in itertools.pairwise(pool.hull(edges_s[0], edges_s[-1]))
            if (number[a], number[b]) not in self._joined
        ]
        self._joined.update((number[a], number[b]) for a, b in pairs)
        ends = np.array(pairs, dtype=np.intp).reshape(-1, 2)
        fast, slow = pool.options(ends[:, 0]), pool.options(ends[:, 1])
        for part in self._parts(len(pairs), 2 * _SEAMS):
            joined = []
            for a, b in zip(fast[:, part].T[:, :, None], slow[:, part].T[:, :, None], strict=True):
                durations = problem.durations(a)
                middle = (problem.finishes(durations)[:-1] - durations / 2)[:, 0]
                early = middle[:, None] < np.linspace(0.0, middle.max(), _SEAMS + 2)[1:-1]
                joined += [np.where(early, a, b), np.where(early, b, a)]
            pool.add(self._rounding.fill(np.concatenate(joined, axis=1)))

    def _parts(self, number: int, each: int = 1) -> list[slice]:
        """Divides so many columns, of each of which come so many plans."""
        size = max(1, max(_COLUMNS, _CHUNK // self.problem.count) // each)
        return [slice(first, first + size) for first in range(0, number, size)]


def wanted_times(problem: Problem, bound: Callable[[Floats], Floats], points: int | None) -> Floats:
    """Times between which a frontier has a plan, rising.

    Neighbours are at most `STEP` of the energy apart, and within `CLOSE` of the fastest time at
    most `STEP` of that time. Where `points` are too few for that, both are scaled, and those within
    `CLOSE` the least.

    Args:
        problem: The problem.
        bound: Least effective energy for a time.
        points: Plans wanted; None: as many as it takes.
    """
    fastest_s, slowest_s = problem.min_time_s, problem.max_time_s
    close_s = min(slowest_s, (1 + CLOSE) * fastest_s)
    dense = np.linspace(fastest_s, close_s, 500, dtype=np.float64)
    if slowest_s > close_s:
        dense = np.concatenate([dense, np.linspace(close_s, slowest_s, 1500)[1:]])
    cost_j = bound(dense)
    energy_j = np.abs(problem.energy(cost_j, dense))
    by_energy = np.maximum(-np.diff(cost_j), 0.0) / np.maximum(energy_j[1:], 1e-300)
    by_time = np.where(dense[1:] <= close_s, np.diff(dense) / fastest_s, 0.0)
    density = np.maximum(by_energy, by_time) / STEP
    near = dense[1:] <= close_s
    total, of_near = density.sum(), density[near].sum()
    if points is None:
        points = 1 + min(MOST, max(1, int(np.ceil(total))))
    if total > 0 and points - 1 < total:
        kept = max((points - 1) * of_near / total, min(of_near, MANY, (points - 1) / 2))
        rest = total - of_near
        if of_near > 0 and rest > 0:
            density = np.where(near, density * kept / of_near, density * (points - 1 - kept) / rest)
    grown = np.concatenate([[0.0], np.cumsum(density)])
    if grown[-1] <= 0:
        return np.array([fastest_s, slowest_s])
    times_s: Floats = np.interp(np.linspace(0.0, grown[-1], max(2, points)), grown, dense)
    return times_s


STEP = 0.001
"""Share of the energy by which neighbours of a frontier differ at most."""

CLOSE = 0.05
"""Up to so much slower than the fastest is where most pipelines are run."""

MANY = 32
"""Plans of that region that even a short frontier has, as long as that is half of them."""

MOST = 2000

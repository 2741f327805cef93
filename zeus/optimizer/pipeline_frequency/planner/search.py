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
from zeus.optimizer.pipeline_frequency.planner.problem import (
    Floats,
    Ints,
    Problem,
    fits,
    lower_hull,
)
from zeus.optimizer.pipeline_frequency.planner.rounding import Rounding

Progress = Callable[[int, int], None]
"""Progress callback: (done, total)."""

_PARTS = 8
"""Of the times: one that is asked for needs few of them."""

_CHAIN = 11
"""Deadlines of a part for which the linear program is solved, each from the last one's optimum.
With half as many, plans take 0.01 % more energy in the mean."""

_AROUND = 4
"""Deadlines on both sides of a part whose plans its own are joined with: what lies between two
good plans may be wider. With 1, plans take 0.01 % more energy in the mean."""

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
        self._optima: dict[float, Optimum] = {}
        self._seen: set[int] = set()
        share = np.linspace(0.0, 1.0, _PARTS * _CHAIN + 1) ** 1.5
        self._grid_s = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
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
        for part in range(_PARTS):
            self._look(part)
            tell(part + 1, _PARTS)

    def near(self, deadline_s: float, price_w: float = 0.0) -> None:
        """Looks for plans of one time, until there can be no better one elsewhere.

        Args:
            price_w: Cost of a second of the iteration beside the effective energy.
        """
        found = self.solve(deadline_s, price_w)
        at = np.searchsorted(self._grid_s, found.deadline_s) - 1
        part = int(np.clip(at // _CHAIN, 0, _PARTS - 1))
        self._look(part)
        self.pool.add(
            self._rounding.round(found.durations_s[:, None], np.array([found.deadline_s]))
        )
        fit = self.pool.fitting(found.deadline_s)
        self._join(self.pool, max(0, fit - 2), fit + 1)
        # Away from its optimum the bound only rises.
        for edge, others in ((-1, range(part)[::-1]), (0, range(part + 1, _PARTS))):
            for other in others:
                edge_s = self._edges(other)[edge : edge + 1 or None]
                least_j = self.bound(edge_s) + price_w * edge_s
                best_j = self.pool.totals(deadline_s, price_w).min(initial=np.inf)
                if edge_s >= deadline_s or best_j <= least_j:
                    break
                self._look(other)

    def _edges(self, part: int) -> Floats:
        """The deadlines of a part of the times, rising; neighbours share one."""
        return self._grid_s[part * _CHAIN : (part + 1) * _CHAIN + 1]

    def _look(self, part: int) -> None:
        """Looks for plans in a part of the times, once. What it finds depends on the problem alone,
        whatever was asked before.
        """
        if part in self._seen:
            return
        self._seen.add(part)
        first = max(0, part * _CHAIN - _AROUND)
        known_s = self._grid_s[first : (part + 1) * _CHAIN + 1 + _AROUND]
        steps = len(known_s) - 1
        solved = self.program.chain(known_s[::-1].tolist())[::-1]
        self._optima.update((one.deadline_s, one) for one in solved)
        durations = np.stack([one.durations_s for one in solved], axis=1)
        at = np.linspace(0, steps, steps * _PER_DEADLINE + 1)
        left = np.minimum(at.astype(np.intp), steps - 1)
        share = at - left
        pool = Pool(self.problem)
        for some in self._chunks(len(at), 4):
            a, b, of_b = left[some], left[some] + 1, share[some]
            mixed_s = durations[:, a] * (1 - of_b) + durations[:, b] * of_b
            limits_s = known_s[a] * (1 - of_b) + known_s[b] * of_b
            pool.add(self._rounding.round(mixed_s, limits_s))
        self._join(pool, 0, len(pool.time_s))
        inside = np.ones(len(pool.time_s), dtype=bool)
        if not self.problem.changes.time_s:  # else plans take longer than their deadlines
            first_s, last_s = self._edges(part)[[0, -1]]
            inside = fits(pool.time_s, last_s) & ((part == 0) | ~fits(pool.time_s, first_s))
        self.pool.add(pool.plans(np.flatnonzero(inside)))

    def _chunks(self, columns: int, each: int) -> Iterator[slice]:
        size = max(1, _CHUNK // self.problem.count // each)
        return (slice(first, first + size) for first in range(0, columns, size))

    def _join(self, pool: Pool, first: int, last: int) -> None:
        """Joins each plan on the hull of some of a pool's with the next two, either way round:
        the first part of an iteration as one plan of a pair has it, the rest as the other.
        """
        hull = np.array(lower_hull(pool.time_s[first:last], pool.cost_j[first:last]), dtype=np.intp)
        chosen = pool.plans(hull + first)
        for apart in (1, 2):
            for some in self._chunks(len(hull) - apart, 2 * _SEAMS):
                pool.add(self._joined(chosen[:, :-apart][:, some], chosen[:, apart:][:, some]))

    def _joined(self, fast: Ints, slow: Ints) -> Ints:
        problem = self.problem
        durations = problem.durations(fast)
        middle = problem.finishes(durations)[:-1] - durations / 2
        seams = np.linspace(np.zeros(fast.shape[1]), middle.max(axis=0), _SEAMS + 2)[1:-1]
        # The seams of a pair side by side.
        early = (middle[:, :, None] < seams.T).reshape(problem.count, -1)
        a, b = (np.repeat(one, _SEAMS, axis=1) for one in (fast, slow))
        joined = [np.where(early, a, b), np.where(early, b, a)]
        return self._rounding.fill(np.concatenate(joined, axis=1))


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

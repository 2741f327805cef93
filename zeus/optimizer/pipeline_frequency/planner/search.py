"""Looks for good plans where clock changes cost nothing: rounds the linear program's optima.

Where a clock just fits, a plan is almost as good as the bound; between two such deadlines every
rounding wastes a little in every instruction. A plan that runs the first part of the iteration as
the one and the rest as the other wastes only at the seam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from zeus.optimizer.pipeline_frequency.planner import baselines
from zeus.optimizer.pipeline_frequency.planner.linear import Optimum, Program, tangents
from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.problem import (
    Floats,
    Ints,
    PipelineProblem,
    lower_hull,
)
from zeus.optimizer.pipeline_frequency.planner.rounding import Rounding

Progress = Callable[[int, int], None]
"""Progress callback: (done, total)."""


def quietly(done: int, total: int) -> None:
    """Progress that nobody watches."""


STEP = 0.001
"""Share of the energy by which neighbours of a frontier differ at most."""

NEAR = 0.05
"""Slowdown from the fastest plan within which most pipelines are run."""

MAX_PLANS = 2000

_DEADLINES = 89
"""For which the linear program is solved, each from the last one's optimum. With half as many,
plans take 0.01 % more energy in the mean."""

_SEAMS = 16
"""Places at which two plans are joined. With 8, or with neighbours alone, plans take 0.01 % more
energy in the mean."""


class PlanSearch:
    """Finds plans for one problem, and bounds on what any plan takes."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self.program = Program(problem)
        self.policies = baselines.policies(problem)
        self.pool = Pool(problem)
        self._rounding = Rounding(problem)
        self._optima: dict[float, Optimum] = {}
        self._complete = False
        for plans in self.policies.values():
            self.pool.add(plans)
            self.pool.add(self._rounding.fill(plans))

    def solve(self, deadline_s: float, price_w: float = 0.0) -> Optimum:
        """The linear program's optimum, which also makes the bound tighter."""
        problem = self.problem
        deadline_s = min(max(deadline_s, problem.min_time_s), problem.max_time_s)
        if price_w or deadline_s not in self._optima:
            optimum = self.program.solve(deadline_s, price_w)
            self._optima[optimum.deadline_s] = optimum
            return optimum
        return self._optima[deadline_s]

    def bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J."""
        return tangents(list(self._optima.values()), time_s)

    def everywhere(self, tell: Progress = quietly) -> None:
        """Looks for plans of all times, once."""
        if self._complete:
            return
        problem = self.problem
        share = np.linspace(0.0, 1.0, _DEADLINES) ** 1.5
        grid_s = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
        solved = []
        for deadline_s in grid_s[::-1].tolist():
            solved.append(self.solve(deadline_s))
            tell(len(solved), _DEADLINES + 1)
        durations = np.stack([one.durations_s for one in solved[::-1]], axis=1)
        steps = _DEADLINES - 1
        # Durations between two optima that are rounded.
        at = np.linspace(0, steps, steps * 8 + 1)
        left = np.minimum(at.astype(np.intp), steps - 1)
        share = at - left
        for some in self._chunks(len(at), 4):
            a, b, of_b = left[some], left[some] + 1, share[some]
            mixed_s = durations[:, a] * (1 - of_b) + durations[:, b] * of_b
            limits_s = grid_s[a] * (1 - of_b) + grid_s[b] * of_b
            self.pool.add(self._rounding.round(mixed_s, limits_s))
        self._join(0, len(self.pool.time_s))
        self._complete = True
        tell(_DEADLINES + 1, _DEADLINES + 1)

    def near(self, deadline_s: float, price_w: float = 0.0) -> None:
        """Looks for plans of one time, beside those of all times.

        Args:
            price_w: Cost of a second of the iteration beside the effective energy.
        """
        self.everywhere()
        optimum = self.solve(deadline_s, price_w)
        at_s = np.array([optimum.deadline_s])
        self.pool.add(self._rounding.round(optimum.durations_s[:, None], at_s))
        fit = self.pool.fitting(optimum.deadline_s)
        self._join(max(0, fit - 2), fit + 1)

    def _chunks(self, columns: int, each: int) -> Iterator[slice]:
        # Entries of an array of plans that are evaluated together: bounds the memory.
        size = max(1, 400_000 // self.problem.count // each)
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


def spread(problem: PipelineProblem, pool: Pool, bound_j: Floats, points: int | None) -> Ints:
    """Places of a frontier's plans in a pool, the fastest first.

    Neighbours are at most `STEP` of the energy apart, and within `NEAR` of the fastest time at most
    `STEP` of that time, as far as there are plans. Where `points` are too few for that, steps are
    wider, and the plans near the fastest keep a share of them.
    """
    step_j = STEP * abs(float(problem.energy(pool.cost_j, pool.time_s).min()))
    near = max(1, pool.fitting((1 + NEAR) * problem.min_time_s)) - 1

    def walk(first: int, end: int, step_s: float, wider: float = 1.0) -> list[int]:
        """Of the plans in the second half of each step, that which is nearest to the bound."""
        plans: list[int] = []
        while first < end:
            after = [
                min(
                    np.searchsorted(-pool.cost_j, part * step_j - pool.cost_j[first], "right"),
                    np.searchsorted(pool.time_s, pool.time_s[first] + part * step_s, "right"),
                )
                for part in (wider / 2, wider)
            ]
            half, whole = np.clip(np.array(after) - [0, 1], first + 1, end)
            half = min(half, whole)
            above_j = pool.cost_j[half : whole + 1] - bound_j[half : whole + 1]
            first = int(half + above_j.argmin())
            plans.append(first)
        return plans

    parts = [(0, near, STEP * problem.min_time_s), (near, len(pool.time_s) - 1, np.inf)]
    numbers = [len(walk(*part)) for part in parts]
    room = (MAX_PLANS if points is None else points) - 1
    # Plans of that region that even a short frontier has, as long as that is half of them.
    least = min(numbers[0], 32, room / 2)
    kept = int(max(room * numbers[0] / max(1, sum(numbers)), least))
    chosen = [0]
    for part, number, most in zip(parts, numbers, (kept, room - kept), strict=True):
        wider = max(1.0, number / most) if most else math.inf
        walked = walk(*part, wider)
        while len(walked) > most > 0:
            wider *= 1.05
            walked = walk(*part, wider)
        chosen += walked if most else []
    return np.array(chosen, dtype=np.intp)

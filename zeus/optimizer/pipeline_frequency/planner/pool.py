"""Plans found so far, of one problem: the better ones of every time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem

Bound = Callable[[Floats], Floats]
"""Least effective energy for iteration times."""


class Pool:
    """Keeps, of what it is given, the best plans of each interval of time and the lower hull.

    Args:
        problem: Whose plans.
        bound: What plans are held against.
        shortest_s, longest_s: Times of interest.
        intervals: Into so many the times are divided.

    Attributes:
        options: (instructions, plans).
        time_s, cost_j: Of each plan.
        number: Names each plan for good.
    """

    def __init__(
        self, problem: Problem, bound: Bound, shortest_s: float, longest_s: float, intervals: int
    ) -> None:
        self._problem = problem
        self._bound = bound
        self._shortest_s = shortest_s
        self._per_s = intervals / max(longest_s - shortest_s, 1e-300)
        self._intervals = intervals
        self.options: Ints = np.zeros((problem.count, 0), dtype=np.intp)
        self.time_s: Floats = np.zeros(0)
        self.cost_j: Floats = np.zeros(0)
        self.number: Ints = np.zeros(0, dtype=np.intp)
        self._added = 0

    def add(self, options: Ints) -> None:
        """Evaluates plans, and keeps the good ones."""
        problem = self._problem
        everything = np.concatenate([self.options, options], axis=1)
        time_s = np.concatenate([self.time_s, problem.longest(problem.durations(options))])
        cost_j = np.concatenate([self.cost_j, problem.cost(options)])
        numbers = np.arange(self._added, self._added + options.shape[1])
        self._added += options.shape[1]
        number = np.concatenate([self.number, numbers])
        keep = set(_hull(time_s, cost_j))
        excess = cost_j - self._bound(time_s)
        rank = np.lexsort((excess, self.interval(time_s)))
        interval = self.interval(time_s)[rank]
        first = np.flatnonzero(np.diff(interval, prepend=-1))
        second = first[np.isin(first + 1, np.arange(len(rank))) & ~np.isin(first + 1, first)] + 1
        keep.update(rank[first].tolist(), rank[second].tolist())
        chosen = np.array(sorted(keep), dtype=np.intp)
        self.options = everything[:, chosen]
        self.time_s, self.cost_j, self.number = time_s[chosen], cost_j[chosen], number[chosen]

    def interval(self, time_s: Floats) -> Ints:
        """The intervals that times lie in."""
        place = np.floor((time_s - self._shortest_s) * self._per_s)
        return np.clip(place, 0, self._intervals - 1).astype(np.intp)

    def hull(self) -> list[int]:
        """Plans on the lower hull of times and costs, the fastest first."""
        return _hull(self.time_s, self.cost_j)

    def best_of_each(self) -> Ints:
        """For each interval that has plans, the one nearest to the bound."""
        excess = self.cost_j - self._bound(self.time_s)
        interval = self.interval(self.time_s)
        rank = np.lexsort((excess, interval))
        first = np.flatnonzero(np.diff(interval[rank], prepend=-1))
        return np.asarray(rank[first])


def _hull(time_s: Floats, cost_j: Floats) -> list[int]:
    hull: list[int] = []
    for place in np.lexsort((cost_j, time_s)).tolist():
        if hull and cost_j[place] >= cost_j[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            steeper = (cost_j[b] - cost_j[a]) * (time_s[place] - time_s[a])
            if steeper < (cost_j[place] - cost_j[a]) * (time_s[b] - time_s[a]):
                break
            hull.pop()
        hull.append(place)
    return hull

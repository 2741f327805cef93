"""Plans found so far for one problem: each is the cheapest of those that are not slower."""

from __future__ import annotations

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem

SAME = 1e-11
"""Relative difference of times that is rounding."""


class Pool:
    """Keeps every plan that no other plan beats, the fastest first.

    Args:
        problem: The problem that the plans solve.

    Attributes:
        time_s: Iteration times, rising, s.
        cost_j: Effective energies, falling, J.
        number: A number for each plan that it keeps while other plans come and go.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._options = np.zeros((problem.count, 0), dtype=np.int16)
        self.time_s: Floats = np.zeros(0)
        self.cost_j: Floats = np.zeros(0)
        self.number: Ints = np.zeros(0, dtype=np.intp)
        self._added = 0

    def add(self, options: Ints) -> None:
        """Evaluates plans (instructions, plans) and drops those that another plan beats."""
        problem = self._problem
        self.add_known(options, problem.longest(problem.durations(options)), problem.cost(options))

    def add_known(self, options: Ints, time_s: Floats, cost_j: Floats) -> None:
        """`add`, for plans of which time and cost are known."""
        problem = self._problem
        count = options.shape[1]
        if not count:
            return
        time_s = np.concatenate([self.time_s, time_s])
        cost_j = np.concatenate([self.cost_j, cost_j])
        number = np.concatenate([self.number, np.arange(self._added, self._added + count)])
        self._added += count
        rank = np.lexsort((cost_j, time_s))
        cheapest = np.minimum.accumulate(cost_j[rank])
        kept = rank[np.concatenate([[True], cheapest[1:] < cheapest[:-1]])]
        # Of times that differ by rounding, as sums of whole hundredths do, the cheapest plan.
        later = np.append(np.diff(time_s[kept]) > problem.tolerance_s, True)
        kept = kept[later]
        new = kept >= len(self.time_s)
        found = np.empty((problem.count, len(kept)), dtype=np.int16)
        found[:, ~new] = self._options[:, kept[~new]]
        found[:, new] = options[:, kept[new] - len(self.time_s)]
        self._options = found
        self.time_s, self.cost_j, self.number = time_s[kept], cost_j[kept], number[kept]

    def options(self, places: Ints) -> Ints:
        """The options of plans (instructions, plans)."""
        return self._options[:, places].astype(np.intp)

    def part(self, places: Ints) -> Pool:
        """A pool of some of the plans."""
        found = Pool(self._problem)
        found.add_known(self.options(places), self.time_s[places], self.cost_j[places])
        return found

    def best(self, limit_s: float, price_w: float = 0.0) -> int:
        """The plan within a time that costs least.

        Args:
            limit_s: At least `Problem.min_time_s`.
            price_w: Cost of a second of the iteration beside the effective energy.
        """
        fit = int(np.searchsorted(self.time_s, limit_s * (1 + SAME), side="right"))
        return int((self.cost_j[:fit] + price_w * self.time_s[:fit]).argmin())

    def least(self, limit_s: float, price_w: float = 0.0) -> float:
        """What the plan of `best` costs, J; infinity where none is that fast."""
        fit = int(np.searchsorted(self.time_s, limit_s * (1 + SAME), side="right"))
        return float((self.cost_j[:fit] + price_w * self.time_s[:fit]).min(initial=np.inf))

    def within(self, low_s: float, high_s: float) -> Ints:
        """Plans that take at least and at most these times."""
        first, last = np.searchsorted(self.time_s, [low_s * (1 - SAME), high_s * (1 + SAME)])
        return np.arange(first, last)

    def hull(self, low_s: float, high_s: float) -> list[int]:
        """Plans between two times that are on the lower hull of times and costs."""
        hull: list[int] = []
        time_s, cost_j = self.time_s.tolist(), self.cost_j.tolist()
        for place in self.within(low_s, high_s).tolist():
            while len(hull) > 1:
                a, b = hull[-2], hull[-1]
                steeper = (cost_j[b] - cost_j[a]) * (time_s[place] - time_s[a])
                if steeper < (cost_j[place] - cost_j[a]) * (time_s[b] - time_s[a]):
                    break
                hull.pop()
            hull.append(place)
        return hull

    def nearest(self, edges_s: Floats, bound_j: Floats) -> Ints:
        """The plan of each interval of time that is nearest to the bound.

        Args:
            edges_s: Where the intervals begin and end, rising.
            bound_j: The least cost for each plan's time.
        """
        places = self.within(float(edges_s[0]), float(edges_s[-1]))
        interval = np.searchsorted(edges_s[1:-1], self.time_s[places], side="right")
        rank = np.lexsort(((self.cost_j - bound_j)[places], interval))
        first: Ints = rank[np.diff(interval[rank], prepend=-1) > 0]
        return places[first]

    def between(self, chosen: Ints, step_j: float) -> Ints:
        """Adds plans until neighbours are at most a step apart, as far as there are plans.

        Args:
            chosen: Plans, the fastest first.
            step_j: Difference of effective energies.
        """
        found = [int(chosen[0])]
        for slower in chosen[1:].tolist():
            while self.cost_j[found[-1]] - self.cost_j[slower] > step_j:
                # The slowest plan within a step, or the next one if none is.
                after = np.searchsorted(-self.cost_j, step_j - self.cost_j[found[-1]], side="right")
                found.append(max(int(after) - 1, found[-1] + 1))
                if found[-1] >= slower:
                    found.pop()
                    break
            found.append(slower)
        return np.array(found, dtype=np.intp)

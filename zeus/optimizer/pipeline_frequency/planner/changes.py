"""Plans that change clocks less often, where a change takes time or is to be rare."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.baselines import uniform_settings
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem

_TRIALS = 64
"""Runs of equal clocks that are tried slower at once."""

_HALVINGS = 14
"""Of the interval in which prices are looked for."""

_RARER = (1, 2, 4, 0)
"""Fewer changes than may be are tried too, and none: prices are only known about."""

_PRICES = (-12.0, 16.0)
"""Powers of two: how far from usual prices are looked for."""


@dataclass(frozen=True)
class Changes:
    """What a change of a stage's clock costs.

    Attributes:
        time_s: The instruction after it is delayed by this, s.
        most: Changes in an iteration at most; None: any number.
    """

    time_s: float = 0.0
    most: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < 3600:
            raise PipelineFrequencyError(
                f"the time of a clock change must be seconds, such as 0.001, not {self.time_s}"
            )
        if self.most is not None and self.most < 0:
            raise PipelineFrequencyError(
                f"the number of clock changes cannot be below 0: {self.most}"
            )


class Steady:
    """Makes plans of one problem change clocks less often.

    Args:
        problem: The problem.
        changes: What changes cost.
    """

    def __init__(self, problem: Problem, changes: Changes) -> None:
        self._problem = problem
        self._changes = changes
        self._tables = problem.by_clock()
        self._before = np.full(problem.count, -1, dtype=np.intp)
        stages = self._stages = problem.adjustable
        self._places = np.full(
            (len(stages), max(1, *map(len, stages))), problem.count, dtype=np.intp
        )
        for row, stage in enumerate(stages):
            self._before[stage[1:]] = stage[:-1]
            self._places[row, : len(stage)] = stage
        self._mhz = np.array(sorted({mhz for table in self._tables for mhz in table}))
        none = (np.inf, np.inf)
        figures = [[table.get(mhz, none) for mhz in self._mhz.tolist()] for table in self._tables]
        self._time, self._cost = np.moveaxis(np.array(figures)[problem.kind], 2, 0)

    def cost(self, clocks: Ints) -> float:
        """Effective energy of an iteration at these clocks, J."""
        places = np.arange(len(clocks))
        return float(self._cost[places, np.searchsorted(self._mhz, clocks)].sum())

    def time_of(self, place: int, mhz: int) -> float:
        """Of one instruction, s."""
        return self._of(place, mhz)[0]

    def times(self, clocks: Ints) -> Floats:
        """Of an iteration with the changes' time, s, for plans (instructions, plans) of clocks."""
        places = np.arange(clocks.shape[0])[:, None]
        durations = self._time[places, np.searchsorted(self._mhz, clocks)]
        return self._problem.longest(durations + self._delays(clocks))

    def runs(self, clocks: Ints) -> tuple[Floats, Floats, Floats]:
        """When each instruction of a plan begins and ends, s, and its effective energy, J."""
        places, columns = np.arange(len(clocks)), np.searchsorted(self._mhz, clocks)
        durations = self._time[places, columns]
        ends = self._problem.finishes((durations + self._delays(clocks[:, None])[:, 0])[:, None])
        return ends[:-1, 0] - durations, ends[:-1, 0], self._cost[places, columns]

    def _delays(self, clocks: Ints) -> Floats:
        """What changes of a clock delay each instruction, s, of plans (instructions, plans)."""
        delays = np.zeros(clocks.shape)
        if self._changes.time_s:
            later = self._before >= 0
            changed = clocks[later] != clocks[self._before[later]]
            delays[later] = self._changes.time_s * changed
        return delays

    def count(self, clocks: Ints) -> int:
        """Changes in an iteration."""
        later = self._before >= 0
        return int((clocks[later] != clocks[self._before[later]]).sum())

    @cached_property
    def _uniform(self) -> tuple[Ints, Floats, Floats]:
        """Plans of `uniform_settings` that change clocks seldom enough: the clocks (instructions,
        plans), iteration times, s, and effective energies, J.
        """
        clocks = uniform_settings(self._problem)
        if self._changes.most is not None:
            clocks = clocks[:, [self.count(one) <= self._changes.most for one in clocks.T]]
        cost_j = np.array([self.cost(one) for one in clocks.T])
        return clocks, self.times(clocks), cost_j

    def uniform(self, limit_s: float, price_w: float = 0.0) -> Ints | None:
        """The cheapest plan with one clock, or the clocks of one power limit, for all instructions.

        Args:
            limit_s: The time that it keeps within.
            price_w: What a second of the iteration costs beside the effective energy.

        Returns:
            None where none is that fast, or changes clocks that seldom.
        """
        clocks, time_s, cost_j = self._uniform
        total_j = np.where(self._within(time_s, limit_s), cost_j + price_w * time_s, np.inf)
        if not np.isfinite(total_j).any():
            return None
        return clocks[:, int(total_j.argmin())]

    @staticmethod
    def _within(time_s: Floats, limit_s: float) -> NDArray[np.bool_]:
        return np.asarray(time_s <= limit_s * (1 + 1e-11))

    def settle(self, clocks: Ints, deadline_s: float) -> Ints | None:
        """A plan that keeps the deadline with the changes' time, and their number.

        Args:
            clocks: Of each instruction, MHz.
            deadline_s: The deadline.

        Returns:
            None where none was found: with few changes even the highest clocks may be too slow.
        """
        clocks = self._ties(clocks)
        if self._fits(clocks, deadline_s):
            return clocks
        prices = self._prices(clocks)
        found = [self._cheapest(prices, deadline_s, rarer) for rarer in _RARER]
        found += [self._one_clock_each(clocks, deadline_s), self.uniform(deadline_s)]
        kept = [self._slow_down(one, deadline_s) for one in found if one is not None]
        return min(kept, key=self.cost, default=None)

    def _of(self, place: int, mhz: int) -> tuple[float, float]:
        table = self._tables[int(self._problem.kind[place])]
        return table[mhz]

    def _joined(self, places: list[int], mhz: int, clocks: Ints) -> float | None:
        """What it costs to run instructions at another clock, none of them slower; None: one is."""
        cost = 0.0
        for place in places:
            table = self._tables[self._problem.kind[place]]
            if mhz not in table:
                return None
            now = table[int(clocks[place])]
            if table[mhz][0] > now[0]:
                return None
            cost += table[mhz][1] - now[1]
        return cost

    def _ties(self, clocks: Ints) -> Ints:
        """Runs take a neighbour's clock where that costs nothing."""
        clocks = clocks.copy()
        for stage in self._stages:
            for runs in (_runs(stage, clocks), _runs(stage, clocks)[::-1]):
                for one, neighbour in itertools.pairwise(runs):
                    mhz = int(clocks[neighbour[0]])
                    cost = self._joined(one, mhz, clocks)
                    if cost is not None and cost <= 0:
                        clocks[one] = mhz
        return clocks

    def _fits(self, clocks: Ints, deadline_s: float) -> bool:
        most = self._changes.most
        if most is not None and self.count(clocks) > most:
            return False
        return bool(self._within(self.times(clocks[:, None]), deadline_s)[0])

    def _one_clock_each(self, clocks: Ints, deadline_s: float) -> Ints | None:
        """Every stage at the clock that makes it fastest."""
        clocks = clocks.copy()
        for stage in filter(None, self._stages):
            tables = [self._tables[self._problem.kind[place]] for place in stage]
            common = set.intersection(*(set(table) for table in tables))
            if not common:
                return None
            best = min(common, key=lambda mhz: sum(table[mhz][0] for table in tables))
            clocks[stage] = best
        return clocks if self._fits(clocks, deadline_s) else None

    def _prices(self, clocks: Ints) -> Floats:
        """What a second of each instruction is worth, W: its curve's slope where the plan has it.

        A good plan has it there because time is worth as much on that way through the graph.
        """
        prices = []
        for place, mhz in enumerate(clocks.tolist()):
            curve = self._problem.curves[int(self._problem.kind[place])]
            times, costs = curve.time_s[curve.hull], curve.cost_j[curve.hull]
            right = int(np.searchsorted(times, self.time_of(place, mhz), side="right"))
            slopes = -np.diff(costs) / np.diff(times) if len(times) > 1 else np.zeros(1)
            prices.append(float(slopes[min(max(right - 1, 0), len(slopes) - 1)]))
        return np.array(prices)

    def _cheapest(self, prices: Floats, deadline_s: float, rarer: int) -> Ints | None:
        """The plan that costs least with time and changes at their prices.

        All times' prices are raised together until the deadline is kept; the price of a change
        until there are few enough.
        """
        best = None
        low, high = _PRICES
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            chosen = self._few_changes(prices * 2.0**middle, rarer)
            if chosen is not None and self._fits(chosen, deadline_s):
                best, high = chosen, middle
            else:
                low = middle
        return best

    def _few_changes(self, prices: Floats, rarer: int) -> Ints | None:
        # Where there is no such setting the cost is infinite, and so must be the sum.
        times = np.where(np.isinf(self._time), 0.0, self._time)
        values = self._cost + prices[:, None] * times
        taking = prices * self._changes.time_s * rarer
        most = self._changes.most if rarer else 0
        if most is None:
            return self._walk(values, taking)
        best = None
        usual = float(np.median([np.ptp(curve.cost_j) for curve in self._problem.curves])) or 1.0
        low, high = _PRICES
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            chosen = self._walk(values, taking + usual * 2.0**middle)
            if self.count(chosen) <= most // max(rarer, 1):
                best, high = chosen, middle
            else:
                low = middle
        return best

    def _walk(self, values: Floats, change: Floats) -> Ints:
        """The cheapest sequence of clocks of each stage, all stages at once.

        Args:
            values: (instructions, clocks): what each clock costs; inf where there is none.
            change: (instructions,): what a change before it costs.
        """
        places = self._places
        stages, length = places.shape
        rows = np.arange(stages)
        # Where a stage has fewer instructions than another: nothing costs, nothing changes.
        values = np.vstack([values, np.zeros((1, values.shape[1]))])
        change = np.append(change, np.inf)
        total = values[places[:, 0]]
        came = np.zeros((length, *total.shape), dtype=np.intp)
        stay = np.arange(total.shape[1])
        for step in range(1, length):
            place = places[:, step]
            cheapest = total.argmin(axis=1)
            other = (total[rows, cheapest] + change[place])[:, None]
            changed = other < total
            came[step] = np.where(changed, cheapest[:, None], stay)
            total = np.where(changed, other, total) + values[place]
        chosen = np.zeros(self._problem.count + 1, dtype=np.intp)
        at = total.argmin(axis=1)
        for step in range(length - 1, -1, -1):
            chosen[places[:, step]] = at
            at = came[step][rows, at]
        return np.asarray(self._mhz[chosen[:-1]])

    def _slow_down(self, clocks: Ints, deadline_s: float) -> Ints:
        """Whole runs get slower while that saves energy and the deadline allows it."""
        while True:
            trials = []
            for stage in self._stages:
                for run in _runs(stage, clocks):
                    step = self._slower(run, clocks)
                    if step is not None:
                        trials.append((step[0], run, step[1]))
            trials.sort(key=lambda trial: trial[0])
            taken = False
            for first in range(0, len(trials), _TRIALS):
                part = trials[first : first + _TRIALS]
                columns = np.repeat(clocks[:, None], len(part), axis=1)
                for number, (_, run, mhz) in enumerate(part):
                    columns[run, number] = mhz
                fit = np.flatnonzero(self._within(self.times(columns), deadline_s))
                if len(fit):
                    clocks = columns[:, fit[0]].copy()
                    taken = True
                    break
            if not taken:
                return clocks

    def _slower(self, run: list[int], clocks: Ints) -> tuple[float, int] | None:
        """The next clock down that saves energy on a run, and what it saves, below 0."""
        now = int(clocks[run[0]])
        tables = [self._tables[self._problem.kind[place]] for place in run]
        common = set.intersection(*(set(table) for table in tables))
        for mhz in sorted((mhz for mhz in common if mhz < now), reverse=True):
            saved = sum(table[mhz][1] - table[now][1] for table in tables)
            if saved < 0:
                return saved, mhz
        return None


def _runs(stage: list[int], clocks: Ints) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in stage:
        if runs and clocks[runs[-1][0]] == clocks[place]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs

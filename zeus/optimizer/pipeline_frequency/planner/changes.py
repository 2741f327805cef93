"""Plans that change clocks less often, where a change takes time or is to be rare."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem

_TRIALS = 64
"""Runs of equal clocks that are tried slower at once."""

_HALVINGS = 20
"""Of the interval in which prices are looked for."""


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
        for stage in problem.pipeline.stages:
            self._before[stage[1:]] = stage[:-1]

    def cost(self, clocks: Ints) -> float:
        """Effective energy of an iteration at these clocks, J."""
        return float(sum(self._of(place, mhz)[1] for place, mhz in enumerate(clocks.tolist())))

    def time_of(self, place: int, mhz: int) -> float:
        """Of one instruction, s."""
        return self._of(place, mhz)[0]

    def times(self, clocks: Ints) -> Floats:
        """Of an iteration with the changes' time, s, for plans (instructions, plans) of clocks."""
        durations = np.empty(clocks.shape)
        for place in range(clocks.shape[0]):
            table = self._tables[self._problem.kind[place]]
            durations[place] = [table[mhz][0] for mhz in clocks[place].tolist()]
        if self._changes.time_s:
            later = self._before >= 0
            changed = clocks[later] != clocks[self._before[later]]
            durations[later] += self._changes.time_s * changed
        return self._problem.longest(durations)

    def count(self, clocks: Ints) -> int:
        """Changes in an iteration."""
        later = self._before >= 0
        return int((clocks[later] != clocks[self._before[later]]).sum())

    def settle(self, clocks: Ints, deadline_s: float) -> Ints | None:
        """A plan that keeps the deadline with the changes' time, and their number.

        Args:
            clocks: Of each instruction, MHz.
            deadline_s: The deadline.

        Returns:
            None where none was found: with few changes even the highest clocks may be too slow.
        """
        clocks = self._ties(clocks)
        merged = self._merge(clocks, deadline_s)
        if merged is None:
            return None
        if merged is clocks:
            return clocks
        found = [self._slow_down(merged, deadline_s)]
        priced = self._priced(merged, self._prices(clocks), deadline_s)
        if priced is not None:
            found.append(self._slow_down(priced, deadline_s))
        return min(found, key=self.cost)

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
        for stage in self._problem.pipeline.stages:
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
        return bool(self.times(clocks[:, None])[0] <= deadline_s * (1 + 1e-11))

    def _merge(self, clocks: Ints, deadline_s: float) -> Ints | None:
        """Joins the runs whose joining costs the least, until everything fits."""
        if self._fits(clocks, deadline_s):
            return clocks
        steps = self._merges(clocks)
        low, high = 0, len(steps)

        def after(number: int) -> Ints:
            changed: Ints = clocks.copy()
            for places, mhz in steps[:number]:
                changed[places] = mhz
            return changed

        if not self._fits(after(high), deadline_s):
            return self._one_clock_each(clocks, deadline_s)
        while low < high:
            middle = (low + high) // 2
            if self._fits(after(middle), deadline_s):
                high = middle
            else:
                low = middle + 1
        return after(high)

    def _merges(self, clocks: Ints) -> list[tuple[list[int], int]]:
        """Joins in the order of what they cost, until each stage has one clock."""
        clocks = clocks.copy()
        runs: dict[int, list[int]] = {}
        left: dict[int, int | None] = {}
        right: dict[int, int | None] = {}
        number = 0
        for stage in self._problem.pipeline.stages:
            before = None
            for run in _runs(stage, clocks):
                runs[number], left[number], right[number] = run, before, None
                if before is not None:
                    right[before] = number
                before, number = number, number + 1
        queue: list[tuple[float, int, int, int]] = []
        version = dict.fromkeys(runs, 0)

        def offer(name: int) -> None:
            for other in (left[name], right[name]):
                if other is None:
                    continue
                cost = self._joined(runs[name], int(clocks[runs[other][0]]), clocks)
                if cost is not None:
                    heapq.heappush(queue, (cost, name, other, version[name] + version[other]))

        for name in runs:
            offer(name)
        steps = []
        while queue:
            _, name, other, stamp = heapq.heappop(queue)
            if name not in runs or other not in runs or stamp != version[name] + version[other]:
                continue
            mhz = int(clocks[runs[other][0]])
            steps.append((list(runs[name]), mhz))
            clocks[runs[name]] = mhz
            _absorb(name, other, runs, left, right)
            # The run on the other side may have that clock too.
            for side in (left[other], right[other]):
                if side is not None and int(clocks[runs[side][0]]) == mhz:
                    _absorb(side, other, runs, left, right)
            version[other] += 1_000_003
            offer(other)
            for side in (left[other], right[other]):
                if side is not None:
                    version[side] += 1
                    offer(side)
        return steps

    def _one_clock_each(self, clocks: Ints, deadline_s: float) -> Ints | None:
        """Every stage at the clock that makes it fastest."""
        clocks = clocks.copy()
        for stage in self._problem.pipeline.stages:
            tables = [self._tables[self._problem.kind[place]] for place in stage]
            common = set.intersection(*(set(table) for table in tables))
            if not common:
                return None
            best = min(common, key=lambda mhz: sum(table[mhz][0] for table in tables))
            clocks[stage] = best
        return clocks if self._fits(clocks, deadline_s) else None

    def _prices(self, clocks: Ints) -> list[float]:
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
        return prices

    def _priced(self, clocks: Ints, prices: list[float], deadline_s: float) -> Ints | None:
        """Every run at the clock that costs least with its time at its price.

        All prices are raised together until the deadline is kept.
        """
        runs = [run for stage in self._problem.pipeline.stages for run in _runs(stage, clocks)]
        choices = []
        for run in runs:
            tables = [self._tables[int(self._problem.kind[place])] for place in run]
            common = set.intersection(*(set(table) for table in tables))
            choices.append(
                [
                    (
                        mhz,
                        sum(table[mhz][1] for table in tables),
                        sum(
                            prices[place] * table[mhz][0]
                            for place, table in zip(run, tables, strict=True)
                        ),
                    )
                    for mhz in sorted(common, reverse=True)
                ]
            )

        def at(factor: float) -> Ints:
            chosen: Ints = clocks.copy()
            for run, options in zip(runs, choices, strict=True):
                chosen[run] = min(options, key=lambda one: one[1] + factor * one[2])[0]
            return chosen

        best = None
        low, high = -10.0, 10.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            chosen = at(2.0**middle)
            if self._fits(chosen, deadline_s):
                best, high = chosen, middle
            else:
                low = middle
        return best

    def _slow_down(self, clocks: Ints, deadline_s: float) -> Ints:
        """Whole runs get slower while that saves energy and the deadline allows it."""
        problem = self._problem
        while True:
            trials = []
            for stage in problem.pipeline.stages:
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
                fit = np.flatnonzero(self.times(columns) <= deadline_s * (1 + 1e-11))
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


def _absorb(
    name: int,
    into: int,
    runs: dict[int, list[int]],
    left: dict[int, int | None],
    right: dict[int, int | None],
) -> None:
    """Takes one run out of the chain, its instructions into a neighbour."""
    runs[into] = sorted(runs[into] + runs.pop(name))
    before, after = left.pop(name), right.pop(name)
    if before is not None:
        right[before] = after
    if after is not None:
        left[after] = before

"""From times on the hull to clocks that a GPU has: many plans at once, as columns of arrays.

Each plan is walked through the graph, from the iteration's beginning or from its end. An
instruction gets the slowest clock with which it ends when the linear program says; what it does not
use is left to those after it. So no plan misses its deadline. Afterwards what slack is left is
used up: by single instructions, then by pairs of which one gets slower and the next faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeus.optimizer.pipeline_frequency.planner.problem import (
    Floats,
    Ints,
    Order,
    Problem,
    last_of,
)

_STEPS = np.arange(1, 9)
"""By how many options the partner in a pair may get faster."""

ALL, HULL, CEILING = range(3)
"""Options to choose from: all; those on the hull; on the hull, and none slower than the one just
above the program's time. Which is best differs from plan to plan."""

MODES = (ALL, HULL, CEILING)


@dataclass(frozen=True)
class _Place:
    """A group of instructions on the way through the graph.

    Attributes:
        level, before, after: As in `Order`.
        kinds, row: Their curves, and where these begin in a table of all, as a column.
        none: Where `after` stands for none.
        behind: `after` with any instruction for none.
        behind_row: Where their curves begin, for arrays with an axis before, between and after.
        others: For each place in `after`, the other places.
    """

    level: Ints
    before: Ints
    after: Ints
    kinds: Ints
    row: Ints
    none: NDArray[np.bool_]
    behind: Ints
    behind_row: Ints
    others: Ints

    @classmethod
    def of(cls, problem: Problem, level: Ints, before: Ints, after: Ints) -> _Place:
        """The group of these instructions."""
        width = problem.times.shape[1]
        kinds = problem.kind[level][:, None]
        behind = np.minimum(after, problem.count - 1)
        behind_row = (problem.kind[behind] * width)[:, None, :, None]
        none = after == problem.count
        slots = range(after.shape[1])
        others = np.array([[one for one in slots if one != slot] for slot in slots], dtype=np.intp)
        return cls(level, before, after, kinds, kinds * width, none, behind, behind_row, others)


class Rounding:
    """Rounds for one problem.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # How long it takes at least from an instruction's end to the iteration's, and to its
        # beginning from the iteration's.
        ends = problem.finishes(problem.fastest[:, None])[:-1]
        tails = problem.finishes(problem.fastest[:, None], problem.reverse)[:-1]
        self._left = {
            id(problem.forward): tails - problem.fastest[:, None],
            id(problem.reverse): ends - problem.fastest[:, None],
        }
        self._times, self._costs = problem.times.ravel(), problem.costs.ravel()
        self._places = {
            id(order): [
                _Place.of(problem, level, before, after)
                for (level, before), after in zip(order.levels, order.after, strict=True)
            ]
            for order in (problem.forward, problem.reverse)
        }

    def round(self, durations: Floats, deadlines: Floats) -> Ints:
        """Plans within their deadlines, several for each column of durations.

        Args:
            durations: (instructions, columns), s: each within its deadline.
            deadlines: (columns,), s.

        Returns:
            Options (instructions, 2 * len(MODES) * columns); the columns of one kind follow one
            another, so a plan's deadline is `np.tile(deadlines, 2 * len(MODES))`.
        """
        problem = self._problem
        snapped, ceilings = self._snap(durations)
        options = np.concatenate(
            [
                self._diffuse(order, snapped, ceilings, deadlines)
                for order in (problem.forward, problem.reverse)
            ],
            axis=1,
        )
        limits = np.tile(deadlines, 2 * len(MODES))
        self._use_slack(options, limits, problem.forward, problem.reverse)
        self._use_slack(options, limits, problem.reverse, problem.forward)
        return options

    def fill(self, options: Ints) -> Ints:
        """Uses the slack of plans, each within its own time. Changes the options; returns them."""
        problem = self._problem
        times = problem.longest(problem.durations(options))
        self._use_slack(options, times, problem.forward, problem.reverse)
        self._use_slack(options, times, problem.reverse, problem.forward)
        return options

    def improve(self, options: Ints, deadlines: Floats) -> Ints:
        """Uses slack that no instruction can use alone. Changes the options, and returns them."""
        problem = self._problem
        self._use_slack(options, deadlines, problem.forward, problem.reverse, pairs=True)
        self._use_slack(options, deadlines, problem.reverse, problem.forward, pairs=True)
        return options

    def _snap(self, durations: Floats) -> tuple[Floats, Ints]:
        """Durations without the solver's tolerance, and the hull's points just above them."""
        problem = self._problem
        snapped = durations.copy()
        ceilings = np.zeros(durations.shape, dtype=np.intp)
        for number, curve in enumerate(problem.curves):
            rows = np.flatnonzero(problem.kind == number)
            points = curve.time_s[curve.hull]
            slack = 1e-6 * points[0]
            found = snapped[rows]
            place = np.searchsorted(points, found - slack)
            place = np.minimum(place, len(points) - 1)
            ceilings[rows] = curve.hull[place]
            snapped[rows] = np.where(np.abs(points[place] - found) <= slack, points[place], found)
        return snapped, ceilings

    def _diffuse(self, order: Order, durations: Floats, ceilings: Ints, deadlines: Floats) -> Ints:
        """Plans of each column by all modes, walking in one order."""
        problem = self._problem
        targets = problem.finishes(durations, order)[:-1]
        # Snapping may have made the program's times longer than the deadline by a hair.
        targets = np.minimum(targets, deadlines - self._left[id(order)]) + problem.tolerance_s
        targets = np.tile(targets, len(MODES))
        columns = durations.shape[1]
        hull, ceiling = (slice(mode * columns, None) for mode in (HULL, CEILING))
        ends = np.zeros((problem.count + 1, targets.shape[1]))
        options = np.zeros(targets.shape, dtype=np.intp)
        for place in self._places[id(order)]:
            level, kinds = place.level, place.kinds
            starts = last_of(ends, place.before)
            found = problem.slowest_within(kinds, targets[level] - starts)
            found[:, hull] = problem.hull_below[kinds, found[:, hull]]
            found[:, ceiling] = np.minimum(found[:, ceiling], ceilings[level])
            options[level] = found
            ends[level] = starts + self._times.take(found + place.row)
        return options

    def _use_slack(
        self, options: Ints, deadlines: Floats, order: Order, back: Order, pairs: bool = False
    ) -> None:
        """Makes instructions slower, one after the other, where the deadline allows it."""
        problem = self._problem
        durations = np.vstack([problem.durations(options), np.zeros((1, options.shape[1]))])
        # When each may end at the latest, if those after it stay as they are.
        latest = deadlines - (problem.finishes(durations[:-1], back) - durations)
        latest += problem.tolerance_s
        ends = np.zeros(durations.shape)
        for place in self._places[id(order)]:
            level, after = place.level, place.after
            starts = last_of(ends, place.before)
            # Of all behind it, when the first must begin at the latest.
            begin = np.where(place.none[:, :, None], deadlines, latest[after] - durations[after])
            budget = begin.min(axis=1) - starts
            found = np.maximum(problem.slowest_within(place.kinds, budget), options[level])
            if pairs:
                found = self._pair(options, durations, latest, place, starts, begin, found)
            options[level] = found
            durations[level] = self._times.take(found + place.row)
            ends[level] = starts + durations[level]

    def _pair(
        self,
        options: Ints,
        durations: Floats,
        latest: Floats,
        place: _Place,
        starts: Floats,
        begin: Floats,
        alone: Ints,
    ) -> Ints:
        """Makes an instruction slower still where it pays that one behind it gets faster."""
        problem, behind = self._problem, place.behind
        # Axes: the instruction, the plan, the one behind it, and how much faster that one gets.
        now = options[behind].transpose(0, 2, 1).copy()[..., None]
        candidate = now - _STEPS
        impossible = (candidate < 0) | place.none[:, None, :, None]
        np.maximum(candidate, 0, out=candidate)
        allowed = latest[behind].transpose(0, 2, 1)[..., None] - self._times.take(
            candidate + place.behind_row
        )
        if behind.shape[1] > 1:
            others = begin[:, place.others].min(axis=2).transpose(0, 2, 1)
            np.minimum(allowed, others[..., None], out=allowed)
        allowed -= starts[:, :, None, None]
        found = problem.slowest_within(place.kinds[:, :, None, None], allowed)
        np.maximum(found, options[place.level][:, :, None, None], out=found)
        cost = self._costs.take(found + place.row[:, :, None, None])
        cost += self._costs.take(candidate + place.behind_row)
        cost -= self._costs.take(now + place.behind_row)
        cost[impossible] = np.inf
        ways = cost.shape[2] * cost.shape[3]
        way = cost.reshape(*alone.shape, ways).argmin(axis=2)
        at = way + np.arange(0, cost.size, ways).reshape(alone.shape)
        alone_cost = self._costs.take(alone + place.row)
        better = cost.take(at) < alone_cost - 1e-12 * np.abs(alone_cost)
        rows, columns = better.nonzero()
        if not len(rows):
            return alone
        best: Ints = alone.copy()
        best[rows, columns] = found.take(at[rows, columns])
        partners = behind[rows, way[rows, columns] // len(_STEPS)]
        # Two may have the same partner: the faster of what they ask for suits both.
        np.minimum.at(options, (partners, columns), candidate.take(at[rows, columns]))
        changed = np.unique(partners)
        durations[changed] = problem.times[problem.kind[changed][:, None], options[changed]]
        return best

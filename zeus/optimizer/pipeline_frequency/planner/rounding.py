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
    CurveTables,
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

    Instructions are rows here, as in `Order.rows`.

    Attributes:
        span: Its rows.
        before, after: Those before and behind each of its instructions, filled up with the number
            of instructions, which stands for none.
        row: Where their curves begin in a table of all, as a column.
        table, deep_table: Where the curves are in the tables, for plans, and for plans with an axis
            between and after.
        none: Where `after` stands for none.
        behind: `after` with any instruction for none.
        behind_row: Where their curves begin, for arrays with an axis before, between and after.
        others: For each place in `after`, the other places.
    """

    span: slice
    before: Ints
    after: Ints
    row: Ints
    table: CurveTables
    deep_table: CurveTables
    none: NDArray[np.bool_]
    behind: Ints
    behind_row: Ints
    others: Ints

    @classmethod
    def all_of(cls, problem: Problem, order: Order) -> list[_Place]:
        """The groups of an order."""
        width = problem.times.shape[1]
        kind = problem.kind[order.rows]
        found = []
        for (span, before), after in zip(order.spans, order.after, strict=True):
            kinds = kind[span][:, None]
            rows_after = order.row_of[after]
            behind = np.minimum(rows_after, problem.count - 1)
            slots = range(after.shape[1])
            others = [[one for one in slots if one != slot] for slot in slots]
            found.append(
                cls(
                    span,
                    before,
                    rows_after,
                    kinds * width,
                    problem.tables_of(kinds),
                    problem.tables_of(kinds[:, :, None, None]),
                    rows_after == problem.count,
                    behind,
                    (kind[behind] * width)[:, None, :, None],
                    np.array(others, dtype=np.intp),
                )
            )
        return found


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
        self._hull_below = problem.hull_below.ravel()
        self._places = {
            id(order): _Place.all_of(problem, order) for order in (problem.forward, problem.reverse)
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
        targets = np.tile(targets[order.rows], len(MODES))
        ceilings = ceilings[order.rows]
        columns = durations.shape[1]
        hull, ceiling = (slice(mode * columns, None) for mode in (HULL, CEILING))
        ends = np.zeros((problem.count + 1, targets.shape[1]))
        options = np.zeros(targets.shape, dtype=np.intp)
        for place in self._places[id(order)]:
            span = place.span
            starts = last_of(ends, place.before)
            found = place.table.slowest_within(targets[span] - starts)
            found[:, hull] = self._hull_below.take(found[:, hull] + place.row)
            np.minimum(found[:, ceiling], ceilings[span], out=found[:, ceiling])
            options[span] = found
            found += place.row
            np.add(starts, self._times.take(found), out=ends[span])
        return options[order.row_of[:-1]]

    def _use_slack(
        self, options: Ints, deadlines: Floats, order: Order, back: Order, pairs: bool = False
    ) -> None:
        """Makes instructions slower, one after the other, where the deadline allows it."""
        problem = self._problem
        durations = np.vstack([problem.durations(options), np.zeros((1, options.shape[1]))])
        # When each may end at the latest, if those after it stay as they are.
        latest = deadlines - (problem.finishes(durations[:-1], back) - durations)
        latest += problem.tolerance_s
        latest[-1] = deadlines
        rows = np.append(order.rows, problem.count)
        latest = latest.take(rows, axis=0)
        chosen = options.take(order.rows, axis=0)
        # And when it must begin: the last row stands for the iteration's end.
        begins = latest - durations.take(rows, axis=0)
        ends = np.zeros(durations.shape)
        for place in self._places[id(order)]:
            span = place.span
            starts = last_of(ends, place.before)
            # Of all behind it, when the first must begin.
            begin = begins.take(place.after, axis=0)
            budget = begin.min(axis=1)
            budget -= starts
            found = place.table.slowest_within(budget)
            np.maximum(found, chosen[span], out=found)
            if pairs:
                found = self._pair(chosen, begins, latest, place, starts, begin, found)
            chosen[span] = found
            np.add(starts, self._times.take(found + place.row), out=ends[span])
        options[order.rows] = chosen

    def _pair(
        self,
        options: Ints,
        begins: Floats,
        latest: Floats,
        place: _Place,
        starts: Floats,
        begin: Floats,
        alone: Ints,
    ) -> Ints:
        """Makes an instruction slower still where it pays that one behind it gets faster."""
        behind = place.behind
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
        found = place.deep_table.slowest_within(allowed)
        np.maximum(found, options[place.span][:, :, None, None], out=found)
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
        way_behind = way[rows, columns] // len(_STEPS)
        partners = behind[rows, way_behind]
        # Two may have the same partner: the faster of what they ask for suits both.
        np.minimum.at(options, (partners, columns), candidate.take(at[rows, columns]))
        taken = options[partners, columns] + place.behind_row[rows, 0, way_behind, 0]
        begins[partners, columns] = latest[partners, columns] - self._times.take(taken)
        return best

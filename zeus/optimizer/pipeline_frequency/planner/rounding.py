"""From times on the hull to clocks that a GPU has: many plans at once, as columns of arrays.

Each plan is walked through the graph, from the iteration's beginning or from its end. An
instruction gets the slowest clock with which it ends when the linear program says; what it does not
use is left to those after it. So no plan misses its deadline. Afterwards what slack is left is
used up: by single instructions, then by pairs of which one gets slower and the next faster.
"""

from __future__ import annotations

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Order, Problem

_STEPS = np.arange(1, 9)
"""By how many options the partner in a pair may get faster."""

ALL, HULL, CEILING = range(3)
"""Options to choose from: all; those on the hull; on the hull, and none slower than the one just
above the program's time. Which is best differs from plan to plan."""

MODES = (ALL, HULL, CEILING)


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
                self._diffuse(order, mode, snapped, ceilings, deadlines)
                for order in (problem.forward, problem.reverse)
                for mode in MODES
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

    def _diffuse(
        self, order: Order, mode: int, durations: Floats, ceilings: Ints, deadlines: Floats
    ) -> Ints:
        problem = self._problem
        targets = problem.finishes(durations, order)[:-1]
        # Snapping may have made the program's times longer than the deadline by a hair.
        targets = np.minimum(targets, deadlines - self._left[id(order)]) + problem.tolerance_s
        ends = np.zeros((problem.count + 1, durations.shape[1]))
        options = np.zeros(durations.shape, dtype=np.intp)
        for level, before in order.levels:
            starts = ends[before].max(axis=1)
            kinds = problem.kind[level][:, None]
            found = problem.slowest_within(kinds, targets[level] - starts)
            if mode != ALL:
                found = problem.hull_below[kinds, found]
            if mode == CEILING:
                found = np.minimum(found, ceilings[level])
            options[level] = found
            ends[level] = starts + problem.times[kinds, found]
        return options

    def _use_slack(
        self, options: Ints, deadlines: Floats, order: Order, back: Order, pairs: bool = False
    ) -> None:
        """Makes instructions slower, one after the other, where the deadline allows it."""
        problem = self._problem
        none = problem.count
        durations = np.vstack([problem.durations(options), np.zeros((1, options.shape[1]))])
        # When each may end at the latest, if those after it stay as they are.
        latest = deadlines - (problem.finishes(durations[:-1], back) - durations)
        latest += problem.tolerance_s
        ends = np.zeros_like(durations)
        for (level, before), after in zip(order.levels, order.after, strict=True):
            starts = ends[before].max(axis=1)
            kinds = problem.kind[level][:, None]
            # Of all behind it, when the first must begin at the latest.
            begin = np.where(
                (after == none)[:, :, None], deadlines, latest[after] - durations[after]
            )
            budget = begin.min(axis=1) - starts
            found = np.maximum(problem.slowest_within(kinds, budget), options[level])
            if pairs:
                found = self._pair(options, durations, latest, level, after, starts, begin, found)
            options[level] = found
            durations[level] = problem.times[kinds, found]
            ends[level] = starts + durations[level]

    def _pair(
        self,
        options: Ints,
        durations: Floats,
        latest: Floats,
        level: Ints,
        after: Ints,
        starts: Floats,
        begin: Floats,
        alone: Ints,
    ) -> Ints:
        """Makes an instruction slower still where it pays that one behind it gets faster."""
        problem = self._problem
        none = problem.count
        kinds = problem.kind[level][:, None]
        best_cost = problem.costs[kinds, alone]
        best = alone
        partner = np.full(alone.shape, -1, dtype=np.intp)
        partner_option = np.zeros(alone.shape, dtype=np.intp)
        width = after.shape[1]
        for slot in range(width):
            other = after[:, slot]
            present = other != none
            if not present.any():
                continue
            rows = np.flatnonzero(present)
            behind = other[rows]
            behind_kinds = problem.kind[behind][:, None]
            now = options[behind]
            others = [begin[rows, column] for column in range(width) if column != slot]
            limit = np.minimum.reduce(others) if others else np.full(now.shape, np.inf)
            # With a last axis for how much faster the one behind gets.
            candidate = now[:, :, None] - _STEPS
            possible = candidate >= 0
            candidate = np.maximum(candidate, 0)
            allowed = latest[behind][:, :, None] - problem.times[behind_kinds[..., None], candidate]
            allowed = np.minimum(allowed, limit[:, :, None]) - starts[rows][:, :, None]
            found = problem.slowest_within(kinds[rows][..., None], allowed)
            found = np.maximum(found, options[level][rows][:, :, None])
            cost = (
                problem.costs[kinds[rows][..., None], found]
                + problem.costs[behind_kinds[..., None], candidate]
                - problem.costs[behind_kinds, now][:, :, None]
            )
            cost = np.where(possible, cost, np.inf)
            step = cost.argmin(axis=2)[:, :, None]
            cost = np.take_along_axis(cost, step, 2)[:, :, 0]
            better = cost < best_cost[rows] - 1e-12 * np.abs(best_cost[rows])
            if better.any():
                found = np.take_along_axis(found, step, 2)[:, :, 0]
                candidate = np.take_along_axis(candidate, step, 2)[:, :, 0]
                best_cost[rows] = np.where(better, cost, best_cost[rows])
                best[rows] = np.where(better, found, best[rows])
                partner[rows] = np.where(better, behind[:, None], partner[rows])
                partner_option[rows] = np.where(better, candidate, partner_option[rows])
        rows, columns = np.nonzero(partner >= 0)
        if len(rows):
            behind = partner[rows, columns]
            # Two may have the same partner: the faster of what they ask for suits both.
            np.minimum.at(options, (behind, columns), partner_option[rows, columns])
            changed = np.unique(behind)
            durations[changed] = problem.times[problem.kind[changed][:, None], options[changed]]
        return best

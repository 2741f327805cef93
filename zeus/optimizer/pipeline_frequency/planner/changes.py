"""Plans that change clocks less often, where a change takes time or is to be rare.

The linear program prices a second of each instruction. With these prices, and a price for a change,
dynamic programming finds the cheapest sequence of clocks of each stage. Then prices move towards
critical paths. The list of plans depends on the problem alone.
"""

from __future__ import annotations

import itertools

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.problem import (
    Booleans,
    Floats,
    Ints,
    PipelineProblem,
    fits,
)
from zeus.optimizer.pipeline_frequency.planner.search import PlanSearch, Progress, quietly

_MULTIPLES = 2.0 ** np.array([0, 0.5, 1, 2, 4, 10])
"""Of the linear program's prices: with the highest all that is critical is as fast as can be."""

_STEPS = 24
"""Moves of prices towards critical paths."""

_TURNS = 6
"""Times that runs of the list's plans get slower; for large pipelines that takes seconds."""


class ChangeSearch:
    """Finds plans of a problem whose clock changes cost something."""

    def __init__(self, search: PlanSearch) -> None:
        self._problem = search.problem
        self._search = search
        self._rows = np.concatenate(self._problem.adjustable)
        self.pool = Pool(self._problem)
        self._complete = False

    def bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J.

        With prices that add up to the same on all ways through the graph, no plan costs less than
        the cheapest one at these prices.
        """
        self.everywhere()
        return np.asarray((self._values_j - self._slopes_w * time_s[:, None]).max(axis=1))

    def near(self, limit_s: float, price_w: float = 0.0) -> None:
        """Slows the best plans down to one time."""
        self.everywhere()
        pool = self.pool
        # Plans of the list that are slowed down to the time that is asked for.
        plans = pool.plans(pool.totals(limit_s, price_w).argsort(kind="stable")[:16])
        pool.add(self._slow_down(plans, np.full(plans.shape[1], limit_s), 10 * _TURNS))

    # ------------------------------------------------------------------------------- the list

    def everywhere(self, tell: Progress = quietly) -> None:
        """Looks for plans of all times, once."""
        if self._complete:
            return
        problem, pool, most = self._problem, self.pool, self._problem.changes.most
        if most is None:
            self._search.everywhere()
        # Instructions times plans that are made together, about, so that a long graph takes
        # seconds.
        size = int(np.clip(32_768 // problem.count, 32, 256))
        prices, total_w = self._first_prices(max(2, min(24, size // len(_MULTIPLES))))
        values_j = []
        for step in range(_STEPS):
            plans, value_j = self._cheapest(prices)
            values_j.append(value_j - (most or 0) * prices[-1])
            pool.add(plans)
            share = 0.7 / (step + 3)
            prices[:-1] *= 1 - share
            prices[:-1] += share * total_w * self._critical(problem.durations(plans))
            tell(step + 1, 2 * _STEPS)
            if most is not None:
                dearer = max(0.5, 8 / 2**step)
                prices[-1] *= np.exp2(np.where(problem.allowed(plans), -dearer, dearer))
        self._keep_bound(np.concatenate(values_j), np.tile(total_w, _STEPS))
        for plans in self._search.policies.values():
            pool.add(plans)
        pool.add(self._search.pool.plans(np.arange(len(self._search.pool.time_s))))
        plans, times_s = pool.plans(np.arange(len(pool.time_s))), pool.time_s
        for first in range(0, len(times_s), 4 * size):
            some = slice(first, first + 4 * size)
            pool.add(self._slow_down(plans[:, some], times_s[some], _TURNS))
        self._complete = True
        tell(2 * _STEPS, 2 * _STEPS)

    def _keep_bound(self, values_j: Floats, slopes_w: Floats) -> None:
        """Keeps the lines that are the highest at some time."""
        some_s = np.linspace(self._problem.min_time_s, 2 * self._problem.max_time_s, 1000)
        highest = np.unique((values_j - slopes_w * some_s[:, None]).argmax(axis=1))
        self._values_j, self._slopes_w = values_j[highest], slopes_w[highest]

    def _first_prices(self, deadlines: int) -> tuple[Floats, Floats]:
        """Value of a second of each instruction, W, and last of a change, J; and the prices' sum
        on any way through the graph, W: of (instructions and change, plans), and of plans.
        """
        problem = self._problem
        share = np.linspace(1.0, 0.0, deadlines) ** 1.5
        times_s = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
        solved = [self._search.program.solve(time_s) for time_s in times_s.tolist()]
        prices = np.stack([one.prices_w for one in solved], axis=1)
        # Share of the mean price that instructions with slack have to begin with.
        little = 1e-3 * prices.mean(axis=0)
        # It is the same for all, and so for any way along a stage.
        total = np.array([one.price_w for one in solved]) + len(problem.stages) * little
        usual = float(np.median([np.ptp(curve.cost_j) for curve in problem.curves])) or 1.0
        change = np.full((1, deadlines), 0.0 if problem.changes.most is None else usual)
        prices = np.concatenate([prices + little, change]).repeat(len(_MULTIPLES), axis=1)
        multiples = np.tile(_MULTIPLES, deadlines)
        prices[:-1] *= multiples
        return prices, total.repeat(len(_MULTIPLES)) * multiples

    def _critical(self, durations_s: Floats) -> Booleans:
        """Which instructions are on one longest way through the graph (instructions, plans)."""
        problem = self._problem
        ends = problem.finishes(durations_s)
        on_way = np.zeros(ends.shape, dtype=bool)
        plans = np.arange(ends.shape[1])
        on_way[ends[:-1].argmax(axis=0), plans] = True
        for level in problem.reverse:
            own = on_way[level.span]
            before = level.after  # of the reverse level: those it waits for
            last = ends[before].argmax(axis=1)
            rows, columns = own.nonzero()
            on_way[before[rows, last[rows, columns]], columns] = True
        return on_way[:-1]

    def _cheapest(self, prices: Floats) -> tuple[Ints, Floats]:
        """The plans that cost least with prices, each for itself, and what they cost, J: the
        cheapest sequence of clocks of each stage.
        """
        problem, width = self._problem, prices.shape[1]
        plans = np.repeat(problem.highest[:, None], width, axis=1)
        fixed = np.flatnonzero(problem.fixed)
        value_j = problem.costs[problem.kind[fixed], plans[fixed, 0]].sum() + (
            prices[fixed] * problem.times[problem.kind[fixed], plans[fixed, 0]][:, None]
        ).sum(axis=0)
        columns = np.arange(width)
        times = np.where(problem.offered, problem.times, 0.0)  # where none is the cost is infinite
        for stage in problem.adjustable:
            total = np.zeros((width, len(problem.settings)))
            steps: list[tuple[int, Ints, Booleans]] = []
            for row in stage.tolist():
                change = prices[row] * problem.changes.time_s + prices[-1]
                cheapest = total.argmin(axis=1)
                other = (total[columns, cheapest] + (change if steps else 0.0))[:, None]
                steps.append((row, cheapest, other < total))
                kind = problem.kind[row]
                total = np.minimum(other, total) + prices[row][:, None] * times[kind]
                total += problem.costs[kind]
            if not steps:
                continue
            at = total.argmin(axis=1)
            value_j = value_j + total[columns, at]
            for row, cheapest, changed in reversed(steps):
                plans[row] = at
                at = np.where(changed[columns, at], cheapest, at)
        return plans, value_j

    # ---------------------------------------------------------------------------- slower runs

    def _slow_down(self, plans: Ints, limits_s: Floats, turns: int) -> Ints:
        """Whole runs of equal clocks get slower while that saves energy and the time allows it.

        Then `ties`, as a plan with fewer changes may be faster: the pool must know each plan as it
        is told, or that plan is no answer to a question for its own time.
        """
        problem, rows = self._problem, self._rows
        kinds = len(problem.kinds)
        times, costs = (
            np.where(problem.offered, one, 1e200) for one in (problem.times, problem.costs)
        )
        plans = plans.copy()
        active = np.arange(plans.shape[1] if len(rows) else 0)
        begins = np.isin(rows, problem.later, invert=True)
        for _ in range(turns):
            if not len(active):
                break
            own = plans[rows][:, active].T
            # Plan after plan: its runs, and how many instructions of each kind they have.
            first = begins | (np.diff(own, axis=1, prepend=-1) != 0)
            run = np.cumsum(first).reshape(first.shape) - 1
            starts = np.flatnonzero(first)
            owner, now = starts // len(rows), own.ravel()[starts]
            number = np.bincount(
                (run * kinds + problem.kind[rows]).ravel(), minlength=len(starts) * kinds
            )
            number = number.reshape(-1, kinds)
            longer_s, saved_j = number @ times, number @ costs
            each = np.arange(len(starts))
            longer_s -= longer_s[each, now][:, None]
            saved_j = saved_j[each, now][:, None] - saved_j
            room_s = self._slack(plans[:, active], limits_s[active])[rows].T.ravel()
            # A run whose instructions wait in between may have more than its tightest one.
            room_s = np.minimum.reduceat(room_s, starts)[:, None] * number.sum(axis=1)[:, None]
            possible = (saved_j > 0) & (longer_s <= room_s)
            changes = []
            for cost in (longer_s, -saved_j / np.maximum(longer_s, 1e-200)):
                # The least slowdown that saves any, and what saves most for its time; none at all
                # counts as one so short that it comes first, and no quotient overflows.
                best = np.where(possible, cost, np.inf).argmin(axis=1)
                saved = np.where(possible[each, best], saved_j[each, best], 0.0)
                # Runs of a plan that are slowed down one by one, at most.
                largest = _largest(saved, owner, 8)
                changes += [(owner[place], place, best[place]) for place in largest]
            which, place, setting = (np.concatenate(one) for one in zip(*changes, strict=True))
            columns = plans[:, active[which]]
            changed = run[which] == place[:, None]
            columns[rows] = np.where(changed.T, setting, columns[rows])
            fit = fits(problem.time(columns), limits_s[active[which]]) & problem.allowed(columns)
            cost_j = problem.cost(columns)
            # The cheapest last: it remains.
            order = np.flatnonzero(fit)[cost_j[fit].argsort(kind="stable")[::-1]]
            plans[:, active[which[order]]] = columns[:, order]
            active = np.unique(active[which[order]])
        return ties(problem, plans)

    def _slack(self, plans: Ints, limits_s: Floats) -> Floats:
        """How much longer each instruction may take if it alone gets slower, s."""
        problem = self._problem
        durations = problem.durations(plans)
        ways_s = problem.finishes(durations)[:-1] - durations
        ways_s += problem.finishes(durations, problem.reverse)[:-1]
        return np.asarray(limits_s - ways_s)


def _largest(saved_j: Floats, owner: Ints, most: int) -> list[Ints]:
    """Of each plan's runs the one that saves most, the second, and so on."""
    order = np.lexsort((-saved_j, owner))
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    good = saved_j[order] > 0
    return [order[(rank == number) & good] for number in range(most)]


def ties(problem: PipelineProblem, plans: Ints) -> Ints:
    """Plans (instructions, plans) with fewer changes: an instruction takes its neighbour's clock
    where that costs nothing.
    """
    tied = plans.copy()
    for stage in problem.adjustable:
        for order in (stage, stage[::-1]):
            for neighbour, row in itertools.pairwise(order.tolist()):
                kind, own, other = problem.kind[row], tied[row], tied[neighbour]
                free = problem.times[kind, other] <= problem.times[kind, own]
                free &= problem.costs[kind, other] <= problem.costs[kind, own]
                tied[row] = np.where(free, other, own)
    # A change that only moved may delay a critical instruction.
    return np.where(problem.time(tied) <= problem.time(plans), tied, plans)

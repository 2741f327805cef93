"""Plans that change clocks less often, where a change takes time or is to be rare.

The linear program prices a second of each instruction. With these prices, and a price for a change,
dynamic programming finds the cheapest sequence of clocks of each stage. Then prices move towards
critical paths, and are varied at random. The list of plans depends on the problem alone, so a
question for one time never gets a worse answer than the frontier has.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.baselines import uniform_settings
from zeus.optimizer.pipeline_frequency.planner.pool import SAME, Pool
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem
from zeus.optimizer.pipeline_frequency.planner.search import PlanSearch

_MULTIPLES = 2.0 ** np.array([0, 0.5, 1, 2, 4, 10])
"""Of the linear program's prices: with the highest all that is critical is as fast as can be."""

_DEADLINES = 24
"""For which the linear program is solved, at most."""

_LITTLE = 1e-3
"""Share of the mean price that instructions with slack have to begin with."""

_STEPS = 24
"""Of prices towards critical paths."""

_ROUNDS = 30
"""In which prices are varied at random."""

_SPREADS = (0.02, 0.1, 0.3)
"""Standard deviations of the logarithm of prices that are varied."""

_ENTRIES = 32_768
"""Instructions times plans that are made together, about; so a long graph takes seconds too."""

_TOGETHER = (32, 256)
"""Plans that are made together, at least and at most."""

_ALONE = 8
"""Runs of a plan that are slowed down one by one, at most."""

_ALMOST_FREE = 0.01
"""Share of an instruction's time: where changes take less, plans without their cost serve, too."""

_MANY = 0.25
"""Changes for each instruction, at most, from which on those plans may have few enough."""

_PATIENCE = 12
"""Times that runs of the list's plans get slower; for large pipelines that takes seconds."""

_NEVER = 1e200
"""What a run takes at a clock that not all of its instructions have, s and J."""

_BEST = 16
"""Plans of the list that are slowed down to the time that is asked for."""


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
    """Plans of one problem whose clock changes cost something.

    Args:
        problem: The problem.
        changes: What changes cost.
        search: Finds plans whose changes cost nothing.

    Attributes:
        almost_free: Whether changes cost so little that such plans serve, too.
    """

    def __init__(self, problem: Problem, changes: Changes, search: PlanSearch) -> None:
        self._problem = problem
        self._changes = changes
        self._search = search
        self._tables = problem.by_clock()
        few = changes.most is not None and changes.most < _MANY * problem.count
        usual_s = float(np.median(problem.fastest))
        self.almost_free = changes.time_s <= _ALMOST_FREE * usual_s and not few
        self._before = np.full(problem.count, -1, dtype=np.intp)
        stages = self._stages = problem.adjustable
        self._places = np.full(
            (len(stages), max(1, *map(len, stages))), problem.count, dtype=np.intp
        )
        for row, stage in enumerate(stages):
            self._before[stage[1:]] = stage[:-1]
            self._places[row, : len(stage)] = stage
        self._later = np.flatnonzero(self._before >= 0)
        self._mhz = np.array(sorted({mhz for table in self._tables for mhz in table}))
        none = (np.inf, np.inf)
        figures = [[table.get(mhz, none) for mhz in self._mhz.tolist()] for table in self._tables]
        self._time_of_kind, self._cost_of_kind = np.moveaxis(np.array(figures), 2, 0)
        self._time, self._cost = self._time_of_kind[problem.kind], self._cost_of_kind[problem.kind]

    # ----------------------------------------------------------------------------- evaluation

    def times(self, clocks: Ints) -> Floats:
        """Of an iteration with the changes' time, s, for plans (instructions, plans) of clocks."""
        columns = np.searchsorted(self._mhz, clocks)
        return self._problem.longest(self._durations(columns))

    def runs(self, clocks: Ints) -> tuple[Floats, Floats, Floats]:
        """When each instruction of a plan begins and ends, s, and its effective energy, J."""
        columns = np.searchsorted(self._mhz, clocks)[:, None]
        ends = self._problem.finishes(self._durations(columns))[:-1, 0]
        took, cost = (self._of(table, columns)[:, 0] for table in (self._time, self._cost))
        return ends - took, ends, cost

    def fits(self, clocks: Ints, limit_s: float) -> bool:
        """Whether a plan takes at most this time, and changes clocks seldom enough."""
        columns = np.searchsorted(self._mhz, clocks)[:, None]
        time_s = self._problem.longest(self._durations(columns))
        return bool(self._few(columns)[0] and time_s[0] <= limit_s * (1 + 1e-9))

    # Plans are columns of numbers of clocks from here on.

    @staticmethod
    def _of(table: Floats, plans: Ints) -> Floats:
        return np.asarray(table[np.arange(len(table))[:, None], plans])

    def _durations(self, plans: Ints) -> Floats:
        """Of each instruction, s, with the change before it."""
        durations = self._of(self._time, plans)
        durations[self._later] += self._changes.time_s * self._changed(plans)
        return durations

    def _changed(self, plans: Ints) -> NDArray[np.bool_]:
        return np.asarray(plans[self._later] != plans[self._before[self._later]])

    def _few(self, plans: Ints) -> NDArray[np.bool_]:
        """Which plans change clocks seldom enough."""
        most = np.inf if self._changes.most is None else self._changes.most
        return np.asarray(self._changed(plans).sum(axis=0) <= most)

    # ---------------------------------------------------------------------------------- plans

    def clocks(self, places: Ints) -> Ints:
        """Clocks of plans of the pool (instructions, plans)."""
        return np.asarray(self._mhz[self.pool.options(places)])

    def within(self, limit_s: float, price_w: float) -> list[Ints]:
        """The clocks of the best plan for a time; none where none is known that is that fast.

        Args:
            limit_s: The time.
            price_w: What a second of the iteration costs beside the effective energy.
        """
        pool = self.pool
        fit = np.flatnonzero(pool.time_s <= limit_s * (1 + SAME))
        if not len(fit):
            return []
        total_j = pool.cost_j[fit] + price_w * pool.time_s[fit]
        plans = pool.options(fit[total_j.argsort(kind="stable")[:_BEST]])
        plans = np.hstack([plans, self._slow_down(plans, np.full(plans.shape[1], limit_s))])
        cost_j = self._of(self._cost, plans).sum(axis=0)
        total_j = cost_j + price_w * self._problem.longest(self._durations(plans))
        return [np.asarray(self._mhz[plans[:, total_j.argmin()]])]

    def bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J.

        With prices that add up to the same on all ways through the graph, no plan costs less than
        the cheapest one at these prices.
        """
        values, slopes = self._listed[1:]
        return np.asarray((values - slopes * time_s[:, None]).max(axis=1))

    @property
    def pool(self) -> Pool:
        """Plans for all times, as numbers of clocks."""
        return self._listed[0]

    @cached_property
    def _listed(self) -> tuple[Pool, Floats, Floats]:
        """The pool; values and slopes of lines that no plan's cost lies below."""
        problem, most = self._problem, self._changes.most
        pool = Pool(problem)
        size = int(np.clip(_ENTRIES // problem.count, *_TOGETHER))
        prices, total_w = self._first_prices(max(2, min(_DEADLINES, size // len(_MULTIPLES))))
        tried = np.empty((len(prices), _STEPS * len(total_w) + _ROUNDS * size))
        added = 0
        lines = []
        for step in range(_STEPS):
            plans, value_j = self._cheapest(prices)
            lines.append(value_j - (most or 0) * prices[-1])
            few = self._add(pool, plans)
            tried[:, added : added + len(few)] = prices[:, few]
            added += len(few)
            share = 0.7 / (step + 3)
            prices[:-1] *= 1 - share
            prices[:-1] += share * total_w * self._critical(self._durations(plans))
            if most is not None:
                dearer = max(0.5, 8 / 2**step)
                prices[-1] *= np.exp2(np.where(self._few(plans), -dearer, dearer))
        chance = np.random.default_rng(0)
        for _ in range(_ROUNDS if added else 0):
            # Where neighbours lie far apart in energy, more is tried.
            at_j = chance.uniform(pool.cost_j[-1], pool.cost_j[0], size)
            one = np.searchsorted(-pool.cost_j, -at_j)
            other = np.clip(one + chance.integers(-1, 2, size), 0, len(pool.number) - 1)
            part = chance.random(size) / 2
            prices = (1 - part) * tried[:, pool.number[one]] + part * tried[:, pool.number[other]]
            varied = chance.standard_normal(prices.shape) + chance.standard_normal(size)
            prices *= np.exp(chance.choice(_SPREADS, size) * varied)
            few = self._add(pool, self._cheapest(prices)[0])
            tried[:, added : added + len(few)] = prices[:, few]
            added += len(few)
        self._add(pool, np.searchsorted(self._mhz, uniform_settings(problem)))
        if self.almost_free:
            self._search.everywhere()
            found = self._search.pool.options(np.arange(len(self._search.pool.time_s)))
            self._add(pool, np.searchsorted(self._mhz, problem.clocks(found)))
        plans, times_s = pool.options(np.arange(len(pool.time_s))), pool.time_s
        for first in range(0, len(times_s), 4 * size):
            some = slice(first, first + 4 * size)
            self._add(pool, self._slow_down(plans[:, some], times_s[some], _PATIENCE))
        values, slopes = np.concatenate(lines), np.tile(total_w, _STEPS)
        last_s = float(pool.time_s.max(initial=problem.max_time_s))
        some_s = np.linspace(problem.min_time_s, last_s, 500)
        highest = np.unique((values - slopes * some_s[:, None]).argmax(axis=1))
        return pool, values[highest], slopes[highest]

    def _add(self, pool: Pool, plans: Ints) -> Ints:
        """Adds those plans to a pool that change clocks seldom enough; returns which these are."""
        few = np.flatnonzero(self._few(plans))
        plans = plans[:, few]
        time_s = self._problem.longest(self._durations(plans))
        pool.add_known(plans, time_s, self._of(self._cost, plans).sum(axis=0))
        return few

    def _first_prices(self, deadlines: int) -> tuple[Floats, Floats]:
        """What a second of each instruction is worth, W, and last a change, J; and the prices' sum
        on any way through the graph, W: of (instructions and change, plans), and of plans.
        """
        problem = self._problem
        self._search.relaxation.restart(None)
        share = np.linspace(1.0, 0.0, deadlines) ** 1.5
        times_s = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
        solved = [self._search.relaxation.solve(float(one)) for one in times_s]
        prices = np.stack([one.prices_w for one in solved], axis=1)
        little = _LITTLE * prices.mean(axis=0)
        # It is the same for all, and so for any way along a stage.
        total = np.array([one.price_w for one in solved]) + len(problem.pipeline.stages) * little
        usual = float(np.median([np.ptp(curve.cost_j) for curve in problem.curves])) or 1.0
        change = np.full((1, deadlines), 0.0 if self._changes.most is None else usual)
        prices = np.concatenate([prices + little, change])
        raised = np.repeat(prices, len(_MULTIPLES), axis=1)
        multiples = np.tile(_MULTIPLES, deadlines)
        raised[:-1] *= multiples
        return raised, total.repeat(len(_MULTIPLES)) * multiples

    def _critical(self, durations: Floats) -> NDArray[np.bool_]:
        """Which instructions are on one longest way through the graph (instructions, plans)."""
        count = self._problem.count
        ends = self._problem.finishes(durations)
        found = np.zeros(ends.shape, dtype=bool)
        plans = np.arange(ends.shape[1])
        at = ends[:-1].argmax(axis=0)
        while (at < count).any():
            found[at, plans] = True
            before = self._preceding[at]
            at = before[plans, ends[before, plans[:, None]].argmax(axis=1)]
        return found[:-1]

    @cached_property
    def _preceding(self) -> Ints:
        """What each instruction waits for, filled up with their number, which stands for none."""
        levels = self._problem.forward.levels
        width = max(before.shape[1] for _, before in levels)
        found = np.full((self._problem.count + 1, width), self._problem.count, dtype=np.intp)
        for level, before in levels:
            found[level, : before.shape[1]] = before
        return found

    @cached_property
    def _useful(self) -> Ints:
        """For each stage its clocks that no other clock beats on all its instructions, filled up
        with the first.
        """
        found = []
        for stage in self._stages:
            kinds = np.unique(self._problem.kind[stage], return_index=True)[1]
            some = np.array(stage, dtype=np.intp)[kinds]
            not_worse = np.ones((len(self._mhz),) * 2, dtype=bool)
            for table in (self._time[some], self._cost[some]):
                not_worse &= (table[:, :, None] <= table[:, None, :]).all(axis=0)
            beaten = not_worse & (~not_worse.T | np.triu(not_worse, 1))
            found.append(np.flatnonzero(~beaten.any(axis=0)))
        width = max(map(len, found))
        return np.array([[*one, *one[:1].repeat(width - len(one))] for one in found])

    def _cheapest(self, prices: Floats) -> tuple[Ints, Floats]:
        """The plans that cost least with prices, each for itself, and what they cost, J: the
        cheapest sequence of clocks of each stage, all stages and plans at once.

        Args:
            prices: Of a second of each instruction, W, and last of a change, J.
        """
        problem, useful = self._problem, self._useful
        stages, length = self._places.shape
        width = prices.shape[1]
        # Where a stage has fewer instructions than another: nothing costs, nothing changes.
        cost, time = (
            np.vstack([one, np.zeros(len(self._mhz))]) for one in (self._cost, self._time)
        )
        time[np.isinf(time)] = 0.0  # where there is no such clock the cost is infinite
        change = prices * self._changes.time_s + prices[-1]
        change[-1] = np.inf
        total: Floats = np.zeros((stages, width, useful.shape[1]))
        changed = np.zeros((length, *total.shape), dtype=bool)
        cheapest = np.zeros((length, stages, width), dtype=np.intp)
        rows, columns = np.arange(stages)[:, None], np.arange(width)
        for step, place in enumerate(self._places.T):
            if step:
                cheapest[step] = total.argmin(axis=2)
                other = (total[rows, columns, cheapest[step]] + change[place])[:, :, None]
                np.less(other, total, out=changed[step])
                np.minimum(other, total, out=total)
            own = (place[:, None], useful)
            total += prices[place][:, :, None] * time[own][:, None, :]
            total += cost[own][:, None, :]
        # Instructions without a choice are in no sequence; of them the first clock is taken.
        plans = np.repeat(np.isfinite(self._time).argmax(axis=1)[:, None], width, axis=1)
        plans = np.concatenate([plans, np.zeros((1, width), dtype=np.intp)])
        alone = np.setdiff1d(np.arange(problem.count), self._places)
        value = self._of(self._cost, plans[:-1])[alone].sum(axis=0) + total.min(axis=2).sum(axis=0)
        value += (prices[alone] * self._of(self._time, plans[:-1])[alone]).sum(axis=0)
        at = total.argmin(axis=2)
        for step in range(length - 1, -1, -1):
            plans[self._places[:, step]] = useful[rows, at]
            at = np.where(changed[step, rows, columns, at], cheapest[step], at)
        return plans[:-1], value

    def _slow_down(self, plans: Ints, limits_s: Floats, turns: int = 1000) -> Ints:
        """Whole runs of equal clocks get slower while that saves energy and the time allows it.

        Args:
            plans: Plans.
            limits_s: Of each plan.
            turns: So many times at most.
        """
        problem, flat = self._problem, self._flat
        kinds = len(problem.kinds)
        time_s, cost_j = (
            np.where(np.isinf(table), _NEVER, table)
            for table in (self._time_of_kind, self._cost_of_kind)
        )
        powers = 2 ** np.arange(len(flat).bit_length())
        plans = plans.copy()
        limits_s = limits_s * (1 + SAME)
        active = np.arange(plans.shape[1] if len(flat) else 0)
        while len(active) and (turns := turns - 1) >= 0:
            durations = self._durations(plans[:, active])
            ways_s = problem.finishes(durations)[:-1] - durations
            ways_s += problem.finishes(durations, problem.reverse)[:-1]
            slack_s = (limits_s[active] - ways_s)[flat].T.ravel()
            # Plan after plan: its runs, and their instructions by kind.
            own = plans[flat][:, active].T
            first = (self._before[flat] < 0) | (np.diff(own, axis=1, prepend=-1) != 0)
            begins = np.flatnonzero(first)
            run = np.cumsum(first).reshape(first.shape) - 1
            cell = (run * kinds + problem.kind[flat]).ravel()
            number = np.bincount(cell, minlength=len(begins) * kinds).reshape(-1, kinds)
            runs, now, owner = np.arange(len(begins)), own.ravel()[begins], begins // len(flat)
            longer_s, saved_j = number @ time_s, number @ cost_j
            longer_s -= longer_s[runs, now][:, None]
            saved_j = saved_j[runs, now][:, None] - saved_j
            room_s = np.minimum.reduceat(slack_s, begins)[:, None]
            # Runs that have the slack for it, each by what saves most for its time: the best one,
            # the two best, four, and so on.
            fit_j = np.where(longer_s <= room_s, saved_j, 0.0)
            best = (fit_j / np.maximum(longer_s, 1e-9 * problem.min_time_s)).argmax(axis=1)
            rank, possible = _ranks(fit_j[runs, best], owner)
            some, which = np.nonzero(possible[:, None] > powers // 2)
            tried = [np.where(rank[run[some]] < powers[which][:, None], best[run[some]], own[some])]
            # A run whose instructions wait in between may have more: by the least that saves any.
            fit_j = np.where(longer_s <= room_s * number.sum(axis=1)[:, None], saved_j, 0.0)
            best = np.where(fit_j > 0, longer_s, np.inf).argmin(axis=1)
            rank, possible = _ranks(fit_j[runs, best], owner)
            alone, which = np.nonzero(possible[:, None] > np.arange(_ALONE))
            tried += [np.where(rank[run[alone]] == which[:, None], best[run[alone]], own[alone])]
            plan = active[np.concatenate([some, alone])]
            columns = plans[:, plan]
            columns[flat] = np.concatenate(tried).T
            fit = np.flatnonzero(problem.longest(self._durations(columns)) <= limits_s[plan])
            # The cheapest last: it remains.
            fit = fit[
                self._of(self._cost, columns[:, fit]).sum(axis=0).argsort(kind="stable")[::-1]
            ]
            plans[:, plan[fit]] = columns[:, fit]
            active = np.unique(plan[fit])
        return plans

    @cached_property
    def _flat(self) -> Ints:
        """Instructions with a choice, stage by stage."""
        return np.array([place for stage in self._stages for place in stage], dtype=np.intp)

    # ----------------------------------------------------------------------------------- ties

    def ties(self, clocks: Ints) -> Ints:
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


def _ranks(saved_j: Floats, owner: Ints) -> tuple[Ints, Ints]:
    """Of each plan's runs: which saves most, 0, and so on; and how many save anything.

    Args:
        saved_j: What runs save, J.
        owner: The plan of each, rising.
    """
    runs = np.arange(len(owner))
    rank = np.empty(len(owner), dtype=np.intp)
    rank[np.lexsort((-saved_j, owner))] = runs - np.searchsorted(owner, owner)
    rank[saved_j <= 0] = len(owner)
    return rank, np.bincount(owner[saved_j > 0], minlength=int(owner[-1]) + 1)


def _runs(stage: list[int], clocks: Ints) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in stage:
        if runs and clocks[runs[-1][0]] == clocks[place]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs

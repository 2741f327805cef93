"""Looks for good plans: rounds the linear program's optima, and joins plans in time.

Where a clock just fits, a plan is almost as good as the bound; between two such deadlines every
rounding wastes a little in every instruction. A plan that runs the first part of the iteration as
the one and the rest as the other wastes only at the seam.

The times between the fastest and the slowest plan are divided into cells. The frontier looks into
all of them; a question for one time looks into those that, by the bound, may hold a better plan
than the best one found so far. A cell's plans depend on the cell alone, so what the frontier
has for a time, a planner finds that is asked for that time only.

All plans that were found go to one pool, so a later question never gets a worse answer than an
earlier one had. It begins with what one clock or one power limit for all instructions gives.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.baselines import POLICIES
from zeus.optimizer.pipeline_frequency.planner.cells import Cell, Worker
from zeus.optimizer.pipeline_frequency.planner.pool import SAME, Pool
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Problem
from zeus.optimizer.pipeline_frequency.planner.relaxation import (
    Optima,
    Relaxation,
    Relaxed,
    tangents,
)

_CELLS = 24

_MANY = 50_000
"""Instructions times cells at most, so that a long graph takes seconds too; six cells at least."""

_LONG = 3000
"""Instructions above which plans are wanted less densely."""

_ROUNDED = 8
"""Deadlines of a cell that are rounded, at least."""

_NEAR = 0.006
"""Of the frontier's width: how far around one deadline plans are looked for."""

_NEAR_INTERVALS = 16

_GAP = 0.0006
"""Share of the energy: cells so near the bound are looked into together: faster."""


class PlanSearch:
    """Finds plans for one problem.

    Args:
        problem: The problem.

    Attributes:
        policies: What simpler policies take.
        pool: Plans that were found so far.
        steps: How many steps `everywhere` reports.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.relaxation = Relaxation(problem)
        self.pool = Pool(problem)
        self._solved: list[Relaxed] = []
        self.policies = {name: make(problem) for name, make in POLICIES.items()}
        for one in self.policies.values():
            self.pool.add(one.options)
        self._start = copy.copy(self.pool)
        self._step = STEP * max(1.0, problem.count / _LONG)
        least_j = np.abs(problem.energy(self.pool.cost_j, self.pool.time_s)).min()
        self._worker = Worker(problem, self.relaxation, self._step * float(least_j))
        self._waiting = self._cells()
        close_s = (1 + CLOSE) * problem.min_time_s
        deadlines = [
            np.linspace(one.low_s, one.high_s, 3 if one.low_s < close_s else 2).tolist()
            for one in self._waiting
        ]
        self._likely_s = self.relaxation.likely_s(problem.blocking_w)
        self._optima = Optima(self.relaxation, deadlines, self._likely_s)
        self.steps = len(self._waiting) + len(_WORK)

    def _cells(self) -> list[Cell]:
        problem = self.problem
        number = max(6, min(_CELLS, _MANY // problem.count))
        share = np.linspace(0.0, 1.0, number + 1) ** 1.5
        grid_s = problem.min_time_s + share * (problem.max_time_s - problem.min_time_s)
        grid_s[-1] = problem.max_time_s
        grid_s = np.unique(grid_s)
        ends_s = list(itertools.pairwise(grid_s.tolist())) or [(problem.min_time_s,) * 2]
        cells = [
            Cell(problem, low_s, high_s, copy.copy(self._start), number)
            for number, (low_s, high_s) in enumerate(ends_s)
        ]
        cells[0].varied_s = problem.min_time_s
        return cells

    # ------------------------------------------------------------------------------- bounds

    def solve(self, deadline_s: float, price_w: float = 0.0) -> Relaxed:
        """The linear program's optimum, which also makes the bound tighter.

        Args:
            deadline_s: At least `Problem.min_time_s`.
            price_w: What a second of the iteration costs beside the effective energy: the optimum
                may be faster than the deadline.
        """
        if not price_w:
            for known in self._solved:
                if known.deadline_s == deadline_s:
                    return known
        # From optima that are needed anyway it is not far.
        likely_s = min(deadline_s, self._likely_s) if price_w else deadline_s
        waiting = [one for one in self._waiting if one.low_s <= likely_s <= one.high_s]
        self._solve_cells(waiting[-1:])
        self.relaxation.restart(self._optima.basis_near(likely_s))
        found = self.relaxation.solve(deadline_s, price_w)
        self._solved.append(found)
        return found

    def _solve_cells(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if not cell.solved:
                self._solved += cell.solve(self._optima)

    def bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J."""
        return tangents(self._solved, time_s)

    def survey(self) -> None:
        """Solves the linear program for times from the slowest to the fastest."""
        self._solve_cells(self._waiting[::-1])

    # -------------------------------------------------------------------------------- plans

    def everywhere(self, tell: Callable[[int, int], None] = lambda done, steps: None) -> None:
        """Looks for plans of all times.

        Args:
            tell: Is told how many of `steps` are done.
        """
        for number, cell in enumerate(self._waiting):
            self._solve_cells([cell])
            tell(number + 1, self.steps)
        self._look_into(self._waiting, tell)

    def within(self, limit_s: float, target_s: float, price_w: float) -> None:
        """Looks for the best plan within a time: near the time where it should be, and in the cells
        that may hold a better one.

        Args:
            limit_s: At least `Problem.min_time_s`.
            target_s: Where the bound is least.
            price_w: What a second of the iteration costs beside the effective energy.
        """
        self.solve(target_s)
        least_j = self._least(target_s, target_s, price_w)
        energy_j = abs(self.problem.energy(least_j - price_w * target_s, target_s))
        cells = self._promising(limit_s, target_s, price_w, least_j + _GAP * energy_j)
        around = [self._around(target_s)]
        while cells or around:
            self._look_into(cells, around=around)
            around = []
            cells = self._promising(limit_s, target_s, price_w)

    def near(self, deadline_s: float) -> None:
        """Looks for plans of one time and a little less.

        Args:
            deadline_s: At least `Problem.min_time_s`.
        """
        self._look_into([], around=[self._around(deadline_s)])

    def _around(self, deadline_s: float) -> Cell:
        problem = self.problem
        spread = _NEAR * (problem.max_time_s - problem.min_time_s)
        deadline_s = min(deadline_s, problem.max_time_s)
        low = max(problem.min_time_s, deadline_s - spread)
        high = min(problem.max_time_s, deadline_s + spread)
        known = self.pool.part(self.pool.within(low, high))
        cell = Cell(problem, low, high, known, varied_s=deadline_s)
        cell.edges_s = np.linspace(low, high, _NEAR_INTERVALS + 1, dtype=np.float64)
        self.solve(deadline_s)
        cell.interpolate(self.relaxation, self._solved)
        return cell

    def _promising(
        self, limit_s: float, target_s: float, price_w: float, best_j: float = np.inf
    ) -> list[Cell]:
        """Cells that by the bound may hold a better plan than this and the best one so far."""
        best_j = min(best_j, self.pool.least(limit_s, price_w))
        while True:
            cells = [
                cell
                for cell in self._waiting
                if cell.low_s <= limit_s * (1 + SAME)
                and self._least(cell.low_s, min(cell.high_s, limit_s), price_w) < best_j
            ]
            unsolved = [cell for cell in cells if not cell.solved]
            if not unsolved:
                return cells
            # Beside a solved cell the bound is tight; far from any it may promise too much.
            self._solve_cells([min(unsolved, key=lambda one: abs(one.high_s - target_s))])

    def _look_into(
        self,
        cells: Sequence[Cell],
        tell: Callable[[int, int], None] = lambda done, steps: None,
        around: Sequence[Cell] = (),
    ) -> None:
        """Looks for plans of cells, and of others around single times."""
        cells = list(cells)
        self._solve_cells(cells)
        known = [len(cell.solved) for cell in cells]
        for cell in cells:
            ends_s = (cell.low_s, cell.high_s)
            bound = functools.partial(tangents, cell.solved)
            cell.edges_s = wanted_times(self.problem, bound, ends_s, None, self._step)
        every = [*cells, *around]
        rounded = [cell.edges_s for cell in every]
        for number, edges_s in enumerate(rounded):
            finer = -(-_ROUNDED // (len(edges_s) - 1))
            places = np.linspace(0, len(edges_s) - 1, (len(edges_s) - 1) * finer + 1)
            rounded[number] = np.interp(places, np.arange(len(edges_s)), edges_s)
        self._worker.round(every, rounded)
        for number, work in enumerate(_WORK):
            # Around a time plans are dense enough.
            work(self._worker, cells if work is Worker.fill else every)
            tell(len(cells) + number + 1, self.steps)
        for cell, number in zip(cells, known, strict=True):
            self._solved += cell.solved[number:]
            self.pool.add(cell.pool.options(cell.inside()))
            self._waiting.remove(cell)
        for cell in around:
            self.pool.add(cell.pool.options(np.arange(len(cell.pool.time_s))))

    def _least(self, low_s: float, high_s: float, price_w: float) -> float:
        """A bound on the cost of plans that take a time between these, J."""
        ends_s = np.array([low_s, high_s])
        lines = [tangents([one], ends_s) + price_w * ends_s for one in self._solved]
        return max(float(line.min()) for line in lines)


_WORK = (Worker.improve, Worker.join, Worker.fill, Worker.improve)


def wanted_times(
    problem: Problem,
    bound: Callable[[Floats], Floats],
    ends_s: tuple[float, float],
    points: int | None,
    step: float,
) -> Floats:
    """Times between which a frontier has a plan, rising.

    Neighbours are at most a step of the energy apart, and within `CLOSE` of the fastest time at
    most a step of that time. Where `points` are too few for that, both are scaled, and those within
    `CLOSE` the least.

    Args:
        problem: The problem.
        bound: Least effective energy for a time.
        ends_s: The first and the last time.
        points: Plans wanted; None: as many as it takes.
        step: As a share.
    """
    first_s, last_s = ends_s
    close_s = min(last_s, (1 + CLOSE) * problem.min_time_s)
    dense = np.linspace(first_s, max(first_s, close_s), 500, dtype=np.float64)
    if last_s > close_s:
        dense = np.concatenate([dense, np.linspace(dense[-1], last_s, 1500)[1:]])
    cost_j = bound(dense)
    energy_j = np.abs(problem.energy(cost_j, dense))
    by_energy = np.maximum(-np.diff(cost_j), 0.0) / np.maximum(energy_j[1:], 1e-300)
    by_time = np.where(dense[1:] <= close_s, np.diff(dense) / problem.min_time_s, 0.0)
    density = np.maximum(by_energy, by_time) / step
    near = dense[1:] <= close_s
    total, of_near = density.sum(), density[near].sum()
    if points is None:
        points = 1 + min(MOST, max(1, int(np.ceil(total))))
    if total > 0 and points - 1 < total:
        kept = max((points - 1) * of_near / total, min(of_near, MANY, (points - 1) / 2))
        rest = total - of_near
        if of_near > 0 and rest > 0:
            density = np.where(near, density * kept / of_near, density * (points - 1 - kept) / rest)
    grown = np.concatenate([[0.0], np.cumsum(density)])
    if grown[-1] <= 0:
        return np.array([first_s, last_s])
    times_s: Floats = np.interp(np.linspace(0.0, grown[-1], max(2, points)), grown, dense)
    return times_s


STEP = 0.001
"""Share of the energy by which neighbours of a frontier differ at most."""

CLOSE = 0.05
"""Up to so much slower than the fastest is where most pipelines are run."""

MANY = 32
"""Plans of that region that even a short frontier has, as long as that is half of them."""

MOST = 2000

"""A part of the frontier, between two times, whose plans depend on these times alone.

A search for one deadline finds the same plans in a part as one for the whole frontier: the linear
programs begin from the same basis, and rounding treats each column by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem
from zeus.optimizer.pipeline_frequency.planner.relaxation import (
    Optima,
    Relaxation,
    Relaxed,
    tangents,
)
from zeus.optimizer.pipeline_frequency.planner.rounding import MODES, Rounding

_SEAMS = 12
"""Places at which two plans are joined."""

_VARIED = 600
"""Instructions up to which other optima are looked at, too."""

_VARIANTS = 12

_GAPS = 12
"""Steps between neighbours that are looked into together; each takes a linear program."""

_CHUNK = 150_000
"""Entries of an array of plans that are evaluated together: bounds the memory."""

_COLUMNS = 512
"""Plans that are evaluated together at least: a graph has many levels, and each takes a call."""


class Cell:
    """A part of the frontier, and the plans that were found in it.

    Args:
        problem: The problem.
        low_s, high_s: Times between which plans are wanted.
        pool: Plans to begin with; those that are found are added.
        number: Its place among the cells of a frontier.
        varied_s: A deadline of which other optima are looked at, too.

    Attributes:
        low_s, high_s, varied_s: As given.
        pool: The plans.
        solved: Optima of the linear program, the slowest deadline first.
        edges_s: Times, rising: between each and the next a plan is wanted.
    """

    def __init__(
        self,
        problem: Problem,
        low_s: float,
        high_s: float,
        pool: Pool,
        number: int = 0,
        varied_s: float | None = None,
    ) -> None:
        self.low_s, self.high_s, self.varied_s = low_s, high_s, varied_s
        self.pool = pool
        self.solved: list[Relaxed] = []
        self.edges_s: Floats = np.array([low_s, high_s])
        self._problem = problem
        self._number = number
        self._basis: object = None
        self._improved: set[int] = set()

    def solve(self, optima: Optima) -> list[Relaxed]:
        """Solves the linear program for both ends, and in fast cells for their middle."""
        found = optima.of_cell(self._number)
        self._basis = found[0].basis
        by_deadline = {one.relaxed.deadline_s: one.relaxed for one in reversed(found)}
        self.solved = list(by_deadline.values())
        return list(self.solved)

    def interpolate(self, relaxation: Relaxation, solved: Sequence[Relaxed]) -> None:
        """Takes the optima of nearby deadlines instead of solving for its own."""
        solved = sorted(solved, key=lambda one: one.deadline_s)
        known = [one.deadline_s for one in solved]
        first = max(0, int(np.searchsorted(known, self.low_s, side="right")) - 1)
        last = max(first, int(np.searchsorted(known, self.high_s)))
        self.solved = solved[first : last + 1][::-1]
        self._basis = relaxation.basis()

    def solve_gaps(self, relaxation: Relaxation, step_j: float) -> list[Relaxed]:
        """The optimum just below the slower one of neighbours more than a step apart."""
        pool, inside = self.pool, self.inside()
        wide = inside[:-1][-np.diff(pool.cost_j[inside]) > step_j][:_GAPS]
        fast, slow = pool.time_s[wide], pool.time_s[wide + 1]
        deadlines = np.maximum(fast, slow - 1e-9 * (slow - fast))
        if len(wide):
            relaxation.restart(self._basis)
        found = [relaxation.solve(float(one)) for one in deadlines[::-1]]
        self.solved += found
        return found

    def mixed(self, deadlines: Floats) -> tuple[Floats, Floats]:
        """Durations between those of the optima, and the deadlines they keep: between theirs."""
        solved = self.solved[::-1]
        known = np.array([one.deadline_s for one in solved])
        durations = np.stack([one.durations_s for one in solved], axis=1)
        right = np.clip(np.searchsorted(known, deadlines), 1, max(1, len(known) - 1))
        right = np.minimum(right, len(known) - 1)
        left = np.maximum(right - 1, 0)
        span = known[right] - known[left]
        share = np.clip((deadlines - known[left]) / np.where(span > 0, span, 1.0), 0.0, 1.0)
        mixed = durations[:, left] * (1 - share) + durations[:, right] * share
        return mixed, known[left] * (1 - share) + known[right] * share

    def variants(self, relaxation: Relaxation) -> Floats | None:
        """Other optima of one deadline, where that takes milliseconds."""
        if self.varied_s is None or self._problem.count > _VARIED:
            return None
        relaxation.restart(self._basis)
        return relaxation.variants(self.varied_s, _VARIANTS)

    def to_improve(self) -> Ints:
        """Plans near the bound or on the hull that were not improved yet."""
        pool = self.pool
        hull = np.array(pool.hull(self.low_s, self.high_s), dtype=np.intp)
        near = pool.nearest(self.edges_s, tangents(self.solved, pool.time_s))
        chosen = np.union1d(near, hull).astype(np.intp)
        chosen = chosen[~np.isin(pool.number[chosen], list(self._improved))]
        self._improved.update(pool.number[chosen].tolist())
        return chosen

    def to_join(self) -> Ints:
        """Neighbours on the hull: (pairs, 2)."""
        hull = self.pool.hull(self.low_s, self.high_s)
        return np.array(list(itertools.pairwise(hull)), dtype=np.intp).reshape(-1, 2)

    def inside(self) -> Ints:
        """The pool's plans that take at least and at most the cell's times."""
        return self.pool.within(self.low_s, self.high_s)


@dataclass(frozen=True)
class _Batch:
    """Columns of one cell that stay together.

    Which of two equal plans a pool keeps depends on the order in which they come. So a cell's
    columns are divided in the same way, with other cells or without.
    """

    cell: Cell
    columns: NDArray[Any]
    limits_s: Floats


class Worker:
    """Looks for plans in cells, in several at once.

    Args:
        problem: The problem.
        relaxation: Its linear program.
        step_j: Difference of energies above which more plans are looked for between neighbours.
    """

    def __init__(self, problem: Problem, relaxation: Relaxation, step_j: float) -> None:
        self._problem = problem
        self._relaxation = relaxation
        self._rounding = Rounding(problem)
        self._step_j = step_j

    def round(self, cells: Sequence[Cell], deadlines: Sequence[Floats]) -> None:
        """Rounds what lies between the optima of each cell."""
        self._run(
            [_Batch(cell, *cell.mixed(one)) for cell, one in zip(cells, deadlines, strict=True)],
            self._rounding.round,
            2 * len(MODES),
        )
        self._vary(cells)

    def improve(self, cells: Sequence[Cell]) -> None:
        """Uses slack that no instruction can use alone."""
        batches = []
        for cell in cells:
            chosen = cell.to_improve()
            batches.append(_Batch(cell, cell.pool.options(chosen), cell.pool.time_s[chosen]))
        self._run(batches, self._rounding.improve)

    def join(self, cells: Sequence[Cell]) -> None:
        """Joins neighbours on the hull, either way round."""
        batches = []
        for cell in cells:
            joined = self._seams(cell)
            batches.append(_Batch(cell, joined, np.zeros(joined.shape[1])))
        self._run(batches, lambda options, _: self._rounding.fill(options.astype(np.intp)))

    def fill(self, cells: Sequence[Cell]) -> None:
        """Looks for plans between neighbours whose costs are more than a step apart."""
        batches = []
        for cell in cells:
            found = cell.solve_gaps(self._relaxation, self._step_j)
            if found:
                durations = np.stack([one.durations_s for one in found], axis=1)
                deadlines = np.array([one.deadline_s for one in found])
                batches.append(_Batch(cell, durations, deadlines))
        self._run(batches, self._rounding.round, 2 * len(MODES))

    def _vary(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            durations = cell.variants(self._relaxation)
            if durations is None or cell.varied_s is None:
                continue
            options = self._rounding.round(durations, np.full(_VARIANTS, cell.varied_s))
            best = np.argsort(self._problem.cost(options), kind="stable")[:_VARIANTS]
            limits = np.full(len(best), cell.varied_s)
            cell.pool.add(self._rounding.improve(options[:, best], limits))

    def _seams(self, cell: Cell) -> NDArray[np.int16]:
        """The first part of an iteration as one plan of a pair has it, the rest as the other."""
        problem = self._problem
        fast, slow = (cell.pool.options(one) for one in cell.to_join().T)
        durations = problem.durations(fast)
        middle = problem.finishes(durations)[:-1] - durations / 2
        seams = np.linspace(np.zeros(fast.shape[1]), middle.max(axis=0), _SEAMS + 2)[1:-1]
        # The seams of a pair side by side.
        early = (middle[:, :, None] < seams.T).reshape(problem.count, -1)
        # In all cells there are many, so they are as small as they can be.
        a, b = (np.repeat(one.astype(np.int16), _SEAMS, axis=1) for one in (fast, slow))
        return np.concatenate([np.where(early, a, b), np.where(early, b, a)], axis=1)

    def _run(
        self,
        batches: Sequence[_Batch],
        work: Callable[[Any, Floats], Ints],
        each: int = 1,
    ) -> None:
        """Does something with the columns of all cells, and adds what comes of them to the pools.

        Args:
            batches: Of the cells.
            work: Makes so many plans of each column, those of the first kind first.
            each: So many.
        """
        size = max(1, max(_COLUMNS, _CHUNK // self._problem.count) // each)
        parts = [
            _Batch(one.cell, one.columns[:, first : first + size], one.limits_s[first:][:size])
            for one in batches
            for first in range(0, one.columns.shape[1], size)
        ]
        together: list[_Batch] = []
        for number, part in enumerate(parts):
            together.append(part)
            width = sum(one.columns.shape[1] for one in together)
            following = parts[number + 1].columns.shape[1] if number + 1 < len(parts) else size
            if width + following > size:
                self._run_together(together, work)
                together = []

    def _run_together(self, batches: Sequence[_Batch], work: Callable[[Any, Floats], Ints]) -> None:
        problem = self._problem
        columns = np.concatenate([one.columns for one in batches], axis=1)
        found = work(columns, np.concatenate([one.limits_s for one in batches]))
        time_s, cost_j = problem.longest(problem.durations(found)), problem.cost(found)
        owner = np.repeat(np.arange(len(batches)), [one.columns.shape[1] for one in batches])
        owner = np.tile(owner, found.shape[1] // columns.shape[1])
        for number, one in enumerate(batches):
            own = np.flatnonzero(owner == number)
            one.cell.pool.add_known(found[:, own], time_s[own], cost_j[own])

"""The planning problem without its discreteness: a linear program.

Every instruction may take any time on the convex hull of its curve. The program's optimum for a
deadline is a bound: no plan that keeps the deadline has less effective energy.

Source: J. Kelley, "Critical-Path Planning and Scheduling: Mathematical Basis", 1961.
"""

from __future__ import annotations

import bisect
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem

_USUAL = 50.0
"""Times are scaled so that instructions take about this: solvers' tolerances are absolute."""

_GROUP = 4
"""Cells with one optimum that begins from no basis."""


@dataclass(frozen=True)
class Relaxed:
    """The optimum for one deadline.

    Attributes:
        deadline_s: The deadline, or the time that costs least in all if it comes earlier.
        durations_s: Of each instruction.
        bound_j: Least effective energy.
        price_w: By how much the bound rises for each second that the deadline comes earlier.
        prices_w: By how much it rises for each second that an instruction takes longer.
    """

    deadline_s: float
    durations_s: Floats
    bound_j: float
    price_w: float
    prices_w: Floats


def tangents(solved: Sequence[Relaxed], time_s: Floats) -> Floats:
    """Least effective energy of plans that take at most these times, J, by some optima.

    The optimum as a function of the deadline is convex: its tangents lie below it.
    """
    lines = [one.bound_j + one.price_w * (one.deadline_s - time_s) for one in solved]
    return np.asarray(np.maximum.reduce(lines))


@dataclass(frozen=True)
class Matrix:
    """A linear program: minimise cost x, rows at least `row_low`, columns within bounds.

    Attributes:
        starts, rows, values: The matrix, column by column.
        end: The column of the iteration's end.
    """

    cost: Floats
    low: Floats
    high: Floats
    row_low: Floats
    starts: Ints
    rows: Ints
    values: Floats
    end: int


class Solver(Protocol):
    """Solves one program again and again, with other deadlines or costs."""

    def solve(
        self, end_high: float, end_cost: float, cost: Floats | None = None
    ) -> tuple[Floats, float, float, Floats]:
        """Values of the columns, the optimum, and the prices of the end's upper bound and of rows.

        Args:
            end_high: Upper bound of the end's column.
            end_cost: Its cost.
            cost: For this time, other costs of all columns than the matrix's.
        """
        ...

    def restart(self, basis: object) -> None:
        """Begins the next solve from a basis; None: from none."""
        ...

    def basis(self) -> object:
        """Where the last solve ended."""
        ...


class Relaxation:
    """Solves the program of a problem.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        usual = float(np.median(problem.fastest))
        self._scale = _USUAL / usual
        self._unit = _watts(problem)
        self._build()
        self._solver: Solver = _solver(self._matrix)

    def _build(self) -> None:
        problem, scale = self._problem, self._scale
        count = problem.count
        before: list[list[int]] = [[] for _ in range(count)]
        last = [True] * count
        for tail, head in problem.arcs:
            before[head].append(tail)
            last[tail] = False
        into: list[list[int]] = [[] for _ in range(count)]
        out: list[list[int]] = [[] for _ in range(count)]
        row_low: list[float] = []
        for place in range(count):
            for tail in before[place] or [-1]:
                into[place].append(len(row_low))
                if tail >= 0:
                    out[tail].append(len(row_low))
                row_low.append(float(problem.fastest[place]) * scale)
        end_rows = []
        for place in range(count):
            if last[place]:
                out[place].append(len(row_low))
                end_rows.append(len(row_low))
                row_low.append(0.0)
        ends = [[*into[place], *out[place]] for place in range(count)]
        signs = [[1.0] * len(into[place]) + [-1.0] * len(out[place]) for place in range(count)]
        # Column by column what one hull segment adds to an instruction's time.
        prices, widths = self._segments_of_curves()
        segments = np.array([len(found) for found in prices])[problem.kind]
        added = [into[place] * number for place, number in enumerate(segments.tolist())]
        sizes = [len(found) for found in ends]
        sizes += np.repeat([len(found) for found in into], segments).tolist()
        rows = [row for found in (*ends, *added, end_rows) for row in found]
        lengths = (sum(map(len, signs)), sum(map(len, added)), len(end_rows))
        values = np.concatenate([np.ones(lengths[0]), -np.ones(lengths[1]), np.ones(lengths[2])])
        values[: lengths[0]] = [sign for found in signs for sign in found]
        none = np.zeros(count)
        cost = np.concatenate([none, *(prices[kind] for kind in problem.kind), [0.0]])
        high = np.concatenate([none + np.inf, *(widths[kind] for kind in problem.kind), [np.inf]])
        starts = np.concatenate([[0], np.cumsum([*sizes, len(end_rows)])])
        self._segments = np.repeat(np.arange(count), segments)
        self._into = np.repeat(np.arange(count), [len(found) for found in into])
        self._matrix = Matrix(
            cost,
            np.zeros(len(cost)),
            high,
            np.array(row_low),
            starts.astype(np.intp),
            np.array(rows, dtype=np.intp),
            values,
            len(cost) - 1,
        )

    def _segments_of_curves(self) -> tuple[list[Floats], list[Floats]]:
        """For each curve the prices of its hull's segments, falling, and their widths; scaled."""
        prices, widths = [], []
        for curve in self._problem.curves:
            width, step = np.diff(curve.time_s[curve.hull]), np.diff(curve.cost_j[curve.hull])
            prices.append(step / width / self._unit)
            widths.append(width * self._scale)
        return prices, widths

    def solve(self, deadline_s: float, time_price_w: float = 0.0) -> Relaxed:
        """The optimum for a deadline.

        Args:
            deadline_s: At least `Problem.min_time_s`; a longer one than the slowest plan needs is
                as good as none.
            time_price_w: What each second of the iteration costs beside the effective energy: the
                power of blocking where nobody waits for a straggler.

        Raises:
            PipelineFrequencyError: No plan is that fast.
        """
        problem = self._problem
        if deadline_s < problem.min_time_s * (1 - 1e-9):
            raise PipelineFrequencyError(
                f"no plan takes {deadline_s:.6g} s or less; the fastest takes "
                f"{problem.min_time_s:.6g} s: ask for at least that"
            )
        deadline_s = min(max(deadline_s, problem.min_time_s), problem.max_time_s)
        unit = self._unit
        end_high = self._end_high(deadline_s)
        values, optimum, price, rows = self._solver.solve(end_high, time_price_w / unit)
        ends = values[self._matrix.end] / self._scale
        fixed = problem.costs[problem.kind, 0].sum()
        bound = float(fixed + optimum * unit / self._scale)
        return Relaxed(
            min(deadline_s, max(ends, problem.min_time_s)) if time_price_w else deadline_s,
            self._durations(values),
            bound - time_price_w * ends,
            time_price_w - price * unit,
            np.asarray(unit * np.bincount(self._into, rows[: len(self._into)], problem.count)),
        )

    def likely_s(self, time_price_w: float) -> float:
        """About the time of the optimum with this price: as if all waited for one stage."""
        problem = self._problem
        prices, widths = self._segments_of_curves()
        stages = []
        for places in map(list, problem.pipeline.stages):
            kinds = problem.kind[places]
            price = np.concatenate([*(prices[kind] for kind in kinds), [0.0]])
            width = np.concatenate([*(widths[kind] for kind in kinds), [0.0]])
            rank, fastest = price.argsort(), problem.fastest[places].sum() * self._scale
            stages.append((fastest, fastest + width[rank].cumsum(), price[rank]))
        slower = np.linspace(1.0, problem.max_time_s / problem.min_time_s, 500)
        busy = slower * max(fastest for fastest, _, _ in stages)
        total = np.zeros(len(busy))
        for _, until, price in stages:
            total += price[np.minimum(np.searchsorted(until, busy), len(price) - 1)]
        place = np.searchsorted(total[:-1], -time_price_w / self._unit)
        return float(problem.min_time_s * slower[place])

    def restart(self, basis: object) -> None:
        """Forgets earlier solves: of several optima, the next one depends on the basis alone.

        Args:
            basis: From `basis`; None: from none.
        """
        self._solver.restart(basis)

    def basis(self) -> object:
        """Where the last solve ended."""
        return self._solver.basis()

    def variants(self, deadline_s: float, number: int) -> Floats:
        """Durations (instructions, number) that are almost as good, each in another way.

        The optimum is one of many. With costs that differ by a percent it is another, and one
        rounds better than the other.
        """
        problem, matrix = self._problem, self._matrix
        chance = np.random.default_rng(number)
        found = []
        for turn in range(number):
            cost = matrix.cost.copy()
            segments = slice(problem.count, matrix.end)
            if turn % 2:
                factors = chance.normal(1.0, 0.01, len(self._segments))
            else:
                factors = chance.normal(1.0, 0.02, problem.count)[self._segments]
            cost[segments] *= factors
            values, *_ = self._solver.solve(self._end_high(deadline_s), 0.0, cost)
            found.append(self._durations(values))
        return np.stack(found, axis=1)

    def _end_high(self, deadline_s: float) -> float:
        # A hair more: the end of the longest way is a sum that rounds.
        return deadline_s * self._scale * (1 + 1e-13)

    def _durations(self, values: Floats) -> Floats:
        count = self._problem.count
        added = values[count : self._matrix.end]
        extra = np.bincount(self._segments, weights=added, minlength=count)
        return np.asarray(self._problem.fastest + extra / self._scale)


@dataclass(frozen=True)
class Optimum:
    """What the linear program gives for a deadline, and the basis that it has there."""

    relaxed: Relaxed
    basis: object


class Optima:
    """Optima for the deadlines of cells, each the same whichever cells are asked for.

    Of several optima a solver finds one that depends on the basis it begins from. So each begins
    of the cell's end nearest the middle of its group of cells, which begins from none.

    Args:
        relaxation: The program.
        cells: Of each cell its deadlines, rising, s; one's last is the next one's first.
        likely_s: About the time of which plans are asked for most: a group's middle.
    """

    def __init__(
        self, relaxation: Relaxation, cells: Sequence[Sequence[float]], likely_s: float
    ) -> None:
        self._relaxation = relaxation
        self._deadlines = [one for cell in cells for one in cell[:-1]] + [cells[-1][-1]]
        self._first = np.cumsum([0, *(len(cell) - 1 for cell in cells)]).tolist()
        self._likely = sum(cell[-1] <= likely_s for cell in cells)
        self._found: dict[tuple[int, int], Optimum] = {}

    def of_cell(self, cell: int) -> list[Optimum]:
        """Optima for a cell's deadlines."""
        after = cell + _GROUP // 2
        middle = after - (after - self._likely) % _GROUP
        root = self._first[min(max(middle, 0), len(self._first) - 1)]
        numbers = range(self._first[cell], self._first[cell + 1] + 1)
        return [self._solve(number, root) for number in numbers]

    def basis_near(self, time_s: float) -> object:
        """The basis of the optimum nearest to a time, of those that were asked for; None: none."""
        known = list(self._found.values())
        apart_s = [abs(one.relaxed.deadline_s - time_s) for one in known]
        return known[apart_s.index(min(apart_s))].basis if known else None

    def _solve(self, number: int, root: int) -> Optimum:
        # Where two groups meet, each has an optimum of its own.
        known = self._found.get((number, root))
        if known is None:
            begin = None
            if number > root:
                begin = self._first[bisect.bisect_left(self._first, number) - 1]
            elif number < root:
                begin = self._first[bisect.bisect_right(self._first, number)]
            basis = None if begin is None else self._solve(begin, root).basis
            self._relaxation.restart(basis)
            relaxed = self._relaxation.solve(self._deadlines[number])
            known = self._found[number, root] = Optimum(relaxed, self._relaxation.basis())
        return known


def _watts(problem: Problem) -> float:
    """Watts that are one in the program: energies may be of any scale."""
    spread = sum(float(np.ptp(curve.cost_j)) for curve in problem.curves)
    span = sum(float(np.ptp(curve.time_s)) for curve in problem.curves)
    return spread / span if span > 0 and spread > 0 else 1.0


def _solver(matrix: Matrix) -> Solver:
    # Their libraries clash in one process; a process that has loaded OR-Tools gets SciPy's HiGHS.
    if "ortools" not in sys.modules:
        try:
            return _Highs(matrix)
        except ImportError:
            pass
    try:
        return _SciPy(matrix)
    except ImportError:
        raise PipelineFrequencyError(
            "planning needs a solver for linear programs; pip install 'zeusd[pfo]'"
        ) from None


class _Highs:
    """Continues from the last optimum."""

    def __init__(self, matrix: Matrix) -> None:
        # Devex weights cost nothing to begin with, and programs begin from many bases.
        highspy, self._highs = silent(presolve="off", simplex_dual_edge_weight_strategy=1)
        self._end = matrix.end
        self._cost = matrix.cost
        self._every = np.arange(len(matrix.cost), dtype=np.int32)
        self._changed = False
        program: Any = highspy.HighsLp()
        program.num_col_ = len(matrix.cost)
        program.num_row_ = len(matrix.row_low)
        program.col_cost_ = matrix.cost
        program.col_lower_ = matrix.low
        program.col_upper_ = matrix.high
        program.row_lower_ = matrix.row_low
        program.row_upper_ = np.full(len(matrix.row_low), np.inf)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = matrix.starts
        program.a_matrix_.index_ = matrix.rows
        program.a_matrix_.value_ = matrix.values
        self._highs.passModel(program)
        self._optimal = highspy.HighsModelStatus.kOptimal

    def solve(
        self, end_high: float, end_cost: float, cost: Floats | None = None
    ) -> tuple[Floats, float, float, Floats]:
        if cost is not None:
            self._highs.changeColsCost(len(cost), self._every, cost)
            self._changed = True
        elif self._changed:
            self._highs.changeColsCost(len(self._cost), self._every, self._cost)
            self._changed = False
        self._highs.changeColBounds(self._end, 0.0, end_high)
        self._highs.changeColCost(self._end, end_cost)
        self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            # What it went on from may be at fault.
            self._highs.clearSolver()
            self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            raise PipelineFrequencyError(
                f"the linear program was not solved ({self._highs.getModelStatus()}); check the "
                "profile's times and energies"
            )
        solution = self._highs.getSolution()
        values = np.array(solution.col_value)
        price = float(solution.col_dual[self._end])
        rows = np.array(solution.row_dual)
        return values, float(self._highs.getObjectiveValue()), price, rows

    def restart(self, basis: object) -> None:
        self._highs.clearSolver()
        if basis is not None:
            self._highs.setBasis(basis)

    def basis(self) -> object:
        return self._highs.getBasis()


class _SciPy:
    """Begins again each time."""

    def __init__(self, matrix: Matrix) -> None:
        from scipy.sparse import csc_array

        shape = (len(matrix.row_low), len(matrix.cost))
        self._matrix = matrix
        self._rows = -csc_array((matrix.values, matrix.rows, matrix.starts), shape=shape)

    def solve(
        self, end_high: float, end_cost: float, cost: Floats | None = None
    ) -> tuple[Floats, float, float, Floats]:
        from scipy.optimize import linprog

        matrix = self._matrix
        cost = (matrix.cost if cost is None else cost).copy()
        high = matrix.high.copy()
        cost[matrix.end], high[matrix.end] = end_cost, end_high
        found = linprog(
            cost,
            A_ub=self._rows,
            b_ub=-matrix.row_low,
            bounds=np.column_stack([matrix.low, high]),
            method="highs-ds",
        )
        if found.status != 0:
            raise PipelineFrequencyError(
                f"the linear program was not solved ({found.message}); check the profile's times "
                "and energies"
            )
        price = float(found.upper.marginals[matrix.end])
        return found.x, float(found.fun), price, -found.ineqlin.marginals

    def restart(self, basis: object) -> None:
        pass

    def basis(self) -> object:
        return None


def silent(**options: Any) -> tuple[Any, Any]:
    """HiGHS's Python module, and a solver with these options, which prints nothing.

    Raises:
        ImportError: highspy is not installed.
    """
    highspy: Any = importlib.import_module("highspy")
    # From 1.16 on, `Highs` prints a banner before it can have options; what it adds is not used.
    solver: Any = getattr(highspy, "_Highs", highspy.Highs)()
    for name, value in {"output_flag": False, "threads": 1, **options}.items():
        solver.setOptionValue(name, value)
    return highspy, solver

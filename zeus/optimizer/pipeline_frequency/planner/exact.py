"""The planning problem as a mixed-integer program: exact where it is small."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem
from zeus.optimizer.pipeline_frequency.planner.relaxation import silent

_USUAL = 50.0
"""Times are scaled so that instructions take about this: solvers' tolerances are absolute."""

_GAP = 1e-9

NODES = 1_000_000_000
"""Of a search: no limit."""


class _Look(NamedTuple):
    """How HiGHS is asked.

    Attributes:
        tolerance: Of a choice that should be whole: times a long instruction it must not hide a
            short one.
        presolve: Whether the program is made smaller first.
    """

    tolerance: float
    presolve: str


_LOOKS = (_Look(1e-9, "choose"), _Look(1e-7, "off"))
"""HiGHS now and then proves a plan that is not the best, where instructions lie on scales far apart
or options on a grid: 1.15 another plan at another tolerance, 1.16 with presolve. Of 120 instances
of these kinds, two looks found every plan with both."""


@dataclass(frozen=True)
class Found:
    """A plan that the solver found.

    Attributes:
        options: One for each instruction.
        bound_j: No plan within the deadline has less effective energy, as far as the options that
            were given to choose from.
        proven: Whether the plan is known to be the best of them.
    """

    options: Ints
    bound_j: float
    proven: bool


@dataclass(frozen=True)
class _Rows:
    """Rows of a program: (row, column, value), and what each row lies between."""

    entries: list[tuple[int, int, float]]
    low: Floats
    high: Floats

    def and_at_most(self, prices: Floats, most: float) -> _Rows:
        """With one more row: the columns' prices add up to so much at most."""
        more = [(len(self.low), int(one), float(prices[one])) for one in np.flatnonzero(prices)]
        low, high = np.append(self.low, -np.inf), np.append(self.high, most)
        return _Rows([*self.entries, *more], low, high)

    def by_column(self, columns: int) -> tuple[Floats, Ints, Ints]:
        """Values, their rows, and where each column begins."""
        place, column, value = (np.array(part) for part in zip(*self.entries, strict=True))
        order = np.lexsort((place, column))
        starts = np.searchsorted(column[order], np.arange(columns + 1))
        return value[order].astype(float), place[order], starts


class Program:
    """Chooses one option for each instruction.

    Args:
        problem: The problem.
        change_time_s: How long a change of a stage's clock takes.
        max_changes: Most changes in an iteration; None: any number.
        count_changes: Whether changes are in the program although they cost nothing, so that
            `fewest_changes` can minimise them.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        change_time_s: float = 0.0,
        max_changes: int | None = None,
        count_changes: bool = False,
    ) -> None:
        self._problem = problem
        self._scale = _USUAL / float(np.median(problem.fastest))
        width = problem.times.shape[1] - 1
        usable = np.arange(width) < problem.num_options[problem.kind][:, None]
        self._owner, self._option = np.nonzero(usable)
        self._binaries = len(self._owner)
        self._changing = count_changes or change_time_s > 0 or max_changes is not None
        spread = float(sum(np.ptp(curve.cost_j) for curve in problem.curves)) or 1.0
        self._unit = spread / len(problem.curves)
        self._build(change_time_s * self._scale, max_changes)

    def _build(self, change: float, max_changes: int | None) -> None:
        """Columns: ends of instructions, choices, changes, the iteration's end."""
        problem, scale = self._problem, self._scale
        count = problem.count
        entries: list[tuple[int, int, float]] = []
        low: list[float] = []
        high: list[float] = []

        def row(least: float, most: float, *terms: tuple[int, float]) -> None:
            entries.extend((len(low), column, value) for column, value in terms)
            low.append(least)
            high.append(most)

        choices: list[list[int]] = [[] for _ in range(count)]
        times: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for place, (owner, option) in enumerate(zip(self._owner, self._option, strict=True)):
            column = count + place
            choices[owner].append(column)
            times[owner].append((column, -problem.times[problem.kind[owner], option] * scale))
        changes: dict[int, int] = {}
        following = count + self._binaries
        if self._changing:
            for stage in problem.adjustable:
                for before, after in itertools.pairwise(stage):
                    changes[after] = following + len(changes)
                    self._link(row, before, after, changes[after], choices)
        self._changes = sorted(changes.values())
        self._end = following + len(changes)
        starts = [True] * count
        last = [True] * count
        for tail, head in problem.arcs:
            starts[head], last[tail] = False, False
        for tail, head in [*problem.arcs, *((-1, n) for n in range(count) if starts[n])]:
            waits = [(tail, -1.0)] if tail >= 0 else []
            cost = [(changes[head], -change)] if head in changes and change else []
            row(0.0, np.inf, (head, 1.0), *waits, *times[head], *cost)
        for place in range(count):
            if last[place]:
                row(0.0, np.inf, (self._end, 1.0), (place, -1.0))
            row(1.0, 1.0, *((column, 1.0) for column in choices[place]))
        if max_changes is not None and changes:
            row(-np.inf, float(max_changes), *((column, 1.0) for column in self._changes))
        self._rows = _Rows(entries, np.array(low), np.array(high))
        # Beyond an instruction's least cost: a gap is relative to what the choices are about.
        self._least = np.array([curve.cost_j[-1] for curve in problem.curves])[problem.kind]
        costs = problem.costs[problem.kind[self._owner], self._option]
        costs = (costs - self._least[self._owner]) / self._unit
        self._cost = np.concatenate([np.zeros(count), costs, np.zeros(len(changes) + 1)])
        self._high = np.full(self._end + 1, np.inf)
        self._high[count : self._end] = 1.0
        self._integer = np.zeros(self._end + 1, dtype=bool)
        self._integer[count : self._end] = True

    def _link(
        self, row: Any, before: int, after: int, column: int, choices: list[list[int]]
    ) -> None:
        """The change is 1 unless both run at one clock."""
        mhz: dict[int, list[list[int]]] = {}
        for side, place in enumerate((before, after)):
            curve = self._problem.curves[self._problem.kind[place]]
            for choice in choices[place]:
                option = self._option[choice - self._problem.count]
                mhz.setdefault(curve.mhz[option], [[], []])[side].append(choice)
        for first, second in mhz.values():
            terms = [(choice, -1.0) for choice in first] + [(choice, 1.0) for choice in second]
            row(0.0, np.inf, (column, 1.0), *terms)

    def solve(
        self,
        deadline_s: float,
        *,
        time_price_w: float = 0.0,
        start: Ints | None = None,
        time_limit_s: float = 60.0,
        node_limit: int = NODES,
        fewest_changes: bool = False,
        twice: bool = False,
    ) -> Found | None:
        """The best plan within a deadline.

        Args:
            deadline_s: The deadline.
            time_price_w: What a second of the iteration costs beside the effective energy.
            start: A plan to begin with.
            time_limit_s: The best found so far after this.
            node_limit: The best found so far after so many nodes of the search, which is the same
                however busy the machine is.
            fewest_changes: Of plans that cost the same, the one that changes clocks the least.
            twice: Whether to look a second time, in another way.

        Returns:
            None where no plan was found.
        """
        cost, high = self._cost.copy(), self._high.copy()
        cost[self._end] = time_price_w / self._unit / self._scale
        high[self._end] = deadline_s * self._scale * (1 + 1e-10)
        first = self._values(start) if start is not None else None
        limits = _Limits(time_limit_s, node_limit)
        looks = []
        for look in _LOOKS[: 1 + twice]:
            found = _solve(self._rows, cost, high, self._integer, first, limits, look)
            if found is not None and not self._late(found[0], deadline_s):
                looks.append(found)
        if not looks:
            return None
        values, bound, proven = min(looks, key=lambda one: float(cost @ one[0]))
        if fewest_changes and proven and self._changes:
            best = float(cost @ values)
            tied = np.zeros(len(cost))
            tied[self._changes] = 1.0
            rows = self._rows.and_at_most(cost, best + 1e-7 * max(1.0, abs(best)))
            again = _solve(rows, tied, high, self._integer, values, limits)
            values = values if again is None else again[0]
        bound_j = bound * self._unit + float(self._least.sum())
        return Found(self._options(values), bound_j, proven)

    def _values(self, options: Ints) -> Floats:
        problem = self._problem
        values = np.zeros(self._end + 1)
        ends = problem.finishes(problem.durations(options[:, None]))[:-1, 0] * self._scale
        values[: problem.count] = ends
        values[problem.count : problem.count + self._binaries] = (
            options[self._owner] == self._option
        )
        if self._changes:
            clocks = problem.clocks(options)
            values[self._changes] = [
                float(clocks[a] != clocks[b])
                for stage in problem.adjustable
                for a, b in itertools.pairwise(stage)
            ]
        values[self._end] = ends.max()
        return values

    def _late(self, values: Floats, deadline_s: float) -> bool:
        """Whether the choices, without the solver's tolerance, miss the deadline."""
        problem = self._problem
        durations = problem.durations(self._options(values)[:, None])
        return bool(problem.longest(durations)[0] > deadline_s * (1 + 1e-9))

    def _options(self, values: Floats) -> Ints:
        problem = self._problem
        options = np.zeros(problem.count, dtype=np.intp)
        taken = values[problem.count : problem.count + self._binaries] > 0.5
        options[self._owner[taken]] = self._option[taken]
        return options


class _Limits(NamedTuple):
    """When a search ends: after this time, or so many nodes."""

    time_s: float
    nodes: int


def _solve(
    rows: _Rows,
    cost: Floats,
    high: Floats,
    integer: NDArray[np.bool_],
    start: Floats | None,
    limits: _Limits,
    look: _Look = _LOOKS[0],
) -> tuple[Floats, float, bool] | None:
    """Values of the columns, a bound on the optimum, and whether it is the optimum."""
    # Their libraries clash in one process; a process that has loaded OR-Tools gets SciPy's HiGHS.
    if "ortools" not in sys.modules:
        try:
            return _by_highs(rows, cost, high, integer, start, limits, look)
        except ImportError:
            pass
    try:
        return _by_scipy(rows, cost, high, integer, limits)
    except ImportError:
        raise PipelineFrequencyError(
            "exact planning needs a solver; pip install 'zeusd[pfo]'"
        ) from None


def _by_highs(
    rows: _Rows,
    cost: Floats,
    high: Floats,
    integer: NDArray[np.bool_],
    start: Floats | None,
    limits: _Limits,
    look: _Look,
) -> tuple[Floats, float, bool] | None:
    highspy, highs = silent(
        time_limit=limits.time_s,
        mip_max_nodes=limits.nodes,
        mip_rel_gap=_GAP,
        mip_abs_gap=_GAP,
        mip_feasibility_tolerance=look.tolerance,
        primal_feasibility_tolerance=look.tolerance,
        dual_feasibility_tolerance=look.tolerance,
        presolve=look.presolve,
    )
    values, places, starts = rows.by_column(len(cost))
    model: Any = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), len(rows.low)
    model.col_cost_, model.col_lower_, model.col_upper_ = cost, np.zeros(len(cost)), high
    model.row_lower_, model.row_upper_ = rows.low, rows.high
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_ = starts, places
    model.a_matrix_.value_ = values
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[int(one)] for one in integer]
    highs.passModel(model)
    if start is not None:
        solution: Any = highspy.HighsSolution()
        solution.col_value = start.tolist()
        highs.setSolution(solution)
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    proven = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return np.array(highs.getSolution().col_value), float(info.mip_dual_bound), proven


def _by_scipy(
    rows: _Rows, cost: Floats, high: Floats, integer: NDArray[np.bool_], limits: _Limits
) -> tuple[Floats, float, bool] | None:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csc_array

    matrix = csc_array(rows.by_column(len(cost)), shape=(len(rows.low), len(cost)))
    found = milp(
        cost,
        integrality=integer.astype(int),
        bounds=Bounds(np.zeros(len(cost)), high),
        constraints=LinearConstraint(matrix, rows.low, rows.high),
        options={
            "time_limit": limits.time_s,
            "node_limit": limits.nodes,
            "mip_rel_gap": _GAP,
        },
    )
    if found.x is None:
        return None
    return found.x, float(found.mip_dual_bound), found.status == 0

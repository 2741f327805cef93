"""The planning problem as one program for HiGHS, linear or in whole numbers.

An instruction takes the time of its fastest option and of the steps to slower ones. In the linear
program every step may be taken in part, along the convex hull of the curve: its optimum is a bound
that no plan beats, and its durations are what rounding begins with. In whole numbers every option
is a step that is taken or not, and the optimum is the best plan.

Source of the linear program: J. Kelley, "Critical-Path Planning and Scheduling: Mathematical
Basis", 1961.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, PipelineProblem, fits

_USUAL = 50.0
"""Instructions take about this in the program: the solver's tolerances are absolute, 1e-7."""

_TOLERANCES = (1e-9, 1e-7)
"""Of whole numbers. HiGHS 1.15 and 1.16 at times prove a plan that is not the best, at one of these
tolerances: `benchmarks/pipeline_instances.py` misses no plan with both."""


@dataclass(frozen=True)
class Optimum:
    """The linear program's optimum for one deadline."""

    deadline_s: float
    durations_s: Floats
    bound_j: float
    price_w: float
    prices_w: Floats


def tangents(optima: Sequence[Optimum], time_s: Floats) -> Floats:
    """Least effective energy of plans that take at most these times, J.

    The optimum is a convex function of the deadline: its tangents lie below it.
    """
    lines = [one.bound_j + one.price_w * (one.deadline_s - time_s) for one in optima]
    return np.asarray(np.maximum.reduce(lines))


class _Rows:
    """Rows of a program, each at least 0 or at least a constant: entries are added as arrays."""

    def __init__(self) -> None:
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self.low: list[float] = []

    def add(self, low: float, columns: Any, values: Any) -> None:
        """A row: the sum of values times columns is at least `low`."""
        columns = np.asarray(columns, dtype=np.intp)
        row = np.full(len(columns), len(self.low), dtype=np.intp)
        self._entries.append((row, columns, np.broadcast_to(values, len(columns)).astype(float)))
        self.low.append(low)

    def by_column(self, columns: int) -> tuple[Ints, Ints, Floats]:
        """Where each column begins, the rows, and the values."""
        row, column, value = (np.concatenate(one) for one in zip(*self._entries, strict=True))
        order = np.lexsort((row, column))
        return np.searchsorted(column[order], np.arange(columns + 1)), row[order], value[order]


class Program:
    """The program of a problem: columns are ends of instructions, steps, changes, and the end."""

    def __init__(
        self, problem: PipelineProblem, *, whole: bool = False, count_changes: bool = False
    ) -> None:
        if "ortools" in sys.modules:
            raise PipelineFrequencyError(
                "OR-Tools is loaded, and its library and HiGHS's clash in one process; plan in "
                "another process"
            )
        try:
            self._highspy: Any = importlib.import_module("highspy")
        except ImportError:
            raise PipelineFrequencyError(
                "planning needs a solver for linear programs; pip install 'zeusd[pfo]'"
            ) from None
        self._problem = problem
        self._whole = whole
        self._scale = _USUAL / float(np.median(problem.fastest))
        spread = sum(float(np.ptp(curve.cost_j)) for curve in problem.curves)
        span = sum(float(np.ptp(curve.time_s)) for curve in problem.curves)
        # What one is in the program's costs: energies may be of any scale.
        self._unit = spread / span / self._scale if span > 0 and spread > 0 else 1.0
        self._build(len(problem.later) if count_changes else 0)

    def _build(self, changes: int) -> None:
        problem, count = self._problem, self._problem.count
        options = [
            np.arange(len(one.time_s)) if self._whole else one.hull for one in problem.curves
        ]
        widths = [
            np.diff(curve.time_s[own]) * self._scale
            for curve, own in zip(problem.curves, options, strict=True)
        ]
        steps = [
            np.diff(curve.cost_j[own]) / self._unit
            for curve, own in zip(problem.curves, options, strict=True)
        ]
        number = np.array([len(one) for one in widths])[problem.kind]
        self._first = count + np.cumsum([0, *number.tolist()])
        self._width = np.concatenate([widths[kind] for kind in problem.kind])
        self._change = int(self._first[-1])
        self._end = self._change + changes
        self._cost = np.zeros(self._end + 1)
        self._cost[count : self._change] = np.concatenate([steps[kind] for kind in problem.kind])
        self._rows = _Rows()
        self._add_waits()
        if self._whole:
            self._add_choices()
        self._solver = self._highs()

    def _steps(self, row: int) -> Ints:
        """Columns of an instruction's steps."""
        return np.arange(self._first[row], self._first[row + 1])

    def _add_waits(self) -> None:
        """An instruction ends its duration after those before it, and the iteration after all."""
        problem, rows = self._problem, self._rows
        before: list[list[int]] = [[] for _ in range(problem.count)]
        for tail, head in problem.arcs:
            before[head].append(tail)
        columns = range(self._change, self._end)
        change_of = dict(zip(problem.later.tolist(), columns, strict=False))
        change_s = problem.changes.time_s * self._scale
        self._head: list[int] = []
        for head in range(problem.count):
            steps = self._steps(head)
            own = [head, *steps]
            values = [1.0, *(-self._width[steps - problem.count])]
            if change_s and head in change_of:
                own.append(change_of[head])
                values.append(-change_s)
            for tail in before[head] or [-1]:
                wait = ([tail], [-1.0]) if tail >= 0 else ([], [])
                rows.add(
                    float(problem.fastest[head]) * self._scale, own + wait[0], values + wait[1]
                )
                self._head.append(head)
        tails = {tail for tail, _ in problem.arcs}
        for row in range(problem.count):
            if row not in tails:
                rows.add(0.0, [self._end, row], [1.0, -1.0])

    def _add_choices(self) -> None:
        """Steps are taken one after the other; a change is 1 unless both run at one clock."""
        problem, rows = self._problem, self._rows
        for row in range(problem.count):
            for step in self._steps(row)[1:].tolist():
                rows.add(0.0, [step - 1, step], [1.0, -1.0])
        pairs = zip(problem.earlier, problem.later, strict=True)
        for change, pair in zip(range(self._change, self._end), pairs, strict=False):
            chosen = [self._chosen(int(row)) for row in pair]
            for setting in set(chosen[0]) | set(chosen[1]):
                # The change is at least "the later one has this setting and the earlier has not".
                columns, values, constant = [change], [1.0], 0.0
                for sign, own in zip((1.0, -1.0), chosen, strict=True):
                    low, high = own.get(setting, (None, None))
                    if setting in own:
                        constant += 0.0 if low is not None else sign
                        columns += [one for one in (low, high) if one is not None]
                        values += [sign] * (low is not None) + [-sign] * (high is not None)
                rows.add(-constant, columns, values)
        if problem.changes.most is not None and self._change < self._end:
            every = np.arange(self._change, self._end)
            rows.add(-float(problem.changes.most), every, -1.0)

    def _chosen(self, row: int) -> dict[int, tuple[int | None, int | None]]:
        """For each setting of an instruction, the step to it and the step beyond it: it is chosen
        if the first is taken and the second is not. None: there is no such step.
        """
        steps: list[int | None] = [None, *self._steps(row).tolist(), None]
        settings = self._problem.curves[self._problem.kind[row]].settings.tolist()
        return {one: (steps[n], steps[n + 1]) for n, one in enumerate(settings)}

    def _highs(self) -> Any:
        highspy = self._highspy
        # From 1.16 on, `Highs` prints a banner before it can have options: its base class does not.
        solver: Any = getattr(highspy, "_Highs", highspy.Highs)()
        options: dict[str, Any] = {"output_flag": False, "threads": 1}
        if self._whole:
            options |= {"mip_rel_gap": 0.0, "mip_abs_gap": 1e-9}
        else:
            options |= {"presolve": "off", "simplex_dual_edge_weight_strategy": 1}
        for name, value in options.items():
            solver.setOptionValue(name, value)
        starts, rows, values = self._rows.by_column(self._end + 1)
        program: Any = highspy.HighsLp()
        program.num_col_, program.num_row_ = self._end + 1, len(self._rows.low)
        program.col_cost_ = self._cost
        program.col_lower_ = np.zeros(self._end + 1)
        high = np.full(self._end + 1, np.inf)
        high[self._problem.count : self._end] = 1.0
        program.col_upper_ = high
        program.row_lower_ = np.array(self._rows.low)
        program.row_upper_ = np.full(len(self._rows.low), np.inf)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_, program.a_matrix_.index_ = starts, rows
        program.a_matrix_.value_ = values
        if self._whole:
            whole = np.zeros(self._end + 1, dtype=int)
            whole[self._problem.count : self._end] = 1
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[one] for one in whole]
        solver.passModel(program)
        return solver

    def _run(self, deadline_s: float, time_price_w: float) -> bool:
        """Solves for a deadline; whether it found the optimum."""
        solver, end = self._solver, self._end
        # A hair more: the end of the longest way is a sum that rounds.
        solver.changeColBounds(end, 0.0, deadline_s * self._scale * (1 + 1e-13))
        solver.changeColCost(end, time_price_w / self._unit / self._scale)
        solver.run()
        return bool(solver.getModelStatus() == self._highspy.HighsModelStatus.kOptimal)

    def solve(self, deadline_s: float, time_price_w: float = 0.0) -> Optimum:
        """The linear program's optimum. Continues from the last one."""
        problem, solver = self._problem, self._solver
        if not self._run(deadline_s, time_price_w):
            solver.clearSolver()  # what it continued from may be at fault
            if not self._run(deadline_s, time_price_w):
                raise PipelineFrequencyError(
                    f"the linear program was not solved ({solver.getModelStatus()}); check the "
                    "profile's times and energies"
                )
        solution = solver.getSolution()
        values, prices = np.array(solution.col_value), np.array(solution.row_dual)
        end_s = float(values[self._end]) / self._scale
        unit_w = self._unit * self._scale
        bound_j = float(solver.getObjectiveValue()) * self._unit + self._least_j()
        return Optimum(
            min(deadline_s, max(end_s, problem.min_time_s)) if time_price_w else deadline_s,
            self._durations(values),
            bound_j - time_price_w * end_s,
            time_price_w - float(solution.col_dual[self._end]) * unit_w,
            np.asarray(np.bincount(self._head, prices[: len(self._head)], problem.count) * unit_w),
        )

    def _least_j(self) -> float:
        """Effective energy with every instruction at its fastest option, J."""
        return float(sum(self._problem.curves[kind].cost_j[0] for kind in self._problem.kind))

    def _durations(self, values: Floats) -> Floats:
        count = self._problem.count
        owner = np.repeat(np.arange(count), np.diff(self._first))
        added = values[count : self._change] * self._width
        return np.asarray(self._problem.fastest + np.bincount(owner, added, count) / self._scale)

    def best(
        self, deadline_s: float, time_price_w: float = 0.0, *, time_limit_s: float
    ) -> tuple[Ints, float] | None:
        """The best plan within a deadline, of a program in whole numbers; of several plans that
        cost the same, the one with the fewest changes of clocks if these are counted.

        Returns:
            The plan, and a bound on what any plan costs in all; None: no plan was found.
        """
        problem = self._problem
        deadline_s = min(deadline_s, problem.max_time_s + problem.changes.time_s * problem.count)
        solutions = []
        for tolerance in _TOLERANCES:
            for name in ("mip_feasibility", "primal_feasibility", "dual_feasibility"):
                self._solver.setOptionValue(f"{name}_tolerance", tolerance)
            self._solver.setOptionValue("time_limit", time_limit_s)
            self._solver.clearSolver()
            proven = self._run(deadline_s, time_price_w)
            values = self._values(deadline_s)
            if values is not None:
                solutions.append((self._total(values, time_price_w), proven, values))
        if not solutions:
            return None
        total_j, proven, values = min(solutions, key=lambda one: one[0])
        bound_j = total_j if proven else -np.inf
        if proven and self._change < self._end:
            values = self._with_fewest_changes(deadline_s, values)
        return self._plan(values), bound_j

    def _values(self, deadline_s: float) -> Floats | None:
        """The columns of the plan that was found, if it keeps the deadline."""
        feasible = self._highspy.SolutionStatus.kSolutionStatusFeasible
        if self._solver.getInfo().primal_solution_status != feasible:
            return None
        values = np.array(self._solver.getSolution().col_value)
        plan = self._plan(values)[:, None]
        kept = fits(self._problem.time(plan)[0], deadline_s) and self._problem.allowed(plan)[0]
        return values if kept else None

    def _with_fewest_changes(self, deadline_s: float, values: Floats) -> Floats:
        """Of the plans that cost as little as one, that with the fewest changes."""
        solver = self._solver
        cost = np.array(solver.getLp().col_cost_)
        least = float(cost @ values)
        priced = np.flatnonzero(cost)
        row = len(self._rows.low)
        solver.addRow(
            -np.inf, least + 1e-7 * max(1.0, abs(least)), len(priced), priced, cost[priced]
        )
        every = np.arange(self._end + 1, dtype=np.int32)
        changes = np.zeros(self._end + 1)
        changes[self._change : self._end] = 1.0
        solver.changeColsCost(len(every), every, changes)
        solver.run()
        fewest = self._values(deadline_s)
        solver.changeColsCost(len(every), every, cost)
        solver.deleteRows(1, np.array([row], dtype=np.int32))
        return values if fewest is None else fewest

    def _total(self, values: Floats, time_price_w: float) -> float:
        problem, plan = self._problem, self._plan(values)[:, None]
        return float(problem.cost(plan)[0] + time_price_w * problem.time(plan)[0])

    def _plan(self, values: Floats) -> Ints:
        """The settings of whole steps."""
        problem = self._problem
        taken = values[problem.count : self._change] > 0.5
        steps = np.add.reduceat(np.append(taken, False), self._first[:-1] - problem.count)
        steps[np.diff(self._first) == 0] = 0
        curves = problem.curves
        return np.array(
            [curves[kind].settings[one] for kind, one in zip(problem.kind, steps, strict=True)]
        )

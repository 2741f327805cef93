"""The planning problem as arrays: what each instruction may do, and who waits for whom.

Costs are effective energies, e - P t: what an instruction takes beyond what its GPUs would draw
while blocked. For a given iteration time their sum is what is to be minimised.

Source: section 4 of J.-W. Chung et al., "Reducing Energy Bloat in Large Model Training", SOSP 2024.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import Setting, Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import Pipeline, levels_of

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

EnergyPer = Literal["gpu", "stage"]

_NAMED = 1_000_000
"""Numbers of settings with names begin here, above all clocks."""

_NARROW = 24
"""Plans from which on `take`, several times, is faster than an index: in a contiguous array."""

_SMALL = 40_000
"""Ends of instructions up to which two copies are cheaper than an index for each group."""

_WIDE = 16
"""Instructions of a group, on average, from which on an array beats a loop for one plan."""

_CELLS = 4096
"""Of a table that finds the slowest option within a time in a few steps."""


@dataclass(frozen=True)
class CostCurve:
    """The options of one kind of instruction that another does not beat.

    Attributes:
        mhz: Numbers of the settings; clocks, MHz.
        time_s: Rising.
        cost_j: Effective energies of all the stage's GPUs, falling.
        hull: Places of those on the lower convex hull.
    """

    mhz: tuple[int, ...]
    time_s: Floats
    cost_j: Floats
    hull: Ints


@dataclass(frozen=True)
class ClockOption:
    """An option of a profile, with a number for its setting: a clock is its MHz."""

    setting: int
    time_s: float
    energy_j: float


def curve_of(
    options: Sequence[ClockOption], power_w: float, gpus: int, per: EnergyPer
) -> CostCurve:
    """Options for one instruction, without those that take more time and more energy.

    Args:
        options: From a profile.
        power_w: What one GPU draws while blocked.
        gpus: That share the stage.
        per: Whether the profile's energies are one GPU's or all of the stage's.
    """
    factor = gpus if per == "gpu" else 1
    points = sorted(
        (option.time_s, factor * option.energy_j - gpus * power_w * option.time_s, option.setting)
        for option in options
    )
    kept: list[tuple[float, float, int]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    hull: list[int] = []
    for place, (time_s, cost_j, _) in enumerate(kept):
        while len(hull) > 1:
            (t0, c0, _), (t1, c1, _) = kept[hull[-2]], kept[hull[-1]]
            if (c1 - c0) * (time_s - t0) < (cost_j - c0) * (t1 - t0):
                break
            hull.pop()
        hull.append(place)
    return CostCurve(
        tuple(mhz for _, _, mhz in kept),
        np.array([time_s for time_s, _, _ in kept], dtype=np.float64),
        np.array([cost_j for _, cost_j, _ in kept], dtype=np.float64),
        np.array(hull, dtype=np.intp),
    )


@dataclass(frozen=True)
class Order:
    """One direction through the graph, group after group.

    Attributes:
        levels: Pairs: the group's instructions, and for each those before it, filled up with the
            number of instructions, which stands for none.
        after: For each group, those behind each of its instructions, filled up alike.
        rows: The instructions, group after group.
        row_of: The row of each, and last their number.
        spans: The rows of each group, and of those before each of its instructions.
        sequence: Pairs: each instruction, and those before it, group after group.
    """

    levels: tuple[tuple[Ints, Ints], ...]
    after: tuple[Ints, ...]
    rows: Ints
    row_of: Ints
    spans: tuple[tuple[slice, Ints], ...]
    sequence: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class CurveTables:
    """Where some curves are in the tables that find their slowest option within a time.

    Attributes:
        first, per_cell: Time of the fastest option, s, and cells of the table for each second.
        table_row, times_row: Where they begin, and where those of `times` do, from the second one.
        table, times: The tables of all curves.
        corrections: By how many options the table may be off.
    """

    first: Floats
    per_cell: Floats
    table_row: Ints
    times_row: Ints
    table: Ints
    times: Floats
    corrections: int

    def slowest_within(self, budget_s: Floats) -> Ints:
        """`Problem.slowest_within`, for these curves."""
        cells = (budget_s - self.first) * self.per_cell
        np.minimum(cells, _CELLS, out=cells)
        np.maximum(cells, 0.0, out=cells)
        places = cells.astype(np.intp)
        places += self.table_row
        # Clipping does no harm, and is faster than looking for what is out of bounds.
        found = self.table.take(places, mode="clip")
        for _ in range(self.corrections):
            np.add(found, self.times_row, out=places)
            found += self.times.take(places, mode="clip") <= budget_s
        return found


class Problem:
    """A pipeline with the curves of its instructions.

    Args:
        profile: What instructions take.
        pipeline: The graph.
        p2p_power_w: What one GPU draws while it is blocked on communication, W.
        gpus_per_stage: GPUs that share a stage.
        energy_per: Whether the profile's energies are one GPU's or all of a stage's.

    Attributes:
        kind: The curve of each instruction.
        offered: What the profile has for each curve, from the highest clock down. Settings with
            names are numbers here, too: above all clocks, and higher where they are faster.
        adjustable: For each stage those of its instructions that have a setting.
        times, costs: Of each curve's options: s, J; filled up with inf.
        hull_below: For each option, the nearest on the hull that is not slower.
        forward, reverse: The graph in both directions.

    Raises:
        PipelineFrequencyError: Profile and pipeline do not fit each other.
    """

    def __init__(
        self,
        profile: InstructionProfile,
        pipeline: Pipeline,
        *,
        p2p_power_w: float,
        gpus_per_stage: int = 1,
        energy_per: EnergyPer = "gpu",
    ) -> None:
        if profile.num_stages != pipeline.num_stages:
            raise PipelineFrequencyError(
                f"the profile has {profile.num_stages} stages and the pipeline "
                f"{pipeline.num_stages}; profile every stage, or pick the stages to plan for"
            )
        if not 0 <= p2p_power_w < math.inf:
            raise PipelineFrequencyError(
                f"the blocking power must be watts of one GPU, such as 80, not {p2p_power_w}"
            )
        if gpus_per_stage < 1:
            raise PipelineFrequencyError(f"a stage has at least one GPU, not {gpus_per_stage}")
        self.pipeline = pipeline
        self.profile = profile
        self.energy_per = energy_per
        self.p2p_power_w = p2p_power_w
        self.gpus_per_stage = gpus_per_stage
        self.blocking_w = p2p_power_w * gpus_per_stage * pipeline.num_stages
        self.count = len(pipeline.instructions)
        names = [(one.stage, one.name, one.chunk) for one in pipeline.instructions]
        self.kinds = list(dict.fromkeys(names))
        number = {name: place for place, name in enumerate(self.kinds)}
        offered = [profile.options(*name) for name in self.kinds]
        self._codes = _codes(offered)
        self._settings = {code: setting for setting, code in self._codes.items()}
        self.offered = [
            sorted(
                (
                    ClockOption(self._codes[one.frequency], one.time_s, one.energy_j)
                    for one in options
                ),
                key=lambda choice: -choice.setting,
            )
            for options in offered
        ]
        self.curves = [
            curve_of(options, p2p_power_w, gpus_per_stage, energy_per) for options in self.offered
        ]
        self.kind = np.array([number[name] for name in names], dtype=np.intp)
        self.num_options = np.array([len(curve.mhz) for curve in self.curves], dtype=np.intp)
        width = int(self.num_options.max())
        self.times = np.full((len(self.curves), width + 1), np.inf)
        self.costs = np.full((len(self.curves), width + 1), np.inf)
        self.hull_below = np.zeros((len(self.curves), width + 1), dtype=np.intp)
        self._clocks = np.zeros((len(self.curves), width), dtype=np.intp)
        unit_j = self._exact_unit_j()
        for place, curve in enumerate(self.curves):
            size = len(curve.mhz)
            self._clocks[place, :size] = curve.mhz
            self.times[place, :size] = curve.time_s
            self.costs[place, :size] = np.rint(curve.cost_j / unit_j) * unit_j
            below = np.searchsorted(curve.hull, np.arange(size), side="right") - 1
            self.hull_below[place, :size] = curve.hull[below]
        fixed = np.array([options[0].setting == 0 for options in self.offered])[self.kind]
        self.adjustable = [
            [place for place in stage if not fixed[place]] for stage in pipeline.stages
        ]
        self.arcs = _without_implied(pipeline)
        self.forward = _order(self.count, self.arcs)
        self.reverse = _order(self.count, [(head, tail) for tail, head in self.arcs])
        self._build_table()
        self.fastest = self.times[self.kind, 0]
        self.slowest = self.times[self.kind, self.num_options[self.kind] - 1]
        self.min_time_s = float(self.longest(self.fastest[:, None])[0])
        self.max_time_s = float(self.longest(self.slowest[:, None])[0])
        self.tolerance_s = 1e-12 * self.max_time_s

    # ---------------------------------------------------------------------------- evaluation

    def finishes(self, durations: Floats, order: Order | None = None) -> Floats:
        """When each instruction ends at the earliest, s; the last row is 0.

        Args:
            durations: (instructions, plans), s.
            order: `reverse` for the time from an instruction's beginning to the iteration's end.
        """
        order = order or self.forward
        ends = np.zeros((self.count + 1, durations.shape[1]))
        if ends.shape[1] == 1 and self.count < _WIDE * len(order.levels):
            ends[:-1, 0] = _finishes_of_one(durations[:, 0].tolist(), order)
            return ends
        if ends.size > _SMALL:
            for level, before in order.levels:
                ends[level] = last_of(ends, before) + durations[level]
            return ends
        durations = durations.take(order.rows, axis=0)
        for span, before in order.spans:
            np.add(last_of(ends, before), durations[span], out=ends[span])
        return ends.take(order.row_of, axis=0)

    def longest(self, durations: Floats) -> Floats:
        """The iteration's time, s, for each of several plans (instructions, plans)."""
        return np.asarray(self.finishes(durations).max(axis=0))

    def durations(self, options: Ints) -> Floats:
        """s, of chosen options (instructions, plans)."""
        return np.asarray(self.times[self.kind[:, None], options])

    def cost(self, options: Ints) -> Floats:
        """Effective energy of an iteration, J, of each plan (instructions, plans)."""
        return np.asarray(self.costs[self.kind[:, None], options].sum(axis=0))

    def energy(self, cost_j: Any, time_s: Any) -> Any:
        """Energy of an iteration, J: blocking throughout added to the effective energy."""
        return cost_j + self.blocking_w * time_s

    def _exact_unit_j(self) -> float:
        """A power of two: a float holds any sum of multiples of it exactly.

        With such costs a sum does not depend on its order, which differs with the number of plans
        that are evaluated together.
        """
        most_j = sum(float(np.abs(self.curves[kind].cost_j).max()) for kind in self.kind)
        return 2.0 ** (math.frexp(most_j)[1] - 53) if most_j > 0 else 1.0

    def slowest_within(self, kinds: Ints, budget_s: Floats) -> Ints:
        """The slowest option of each curve that takes at most so long; the fastest if none does.

        Args:
            kinds: Curves, of a shape that broadcasts against the budgets.
            budget_s: Times.
        """
        return self.tables_of(kinds).slowest_within(budget_s)

    def tables_of(self, kinds: Ints) -> CurveTables:
        """Where these curves are in the tables: for many calls of `slowest_within`."""
        return CurveTables(
            self._first[kinds],
            self._per_cell[kinds],
            self._table_row[kinds],
            self._times_row[kinds],
            self._table,
            self._flat_times,
            self._corrections,
        )

    def _build_table(self) -> None:
        self._first = np.array([curve.time_s[0] for curve in self.curves])
        spans = np.array([curve.time_s[-1] - curve.time_s[0] for curve in self.curves])
        self._per_cell = np.divide(_CELLS, spans, out=np.zeros_like(spans), where=spans > 0)
        self._table = np.zeros((len(self.curves), _CELLS + 1), dtype=np.intp)
        most = 1
        for place, curve in enumerate(self.curves):
            # A hair below, so that rounding never finds too slow an option.
            edges = curve.time_s[0] + spans[place] * (np.arange(_CELLS + 1) / _CELLS - 1e-9)
            found = np.maximum(np.searchsorted(curve.time_s, edges, side="right") - 1, 0)
            self._table[place] = found
            if spans[place] > 0:
                most = max(most, int(np.diff(found).max()))
        self._corrections = most
        every = np.arange(len(self.curves))
        self._table_row = every * (_CELLS + 1)
        # What is looked at is the option after the one found.
        self._times_row = every * self.times.shape[1] + 1
        self._flat_times = np.ascontiguousarray(self.times).ravel()

    # ----------------------------------------------------------------------------- read plans

    def stages(self, clocks: Ints) -> tuple[tuple[Step, ...], ...]:
        """A plan as it is written, of one clock for each instruction."""
        settings = [self._settings[code] for code in clocks.tolist()]
        instructions = self.pipeline.instructions
        return tuple(
            tuple((instructions[place].name, settings[place]) for place in stage)
            for stage in self.pipeline.stages
        )

    def clocks_of(self, stages: Sequence[Sequence[Step]]) -> Ints:
        """The number of each instruction's setting, of a plan as it is written."""
        clocks = np.zeros(self.count, dtype=np.intp)
        for places, steps in zip(self.pipeline.stages, stages, strict=True):
            clocks[list(places)] = [self._codes[setting] for _, setting in steps]
        return clocks

    def clocks(self, options: Ints) -> Ints:
        """MHz of each instruction, of one option for each, of a plan or (instructions, plans)."""
        return np.asarray(
            self._clocks[self.kind[:, None], options.reshape(self.count, -1)]
        ).reshape(options.shape)

    def offered_figures(self, kind: int) -> tuple[Floats, Floats]:
        """Times, s, and effective energies, J, of all that the profile has for a curve."""
        factor = self.gpus_per_stage if self.energy_per == "gpu" else 1
        blocking_w = self.p2p_power_w * self.gpus_per_stage
        options = self.offered[kind]
        time_s = np.array([option.time_s for option in options], dtype=np.float64)
        energy_j = np.array([option.energy_j for option in options], dtype=np.float64)
        return time_s, factor * energy_j - blocking_w * time_s

    def by_clock(self) -> list[dict[int, tuple[float, float]]]:
        """For each curve, what every clock of the profile takes: s, and effective energy, J."""
        found = []
        for kind, options in enumerate(self.offered):
            time_s, cost_j = self.offered_figures(kind)
            mhz = [option.setting for option in options]
            pairs = zip(time_s.tolist(), cost_j.tolist(), strict=True)
            found.append(dict(zip(mhz, pairs, strict=True)))
        return found

    def at_highest_clock(self) -> tuple[float, float]:
        """Time, s, and energy, J, of an iteration with every instruction at its highest clock."""
        figures = [self.offered_figures(kind) for kind in range(len(self.kinds))]
        durations = np.array([time_s[0] for time_s, _ in figures])[self.kind]
        cost_j = np.array([cost_j[0] for _, cost_j in figures])[self.kind].sum()
        time_s = float(self.longest(durations[:, None])[0])
        return time_s, float(self.energy(cost_j, time_s))


def _finishes_of_one(durations: list[float], order: Order) -> list[float]:
    """`Problem.finishes` for one plan."""
    ends = [0.0] * len(durations)
    for place, before in order.sequence:
        start = 0.0
        for one in before:
            if ends[one] > start:
                start = ends[one]
        ends[place] = start + durations[place]
    return ends


def last_of(ends: Floats, before: Ints) -> Floats:
    """When the last of those before each instruction ends (instructions, plans)."""
    if ends.shape[1] < _NARROW:
        return np.asarray(np.maximum.reduce(ends[before], axis=1))
    found: Floats = ends.take(before[:, 0], axis=0)
    for others in before.T[1:]:
        np.maximum(found, ends.take(others, axis=0), out=found)
    return found


def _codes(offered: Sequence[Sequence[Option]]) -> dict[Setting, int]:
    """A number for each setting: clocks are their MHz."""
    times: dict[Setting, list[float]] = {}
    for options in offered:
        for option in options:
            # Relative, so that a short instruction has as much of a say as a long one.
            times.setdefault(option.frequency, []).append(option.time_s / options[0].time_s)
    named = [setting for setting in times if isinstance(setting, str)]
    named.sort(key=lambda setting: -math.fsum(times[setting]) / len(times[setting]))
    codes: dict[Setting, int] = {one: one for one in times if not isinstance(one, str)}
    return {**codes, **{setting: _NAMED + place for place, setting in enumerate(named)}}


def _without_implied(pipeline: Pipeline) -> list[tuple[int, int]]:
    """Arcs without those that a longer way implies."""
    count = len(pipeline.instructions)
    after: list[list[int]] = [[] for _ in range(count)]
    for tail, head in pipeline.arcs:
        after[tail].append(head)
    level = [0] * count
    for number, group in enumerate(pipeline.levels):
        for place in group:
            level[place] = number
    kept = []
    for tail, head in pipeline.arcs:
        seen = {place for place in after[tail] if place != head and level[place] < level[head]}
        waiting = list(seen)
        implied = False
        while waiting and not implied:
            for place in after[waiting.pop()]:
                if place == head:
                    implied = True
                elif level[place] < level[head] and place not in seen:
                    seen.add(place)
                    waiting.append(place)
        if not implied:
            kept.append((tail, head))
    return kept


def _order(count: int, arcs: Sequence[tuple[int, int]]) -> Order:
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for tail, head in arcs:
        before[head].append(tail)
        after[tail].append(head)
    groups = levels_of(count, arcs)
    levels = [(np.array(one, dtype=np.intp), _filled(one, before, count)) for one in groups]
    rows = np.concatenate([level for level, _ in levels])
    row_of = np.append(rows.argsort(), count)
    ends = itertools.pairwise(np.cumsum([0, *map(len, groups)]).tolist())
    spans = [(slice(*one), row_of[waits]) for one, (_, waits) in zip(ends, levels, strict=True)]
    after_each = tuple(_filled(one, after, count) for one in groups)
    sequence = tuple((place, tuple(before[place])) for place in rows.tolist())
    return Order(tuple(levels), after_each, rows, row_of, tuple(spans), sequence)


def _filled(places: Sequence[int], lists: Sequence[Sequence[int]], none: int) -> Ints:
    width = max(1, max(len(lists[place]) for place in places))
    filled = np.full((len(places), width), none, dtype=np.intp)
    for row, place in enumerate(places):
        filled[row, : len(lists[place])] = lists[place]
    return filled

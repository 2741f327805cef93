"""The planning problem as arrays: what each instruction may do, and who waits for whom.

A plan is a column of settings, one for each instruction; many plans are evaluated at once. Its cost
is the effective energy, e - P t summed over instructions: what they take beyond what their GPUs
would draw while blocked. For a given iteration time that is what has to be minimised.

Source: section 4 of J.-W. Chung et al., "Reducing Energy Bloat in Large Model Training", SOSP 2024.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import PlanningProblem, Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option, Setting
from zeus.optimizer.pipeline_frequency.schedules import Pipeline

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Booleans = NDArray[np.bool_]

TOLERANCE = 1e-9
"""Times that differ by this share are one: a sum of a thousand times depends on their order."""


def fits(time_s: Any, limit_s: Any) -> Any:
    """Whether an iteration of this time keeps a deadline. All times are compared here."""
    return time_s <= limit_s * (1 + TOLERANCE)


class Changes(NamedTuple):
    """What a change of a stage's clock costs.

    Attributes:
        time_s: Delay of the instruction that follows it, s.
        most: Maximum number of changes in an iteration; None: any number.
    """

    time_s: float = 0.0
    most: int | None = None


@dataclass(frozen=True)
class Curve:
    """The settings of one kind of instruction that no other setting beats.

    Attributes:
        settings: Their columns in the problem's tables.
        cost_j: Effective energies of all the stage's GPUs, falling.
    """

    settings: Ints
    time_s: Floats
    cost_j: Floats
    hull: Ints

    @classmethod
    def of(cls, time_s: Floats, cost_j: Floats) -> Curve:
        """The curve of settings with these times and costs; infinite where there is none."""
        kept: list[int] = []
        for setting in np.lexsort((cost_j, time_s)).tolist():
            if cost_j[setting] < (cost_j[kept[-1]] if kept else np.inf):
                kept.append(setting)
        settings = np.array(kept, dtype=np.intp)
        time_s, cost_j = time_s[settings], cost_j[settings]
        return cls(settings, time_s, cost_j, np.array(lower_hull(time_s, cost_j), dtype=np.intp))


def lower_hull(x: Floats, y: Floats) -> list[int]:
    """Places of the points, sorted by x, on the lower convex hull."""
    hull: list[int] = []
    for place in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[place] - x[a]) < (y[place] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(place)
    return hull


@dataclass(frozen=True)
class Level:
    """Instructions that do not wait for each other."""

    span: slice
    before: Ints
    after: Ints


class PipelineProblem:
    """A pipeline with the times and costs of its instructions.

    Rows are instructions, level after level of the graph; columns of tables are settings, the
    fastest first.

    Attributes:
        kinds: Stage, name and chunk of each kind of instruction.
        instructions, kind: The instruction of each row, and its kind.
        times, costs: Of each kind at each setting: s, J; infinite where it was not measured.
        offered: Which settings each kind has.
        highest: The first setting of each row, as a plan.
        curves: Of each kind.
        stages: For each stage its rows in the order in which they run.
        adjustable: The same without instructions that have no setting.
        forward, reverse: The graph's levels from the iteration's beginning, and from its end.

    Raises:
        PipelineFrequencyError: Profile and pipeline do not fit each other.
    """

    def __init__(
        self, profile: InstructionProfile, pipeline: Pipeline, asked: PlanningProblem
    ) -> None:
        if profile.num_stages != pipeline.num_stages:
            raise PipelineFrequencyError(
                f"the profile has {profile.num_stages} stages and the pipeline "
                f"{pipeline.num_stages}; profile every stage, or pick the stages to plan for"
            )
        self.pipeline = pipeline
        self.profile = profile
        self.changes = Changes(asked.change_time_s, asked.max_changes)
        self.blocked_w = asked.p2p_power_w * asked.gpus_per_stage
        self.blocking_w = self.blocked_w * pipeline.num_stages
        self.count = len(pipeline.instructions)
        self._build_graph()
        self._build_tables(asked.gpus_per_stage if asked.energy_per == "gpu" else 1)
        self._build_curves()
        self._build_changes()
        self.fastest = np.array([curve.time_s[0] for curve in self.curves])[self.kind]
        slowest = np.array([curve.time_s[-1] for curve in self.curves])[self.kind]
        self.min_time_s, self.max_time_s = (
            float(self.finishes(one[:, None]).max()) for one in (self.fastest, slowest)
        )

    def _build_graph(self) -> None:
        groups = self.pipeline.levels
        instructions = [place for group in groups for place in group]
        row_of = np.empty(self.count, dtype=np.intp)
        row_of[instructions] = np.arange(self.count)
        self.arcs = [(int(row_of[tail]), int(row_of[head])) for tail, head in self.pipeline.arcs]
        before: list[list[int]] = [[] for _ in range(self.count)]
        after: list[list[int]] = [[] for _ in range(self.count)]
        for tail, head in self.arcs:
            before[head].append(tail)
            after[tail].append(head)
        ends = np.cumsum([0, *map(len, groups)]).tolist()
        self.forward = [
            Level(slice(a, b), _padded(before[a:b], self.count), _padded(after[a:b], self.count))
            for a, b in itertools.pairwise(ends)
        ]
        self.reverse = [Level(one.span, one.after, one.before) for one in self.forward[::-1]]
        self.stages = [row_of[list(stage)] for stage in self.pipeline.stages]
        self.instructions = [self.pipeline.instructions[place] for place in instructions]
        names = [(one.stage, one.name, one.chunk) for one in self.instructions]
        self.kinds = sorted(set(names))
        number = {name: place for place, name in enumerate(self.kinds)}
        self.kind = np.array([number[name] for name in names], dtype=np.intp)

    def _build_tables(self, gpus: int) -> None:
        """Tables of energies of one GPU, times so many GPUs."""
        options = [self.profile.options(*name) for name in self.kinds]
        self.settings = _fastest_first(options)
        column = {setting: place for place, setting in enumerate(self.settings)}
        self.times = np.full((len(self.kinds), len(self.settings)), np.inf)
        self.costs = self.times.copy()
        for row, own in enumerate(options):
            for option in own:
                at = row, column[option.frequency]
                self.times[at] = option.time_s
                self.costs[at] = gpus * option.energy_j - self.blocked_w * option.time_s
        self.offered = np.isfinite(self.times)
        self.highest = self.offered.argmax(axis=1)[self.kind]
        self.fixed = np.array([own[0].frequency == 0 for own in options])[self.kind]
        self.adjustable = [stage[~self.fixed[stage]] for stage in self.stages]

    def _build_curves(self) -> None:
        """Curves, and what `slowest_within` searches: times as shares of each curve's range."""
        self.curves = [Curve.of(*rows) for rows in zip(self.times, self.costs, strict=True)]
        first = np.array([curve.time_s[0] for curve in self.curves])
        range_s = np.array([curve.time_s[-1] for curve in self.curves]) - first
        self._first_s = first
        self._per_s = np.divide(1.0, range_s, out=np.zeros_like(range_s), where=range_s > 0)
        self._start = np.cumsum([0, *(len(curve.time_s) for curve in self.curves)])[:-1]
        self.option_times = np.concatenate([curve.time_s for curve in self.curves])
        self.option_settings = np.concatenate([curve.settings for curve in self.curves])
        hull = np.concatenate(
            [curve.hull + start for curve, start in zip(self.curves, self._start, strict=True)]
        )
        every = np.arange(len(self.option_times))
        at_most = np.searchsorted(hull, every, side="right") - 1
        self.hull_below = hull[at_most]
        self.hull_above = hull[np.minimum(at_most + 1, len(hull) - 1)]
        owner = np.repeat(np.arange(len(self.curves)), [len(one.time_s) for one in self.curves])
        self._shares = 2.0 * owner + (self.option_times - first[owner]) * self._per_s[owner]

    def _build_changes(self) -> None:
        """Pairs of instructions between which a stage may change its clock."""
        pairs = [pair for stage in self.adjustable for pair in itertools.pairwise(stage.tolist())]
        self.earlier, self.later = np.array(pairs, dtype=np.intp).reshape(-1, 2).T

    # ---------------------------------------------------------------------------- evaluation

    def durations(self, plans: Ints) -> Floats:
        """Of each instruction, s, with the change before it (instructions, plans)."""
        durations = self.times[self.kind[:, None], plans]
        if self.changes.time_s:
            durations[self.later] += self.changes.time_s * self.changed(plans)
        return np.asarray(durations)

    def time(self, plans: Ints) -> Floats:
        """The iteration's time of each plan, s."""
        return np.asarray(self.finishes(self.durations(plans)).max(axis=0))

    def cost(self, plans: Ints) -> Floats:
        """Effective energy of an iteration of each plan, J."""
        return np.asarray(self.costs[self.kind[:, None], plans].sum(axis=0))

    def changed(self, plans: Ints) -> Booleans:
        """Whether the clock changes between `earlier` and `later` (pairs, plans)."""
        return np.asarray(plans[self.later] != plans[self.earlier])

    def allowed(self, plans: Ints) -> Booleans:
        """Which plans change clocks no more often than they may."""
        if self.changes.most is None:
            return np.ones(plans.shape[1], dtype=bool)
        return np.asarray(self.changed(plans).sum(axis=0) <= self.changes.most)

    def energy(self, cost_j: Any, time_s: Any) -> Any:
        """Energy of an iteration, J: blocking throughout added to the effective energy."""
        return cost_j + self.blocking_w * time_s

    def finishes(self, durations: Floats, levels: Sequence[Level] | None = None) -> Floats:
        """When each instruction ends at the earliest, s; the last row is 0."""
        ends = np.zeros((self.count + 1, durations.shape[1]))
        for level in levels or self.forward:
            np.add(latest(ends, level.before), durations[level.span], out=ends[level.span])
        return ends

    def runs(self, plans: Ints) -> Floats:
        """When each instruction begins and ends, s (2, instructions, plans)."""
        ends = self.finishes(self.durations(plans))[:-1]
        return np.stack([ends - self.times[self.kind[:, None], plans], ends])

    # ------------------------------------------------- options, numbered through all curves

    def slowest_within(self, kinds: Ints, budget_s: Floats) -> Ints:
        """The slowest option of each curve that takes at most so long, else the fastest.

        Exact to 1e-13 of the curve's range: callers leave more than that.
        """
        share = (budget_s - self._first_s[kinds]) * self._per_s[kinds]
        np.clip(share, 0.0, 1.0, out=share)
        share += 2.0 * kinds
        return np.asarray(np.searchsorted(self._shares, share, side="right") - 1)

    # ----------------------------------------------------------------------------- read plans

    def written(self, plan: Ints) -> tuple[tuple[Step, ...], ...]:
        """A plan as it is written: for each stage its instructions and their settings."""
        return tuple(
            tuple(
                (self.kinds[self.kind[row]][1], self.settings[plan[row]]) for row in stage.tolist()
            )
            for stage in self.stages
        )

    def read(self, stages: Sequence[Sequence[Step]]) -> Ints:
        """The reverse of `written`."""
        column = {setting: place for place, setting in enumerate(self.settings)}
        plan = np.zeros(self.count, dtype=np.intp)
        for rows, steps in zip(self.stages, stages, strict=True):
            plan[rows] = [column[setting] for _, setting in steps]
        return plan


def latest(ends: Floats, before: Ints) -> Floats:
    """When the last of those before each instruction ends (instructions, plans)."""
    ends_s: Floats = ends[before[:, 0]]
    for others in before.T[1:]:
        np.maximum(ends_s, ends[others], out=ends_s)
    return ends_s


def _fastest_first(offered: Sequence[Sequence[Option]]) -> list[Setting]:
    """Settings with names by the mean of their relative times, then clocks from the highest."""
    times: dict[Setting, list[float]] = {}
    for options in offered:
        for option in options:
            # Relative, so that a short instruction has as much of a say as a long one.
            times.setdefault(option.frequency, []).append(option.time_s / options[0].time_s)
    named = [setting for setting in times if isinstance(setting, str)]
    named.sort(key=lambda setting: math.fsum(times[setting]) / len(times[setting]))
    clocks = [setting for setting in times if not isinstance(setting, str)]
    return [*named, *sorted(clocks, reverse=True)]


def _padded(lists: Sequence[Sequence[int]], none: int) -> Ints:
    width = max(1, max(map(len, lists)))
    return np.array([[*one, *[none] * (width - len(one))] for one in lists], dtype=np.intp)

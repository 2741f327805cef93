"""Steps of an engine and updates of a sensor, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Columns:
    """Arrays with one row for each of the same things."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(next(iter(vars(self).values())))

    def where(self, chosen: slice | Flags | Ints) -> Self:
        """Some of the rows."""
        return type(self)(*(column[chosen] for column in vars(self).values()))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of at least one part."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))


@dataclass(frozen=True)
class Updates(Columns):
    """Updates of a sensor, ascending and without overlap; there may be gaps between them."""

    begin_ns: Ints
    end_ns: Ints
    joules: Floats
    seen_begin_ns: Ints
    """Start and end of the part that the sensor measured."""
    seen_end_ns: Ints
    clock_mhz: Floats
    """NaN: unknown."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float, int, int, float]]) -> Updates:
        """Updates from at least one row, each with the fields of one update."""
        begin, end, joules, first, last, clock = map(np.array, zip(*rows, strict=True))
        return cls(begin, end, joules, first, last, clock)

    @property
    def length_s(self) -> Floats:
        """Length of each update, s."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Seen(Columns):
    """What ran in each update, as a fit needs it.

    Attributes:
        joules: Energy of the part that the sensor measured.
        features: Features of the steps in it, with idle seconds last; updates x columns.
        center_s: Its middle.
        level: Clock level.
        whole_j: Energy of the whole update.
        idle_s: Seconds of the whole update without a step.
    """

    joules: Floats
    features: Floats
    center_s: Floats
    level: Ints
    whole_j: Floats
    idle_s: Floats
    begin_ns: Ints
    end_ns: Ints

    @property
    def busy(self) -> Flags:
        """Whether a step ran in the part that the sensor measured."""
        flags: Flags = self.features[:, 0] > 0
        return flags

    @property
    def length_s(self) -> Floats:
        """Length of each update, s."""
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def empty(self) -> Flags:
        """Whether no step ran in the update."""
        return no_step(self.idle_s, self.length_s)


def no_step(idle_s: Floats, length_s: Floats) -> Flags:
    """Whether updates of this length, of which these seconds had no step, had none at all."""
    flags: Flags = idle_s > 0.999 * length_s
    return flags


@dataclass(frozen=True)
class StepColumns:
    """Steps in the order of their ends, and for each the requests in it.

    A row is one request in one step; the rows of step `s` are `first_row[s]:first_row[s + 1]`.
    """

    begin_ns: Ints
    end_ns: Ints
    first_row: Ints
    """One more than there are steps."""
    request: Ints
    """Request number of each row, chosen by the caller."""
    prefill: Flags
    tokens: Floats
    """Tokens computed in this step."""
    context: Floats
    """Tokens in the KV cache at the start of the step."""

    @property
    def count(self) -> int:
        """Number of steps."""
        return int(self.begin_ns.size)

    @property
    def rows(self) -> tuple[NDArray[Any], ...]:
        """The columns with one value per row, in the order of the arguments."""
        return self.request, self.prefill, self.tokens, self.context

    @property
    def step_of_row(self) -> Ints:
        """The position of each row's step."""
        return np.repeat(np.arange(self.count), np.diff(self.first_row))

    @property
    def length_s(self) -> Floats:
        """Length of each step, s."""
        return (self.end_ns - self.begin_ns) / 1e9

    def part(self, begin: int, end: int) -> StepColumns:
        """The steps at positions `begin:end`."""
        rows = slice(int(self.first_row[begin]), int(self.first_row[end]))
        return StepColumns(
            self.begin_ns[begin:end],
            self.end_ns[begin:end],
            self.first_row[begin : end + 1] - self.first_row[begin],
            *(column[rows] for column in self.rows),
        )

    def between(self, sums: Floats, begin_ns: Ints, end_ns: Ints) -> Floats:
        """Sums of a figure of each step over the time between instants; a step counts by the share
        of its time in between. The steps must not overlap."""
        base = int(self.begin_ns[0])
        knots = (np.stack([self.begin_ns, self.end_ns], axis=1).ravel() - base).astype(np.float64)
        total = np.repeat(np.concatenate([[0.0], np.cumsum(sums)]), 2)[1:-1]
        amounts: Floats = np.interp(end_ns - base, knots, total)
        amounts -= np.interp(begin_ns - base, knots, total)
        return amounts


def clipped(steps: StepColumns) -> StepColumns:
    """The same steps without overlap: each begins at the end of the one before, or later.

    Engines that schedule a step while another runs report overlapping steps; the later one has the
    GPU only after the end of the earlier one. A step's length is at least 1 ns.
    """
    end_ns = np.maximum.accumulate(steps.end_ns)
    end_ns = end_ns + _ties(end_ns)
    begin_ns = np.maximum(steps.begin_ns, np.concatenate([steps.begin_ns[:1], end_ns[:-1]]))
    begin_ns = np.minimum(begin_ns, end_ns - 1)
    return replace(steps, begin_ns=begin_ns, end_ns=end_ns)


def _ties(end_ns: Ints) -> Ints:
    """Offsets that make equal ends strictly ascending: 0, 1, 2... within each run of equal ones."""
    if end_ns.size == 0:
        return end_ns
    position = np.arange(end_ns.size)
    fresh = np.concatenate([[True], np.diff(end_ns) > 0])
    begin: Ints = np.maximum.accumulate(np.where(fresh, position, 0))
    return position - begin


def joined(parts: list[StepColumns]) -> StepColumns:
    """Several runs of steps as one."""
    if len(parts) == 1:
        return parts[0]
    counts = np.concatenate([np.diff(part.first_row) for part in parts])
    return StepColumns(
        np.concatenate([part.begin_ns for part in parts]),
        np.concatenate([part.end_ns for part in parts]),
        np.concatenate([[0], np.cumsum(counts)]),
        *map(np.concatenate, zip(*(part.rows for part in parts), strict=True)),
    )


def by_end(steps: StepColumns) -> StepColumns:
    """The same steps in the order of their ends."""
    if steps.count < 2 or bool((np.diff(steps.end_ns) >= 0).all()):
        return steps
    order = np.argsort(steps.end_ns, kind="stable")
    sizes = np.diff(steps.first_row)[order]
    first = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.repeat(steps.first_row[:-1][order] - first[:-1], sizes) + np.arange(first[-1])
    return StepColumns(
        steps.begin_ns[order],
        steps.end_ns[order],
        first,
        *(column[rows] for column in steps.rows),
    )

"""Steps of an engine and updates of a sensor, as columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


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

    def part(self, begin: int, end: int) -> StepColumns:
        """The steps at positions `begin:end`."""
        rows = slice(int(self.first_row[begin]), int(self.first_row[end]))
        return StepColumns(
            self.begin_ns[begin:end],
            self.end_ns[begin:end],
            self.first_row[begin : end + 1] - self.first_row[begin],
            *(column[rows] for column in self.rows),
        )


@dataclass(frozen=True)
class Updates:
    """Updates of a sensor, ascending and without overlap; there may be gaps between them."""

    begin_ns: Ints
    end_ns: Ints
    joules: Floats
    seen_begin_ns: Ints
    """Start and end of the part that the sensor measured."""
    seen_end_ns: Ints
    clock_mhz: Floats
    """NaN: unknown."""

    @property
    def count(self) -> int:
        """Number of updates."""
        return int(self.begin_ns.size)

    @property
    def length_s(self) -> Floats:
        """Length of each update, s."""
        return (self.end_ns - self.begin_ns) / 1e9

    def part(self, begin: int, end: int) -> Updates:
        """The updates at positions `begin:end`."""
        return Updates(*(column[begin:end] for column in vars(self).values()))


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


def joined_updates(parts: list[Updates]) -> Updates:
    """Several runs of updates as one."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Updates(*map(np.concatenate, columns))


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

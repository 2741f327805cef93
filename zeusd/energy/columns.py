"""A ring buffer of rows, stored as columns of fixed width in one block of memory.

The block may be a mapped file, whose contents outlive the process that wrote it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from zeus_common.units import SECOND_NS

WIDTHS = {"q": 8, "i": 4, "I": 4, "h": 2, "H": 2}

SPARE = 4
"""Number of oldest rows that are not read, because another thread is about to overwrite them."""

TypeCode = Literal["q", "i", "I", "h", "H"]

GRAINS = ((SECOND_NS, 10_800), (30 * SECOND_NS, 8_640), (1200 * SECOND_NS, 2_160))
"""Period and number of rows of each tier of a history."""


class PackedColumn(NamedTuple):
    """One column: its name and the format of its numbers, as in `struct`."""

    name: str
    code: TypeCode


def size_of(columns: Sequence[PackedColumn], capacity: int) -> int:
    """Bytes that a ring buffer needs. Each column starts at a multiple of eight."""
    return 8 + sum(_padded(WIDTHS[column.code] * capacity) for column in columns)


def tiers_size(columns: Sequence[PackedColumn]) -> int:
    """Bytes that all tiers of a table need."""
    return sum(size_of(columns, rows) for _, rows in GRAINS)


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8


class Ring:
    """The newest rows of a table. Each row has a fixed number, counted from 0.

    Args:
        columns: The columns of a row.
        capacity: Number of rows that are kept.
        memory: `size_of` bytes; rows that they contain are kept. One ring may append to them.

    Attributes:
        end: Number of the next row.
    """

    def __init__(self, columns: Sequence[PackedColumn], capacity: int, memory: memoryview) -> None:
        self.capacity = capacity
        self._count = memory[:8].cast("q")
        self.end = self._count[0]
        self._columns = []
        offset = 8
        for column in columns:
            width = WIDTHS[column.code] * capacity
            self._columns.append(memory[offset : offset + width].cast(column.code))
            offset += _padded(width)
        self._views = [ColumnView(values, capacity) for values in self._columns]

    @property
    def start(self) -> int:
        """Number of the oldest row that may be read."""
        return max(0, self.end - self.capacity + SPARE)

    def column(self, position: int) -> ColumnView:
        """One column, indexed by the rows' numbers."""
        return self._views[position]

    def newest(self, position: int) -> int:
        """The newest row's value in one column; 0: there is none."""
        value: int = self._columns[position][(self.end - 1) % self.capacity]
        return value if self.end else 0

    def append(self, *row: int) -> None:
        """Adds a row. It becomes visible when it is complete: other threads may read meanwhile."""
        place = self.end % self.capacity
        for values, value in zip(self._columns, row, strict=True):
            values[place] = value
        self.end = self._count[0] = self.end + 1


class ColumnView:
    """One column of a ring buffer, indexed by the rows' numbers."""

    __slots__ = ("_capacity", "_values")

    def __init__(self, values: memoryview, capacity: int) -> None:
        self._values = values
        self._capacity = capacity

    def __getitem__(self, number: int) -> int:
        value: int = self._values[number % self._capacity]
        return value

    def span(self, low: int, high: int) -> list[int]:
        """The rows in [low, high), which must not be more than the capacity."""
        place, count = low % self._capacity, high - low
        rows: list[int] = self._values[place : place + count].tolist()
        if len(rows) < count:
            rows += self._values[: count - len(rows)].tolist()
        return rows

    def first_at_least(self, value: int, low: int, high: int) -> int:
        """Number of the first row in [low, high) that is not below `value`, else `high`."""
        if low >= high:
            return high
        values = self._values
        turn = (high - 1) // self._capacity * self._capacity  # the newest row at place 0
        if low < turn and values[0] >= value:
            turn, high = turn - self._capacity, turn
        return turn + bisect_left(values, value, max(0, low - turn), high - turn)

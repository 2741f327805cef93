"""A ring buffer of rows, stored as columns of fixed width in one block of memory.

The block may be a mapped file, whose contents outlive the process that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

WIDTHS = {"q": 8, "i": 4, "I": 4, "h": 2, "H": 2}

SPARE = 4
"""Number of oldest rows that are not read, because another thread is about to overwrite them."""

TypeCode = Literal["q", "i", "I", "h", "H"]


class Column(NamedTuple):
    """One column: its name and the format of its numbers, as in `struct`."""

    name: str
    code: TypeCode


def size_of(columns: Sequence[Column], capacity: int) -> int:
    """Bytes that a ring buffer needs. Each column starts at a multiple of eight."""
    return 8 + sum(_padded(WIDTHS[column.code] * capacity) for column in columns)


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8


class Ring:
    """The newest rows of a table. Each row has a fixed number, counted from 0.

    Args:
        columns: The columns of a row.
        capacity: Number of rows that are kept.
        memory: `size_of` bytes; rows that they contain are kept.
    """

    def __init__(self, columns: Sequence[Column], capacity: int, memory: memoryview) -> None:
        self.capacity = capacity
        self._count = memory[:8].cast("q")
        self._columns = []
        offset = 8
        for column in columns:
            width = WIDTHS[column.code] * capacity
            self._columns.append(memory[offset : offset + width].cast(column.code))
            offset += _padded(width)

    @property
    def end(self) -> int:
        """Number of the next row."""
        return self._count[0]

    @property
    def start(self) -> int:
        """Number of the oldest row that may be read."""
        return max(0, self._count[0] - self.capacity + SPARE)

    def column(self, position: int) -> ColumnView:
        """One column, indexed by the rows' numbers."""
        return ColumnView(self._columns[position], self.capacity)

    def append(self, *row: int) -> None:
        """Adds a row. It becomes visible when it is complete: other threads may read meanwhile."""
        count = self._count[0]
        place = count % self.capacity
        for values, value in zip(self._columns, row, strict=True):
            values[place] = value
        self._count[0] = count + 1


class ColumnView:
    """One column of a ring buffer, indexed by the rows' numbers."""

    __slots__ = ("_capacity", "_values")

    def __init__(self, values: memoryview, capacity: int) -> None:
        self._values = values
        self._capacity = capacity

    def __getitem__(self, number: int) -> int:
        return int(self._values[number % self._capacity])

    def first_at_least(self, value: int, low: int, high: int) -> int:
        """Number of the first row in [low, high) that is not below `value`, else `high`."""
        values, capacity = self._values, self._capacity
        while low < high:
            middle = (low + high) // 2
            if values[middle % capacity] < value:
                low = middle + 1
            else:
                high = middle
        return low

"""Readings of one sensor, and the updates among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ShownUpdate(NamedTuple):
    """An observed update.

    Attributes:
        after_ns: The last reading of the value before.
        until_ns: The first reading of the new value.
        value: The new value.
    """

    after_ns: int
    until_ns: int
    value: int

    @property
    def t_ns(self) -> float:
        """The middle of the update's interval."""
        return (self.after_ns + self.until_ns) / 2

    @property
    def width_ns(self) -> int:
        """Length of that interval."""
        return self.until_ns - self.after_ns


class ReadingSeries:
    """Readings of one sensor, in the order of time.

    Args:
        readings: Time (ns) and value of each.

    Attributes:
        t_ns: When each was taken: midway through the call.
        values: The readings.
        failures: Return codes of readings that failed, and how many had each.
    """

    def __init__(self, readings: Iterable[tuple[int, int]] = ()) -> None:
        self.t_ns: list[int] = []
        self.values: list[int] = []
        self.failures: dict[int, int] = {}
        for t_ns, value in readings:
            self.add(t_ns, value)

    def add(self, t_ns: int, value: int) -> None:
        """Adds a reading."""
        self.t_ns.append(t_ns)
        self.values.append(value)

    def failed(self, code: int) -> None:
        """Counts a reading that failed with a return code."""
        self.failures[code] = self.failures.get(code, 0) + 1

    def changes(self) -> list[ShownUpdate]:
        """Every observed update."""
        t_ns, values = self.t_ns, self.values
        return [
            ShownUpdate(t_ns[number - 1], t_ns[number], values[number])
            for number in range(1, len(values))
            if values[number] != values[number - 1]
        ]

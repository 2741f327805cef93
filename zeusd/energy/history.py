"""History of a device's sensors: every tick of the last minutes, and coarser rows for days.

Memory does not depend on the uptime: 20,000 ticks (7 minutes at 20 ms, half an hour at 100 ms), a
row each second for three hours, one every half minute for three days, and one every 20 minutes for
30 days, so that a window may be as long as a training; 2 MB in all, with the time limited
(`energy.limited`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zeusd.energy.columns import GRAINS, PackedColumn, Ring, size_of, tiers_size
from zeusd.energy.limited import TimeLimited
from zeusd.energy.meter import Edge

TICKS = (
    PackedColumn("t_ns", "q"),
    PackedColumn("energy_uj", "q"),
    PackedColumn("level_mw", "i"),
    PackedColumn("power_mw", "i"),
)
ROWS = (
    PackedColumn("t_ns", "q"),
    PackedColumn("energy_uj", "q"),
    PackedColumn("power_mw", "i"),
    PackedColumn("average_mw", "i"),
    PackedColumn("memory_mw", "i"),
    PackedColumn("reasons", "I"),
    PackedColumn("temperature_c", "h"),
    PackedColumn("gpu_mhz", "H"),
    PackedColumn("memory_mhz", "H"),
    PackedColumn("limit_mw", "i"),
)
TICK_ROWS = 20_000
RECENT = 40
"""Number of newest ticks that are kept as lists, while no later one is added."""

META = (PackedColumn("counted_uj", "q"), PackedColumn("raw", "q"))
"""State of the meter; only the last row is valid."""

ABSENT = -1
LAYOUT = hashlib.sha256(
    f"1{TICKS}{TICK_ROWS}{ROWS}{GRAINS}{META}{TimeLimited.COLUMNS}".encode()
).hexdigest()[:16]
"""Version of the format; changes with it."""

SIZE = (
    size_of(TICKS, TICK_ROWS)
    + tiers_size(ROWS)
    + size_of(META, 8)
    + tiers_size(TimeLimited.COLUMNS)
)
"""Bytes of a history."""


class TickRows(NamedTuple):
    """Consecutive ticks, oldest first."""

    t_ns: list[int]
    energy_uj: list[int]
    level_mw: list[int]
    power_mw: list[int]


class Slow(NamedTuple):
    """Values that are read once a second. None: not offered."""

    average_mw: int | None = None
    memory_mw: int | None = None
    temperature_c: int | None = None
    gpu_mhz: int | None = None
    memory_mhz: int | None = None
    reasons: int | None = None
    limit_mw: int | None = None
    module_mw: int | None = None
    """Not in the rows, because a module has its own history."""
    seen_ns: int | None = None
    """Part of a tick that energy is measured over; None: all of it. Not in the rows."""


class History:
    """The history of one device.

    Args:
        memory: `SIZE` bytes: zeros, or an earlier history.

    Attributes:
        ends_ns: The newest tick; 0: there is none.
        limited: The time in which the clocks were limited.
        next_row_ns: When the next coarser row, with the values read once a second, is due.
    """

    def __init__(self, memory: memoryview) -> None:
        offset = 0

        def take(size: int) -> memoryview:
            nonlocal offset
            offset += size
            return memory[offset - size : offset]

        self.ticks = Ring(TICKS, TICK_ROWS, take(size_of(TICKS, TICK_ROWS)))
        self.tiers = [Ring(ROWS, rows, take(size_of(ROWS, rows))) for _, rows in GRAINS]
        self._meta = Ring(META, 8, take(size_of(META, 8)))
        self.limited = TimeLimited(take(tiers_size(TimeLimited.COLUMNS)))
        self._next_ns = [0] * len(GRAINS)
        self.next_row_ns = 0
        self.t_ns, self.energy_uj, self.level_mw, self.power_mw = (
            self.ticks.column(position) for position in range(len(TICKS))
        )
        self._recent = 0, TickRows([], [], [], [])
        self.ends_ns = self.ticks.newest(0)

    def add(self, edge: Edge, raw: int | None, slow: Slow) -> None:
        """Adds a tick. `raw` is the device's own counter in its unit; None: it has none."""
        self.append(edge, slow)
        self.keep(edge.counted_uj, raw)

    def keep(self, counted_uj: int, raw: int | None) -> None:
        """Keeps the state of the meter at the newest of the ticks that were appended."""
        self._meta.append(counted_uj, ABSENT if raw is None else raw)

    def append(self, edge: Edge, slow: Slow) -> None:
        """Adds a tick; `keep` follows."""
        t_ns, energy_uj, level_mw, power_mw, _ = edge
        self.ticks.append(t_ns, energy_uj, level_mw, power_mw)
        self.ends_ns = t_ns
        if t_ns < self.next_row_ns:
            return  # of all tiers: their periods are multiples
        for position, (period_ns, _) in enumerate(GRAINS):
            if t_ns >= self._next_ns[position]:
                self._next_ns[position] = (t_ns // period_ns + 1) * period_ns
                self.tiers[position].append(
                    t_ns,
                    energy_uj,
                    power_mw,
                    *(ABSENT if value is None else value for value in slow[:2]),
                    (slow.reasons or 0) & 0xFFFFFFFF,
                    ABSENT if slow.temperature_c is None else slow.temperature_c,
                    slow.gpu_mhz or 0,
                    slow.memory_mhz or 0,
                    ABSENT if slow.limit_mw is None else slow.limit_mw,
                )
        self.next_row_ns = self._next_ns[0]

    def last(self) -> tuple[Edge, int | None] | None:
        """The newest edge, and the counter's value there."""
        if not self.ticks.end or not self._meta.end:
            return None
        number, meta = self.ticks.end - 1, self._meta.end - 1
        raw = self._meta.column(1)[meta]
        edge = Edge(
            self.t_ns[number],
            self.energy_uj[number],
            self.level_mw[number],
            self.power_mw[number],
            self._meta.column(0)[meta],
        )
        return edge, None if raw == ABSENT else raw

    @property
    def begins_ns(self) -> int | None:
        """The oldest time in the history; None: it is empty."""
        coarsest = self.tiers[-1]
        return coarsest.column(0)[coarsest.start] if coarsest.end else None

    def rows(self, first: int, end: int) -> TickRows:
        """Copies ticks by their numbers."""
        columns = (self.t_ns, self.energy_uj, self.level_mw, self.power_mw)
        return TickRows(*(column.span(first, end) for column in columns))

    @property
    def recent(self) -> TickRows:
        """The newest ticks. What waits for a tick needs the same ones, so they are copied once."""
        end, rows = self._recent
        if end != self.ticks.end:
            end = self.ticks.end
            rows = self.rows(max(self.ticks.start, end - RECENT), end)
            self._recent = end, rows
        return rows

    def coarse(self, t_ns: int) -> Ring | None:
        """The finest coarser tier that reaches back to a time."""
        for ring in self.tiers:
            if ring.end and ring.column(0)[ring.start] <= t_ns:
                return ring
        return None

    def timeline(
        self,
        value: Callable[[Ring, int], int | None],
        ring: Ring,
        start_ns: int,
        end_ns: int,
        limit: int,
    ) -> Iterator[tuple[int, int | None]]:
        """Times and values of the oldest rows in a span, at most `limit` with a value, oldest
        first."""
        times = ring.column(0)
        number = times.first_at_least(start_ns, ring.start, ring.end)
        while number < ring.end and limit > 0 and times[number] <= end_ns:
            reading = value(ring, number)
            yield times[number], reading
            limit -= reading is not None
            number += 1

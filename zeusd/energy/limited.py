"""How long a GPU's clocks were limited between two times, by reason, from the driver's counters.

They are read about once a second, and when someone waits for a window. Between two readings, the
time limited is next to the reading after which, or before which, the GPU was always limited; if
there is none, it is spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeus_common.units import MS
from zeus_ipc.limited import REASONS
from zeusd.energy.columns import GRAINS, PackedColumn, Ring, size_of

NOT_COUNTED = 0xFFFFFFFF
"""In place of a counter that the driver does not have. The others, in ms, begin again before it."""

SLACK_MS = 2_000
"""A counter that grows by so much more than the time that has passed was reset."""

STALE_NS = 2_500_000_000
"""Time after a counter's newest reading about which it says nothing."""

ALWAYS, NEVER = 0.98, 0.001
"""Shares of a time from which, and up to which, a GPU was always and never limited."""


class TimeLimited:
    """The counters of one GPU over time.

    Args:
        memory: `tiers_size(COLUMNS)` bytes: zeros, or an earlier history.

    Attributes:
        counted_ns: The driver's newest counters, by reason.
        read_ns: When it was last asked for them, also if it counted none: then nobody waits for it.
    """

    COLUMNS = (
        PackedColumn("t_ns", "q"),
        *(PackedColumn(f"{reason}_ms", "I") for reason in REASONS),
    )

    def __init__(self, memory: memoryview) -> None:
        self._tiers: list[Ring] = []
        for _, rows in GRAINS:
            size = size_of(self.COLUMNS, rows)
            self._tiers.append(Ring(self.COLUMNS, rows, memory[:size]))
            memory = memory[size:]
        self._offset_ms = [0] * len(REASONS)
        self.counted_ns: dict[str, int] = {}
        self.read_ns = self.ends_ns
        # When each was counted last, and its value.
        self._counted = [
            (self.ends_ns, self._tiers[0].newest(place) if self.ends_ns else NOT_COUNTED)
            for place in range(1, len(REASONS) + 1)
        ]

    @property
    def ends_ns(self) -> int:
        """The newest reading; 0: there is none."""
        return self._tiers[0].newest(0)

    def add(self, t_ns: int, counted_ns: Sequence[int | None]) -> None:
        """Adds a reading: counters in the order of `REASONS`; None: not counted. Empty: none is."""
        if counted_ns and t_ns > self.ends_ns:
            self._append(t_ns, counted_ns)
        self.read_ns = max(self.read_ns, t_ns)

    def _append(self, t_ns: int, counted_ns: Sequence[int | None]) -> None:
        counters = zip(REASONS, counted_ns, strict=True)
        self.counted_ns |= {reason: ns for reason, ns in counters if ns is not None}
        row = [self._continued(place, ns, t_ns) for place, ns in enumerate(counted_ns)]
        for tier, (period_ns, _) in zip(self._tiers, GRAINS, strict=True):
            if tier is self._tiers[0] or t_ns // period_ns > tier.newest(0) // period_ns:
                tier.append(t_ns, *row)

    def _continued(self, place: int, ns: int | None, t_ns: int) -> int:
        """A counter's next value, which is never lower than its last."""
        last_ns, last = self._counted[place]
        if ns is None:  # once, a failure; later, the driver has stopped to count it
            return last if t_ns - last_ns < STALE_NS else NOT_COUNTED
        value = (ns // MS + self._offset_ms[place]) % NOT_COUNTED
        grown_ms = 0 if last == NOT_COUNTED else (value - last) % NOT_COUNTED
        if grown_ms > (t_ns - last_ns) // MS + SLACK_MS:
            self._offset_ms[place] -= grown_ms
            value = last
        self._counted[place] = t_ns, value
        return value

    def window(self, begin_ns: int, end_ns: int) -> Iterator[tuple[str, int | None]]:
        """Reasons, and how long each limited the clocks between two times, ms; None: not known.
        Nothing: the driver counts none."""
        ends = self._at(begin_ns), self._at(end_ns)
        for place, reason in enumerate(REASONS):
            newest = self._tiers[0].newest(place + 1) if self.ends_ns else NOT_COUNTED
            if newest == NOT_COUNTED and reason not in self.counted_ns:
                continue
            begin_ms, end_ms = (None if all_ms is None else all_ms[place] for all_ms in ends)
            if begin_ms is None or end_ms is None:
                yield reason, None
                continue
            grown_ms = (end_ms - begin_ms) % NOT_COUNTED
            if grown_ms > NOT_COUNTED // 2:  # rounded below 0
                grown_ms = 0
            yield reason, min(round(grown_ms), -(-(end_ns - begin_ns) // MS))

    def _at(self, t_ns: int) -> list[float | None] | None:
        """The counters at a time; None: not known."""
        for ring in self._tiers:
            times = ring.column(0)
            if ring.end and times[ring.start] <= t_ns:
                break
        else:
            return None
        after = times.first_at_least(t_ns + 1, ring.start, ring.end)
        if after == ring.end and t_ns - times[after - 1] > STALE_NS:
            return None
        return [_between(ring, place, after, t_ns) for place in range(1, len(REASONS) + 1)]


def _between(ring: Ring, place: int, after: int, t_ns: int) -> float | None:
    """A counter at a time between the readings before and at a row; None: it was not counted."""
    value = ring.column(place)[after - 1]
    if value == NOT_COUNTED or (after < ring.end and ring.column(place)[after] == NOT_COUNTED):
        return None
    passed_ms = (t_ns - ring.column(0)[after - 1]) / MS
    if after == ring.end:  # it goes on like before
        return value + passed_ms * (_share(ring, place, after - 1) or 0.0)
    share = _share(ring, place, after) or 0.0
    before, later = _share(ring, place, after - 1), _share(ring, place, after + 1)
    if later is None and before is not None:
        later = 1.0 if before <= NEVER else 0.0 if before >= ALWAYS else before
    whole_ms = (ring.column(0)[after] - ring.column(0)[after - 1]) / MS
    always_before = before is not None and before >= ALWAYS
    always_later = later is not None and later >= ALWAYS
    if always_before == always_later:
        return value + passed_ms * share
    if always_before:
        return value + min(passed_ms, share * whole_ms)
    return value + max(0.0, share * whole_ms - (whole_ms - passed_ms))


def _share(ring: Ring, place: int, row: int) -> float | None:
    """The share of the time before a row in which the GPU was limited; None: not known."""
    if not ring.start < row < ring.end:
        return None
    values, times = ring.column(place), ring.column(0)
    if NOT_COUNTED in (values[row - 1], values[row]):
        return None
    grown_ms = (values[row] - values[row - 1]) % NOT_COUNTED
    return min(1.0, grown_ms * MS / (times[row] - times[row - 1]))

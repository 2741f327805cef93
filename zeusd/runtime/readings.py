"""Reads from a GPU's history when the driver reported it as idle, or reported nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from zeus_common.units import SECOND_NS
from zeusd.energy.accountant import Fact, FactSpan
from zeusd.energy.history import History

REASON_IDLE = 0x1
"""nvmlClocksEventReasonGpuIdle, see `throttle_reasons` in the device port."""

_REASONS = 5
"""Column of `history.ROWS`."""

GAP_NS = 5 * SECOND_NS // 2
"""Rows are a second apart; with this gap, nothing was sampled between them."""

DOWN = "down"
"""Reason: zeusd was not running."""
NOT_SAMPLED = "not sampled"
"""Reason: the GPU did not respond."""


_POWER = 2
"""Column of `history.ROWS`."""


def idle_uw(history: History) -> int | None:
    """The GPU's last power while the driver reported it as idle, uW; None: it did not."""
    ring = history.tiers[0]
    power, reasons = ring.column(_POWER), ring.column(_REASONS)
    readings: list[int] = []
    # Number of rows that are searched for idle ones.
    for number in range(ring.end - 1, max(ring.start, ring.end - 3600) - 1, -1):
        if reasons[number] & REASON_IDLE and power[number] > 0:
            readings.append(power[number])
            # Number of rows whose median is an idle GPU's power.
            if len(readings) == 60:
                break
    return sorted(readings)[len(readings) // 2] * 1000 if readings else None


def observed(history: History, begin_ns: int, end_ns: int, started_ns: int) -> Iterator[FactSpan]:
    """Spans in which the GPU was idle, or was not sampled."""
    ring = history.tiers[0]
    times, reasons = ring.column(0), ring.column(_REASONS)
    first = max(ring.start, times.first_at_least(begin_ns, ring.start, ring.end) - 1)
    rows = [
        (times[number], bool(reasons[number] & REASON_IDLE)) for number in range(first, ring.end)
    ]
    rows = [row for row in rows if row[0] <= end_ns]
    idle_ns: int | None = None
    for (t_ns, idle), (next_ns, next_idle) in pairwise(
        [*rows, (end_ns, rows[-1][1])] if rows else []
    ):
        gap = next_ns - t_ns > GAP_NS
        if idle_ns is not None and (gap or not idle):
            yield FactSpan(Fact.IDLE, idle_ns, t_ns)
            idle_ns = None
        if gap:
            reason = DOWN if t_ns < started_ns <= next_ns else NOT_SAMPLED
            yield FactSpan(Fact.UNKNOWN, t_ns, next_ns, reason=reason)
        elif idle and next_idle and idle_ns is None:
            idle_ns = t_ns
    if idle_ns is not None:
        yield FactSpan(Fact.IDLE, idle_ns, end_ns)

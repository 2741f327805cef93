"""Power by clock, fitted to the board's reported energy; pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

KEPT = 4096
"""Most steps that are kept; energy of older ones is not used."""

NOISE = 0.05
"""Share of a window's energy that the rule does not explain."""

TOP_WINDOWS = 10
"""Time at the highest clock, at intervals, for comparison with lower clocks."""

TOP_S = 30.0
"""Longest such time."""

FIRST_GAP_S = 20.0
"""Interval between the first two such times; it doubles each time."""

LONGEST_S, MOST_W = 60.0, 1e6
"""Largest plausible length and energy of a window."""

LEAST_WINDOWS = 10
"""Number of windows before which the generic curve is used."""


class PowerFit:
    """Splits the board's power into four parts.

    Args:
        generic: The prior: idle, base, memory, clock; in any unit.

    Attributes:
        parts: Power, in any unit: constant; while busy; for memory that steps read, at the rate of
            the highest clock; for the highest clock while busy.
        windows: Number of windows used.
    """

    def __init__(self, generic: Sequence[float]) -> None:
        self.parts = tuple(generic)
        self.windows = 0
        self._enabled = self._looking = False
        self._gap_s = FIRST_GAP_S
        self._need = 0
        self._next_s = self._until_s = -math.inf
        self._theta = [0.0] * 4
        self._p: list[list[float]] = []
        self._busy = self._read = self._clocked = 0.0
        self._times: deque[float] = deque(maxlen=KEPT)
        self._sums: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    def step(self, begin_s: float, end_s: float, stretch: float, clock_power: float) -> None:
        """Adds one step: its time, its stretch, and the clock's share of power (see
        `clock_floor`)."""
        times = self._times
        if times and begin_s <= times[-1]:
            begin_s = times[-1]
        else:
            self._add(begin_s)
        took = end_s - begin_s
        if took > 0.0:
            self._busy += took
            self._read += took / stretch
            self._clocked += took * clock_power
            self._add(end_s)

    def begin(self) -> None:
        """Announces that energy will be reported from now on."""
        self._enabled = True

    def cold(self, now_s: float) -> bool:
        """Whether the highest clock must be measured now."""
        if not self._enabled:
            return False
        if not self._looking and now_s >= self._next_s:
            self._looking = True
            self._need, self._until_s = self.windows + TOP_WINDOWS, now_s + TOP_S
        elif self._looking and (self.windows >= self._need or now_s >= self._until_s):
            self._looking = False
            self._next_s = now_s + self._gap_s
            self._gap_s *= 2.0
        return self._looking

    def forget(self) -> None:
        """Handles that time has gone back."""
        self._times.clear()
        self._sums.clear()
        self._looking = False
        self._next_s = -math.inf

    def energy(self, begin_s: float, end_s: float, joules: float) -> None:
        """Adds the board's energy between two instants."""
        before, after = self._at(begin_s), self._at(end_s)
        total = end_s - begin_s
        if before is None or after is None or not 0.05 < total < LONGEST_S:
            return
        if joules > MOST_W * total:
            return
        x = [total, *(b - a for a, b in zip(before, after, strict=True))]
        if not self._p:
            expected = sum(a * b for a, b in zip(self.parts, x, strict=True))
            scale = joules / expected
            self._theta = [scale * part for part in self.parts]
            self._p = [[(0.6 * scale) ** 2 if i == j else 0.0 for j in range(4)] for i in range(4)]
        px = [sum(a * b for a, b in zip(row, x, strict=True)) for row in self._p]
        noise = (NOISE * joules) ** 2 + 1e-6
        variance = sum(a * b for a, b in zip(px, x, strict=True)) + noise
        error = joules - sum(a * b for a, b in zip(self._theta, x, strict=True))
        for i in range(4):
            gain = px[i] / variance
            self._theta[i] += gain * error
            row = self._p[i]
            for j in range(4):
                row[j] -= gain * px[j]
            row[i] *= 1.002
        self.windows += 1
        if self.windows >= LEAST_WINDOWS:
            parts = tuple(max(0.0, value) for value in self._theta)
            self.parts = parts if parts[0] + parts[1] > 0.0 else self.parts

    def _add(self, time_s: float) -> None:
        self._times.append(time_s)
        self._sums.append((self._busy, self._read, self._clocked))

    def _at(self, time_s: float) -> tuple[float, float, float] | None:
        """Sums until a time; None: no longer known, or not yet."""
        times, sums = self._times, self._sums
        if not times or time_s < times[0]:
            return None
        after = bisect_left(times, time_s)
        if after >= len(times):
            return sums[-1]  # idle since
        if after == 0:
            return sums[0]
        begin, end = times[after - 1], times[after]
        part = (time_s - begin) / (end - begin)
        a, b = sums[after - 1], sums[after]
        return (
            a[0] + part * (b[0] - a[0]),
            a[1] + part * (b[1] - a[1]),
            a[2] + part * (b[2] - a[2]),
        )

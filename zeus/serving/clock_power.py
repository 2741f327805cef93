"""Power by clock, fitted to the board's reported energy, and the clock below which saved energy is
not worth the longer steps; pure.

Under an open load, slower steps make larger batches, so joules per token at a fixed batch is the
wrong measure. The latter uses the energy over time: a clock's power while busy, else idle power.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import mul

from zeus.serving.clock_load import LONGEST_S
from zeus.serving.clock_model import Kalman

KEPT = 4096
"""Most steps that are kept; energy of older ones is not used."""

NOISE = 0.05
"""Share of a window's energy that the rule does not explain."""

LEAST_WINDOWS = 5
"""Windows before which the generic curve is used."""

WORTH = 0.25
"""Percentage of energy that steps longer by 1 % must save."""

GENERIC = (0.2, 0.15, 0.25, 0.4)
"""A generic power curve: constant, while busy, for the memory that steps read (longer steps read
less per second), and for the highest clock."""

FLAT, VOLTS = 0.55, 0.70
"""Share of the highest clock below which the voltage is constant, and its share there."""


def clock_power(r: float) -> float:
    """Clock-dependent power, as a share of that at the highest clock: r V2."""
    above = max(0.0, r - FLAT) / (1.0 - FLAT)
    volts = VOLTS + (1.0 - VOLTS) * min(1.0, above)
    return r * volts * volts


def longer_busy(busy: float, longer: float) -> float:
    """Share of time in which steps run if they are longer by this factor than with a share `busy`.

    Randomly arriving requests find the engine idle with probability exp(-n), if on average n are
    present; n grows with the time of steps. So batches grow, not only busy time.
    """
    idle = 1.0 - min(max(busy, 0.0), 1.0)
    return 1.0 - math.exp(longer * math.log(idle)) if idle > 0.0 else 1.0


class Floor:
    """The lowest level worth its time.

    Attributes:
        windows: Windows of energy so far.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self._powers = [clock_power(r) for r in ratios]
        # Power, in any unit: constant; while busy; for memory that steps read, at the rate of the
        # highest clock; for the highest clock while busy.
        self._parts: tuple[float, ...] = GENERIC
        self.windows = 0
        self._fit: Kalman | None = None
        self._busy = self._read = self._clocked = 0.0
        self._times: deque[float] = deque(maxlen=KEPT)
        self._sums: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    def step(self, begin_s: float, end_s: float, stretch: float, r: float) -> None:
        """Adds one step: its time, its stretch, and the clock's share of the highest."""
        times = self._times
        if times and begin_s <= times[-1]:
            begin_s = times[-1]
        else:
            self._add(begin_s)
        took = end_s - begin_s
        if took > 0.0:
            self._busy += took
            self._read += took / stretch
            self._clocked += took * clock_power(r)
            self._add(end_s)

    def forget(self) -> None:
        """Handles that steps before now are not known: energy from before is not used."""
        self._times.clear()
        self._sums.clear()

    def energy(self, begin_s: float, end_s: float, joules: float) -> None:
        """Adds the board's energy between two instants, J."""
        before, after = self._at(begin_s), self._at(end_s)
        total = end_s - begin_s
        if before is None or after is None or not 0.05 < total < LONGEST_S:
            return
        x = [total, *(b - a for a, b in zip(before, after, strict=True))]
        if self._fit is None:
            scale = joules / sum(map(mul, GENERIC, x))
            theta = [scale * part for part in GENERIC]
            self._fit = Kalman(theta, [(0.6 * scale) ** 2] * 4)
        self._fit.update(x, joules, (NOISE * joules) ** 2 + 1e-6)
        self.windows += 1
        if self.windows >= LEAST_WINDOWS:
            parts = tuple(max(0.0, value) for value in self._fit.theta)
            self._parts = parts if parts[0] + parts[1] > 0.0 else self._parts

    def level(self, stretch: Sequence[float], known: Sequence[bool], busy: float) -> int:
        """The level that is worth most, or the one below it if its stretch is not known.

        The best of all, not the last that is better than the one above: one stretch that was
        measured too long must not hide the levels below it.

        Args:
            stretch: Stretch of each level.
            known: Whether each stretch was measured.
            busy: Share of time in which steps would run at the highest clock.
        """
        best, least = 0, math.inf
        for level in range(len(self._powers)):
            if not known[level]:
                return level if best == level - 1 else best
            cost = self._energy(level, stretch[level], busy) * stretch[level] ** WORTH
            if cost < least:
                best, least = level, cost
        return best

    def saving(self, level: int, stretch: Sequence[float], busy: float) -> float:
        """Share of energy that a level saves compared with the highest clock."""
        return 1.0 - self._energy(level, stretch[level], busy) / self._energy(0, 1.0, busy)

    def _energy(self, level: int, stretch: float, busy: float) -> float:
        share = longer_busy(busy, stretch)
        idle, base, memory, clock = self._parts
        busy_power = base + memory / stretch + clock * self._powers[level]
        return max(1e-12, idle + share * busy_power)  # an idle engine, and a fit without idle power

    def _add(self, time_s: float) -> None:
        self._times.append(time_s)
        self._sums.append((self._busy, self._read, self._clocked))

    def _at(self, time_s: float) -> tuple[float, ...] | None:
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
        return tuple(a + part * (b - a) for a, b in zip(sums[after - 1], sums[after], strict=True))

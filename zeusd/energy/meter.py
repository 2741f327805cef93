"""From what a GPU's sensors show at their ticks to energy that only grows.

A counter may be absent (before Volta; power is integrated then), start again after a driver reload
(what it missed is integrated), stand still, or show nonsense for one reading when it is read too
fast. Whatever it does, the energy goes on from where it was.

Where the sensor sees only part of each tick (25 of 100 ms on A100 and Hopper: arXiv:2312.02741),
the counter grows by that part's power times the tick. The energy of the part that nobody saw is
better shared between the readings around it, so each edge's energy is the counter's, less half of
the unseen time at the edge's power: over long windows that is the counter's, exactly.
"""

from __future__ import annotations

from typing import NamedTuple

from zeusd.devices.port import Sensors

MS = 1_000_000

MAX_POWER_MW = 5_000_000
"""What no GPU draws: a counter that says so is wrong."""

MISSING_READINGS = 20
"""Readings in a row without the counter that there was, before power is integrated instead: about
ten seconds, as they become rarer."""

STUCK_TICKS = 6
"""Ticks without a move of the counter, at some power, before it is taken for stuck."""

VOLTA, AMPERE, HOPPER = 5, 7, 9
_GA100 = ("A100", "A800", "A30 ", "A30-")


def sensor_window_ns(architecture: int, name: str) -> int | None:
    """How much of each tick the power sensor sees; None: all of it.

    Measured by Yang et al., arXiv:2312.02741; Blackwell is taken for Hopper's like.
    """
    if architecture and architecture <= VOLTA:
        return 10 * MS
    if architecture == AMPERE and any(part in f"{name} " for part in _GA100):
        return 25 * MS
    if architecture >= HOPPER:
        return 25 * MS
    return None


def expected_period_ns(window_ns: int | None) -> int:
    """The tick of a sensor that sees so much of each, until it is known (same source)."""
    return 20 * MS if window_ns == 10 * MS else 100 * MS


class Edge(NamedTuple):
    """A tick of a GPU's sensors.

    Attributes:
        t_ns: When.
        energy_uj: Energy until then, from an arbitrary start, microjoules.
        level_mw: Power that the tick speaks of: of what the sensor saw.
        power_mw: POWER_INSTANT's reading.
        counted_uj: The counter's energy until then, from the same start.
    """

    t_ns: int
    energy_uj: int
    level_mw: int
    power_mw: int
    counted_uj: int


class Meter:
    """Adds up one GPU's energy.

    Args:
        window_ns: See `sensor_window_ns`.
        last: Where an earlier meter ended, and what the counter showed then, mJ.

    Attributes:
        window_ns: Shrinks to None where the counter turns out to see all.
        raw_mj: What the counter last showed.
        epochs: How often the counter started again.
        stuck: Whether it stands still although power is drawn.
    """

    def __init__(self, window_ns: int | None, last: tuple[Edge, int | None] | None = None) -> None:
        self.window_ns = window_ns
        self.epochs = 0
        self.stuck = False
        self.raw_mj: int | None = None
        self._last: Edge | None = None
        self._quiet = 0
        self._agree = self._differ = 0
        self._suspect: int | None = None
        self._missing = 0
        if last is not None:
            self._last, self.raw_mj = last

    def key(self, sensors: Sensors) -> tuple[int | None, int | None]:
        """What changes at a tick: the counter, or, where it is of no use, the power."""
        if sensors.energy_mj is None or self.stuck:
            return sensors.energy_mj, sensors.power_instant_mw
        return sensors.energy_mj, None

    def plausible(self, sensors: Sensors) -> bool:
        """Whether a reading can be true. What is said twice is believed."""
        energy_mj, before_mj = sensors.energy_mj, self.raw_mj
        if energy_mj is None:
            if before_mj is None:
                return bool(sensors.power_instant_mw)
            self._missing += 1  # there was a counter a moment ago
            if self._missing < MISSING_READINGS or not sensors.power_instant_mw:
                return False
            self.raw_mj = None
            return True
        self._missing = 0
        if before_mj is None or self._last is None:
            return True
        elapsed_ns = sensors.t_ns - self._last.t_ns + 200 * MS
        grown_mj = energy_mj - before_mj
        suspect, self._suspect = self._suspect, None
        if 0 <= grown_mj <= MAX_POWER_MW * elapsed_ns // 1_000_000_000:
            return True
        if suspect is not None and energy_mj >= suspect:
            return True
        self._suspect = energy_mj
        return False

    def stands_still(self, sensors: Sensors) -> bool:
        """A change was due and none came. Whether the tick counts all the same: where power is
        integrated, it does."""
        if sensors.energy_mj is None or self.stuck:
            return True
        self._quiet += 1
        self.stuck = self._quiet >= STUCK_TICKS and bool(sensors.power_instant_mw)
        return self.stuck

    def advance(self, t_ns: int, period_ns: int, passed_ns: int, sensors: Sensors) -> Edge:
        """The reading changed, or stood still where a change was due.

        Args:
            t_ns: When.
            period_ns: The tick.
            passed_ns: Time since the last edge: a number of ticks, or whatever it was while the
                sensors were not looked at.
            sensors: What is shown now.
        """
        last = self._last
        power_mw = sensors.power_instant_mw
        if last is None:
            self.raw_mj = sensors.energy_mj
            level_mw = power_mw or 0
            # Its unseen part lies before it, like that of every tick that follows.
            self._last = Edge(t_ns, 0, level_mw, level_mw, self._unseen_uj(level_mw, period_ns))
            return self._last
        elapsed_ns = max(0, t_ns - last.t_ns)
        shown_mw = last.power_mw if power_mw is None else power_mw
        grown_uj = self._grown_uj(sensors, shown_mw, elapsed_ns)
        mean_mw = round(grown_uj * MS / max(passed_ns, 1))
        boxcar = self.window_ns is not None and self.window_ns < period_ns
        if power_mw is not None and last.power_mw and passed_ns == period_ns:
            self._compare(mean_mw, power_mw, last.power_mw)
        level_mw = shown_mw if boxcar and power_mw is not None else mean_mw
        counted_uj = last.counted_uj + grown_uj
        energy_uj = counted_uj - self._unseen_uj(level_mw, period_ns)
        edge = Edge(t_ns, max(last.energy_uj, energy_uj), level_mw, shown_mw, counted_uj)
        self._last = edge
        return edge

    # --------------------------------------------------------------------------------- internals

    def _unseen_uj(self, level_mw: int, period_ns: int) -> int:
        """Half of what a tick takes in the part that no sensor sees."""
        if self.window_ns is None:
            return 0
        return level_mw * max(0, period_ns - self.window_ns) // (2 * MS)

    def _grown_uj(self, sensors: Sensors, power_mw: int, elapsed_ns: int) -> int:
        integrated_uj = power_mw * elapsed_ns // MS
        energy_mj = sensors.energy_mj
        if energy_mj is None:
            return integrated_uj
        before_mj, self.raw_mj = self.raw_mj, energy_mj
        if before_mj is None:
            return integrated_uj
        grown_mj = energy_mj - before_mj
        ceiling_mj = MAX_POWER_MW * (elapsed_ns + 200 * MS) // 1_000_000_000
        if grown_mj < 0 or grown_mj > ceiling_mj:
            self.epochs += 1
            self.stuck, self._quiet = False, 0
            return integrated_uj
        if grown_mj and self.stuck:
            # What it missed while it stood has been integrated.
            self.stuck, self._quiet = False, 0
            return integrated_uj
        if grown_mj:
            self._quiet = 0
        return integrated_uj if self.stuck else grown_mj * 1000

    def _compare(self, mean_mw: int, power_mw: int, before_mw: int) -> None:
        """Where power moves, a counter that sees all of it grows otherwise than by the reading."""
        if self.window_ns is None or 10 * abs(power_mw - before_mw) < power_mw:
            return
        off = abs(mean_mw - power_mw)
        if 25 * off < power_mw:
            self._agree += 1
        elif 8 * off > power_mw:
            self._differ += 1
        if self._differ + self._agree >= 32:
            if self._differ > 2 * self._agree:
                self.window_ns = None
            self._agree //= 2
            self._differ //= 2

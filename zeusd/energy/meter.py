"""Turns a GPU's sensor readings at ticks into energy that never decreases.

A counter may be absent (before Volta; then power is integrated), start again after a driver reload
(the gap is integrated), stop, or return a wrong value once when it is read too fast. The energy
continues from its last value in every case.

If the sensor measures only part of each tick (25 of 100 ms on A100 and Hopper: arXiv:2312.02741),
the counter grows by that part's power times the tick. The energy of the part that is not measured
is better divided between the readings around it. So the energy at each edge is the counter's, minus
half of the unmeasured time at the edge's power. Over long windows this is exactly the counter's
energy.
"""

from __future__ import annotations

from typing import NamedTuple

from zeus_common.units import MS
from zeusd.devices.port import SensorValues

MAX_POWER_MW = 5_000_000
"""More than any GPU draws: a counter that implies it is wrong."""

MISSING_READINGS = 20
"""Readings in a row without a counter that was available before, until power is integrated instead:
about ten seconds, as readings become less frequent."""

STUCK_TICKS = 6
"""Ticks without a change of the counter, while power is drawn, after which it counts as stuck."""

VOLTA, AMPERE, HOPPER = 5, 7, 9
FOLLOW_NS = 60_000 * MS
"""Time in which energy from samples catches up with the counter: they differ by up to 1 %."""

COUNTER_AGE_NS = 58 * MS
"""Mean age of what a counter shows that is updated every 100 ms and lags by 8."""

FAR_MJ = 2_000_000
"""A counter this far from what is expected has been reset, or counts something else."""

_GA100 = ("A100", "A800", "A30 ", "A30-")


class SensorTiming(NamedTuple):
    """What a reading of a GPU's energy covers.

    Attributes:
        window_ns: Part of each tick that the counter counts, at its end; None: all of it.
        power_window_ns: The same of the power reading, which stands in for an absent counter.
        lag_ns: Age of the energy that a tick shows.
        error_ns: Error of a tick's time, with that of the lag (standard deviation).
    """

    window_ns: int | None = None
    power_window_ns: int | None = None
    lag_ns: int = 0
    error_ns: int = 300_000


EXACT = SensorTiming()
_LAGGING = SensorTiming(None, 25 * MS, 8 * MS, 3 * MS)
SAMPLED = SensorTiming(lag_ns=2_500_000, error_ns=1_500_000)
"""The driver's own samples of power, measured like the rest: each is the mean since the one before,
and their sum is the counter's growth."""


def sensor_timing(architecture: int, name: str) -> SensorTiming:
    """What is known about a product's sensors.

    Up to Ada, measured by Yang et al. (arXiv:2312.02741). Hopper's energy counter was measured on
    an H100 and an H200 (docs/reference/hardware): it counts everything, 4 to 12 ms late, whereas
    the power reading covers 25 of 100 ms. Blackwell is assumed to be like Hopper.
    """
    if architecture >= HOPPER:
        return _LAGGING
    if architecture and architecture <= VOLTA:
        return SensorTiming(10 * MS, 10 * MS)
    if architecture == AMPERE and any(part in f"{name} " for part in _GA100):
        return SensorTiming(25 * MS, 25 * MS)
    return EXACT


def expected_period_ns(window_ns: int | None) -> int:
    """Update period of a sensor with this window, until it is known (same source)."""
    return 20 * MS if window_ns == 10 * MS else 100 * MS


class Edge(NamedTuple):
    """A tick of a GPU's sensors.

    Attributes:
        t_ns: When.
        energy_uj: Energy until then, from an arbitrary start, microjoules.
        level_mw: Power over the part of the tick that the sensor measured.
        power_mw: Reading of POWER_INSTANT, or the counter's mean over the tick if it covers more.
        counted_uj: The counter's energy until then, from the same start.
    """

    t_ns: int
    energy_uj: int
    level_mw: int
    power_mw: int
    counted_uj: int


class GpuMeter:
    """Accumulates one GPU's energy.

    Args:
        timing: What its readings cover.
        last: The last state of an earlier meter, and the counter's value then, mJ.

    Attributes:
        timing: What its readings cover.
        raw_mj: Last value of the counter.
        epochs: How often the counter was reset.
        stuck: Whether the counter is stopped although power is drawn.
        ahead_mj: By how much the counter is ahead of what `integrate` assumes.
    """

    def __init__(self, timing: SensorTiming, last: tuple[Edge, int | None] | None = None) -> None:
        self.timing = timing
        self._counts_all = timing.window_ns is None
        self.epochs = 0
        self._rest_uj = 0
        self.ahead_mj = 0
        self.stuck = False
        self.raw_mj: int | None = None
        self._last: Edge | None = None
        self._quiet = 0
        self._agree = self._differ = 0
        self._suspect: int | None = None
        self._missing = 0
        if last is not None:
            self._last, self.raw_mj = last

    @property
    def window_ns(self) -> int | None:
        """Part of each tick that its energy is measured over; None: all of it."""
        if self.raw_mj is None or self.stuck:
            return self.timing.power_window_ns
        return None if self._counts_all else self.timing.window_ns

    def key(self, sensors: SensorValues) -> tuple[int | None, int | None]:
        """The value that changes at a tick: the counter or, if it is unusable, the power."""
        if sensors.energy_mj is None or self.stuck:
            return sensors.energy_mj, sensors.power_instant_mw
        return sensors.energy_mj, None

    def plausible(self, sensors: SensorValues) -> bool:
        """Whether a reading is plausible. A value that is read twice is accepted."""
        energy_mj, before_mj = sensors.energy_mj, self.raw_mj
        if energy_mj is None:
            if before_mj is None:
                return bool(sensors.power_instant_mw)
            self._missing += 1  # the counter was available a moment ago
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

    def stands_still(self, sensors: SensorValues) -> bool:
        """Whether a tick without a change counts: it does if power is integrated."""
        if sensors.energy_mj is None or self.stuck:
            return True
        self._quiet += 1
        self.stuck = self._quiet >= STUCK_TICKS and bool(sensors.power_instant_mw)
        return self.stuck

    def advance(self, t_ns: int, period_ns: int, passed_ns: int, sensors: SensorValues) -> Edge:
        """Processes a reading that changed, or that did not although a change was due.

        Args:
            t_ns: When.
            period_ns: The update period.
            passed_ns: Time since the last edge: a number of ticks, or any time if the sensors were
                not read.
            sensors: The present readings.
        """
        last = self._last
        power_mw = sensors.power_instant_mw
        if last is None:
            self.raw_mj = sensors.energy_mj
            level_mw = power_mw or 0
            # Its unmeasured part is before it, like that of every later tick.
            counted_uj = level_mw * self._unseen_ns(period_ns) // (2 * MS)
            self._last = Edge(t_ns, 0, level_mw, level_mw, counted_uj)
            return self._last
        elapsed_ns = max(0, t_ns - last.t_ns)
        shown_mw = last.power_mw if power_mw is None else power_mw
        grown_uj = self._grown_uj(sensors, shown_mw, elapsed_ns)
        mean_mw = round(grown_uj * MS / max(passed_ns, 1))
        if power_mw is not None and last.power_mw and passed_ns == period_ns:
            self._compare(mean_mw, power_mw, last.power_mw)
        unseen_ns = self._unseen_ns(period_ns)
        level_mw = shown_mw if unseen_ns and power_mw is not None else mean_mw
        if self.timing.window_ns is None and self.raw_mj is not None:
            shown_mw = mean_mw  # the reading of power covers less, and other times
        counted_uj = last.counted_uj + grown_uj
        energy_uj = max(last.energy_uj, counted_uj - level_mw * unseen_ns // (2 * MS))
        edge = Edge(t_ns, energy_uj, level_mw, shown_mw, counted_uj)
        self._last = edge
        return edge

    def integrate(self, t_ns: int, mean_mw: int) -> Edge:
        """Adds the time since the last edge, whose mean power is known. The counter is not read,
        but assumed to grow alike; `follow` corrects that."""
        last = self._last
        assert last is not None
        span_ns = t_ns - last.t_ns
        grown_uj = mean_mw * span_ns // MS
        if self.raw_mj is not None:
            grown_uj = max(0, grown_uj + 1000 * self.ahead_mj * span_ns // FOLLOW_NS)
            grown_mj, self._rest_uj = divmod(self._rest_uj + grown_uj, 1000)
            self.raw_mj += grown_mj
        counted_uj = last.counted_uj + grown_uj
        self._last = Edge(t_ns, last.energy_uj + grown_uj, mean_mw, mean_mw, counted_uj)
        return self._last

    def follow(self, t_ns: int, energy_mj: int | None) -> bool:
        """Lets `integrate` follow the counter, which showed this at a time after the last edge:
        over minutes they add up to the same. Returns whether it was far from what is expected."""
        last = self._last
        assert last is not None
        if energy_mj is not None and self.raw_mj is not None:
            shown_mj = last.level_mw * (t_ns - COUNTER_AGE_NS - last.t_ns) // 10**9
            self.ahead_mj = energy_mj - self.raw_mj - shown_mj
        far = abs(self.ahead_mj) > FAR_MJ
        if energy_mj is None or self.raw_mj is None or far:
            self.raw_mj, self.ahead_mj = energy_mj, 0
        return far

    # --------------------------------------------------------------------------------- internals

    def _unseen_ns(self, period_ns: int) -> int:
        """Part of a tick that is not measured. Half of its energy is not in the tick's edge."""
        window_ns = self.window_ns
        return 0 if window_ns is None else max(0, period_ns - window_ns)

    def _grown_uj(self, sensors: SensorValues, power_mw: int, elapsed_ns: int) -> int:
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
            # The energy that it missed while stopped has been integrated.
            self.stuck, self._quiet = False, 0
            return integrated_uj
        if grown_mj:
            self._quiet = 0
        return integrated_uj if self.stuck else grown_mj * 1000

    def _compare(self, mean_mw: int, power_mw: int, before_mw: int) -> None:
        """Detects a counter that measures everything: when power changes, it differs from the
        reading."""
        if self._counts_all or 10 * abs(power_mw - before_mw) < power_mw:
            return
        off = abs(mean_mw - power_mw)
        if 25 * off < power_mw:
            self._agree += 1
        elif 8 * off > power_mw:
            self._differ += 1
        if self._differ + self._agree >= 32:
            if self._differ > 2 * self._agree:
                self._counts_all = True
            self._agree //= 2
            self._differ //= 2

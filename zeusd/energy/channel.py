"""Turns one GPU's readings into energy: decides when to read what, and keeps the history."""

from __future__ import annotations

import threading

from zeusd.devices.port import Sensors
from zeusd.energy.curve import EnergyCurve
from zeusd.energy.history import History, Slow
from zeusd.energy.meter import Edge, Meter, expected_period_ns, sensor_timing
from zeusd.energy.scope import Scope, ScopeTest
from zeusd.energy.ticks import REST_NS, Tick, TickTracker

ORDINARY_MJ = 1_000_000
"""A counter's growth between two readings that is plausible whenever they were."""

POWER_RESOLUTION_MW = 400
"""Resolution of Pascal's readings, which have no counter."""


class Channel:
    """Collects readings, keeps their history, and answers from it.

    Most readings show only that the counter has grown. Their energy is computed later, for all
    since the last row at once, or when it is asked for.

    Args:
        now_ns: The time.
        history: History for the ticks; continues one from an earlier process.
        architecture: NVML's number.
        name: Product name.
        ceiling_mw: Highest power that the GPU may draw.

    Attributes:
        slow: Values that are read once a second.
        attended_ns: Until when each tick is of interest; any thread may set it.
    """

    def __init__(
        self, now_ns: int, history: History, architecture: int, name: str, ceiling_mw: int
    ) -> None:
        self._history = history
        self._guard = threading.Lock()
        self._deferred: list[tuple[Sensors, Tick, int | None]] = []
        self.slow = Slow()
        self.attended_ns = 0
        self._read_ns = now_ns
        self._scope = ScopeTest()
        self._tracker = TickTracker(now_ns)
        self._timing = sensor_timing(architecture, name)
        if self._means:
            history.shown_mw = history.level_mw
        self._meter = Meter(self._timing, history.last())
        # Some ticks may not have been dated well.
        levels = sorted(history.level_mw.span(history.ticks.start, history.ticks.end))
        self._least_mw = levels[len(levels) // 100] if levels else ceiling_mw
        self._ceiling_mw = ceiling_mw
        self._period_ns = expected_period_ns(self._meter.window_ns)
        self._key: tuple[int | None, int | None] | None = None

    @property
    def history(self) -> History:
        """History of the ticks. Any thread may ask for it."""
        if self._deferred:
            with self._guard:
                self._settle()
        return self._history

    @property
    def next_row_ns(self) -> int:
        """When the next coarser row is due."""
        return self._history.next_row_ns

    @property
    def next_read_ns(self) -> int:
        """When to read the sensors next."""
        return 0 if self._roused else self._tracker.next_read_ns

    @property
    def latest_read_ns(self) -> int:
        """Latest time for that reading."""
        return 0 if self._roused else self._tracker.latest_read_ns

    @property
    def _roused(self) -> bool:
        return self.attended_ns > self._read_ns and self._tracker.resting

    @property
    def period_ns(self) -> int | None:
        """The update period, or how often it is read if that is less often; None: not known
        yet."""
        return REST_NS if self._tracker.resting else self._tracker.period_ns

    @property
    def scope(self) -> Scope:
        """What its energy counter counts. A counter that may count more than the GPU is not
        used."""
        return self._scope.verdict

    @property
    def curve(self) -> EnergyCurve:
        """Its energy over time."""
        counted = self._meter.raw_mj is not None and not self._meter.stuck
        resolution_mw = 0 if counted else POWER_RESOLUTION_MW
        return EnergyCurve(
            self._history,
            self._meter.window_ns,
            self._ceiling_mw,
            resolution_mw,
            self._timing.error_ns,
            counted and self._means,
            self._least_mw,
        )

    @property
    def _means(self) -> bool:
        """Whether the counter has each tick's mean, and the reading of power a part of it."""
        return self._timing.window_ns is None and self._timing.power_window_ns is not None

    def failed(self, t_ns: int) -> None:
        """Records that the sensors could not be read."""
        self._looked(t_ns)
        self._tracker.failed(t_ns)

    def _looked(self, t_ns: int) -> None:
        self._read_ns = t_ns
        self._tracker.rests = self.attended_ns <= t_ns

    def observe(self, sensors: Sensors, awaited: bool = True) -> Edge | None:
        """Processes a reading of the sensors. Returns the tick that it revealed, if any and if it
        is awaited; otherwise its energy may be computed later."""
        with self._guard:
            if not awaited and self._grows(sensors):
                self._looked(sensors.t_ns)
                self._key = sensors.energy_mj, None
                tick = self._tracker.observe(sensors.t_ns, True, sensors.took_ns)
                if tick is not None:
                    self._deferred.append((sensors, tick, self._tracker.period_ns))
                return None
            self._settle()
            return self._observe(sensors)

    def _grows(self, sensors: Sensors) -> bool:
        """Whether a reading shows only that the counter has grown since the last one."""
        energy_mj, (before_mj, power_mw) = sensors.energy_mj, self._key or (None, None)
        if energy_mj is None or before_mj is None or power_mw is not None:
            return False
        grown = 0 < energy_mj - before_mj < ORDINARY_MJ and sensors.module_power_mw is None
        return grown and sensors.t_ns < self._history.next_row_ns

    def _settle(self) -> None:
        for sensors, tick, period_ns in self._deferred:
            self._record(sensors, tick.t_ns, tick.ticks, period_ns)
        self._deferred.clear()

    def _observe(self, sensors: Sensors) -> Edge | None:
        self._looked(sensors.t_ns)
        self._scope.observe(sensors)
        if self._scope.verdict is not Scope.GPU:
            sensors = sensors._replace(energy_mj=None)
            self._meter.raw_mj = None
        # A counter continues from the energy that was integrated before it could be used. This
        # alone is not a tick: the counter's next change is.
        appeared = sensors.energy_mj is not None and self._meter.raw_mj is None
        integrated = appeared and self._key is not None and bool(sensors.power_instant_mw)
        seen = sensors._replace(energy_mj=None) if integrated else sensors
        if not self._meter.plausible(seen):
            self._tracker.failed(sensors.t_ns)
            return None
        changed = self._key is not None and self._meter.key(seen) != self._key
        edge = self._seen(seen, changed)
        if appeared:
            self._meter.raw_mj = sensors.energy_mj
        self._key = self._meter.key(sensors)  # another reading may change now
        return edge

    def _seen(self, sensors: Sensors, changed: bool) -> Edge | None:
        tick = self._tracker.observe(sensors.t_ns, changed, sensors.took_ns)
        if tick is None or (tick.silent and not self._meter.stands_still(sensors)):
            return None
        return self._record(sensors, tick.t_ns, tick.ticks, self._tracker.period_ns)

    def _record(
        self, sensors: Sensors, t_ns: int, count: int, period_ns: int | None
    ) -> Edge | None:
        last_ns = self._history.ends_ns
        if self._meter.raw_mj is not None:
            t_ns -= self._timing.lag_ns
        if last_ns and t_ns <= last_ns:
            return None
        passed_ns = t_ns - last_ns if last_ns else self._period_ns
        if period_ns is None:
            self._period_ns = min(self._period_ns, passed_ns)
        else:
            self._period_ns = period_ns
            if count:
                passed_ns = count * period_ns
        edge = self._meter.advance(t_ns, self._period_ns, passed_ns, sensors)
        if period_ns is not None and last_ns:
            self._least_mw = min(self._least_mw, edge.level_mw)
        self._history.add(edge, self._meter.raw_mj, self._meter.window_ns, self.slow)
        return edge

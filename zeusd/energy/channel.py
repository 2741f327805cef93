"""Turns one GPU's readings into energy: decides when to read what, and keeps the history."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from zeus_common.units import MS
from zeusd.devices.port import SensorValues
from zeusd.energy.curve import EnergyCurve
from zeusd.energy.history import History, Slow
from zeusd.energy.meter import (
    COUNTER_AGE_NS,
    SAMPLED,
    Edge,
    GpuMeter,
    SensorTiming,
    expected_period_ns,
    sensor_timing,
)
from zeusd.energy.scope import Scope, ScopeTest
from zeusd.energy.ticks import Tick, TickTracker

ORDINARY_MJ = 1_000_000
"""A counter's growth between two readings that is plausible whenever they were."""

POWER_RESOLUTION_MW = 400
"""Resolution of Pascal's readings, which have no counter."""

EXCURSION = 1.4
"""Highest mean power over some milliseconds, as a multiple of the power limit: a GPU draws more
until its controller has found a lower clock (an H100: 830 W over 90 ms, 980 W over 25)."""

GAP_NS = 100 * MS
"""Longest time between two samples of the driver (45 ms at most were seen)."""

STALE_NS, ENDED_NS = 150 * MS, 3_000 * MS
"""Highest age of the newest sample, and how long readings may find it exceeded before samples are
no longer used: the driver makes no more, or gives them another time. Setting the time of day back
leaves samples of the future for 2.4 s."""

FAR_MOST, FAR_FADES = 2.5, 0.2
"""How often the counter may be far from the samples, and how much of that each reading fades where
it is not: else they are not of the same."""

SAMPLE_NS, APPEARS_NS, LOOK_NS = 20 * MS, 2 * MS, 4 * MS
"""Time from one sample to the next, from its end until it can be read, and to the next reading if
it is not there yet."""

AWAITED_NS, UNHURRIED_NS, PATIENT_NS = 40 * MS, 200 * MS, 400 * MS
"""Time between readings of samples if one is awaited, and otherwise at least and at most: a
reading takes half a millisecond, and the driver keeps the samples of two seconds."""


VAGUE = 0.5
"""Part of the time between two ticks by which both together may be dated wrongly: a quotient of
what the counter has grown and that time would say nothing. Such a change is left to the next."""

FEW = 10
"""Samples from which it is seen whether they cover all time."""


def tiles(samples: Sequence[tuple[int, int]]) -> bool:
    """Whether a driver's samples are close enough to each other to cover all time."""
    if len(samples) < FEW:
        return False
    return samples[-1][0] - samples[0][0] < (len(samples) - 1) * GAP_NS // 2


class Channel:
    """Collects readings, keeps their history, and answers from it.

    Most readings show only that the counter has grown. Their energy is computed later, for all
    since the last row at once, or when it is asked for.

    Args:
        now_ns: The time.
        history: History for the ticks; continues one from an earlier process.
        architecture: NVML's number.
        name: Product name.
        limit_mw: Its highest power limit.

    Attributes:
        slow: Values that are read once a second.
        limited: The time limited of its history, without what waits to be computed.
        sampled_ns: End of the driver's last sample of power; None: it has none that can be used.
    """

    def __init__(
        self, now_ns: int, history: History, architecture: int, name: str, limit_mw: int
    ) -> None:
        self._history = history
        self.limited = history.limited
        self._guard = threading.Lock()
        self._deferred: list[tuple[SensorValues, Tick, int | None]] = []
        self.slow = Slow()
        self.sampled_ns: int | None = 0
        self._looks_ns: tuple[int, int, int] | None = None
        self._stale_ns = 0
        self._far = 0.0
        self._scope = ScopeTest()
        self._tracker = TickTracker(now_ns)
        self._product = architecture, name
        self._timing = sensor_timing(architecture, name)
        self._meter = GpuMeter(self._timing, history.last())
        # Some ticks may not have been dated well.
        levels = sorted(history.level_mw.span(history.ticks.start, history.ticks.end))
        self._least_mw = levels[len(levels) // 100] if levels else limit_mw
        self._ceiling_mw = round(EXCURSION * limit_mw)
        self._period_ns = expected_period_ns(self._meter.window_ns)
        self._key: tuple[int | None, int | None] | None = None
        self._slop_ns = 0  # of the last tick

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
    def next_tick_ns(self) -> int:
        """When to read the sensors next if their next change is awaited."""
        return self._tracker.next_read_ns if self._looks_ns is None else self._looks_ns[0]

    @property
    def next_read_ns(self) -> int:
        """When to read the sensors next."""
        return self._tracker.next_read_ns if self._looks_ns is None else self._looks_ns[1]

    @property
    def latest_read_ns(self) -> int:
        """Latest time for that reading."""
        return self._tracker.latest_read_ns if self._looks_ns is None else self._looks_ns[2]

    @property
    def period_ns(self) -> int | None:
        """The update period; None: not known yet."""
        return self._tracker.period_ns if self._looks_ns is None else SAMPLE_NS

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
            self._least_mw,
        )

    def failed(self, t_ns: int) -> None:
        """Records that the sensors could not be read."""
        self._looks_ns = None
        self._tracker.failed(t_ns)

    def lacks(self, samples: Sequence[tuple[int, int]]) -> bool:
        """Whether time has passed before these samples that no sample covers, so that `extend`
        needs a reading of the sensors."""
        if not samples:
            return False
        ends_ns = self._history.ends_ns
        return not ends_ns or samples[0][0] - SAMPLED.lag_ns - ends_ns > GAP_NS

    def extend(
        self, now_ns: int, samples: list[tuple[int, int]], sensors: SensorValues | None
    ) -> Edge | None:
        """Adds the driver's samples since `sampled_ns` (see `Backend.power_samples`), and a
        reading of the counter that was made after them, if there is one. Returns the last tick.

        If the driver makes no samples any more, the sensors' changes are observed from now on.
        """
        with self._guard:
            self._settle()
            assert self.sampled_ns is not None
            seen = [sample for sample in samples if sample[0] <= now_ns]
            if seen == samples and seen and now_ns - seen[-1][0] < STALE_NS:
                self._stale_ns = 0
            elif not self._stale_ns:
                self._stale_ns = now_ns
            elif now_ns - self._stale_ns > ENDED_NS:
                self._observe_changes()
                return None
            if not self.sampled_ns:
                self._timed(SAMPLED)
            edge = None
            if seen:
                self.sampled_ns = seen[-1][0]
                edge = self._extend(seen, sensors)
                if self.sampled_ns is None:
                    return edge
            apart_ns = AWAITED_NS if seen else LOOK_NS
            tick_ns = max(self.sampled_ns + SAMPLE_NS + APPEARS_NS, now_ns + apart_ns)
            self._looks_ns = tick_ns, now_ns + UNHURRIED_NS, now_ns + PATIENT_NS
            return edge

    def _extend(
        self, samples: Sequence[tuple[int, int]], sensors: SensorValues | None
    ) -> Edge | None:
        edge, meter = None, self._meter
        if sensors is not None and self.lacks(samples):
            (t_ns, power_mw), before_ns = samples[0], self._history.ends_ns
            energy_mj = sensors.energy_mj
            if energy_mj is not None:
                energy_mj += samples[-1][1] * COUNTER_AGE_NS // 10**9 - meter.ahead_mj
                for (begin_ns, _), (end_ns, mean_mw) in itertools.pairwise(samples):
                    energy_mj -= mean_mw * (end_ns - begin_ns) // 10**9
            t_ns -= SAMPLED.lag_ns
            passed_ns = t_ns - before_ns if before_ns else SAMPLE_NS
            then = sensors._replace(t_ns=t_ns, energy_mj=energy_mj, power_instant_mw=power_mw)
            if not meter.plausible(then):
                then = then._replace(energy_mj=None)
            edge = meter.advance(t_ns, SAMPLE_NS, passed_ns, then)
            self._history.append(edge, self.slow)
        for t_ns, power_mw in samples:
            if t_ns - SAMPLED.lag_ns > self._history.ends_ns:
                edge = meter.integrate(t_ns - SAMPLED.lag_ns, power_mw)
                self._history.append(edge, self.slow)
        self._least_mw = min(self._least_mw, *(power_mw for _, power_mw in samples))
        if edge is not None:
            self._history.keep(edge.counted_uj, meter.raw_mj)
        if sensors is not None:
            far = meter.follow(sensors.t_ns, sensors.energy_mj)
            self._far = self._far + 1.0 if far else max(0.0, self._far - FAR_FADES)
            if self._far > FAR_MOST:
                self._observe_changes()
        return edge

    def _observe_changes(self) -> None:
        """Uses samples no longer."""
        self._looks_ns = self.sampled_ns = None
        self._timed(sensor_timing(*self._product))

    def _timed(self, timing: SensorTiming) -> None:
        self._timing = self._meter.timing = timing

    def observe(self, sensors: SensorValues, awaited: bool = True) -> Edge | None:
        """Processes a reading of the sensors. Returns the tick that it revealed, if any and if it
        is awaited; otherwise its energy may be computed later."""
        with self._guard:
            if not awaited and self._grows(sensors):
                self._key = sensors.energy_mj, None
                tick = self._tracker.observe(sensors.t_ns, True, sensors.took_ns)
                if tick is not None:
                    self._deferred.append((sensors, tick, self._tracker.period_ns))
                return None
            self._settle()
            return self._observe(sensors)

    def _grows(self, sensors: SensorValues) -> bool:
        """Whether a reading shows only that the counter has grown since the last one."""
        energy_mj, (before_mj, power_mw) = sensors.energy_mj, self._key or (None, None)
        if energy_mj is None or before_mj is None or power_mw is not None:
            return False
        grown = 0 < energy_mj - before_mj < ORDINARY_MJ and sensors.module_power_mw is None
        return grown and sensors.t_ns < self._history.next_row_ns

    def _settle(self) -> None:
        """Records the ticks whose energy was to be computed later."""
        edge = None
        for sensors, tick, period_ns in self._deferred:
            edge = self._record(sensors, tick, period_ns) or edge
        self._deferred.clear()
        if edge is not None:
            self._history.keep(edge.counted_uj, self._meter.raw_mj)

    def _observe(self, sensors: SensorValues) -> Edge | None:
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

    def _seen(self, sensors: SensorValues, changed: bool) -> Edge | None:
        tick = self._tracker.observe(sensors.t_ns, changed, sensors.took_ns)
        if tick is None or (tick.silent and not self._meter.stands_still(sensors)):
            return None
        edge = self._record(sensors, tick, self._tracker.period_ns)
        if edge is not None:
            self._history.keep(edge.counted_uj, self._meter.raw_mj)
        return edge

    def _record(self, sensors: SensorValues, tick: Tick, period_ns: int | None) -> Edge | None:
        t_ns, last_ns = tick.t_ns, self._history.ends_ns
        if self._meter.raw_mj is not None:
            t_ns -= self._timing.lag_ns
        if last_ns and t_ns <= last_ns:
            return None
        passed_ns = t_ns - last_ns if last_ns else self._period_ns
        slop_ns = self._slop_ns + tick.slop_ns
        counts = self._meter.raw_mj is not None and not self._meter.stuck
        if counts and last_ns and slop_ns > VAGUE * passed_ns:
            return None
        self._slop_ns = tick.slop_ns
        if period_ns is None:
            self._period_ns = min(self._period_ns, passed_ns)
        else:
            self._period_ns = period_ns
            whole_ns = round(passed_ns / period_ns) * period_ns
            if counts and whole_ns and abs(passed_ns - whole_ns) <= slop_ns:
                passed_ns = whole_ns
        edge = self._meter.advance(t_ns, self._period_ns, passed_ns, sensors)
        if period_ns is not None and last_ns:
            self._least_mw = min(self._least_mw, edge.level_mw)
        self._history.append(edge, self.slow)
        return edge

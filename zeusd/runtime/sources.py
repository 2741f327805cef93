"""Devices whose energy is sampled, and how each is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple, Protocol

from zeus_ipc import replies
from zeus_ipc.limited import cause
from zeus_ipc.replies import GpuInfo
from zeusd.devices.port import Backend, CallOutcome, DeviceError, Handle, SensorValues
from zeusd.energy.channel import FEW, Channel, tiles
from zeusd.energy.curve import EnergyCurve
from zeusd.energy.history import History, Slow
from zeusd.energy.meter import HOPPER, Edge
from zeusd.energy.scope import Scope
from zeusd.runtime.outside import OutsideWatch

STREAMED_SLOW_NS = 200_000_000
"""Period at which clocks, temperature, throttle reasons and limit of a streamed GPU are read; for
other GPUs, once for each row of the history."""

SHARED_PERIOD_NS = 100_000_000
"""Period of the rows of a GPU without its own energy."""


class TickReading(NamedTuple):
    """The reading of a device at a tick; units as in `replies.Sample`."""

    t_ns: int
    energy_uj: int
    power_mw: int
    slow: Slow
    number: int


def describe_sample(name: str, sample: TickReading) -> replies.Sample:
    """A published sample."""
    slow = sample.slow
    return replies.Sample(
        gpu=name,
        t_ns=sample.t_ns,
        number=sample.number,
        energy_uj=sample.energy_uj,
        power_mw=sample.power_mw,
        average_mw=slow.average_mw,
        memory_mw=slow.memory_mw,
        gpu_clock_mhz=slow.gpu_mhz,
        memory_clock_mhz=slow.memory_mhz,
        temperature_c=slow.temperature_c,
        throttle_reasons=slow.reasons,
        power_limit_mw=slow.limit_mw,
        module_mw=slow.module_mw,
        seen_ns=slow.seen_ns,
    )


class Source(Protocol):
    """A device whose energy is sampled."""

    aligns: bool
    """Whether windows aligned with the GPU's work are also aligned with this device's work."""

    @property
    def history(self) -> History:
        """Its ticks so far."""

    @property
    def next_tick_ns(self) -> int:
        """When to read it next if its next change is awaited."""

    @property
    def next_read_ns(self) -> int:
        """When to read it next."""

    @property
    def latest_read_ns(self) -> int:
        """Latest time for that reading."""

    @property
    def period_ns(self) -> int:
        """How often it changes."""

    @property
    def curve(self) -> EnergyCurve:
        """Its energy over time."""

    @property
    def failure(self) -> DeviceError | OSError | None:
        """Why the last readings failed; None: they did not."""

    def read(self, streamed: bool, awaited: bool = True) -> Edge | None:
        """Reads it now. Returns the tick that the reading revealed, if any; one that is not awaited
        may be recorded later."""

    @property
    def slow(self) -> Slow:
        """What is read now and then."""

    def limited_ns(self, begin_ns: int, end_ns: int) -> Mapping[str, int]:
        """How long its clocks were limited between two times, ns, by cause."""


class GpuSource:
    """One GPU.

    Attributes:
        module_reading: Time and power, mW, of the last reading of its superchip.
        limited_until_ns: Time until which someone waits for the time limited; it is then read
            before the next second.
        next_tick_ns, next_read_ns, latest_read_ns: See `Source`; CLOCK_MONOTONIC.
    """

    aligns = True

    def __init__(
        self,
        nvml: Backend,
        handle: Handle,
        info: GpuInfo,
        history: History,
        clock_ns: Callable[[], int],
        watch: OutsideWatch | None = None,
    ) -> None:
        self.failure: DeviceError | OSError | None = None
        self._nvml = nvml
        self._handle = handle
        self._clock_ns = clock_ns
        limit_mw = info.power_limit_max_mw or 1_000_000
        self.next_tick_ns = self.next_read_ns = self.latest_read_ns = now_ns = clock_ns()
        self._channel = Channel(now_ns, history, info.architecture, info.name, limit_mw)
        if info.architecture < HOPPER or info.module is not None:
            self._channel.sampled_ns = None  # it is not known what samples would cover
        self.module_reading: tuple[int, int] | None = None
        self._slow_at_ns = self._counter_at_ns = 0
        self.limited_until_ns = 0
        self._uuid, self._watch = info.uuid, watch
        # Newest changes of who set the power limit that are kept.
        self._authors: deque[tuple[int, str | None]] = deque(maxlen=64)
        self._served: set[str] = set()
        self._refused: dict[str, int] = {}

    @property
    def history(self) -> History:
        """Its ticks so far."""
        return self._channel.history

    @property
    def period_ns(self) -> int:
        """How often it changes."""
        return self._channel.period_ns or 100_000_000

    @property
    def curve(self) -> EnergyCurve:
        """Its energy over time."""
        return self._channel.curve

    @property
    def slow(self) -> Slow:
        """What is read now and then."""
        return self._channel.slow

    @property
    def scope(self) -> Scope:
        """What the GPU's energy counter counts."""
        return self._channel.scope

    def read(self, streamed: bool, awaited: bool = True) -> Edge | None:
        """Reads it now. Returns the tick that the reading revealed, if any; one that is not awaited
        may be recorded later."""
        edge, channel = self._read(streamed, awaited), self._channel
        self.next_tick_ns, self.next_read_ns = channel.next_tick_ns, channel.next_read_ns
        self.latest_read_ns = channel.latest_read_ns
        return edge

    def _read(self, streamed: bool, awaited: bool) -> Edge | None:
        channel, sensors, counted = self._channel, None, None
        try:
            samples = None if channel.sampled_ns is None else self._samples(channel.sampled_ns)
            now_ns = self._clock_ns()
            due = self._due(now_ns, streamed)
            if samples is None or channel.lacks(samples) or now_ns >= self._counter_at_ns:
                sensors = counted = self._nvml.sensors(self._handle, True, due)
                # Time between readings of the energy counter where power is known otherwise.
                self._counter_at_ns = now_ns + 10_000_000_000
            elif due:
                sensors = self._nvml.sensors(self._handle, False)
        except DeviceError as error:
            self.failure = error
            channel.failed(self._clock_ns())
            return None
        # A reading that took longer is not used: a driver that answers at all takes some
        # milliseconds.
        if self._clock_ns() - now_ns > 500_000_000:
            # Its value may be of any time since it began: the next reading is of a known time.
            self._counter_at_ns = 0
            channel.failed(self._clock_ns())
            return None
        if sensors is not None:
            if sensors.module_power_mw is not None:
                self.module_reading = sensors.t_ns, sensors.module_power_mw
            if due:
                self._slow_at_ns = sensors.t_ns + STREAMED_SLOW_NS
                self._read_slow(sensors)
        if samples is not None:
            edge = channel.extend(now_ns, samples, counted)
        else:
            assert counted is not None
            edge = channel.observe(counted, awaited or self.failure is not None)
        if edge is not None:
            self.failure = None
        return edge

    def _samples(self, since_ns: int) -> list[tuple[int, int]] | None:
        """The driver's newest samples of power; None: it has none that can be used."""
        try:
            samples = self._nvml.power_samples(self._handle, since_ns)
        except DeviceError as error:
            if error.outcome not in (CallOutcome.UNSUPPORTED, CallOutcome.INVALID):
                raise
            samples = []
        if since_ns or tiles(samples):
            return samples
        if not samples or len(samples) >= FEW:
            self._channel.sampled_ns = None
        return None

    def _due(self, t_ns: int, streamed: bool) -> bool:
        """Whether the values that are read once a second are due."""
        if t_ns < self._slow_at_ns:
            return False
        channel = self._channel
        waits = channel.limited.read_ns < self.limited_until_ns
        return streamed or waits or t_ns >= channel.next_row_ns

    def _read_slow(self, sensors: SensorValues) -> None:
        nvml = self._nvml
        self._channel.limited.add(sensors.t_ns, sensors.limited_ns)
        # A few drivers answer 0 if they lack the field.
        limit_mw = sensors.current_limit_mw or self._optional(nvml.enforced_power_limit_mw, 31)
        gpu_mhz, memory_mhz = map(self._optional, (nvml.gpu_clock_mhz, nvml.memory_clock_mhz))
        if self._watch is not None:
            requested_mw = sensors.requested_limit_mw or limit_mw
            set_by = self._watch.limits(self._uuid, sensors.t_ns, requested_mw, limit_mw)
            if not self._authors or self._authors[-1][1] != set_by:
                self._authors.append((sensors.t_ns, set_by))
            self._watch.clocks(self._uuid, sensors.t_ns, gpu_mhz, memory_mhz)
        self._channel.slow = Slow(
            average_mw=sensors.power_average_mw,
            memory_mw=sensors.memory_power_average_mw,
            temperature_c=self._optional(nvml.temperature_c),
            gpu_mhz=gpu_mhz,
            memory_mhz=memory_mhz,
            # For the bit of an idle GPU, which no driver counts; what limits is counted, see above.
            reasons=self._optional(nvml.throttle_reasons, 64),
            limit_mw=limit_mw,
            module_mw=sensors.module_power_mw,
            seen_ns=self.curve.window_ns,
        )

    def limited_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """How long its clocks were limited between two times, ns, by cause."""
        changes = [*self._authors]
        since = [(begin_ns, None), *(change for change in changes if change[0] < end_ns)]
        by_reason: dict[str, int] = {}
        for (first_ns, set_by), (last_ns, _) in pairwise([*since, (end_ns, None)]):
            if last_ns <= begin_ns:
                continue
            for reason, ms in self._channel.limited.window(max(begin_ns, first_ns), last_ns):
                if ms:
                    name = cause(reason, set_by)
                    by_reason[name] = by_reason.get(name, 0) + ms * 1_000_000
        return by_reason

    def _optional(self, call: Callable[[Handle], int], bits: int = 15) -> int | None:
        """A value; None: not offered, or impossible, of more bits than the history keeps."""
        name = call.__name__
        # Readings between requests for a value that was never available. One that was is always
        # requested.
        if self._refused.get(name, 0) >= 3:
            return None
        try:
            value = call(self._handle)
        except DeviceError as error:
            absent = error.outcome is CallOutcome.UNSUPPORTED
            if absent and name not in self._served:
                self._refused[name] = self._refused.get(name, 0) + 1
            return None
        self._served.add(name)
        return None if abs(value) >> bits else value


class SharedGpuSource(GpuSource):
    """A GPU whose power and energy are reported by another one, as the second die of a card.

    Its own energy is 0, so that sums over GPUs count the card once.
    """

    @property
    def period_ns(self) -> int:
        """How often it changes."""
        return SHARED_PERIOD_NS

    def read(self, streamed: bool, awaited: bool = True) -> Edge | None:
        """Reads it now. Returns the tick that the reading revealed, if any."""
        t_ns = self._clock_ns()
        self.next_tick_ns = self.next_read_ns = t_ns + SHARED_PERIOD_NS
        self.latest_read_ns = self.next_read_ns + SHARED_PERIOD_NS // 2
        if t_ns <= self.history.ends_ns:
            return None
        if self._due(t_ns, streamed):
            self._slow_at_ns = t_ns + STREAMED_SLOW_NS
            self._read_slow(SensorValues(t_ns, None, 0, None, None))
        edge = Edge(t_ns, 0, 0, 0, 0)
        self.history.add(edge, None, self.slow)
        return edge

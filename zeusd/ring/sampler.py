"""Reads the energy of all devices, for all clients, on one thread.

Each device is read when its sensors are about to change (`zeusd.energy.ticks`). A driver that keeps
a call costs the other devices nothing: their thread is left to it, and they get another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from zeus_ipc.messages import GpuInfo
from zeusd.energy.channel import Channel
from zeusd.energy.curve import Curve
from zeusd.energy.history import History, Slow
from zeusd.energy.meter import Edge
from zeusd.nvml.api import Handle, Nvml, NvmlError, Sensors

log = logging.getLogger(__name__)

LONGEST_SLEEP_S = 0.05
"""How soon a new device is noticed."""

STUCK_NS = 1_000_000_000
STREAMED_SLOW_NS = 200_000_000
"""How often clocks, temperature and throttle reasons are read of a GPU that is streamed; of others
once for each row of the history."""

DEFAULT_CEILING_MW = 1_000_000


class Sample(NamedTuple):
    """What a device showed at a tick; units as in `messages.Sample`."""

    t_ns: int
    energy_uj: int
    power_mw: int
    slow: Slow
    number: int


def describe_sample(name: str, sample: Sample) -> dict[str, object]:
    """`messages.Sample` as a map."""
    slow = sample.slow
    return {
        "gpu": name,
        "t_ns": sample.t_ns,
        "number": sample.number,
        "energy_uj": sample.energy_uj,
        "power_mw": sample.power_mw,
        "average_mw": slow.average_mw,
        "memory_mw": slow.memory_mw,
        "gpu_clock_mhz": slow.gpu_mhz,
        "memory_clock_mhz": slow.memory_mhz,
        "temperature_c": slow.temperature_c,
        "throttle_reasons": slow.reasons,
    }


class Source(Protocol):
    """A device whose energy is sampled."""

    history: History
    aligns: bool
    """Whether windows that are aligned with the GPU's work are aligned with this device's."""

    @property
    def next_read_ns(self) -> int:
        """When to read it next."""

    @property
    def latest_read_ns(self) -> int:
        """How long that may wait for others to be due."""

    @property
    def period_ns(self) -> int:
        """How often it changes."""

    @property
    def curve(self) -> Curve:
        """Its energy over time."""

    @property
    def failure(self) -> NvmlError | OSError | None:
        """Why its last readings failed, if they did."""

    def read(self, streamed: bool) -> Edge | None:
        """Reads it now. Returns the tick that this showed to have passed, if any."""

    @property
    def slow(self) -> Slow:
        """What is read now and then."""


class GpuSource:
    """One GPU.

    Args:
        nvml: The library.
        handle: The GPU.
        info: What it is.
        history: Where its ticks go.
        clock_ns: CLOCK_MONOTONIC.
    """

    aligns = True

    def __init__(
        self,
        nvml: Nvml,
        handle: Handle,
        info: GpuInfo,
        history: History,
        clock_ns: Callable[[], int],
    ) -> None:
        self.history = history
        self.failure: NvmlError | OSError | None = None
        self._nvml = nvml
        self._handle = handle
        self._clock_ns = clock_ns
        ceiling_mw = info.power_limit_max_mw or DEFAULT_CEILING_MW
        self._channel = Channel(clock_ns(), history, info.architecture, info.name, ceiling_mw)
        self._slow_at_ns = 0
        self._absent: set[str] = set()

    @property
    def next_read_ns(self) -> int:
        """See `Source`."""
        return self._channel.next_read_ns

    @property
    def latest_read_ns(self) -> int:
        """See `Source`."""
        return self._channel.latest_read_ns

    @property
    def period_ns(self) -> int:
        """See `Source`."""
        return self._channel.period_ns or 100_000_000

    @property
    def curve(self) -> Curve:
        """See `Source`."""
        return self._channel.curve

    @property
    def slow(self) -> Slow:
        """See `Source`."""
        return self._channel.slow

    def read(self, streamed: bool) -> Edge | None:
        """See `Source`."""
        channel = self._channel
        try:
            sensors = self._nvml.sensors(self._handle)
        except NvmlError as error:
            self.failure = error
            channel.failed(self._clock_ns())
            return None
        row_ns = 0 if streamed else self.history.next_row_ns
        if sensors.t_ns >= max(self._slow_at_ns, row_ns):
            self._slow_at_ns = sensors.t_ns + STREAMED_SLOW_NS
            self._read_slow(sensors)
        edge = channel.observe(sensors)
        if edge is not None:
            self.failure = None
        return edge

    def _read_slow(self, sensors: Sensors) -> None:
        nvml = self._nvml
        self._channel.slow = Slow(
            average_mw=sensors.power_average_mw,
            memory_mw=sensors.memory_power_average_mw,
            temperature_c=self._optional(nvml.temperature_c),
            gpu_mhz=self._optional(nvml.gpu_clock_mhz),
            memory_mhz=self._optional(nvml.memory_clock_mhz),
            reasons=self._optional(nvml.throttle_reasons),
        )

    def _optional(self, call: Callable[[Handle], int]) -> int | None:
        name = call.__name__
        if name in self._absent:
            return None
        try:
            return call(self._handle)
        except NvmlError as error:
            if error.code in (3, 13):
                self._absent.add(name)
            return None


class Sampler:
    """Reads sources when they are due.

    Args:
        on_tick: Called on the sampler's thread after each tick that somebody waits for.
        publish: Called there with each sample of a source in `streamed`.
        clock_ns: CLOCK_MONOTONIC.

    Attributes:
        streamed: Names of sources whose samples are wanted at once.
    """

    def __init__(
        self,
        on_tick: Callable[[str], None],
        publish: Callable[[str, Sample], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._guard = threading.Lock()
        self.streamed: frozenset[str] = frozenset()
        self._on_tick = on_tick
        self._publish = publish
        self._clock_ns = clock_ns
        self._sources: dict[str, Source] = {}
        self._rotation: dict[str, Source] = {}
        self._urgent: set[str] = set()
        self._wake = threading.Lock()
        self._wake.acquire()
        self._generation = 0
        self._busy: tuple[str, int] | None = None
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def add(self, name: str, source: Source) -> None:
        """Samples a source from now on, or again after it was found anew."""
        with self._guard:
            self._sources[name] = source
            self._rotation = {**self._rotation, name: source}

    def find(self, name: str) -> Source | None:
        """The source of a name."""
        return self._sources.get(name)

    def names(self) -> Iterator[str]:
        """All sources."""
        return iter(list(self._sources))

    def hurry(self, name: str) -> None:
        """Somebody waits for this source's next tick."""
        self._urgent.add(name)
        self._awaken()

    # ---------------------------------------------------------------------------------- reading

    @property
    def next_ns(self) -> int | None:
        """When next to read; None while there is nothing."""
        return min(
            (
                source.next_read_ns
                if name in self._urgent or name in self.streamed
                else source.latest_read_ns
                for name, source in self._rotation.items()
            ),
            default=None,
        )

    def run_due(self, now_ns: int) -> None:
        """Reads every source that may be read now."""
        for name, source in self._rotation.items():
            if source.next_read_ns <= now_ns:
                self._read(name, source)

    def _read(self, name: str, source: Source) -> None:
        try:
            edge = source.read(name in self.streamed)
        except Exception:  # the other devices must be read whatever happens to this one
            log.exception("sampling failed", extra={"event": "bug", "gpu": name})
            with self._guard:
                self._rotation = {key: one for key, one in self._rotation.items() if key != name}
            return
        if edge is None:
            return
        if name in self._urgent:
            self._urgent.discard(name)
            self._on_tick(name)
        if name in self.streamed:
            number = source.history.ticks.end
            self._publish(
                name, Sample(edge.t_ns, edge.energy_uj, edge.power_mw, source.slow, number)
            )

    # ----------------------------------------------------------------------------------- threads

    def start(self) -> None:
        """Begins to read, on a thread of its own."""
        self._generation += 1
        thread = threading.Thread(
            target=self._run, args=(self._generation,), name="sampler", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Ends it. Waits a moment."""
        self._stopped = True
        self._awaken()
        for thread in self._threads[-1:]:
            thread.join(timeout=1.0)

    def replace_stuck(self) -> None:
        """Leaves a thread that a driver keeps to its device, and goes on with another."""
        busy = self._busy
        if busy is None or self._stopped or self._clock_ns() - busy[1] < STUCK_NS:
            return
        name, since_ns = busy
        with self._guard:
            if self._busy != busy:
                return
            self._rotation = {key: one for key, one in self._rotation.items() if key != name}
            self._busy = None
        log.error(
            "reading %s has taken over %.0f s; it is left out until the driver answers",
            name,
            (self._clock_ns() - since_ns) / 1e9,
            extra={"event": "sampler_stuck", "gpu": name},
        )
        self.start()

    def _run(self, generation: int) -> None:
        clock_ns, wake = self._clock_ns, self._wake
        while not self._stopped:
            next_ns = self.next_ns
            wait_s = LONGEST_SLEEP_S
            if next_ns is not None:
                wait_s = min(wait_s, (next_ns - clock_ns()) / 1e9)
            if wait_s > 0:
                wake.acquire(timeout=wait_s)
            for name, source in self._rotation.items():
                now_ns = clock_ns()
                if source.next_read_ns <= now_ns:
                    self._busy = (name, now_ns)
                    self._read(name, source)
                    if generation != self._generation:
                        self._rejoin(name, source)
                        return
                    self._busy = None

    def _awaken(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._wake.release()

    def _rejoin(self, name: str, source: Source) -> None:
        """The driver has let go of this thread; another reads by now."""
        log.warning("reading %s works again", name, extra={"event": "sampler_unstuck", "gpu": name})
        with self._guard:
            if self._sources.get(name) is source:
                self._rotation = {**self._rotation, name: source}

"""The sampler, its histories, and what answers queries about them."""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from zeus_ipc.limited import RECENT_S
from zeus_ipc.replies import CpuInfo, GpuInfo, SourceState
from zeusd.devices.port import Backend, Handle
from zeusd.energy.history import LAYOUT, SIZE, History
from zeusd.energy.scope import Scope
from zeusd.runtime.historian import Historian, LookUp
from zeusd.runtime.outside import OutsideWatch
from zeusd.runtime.power_sources import (
    PERIOD_NS,
    PowerMeter,
    PowerSource,
    find_power_meters,
    module_power_mw,
)
from zeusd.runtime.powercap import Zone, ZoneSource, find_packages
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.sampler import Sampler
from zeusd.runtime.sources import GpuSource, SharedGpuSource, TickReading
from zeusd.runtime.trouble import OpenFailure

log = logging.getLogger(__name__)

CHECK_S = 0.5
HISTORY_PREFIX = "history-"
_HEADER = 512


class SamplingClock(Protocol):
    """Virtual time that drives the sampler as it advances."""

    def __call__(self) -> int:
        """The time, ns."""

    def attach(self, sampler: Sampler) -> None:
        """Advances the time, and lets the sampler read what becomes due."""

    def detach(self, sampler: Sampler) -> None:
        """No longer."""

    def hurry(self) -> None:
        """Advances the time until the sampler has read again."""


class Histories:
    """Memory for histories: files that outlive this process, or plain memory."""

    def __init__(self, directory: str | None, boot: str) -> None:
        self._directory = directory
        self._boot = boot

    def open(self, name: str, driver: str) -> History:
        """The history of a source; empty if there is none of this boot and driver."""
        if self._directory is not None:
            identity = json.dumps([LAYOUT, self._boot, driver]).encode()[: _HEADER - 1]
            try:
                return History(self._map(name, identity))
            except (OSError, ValueError) as error:
                log.warning(
                    "the history of %s is kept in memory only: %s",
                    name,
                    error,
                    extra={"event": "history_not_kept", "gpu": name},
                )
        return History(memoryview(mmap.mmap(-1, SIZE)))

    def _map(self, name: str, identity: bytes) -> memoryview:
        assert self._directory is not None
        path = Path(self._directory, HISTORY_PREFIX + name.replace("/", "-").replace(":", "-"))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise ValueError(f"{path} belongs to another user")
            if os.pread(fd, _HEADER, 0).rstrip(b"\0") != identity:
                os.ftruncate(fd, 0)
                os.pwrite(fd, identity, 0)
            # Allocate it now: a page that a full disk cannot provide later would kill this process.
            try:
                os.posix_fallocate(fd, 0, _HEADER + SIZE)
            except OSError:
                os.unlink(path)
                raise
            return memoryview(mmap.mmap(fd, _HEADER + SIZE))[_HEADER:]
        finally:
            os.close(fd)


class Sampling:
    """Samples the GPUs and CPUs, and answers queries about the past.

    Attributes:
        watch: Is told what the sampler reads of GPUs once a second; set before any GPU is found.
    """

    def __init__(
        self,
        nvml: Backend,
        reactor: Reactor,
        histories: Histories,
        *,
        publish: Callable[[str, TickReading], None],
        lazy: bool = False,
        powercap: str | None = None,
        hwmon: str | None = None,
        clock: SamplingClock | None = None,
    ) -> None:
        self._nvml = nvml
        self._histories = histories
        self._lazy = lazy
        self._clock = clock
        self._clock_ns: Callable[[], int] = time.monotonic_ns if clock is None else clock
        self._offered: dict[str, Callable[[], None]] = {}
        self.watch: OutsideWatch | None = None
        self._modules: dict[int, set[str]] = {}
        self._blind: set[str] = set()
        self._packages = [] if powercap is None else find_packages(powercap)
        self._meters: list[PowerMeter] = []
        if hwmon is not None and not self._packages:
            self._meters = find_power_meters(hwmon)
        self.sampler = Sampler(self._ticked, publish, self._clock_ns)
        hurry = None if clock is None else clock.hurry
        self._historian = Historian(self.sampler, reactor, self._clock_ns, hurry)

    @property
    def cpus(self) -> list[CpuInfo]:
        """The measured CPU packages."""
        return [
            *(package.info for package in self._packages),
            *(meter.info for meter in self._meters),
        ]

    @property
    def names(self) -> set[str]:
        """All sources, including those that are sampled only on request."""
        return {*self.sampler.names(), *self._offered}

    def start(self) -> None:
        """Begins."""
        for package in self._packages:
            index = package.info.index
            zones = {f"cpu:{index}": package.zone, f"dram:{index}": package.dram}
            for name, zone in zones.items():
                if zone is not None:
                    self._offer(name, partial(self._add_zone, name, zone))
        for meter in self._meters:
            name, period_ns = f"cpu:{meter.info.index}", meter.period_ns
            self._offer(name, partial(self._add_power, name, "hwmon", meter.read_mw, period_ns))
        if self._clock is None:
            self.sampler.start()
        else:
            self._clock.attach(self.sampler)

    def gpus_found(self, driver: str, gpus: Iterable[tuple[GpuInfo, Handle]]) -> None:
        """Adds GPUs, at start or when they are found again."""
        for info, handle in gpus:
            (self._blind.discard if info.has_sensor else self._blind.add)(info.uuid)
            self._offer(info.uuid, partial(self._add_gpu, driver, info, handle))
            if info.module is not None:
                self._modules.setdefault(info.module, set()).add(info.uuid)
        for module, uuids in self._modules.items():
            self._offer(f"module:{module}", partial(self._add_module, driver, module, uuids))

    def pause(self, gpus: Iterable[str], timeout_s: float) -> bool:
        """Stops reading these GPUs until they are found again. Waits for readings in progress.

        Returns whether none is left in progress.
        """
        names = frozenset(gpus)
        for name in names:
            self._offered.pop(name, None)
        return self.sampler.pause(names, timeout_s)

    def describe(self) -> list[SourceState]:
        """The last reading of each device."""
        states: list[SourceState] = []
        for name in self.sampler.names():
            source = self.sampler.find(name)
            last = None if source is None else source.history.last()
            if source is not None and last is not None:
                edge, _ = last
                states.append(
                    SourceState(
                        source=name,
                        energy_uj=edge.energy_uj,
                        power_mw=edge.power_mw,
                        t_ns=edge.t_ns,
                        tick_ns=source.period_ns,
                        limited_ns=source.history.limited.counted_ns,
                    )
                )
        return states

    @property
    def troubles(self) -> list[OpenFailure]:
        """Of each device that is not sampled, although it has a sensor."""
        failures = []
        for name, ends_ns, why in self.sampler.overdue():
            if name not in self._blind:
                since_ns = time.monotonic_ns() - (self._clock_ns() - ends_ns)
                failures.append(trouble := OpenFailure("sampling", name, since_ns))
                trouble.reading_failed(why, f"no new samples of {name}")
        return failures

    def look_up(self, look_up: LookUp) -> None:
        """Passes on a query about the past."""
        for name in look_up.names:
            self._begin(name)
        self._historian.submit(look_up)

    def sample_ns(self) -> int:
        """The time of the samples: CLOCK_MONOTONIC, or simulated time."""
        return self._clock_ns()

    def period_ns(self, name: str) -> int | None:
        """Update period of a source; None: it is not sampled."""
        source = self.sampler.find(name)
        return None if source is None else source.period_ns

    def energy_scope(self, name: str) -> str:
        """What a GPU's energy counter counts, see `energy.scope`."""
        source = self.sampler.find(name)
        scope = source.scope if isinstance(source, GpuSource) else Scope.GPU
        return scope.value

    def limited_ms(self, name: str) -> dict[str, int]:
        """See `GpuState.limited_ms`."""
        source, now_ns = self.sampler.find(name), self._clock_ns()
        if source is None:
            return {}
        limited = source.history.limited.window(now_ns - (RECENT_S * 1_000_000_000), now_ns)
        return {reason: ms for reason, ms in limited if ms is not None}

    def stream(self, names: Iterable[str]) -> None:
        """Publish the samples of exactly these sources from now on."""
        streamed = frozenset(names)
        for name in streamed:
            self._begin(name)
        self.sampler.stream(streamed)

    def check(self) -> None:
        """Periodic work; call it every `CHECK_S`."""
        self.sampler.replace_stuck()

    def stop(self) -> None:
        """Ends it."""
        if self._clock is not None:
            self._clock.detach(self.sampler)
        self.sampler.stop()

    # --------------------------------------------------------------------------------- internals

    def _begin(self, name: str) -> None:
        """Starts to sample a GPU that was only offered so far."""
        offered = self._offered.pop(name, None)
        if offered is not None:
            offered()

    def _offer(self, name: str, add: Callable[[], None]) -> None:
        if self._lazy and self.sampler.find(name) is None:
            self._offered[name] = add
        else:
            add()

    def _add_gpu(self, driver: str, info: GpuInfo, handle: Handle) -> None:
        known = self.sampler.find(info.uuid)
        history = self._histories.open(info.uuid, driver) if known is None else known.history
        shares = info.power_domain[:1] not in ([], [info.uuid])
        kind = SharedGpuSource if shares else GpuSource
        source = kind(self._nvml, handle, info, history, self._clock_ns, self.watch)
        self.sampler.add(info.uuid, source)

    def _add_zone(self, name: str, zone: Zone) -> None:
        history = self._histories.open(name, "powercap")
        self.sampler.add(name, ZoneSource(zone, history, self._clock_ns))

    def _add_module(self, driver: str, module: int, uuids: set[str]) -> None:
        for uuid in uuids:
            self._begin(uuid)
        sources = (self.sampler.find(uuid) for uuid in uuids)
        gpus = [source for source in sources if isinstance(source, GpuSource)]
        read_mw = partial(module_power_mw, gpus, self._clock_ns)
        self._add_power(f"module:{module}", driver, read_mw, PERIOD_NS)

    def _add_power(
        self, name: str, driver: str, read_mw: Callable[[], int], period_ns: int
    ) -> None:
        known = self.sampler.find(name)
        history = self._histories.open(name, driver) if known is None else known.history
        self.sampler.add(name, PowerSource(read_mw, history, period_ns, self._clock_ns))

    def _ticked(self, name: str) -> None:
        self._historian.ticked(name)

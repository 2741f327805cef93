"""`PowerMonitor`: power of GPUs and CPUs over time, without a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Literal, TypeVar

from zeus import _node
from zeus.device import get_gpus
from zeus.exceptions import from_ipc
from zeus.monitor.devices import resolve_cpus, resolve_gpus
from zeus.monitor.timeline import Timelines
from zeus.utils.configured import Configured
from zeus_common.epoch import offset_ns
from zeus_ipc.errors import ZeusIpcError


class PowerDomain(Enum):
    """The kind of a GPU's power."""

    DEVICE_INSTANT = "device_instant"
    """The GPU's, as its sensor last measured it."""
    DEVICE_AVERAGE = "device_average"
    """The GPU's, mean of the last second. Ampere (except A100) and newer."""
    MEMORY_AVERAGE = "memory_average"
    """The GPU memory's, mean of the last second. Some Hopper and newer."""


GPUPowerDomain = PowerDomain


class CPUPowerDomain(Enum):
    """The kind of a CPU package's power, mean from one reading of its energy counter to the
    next."""

    PACKAGE_AVERAGE = "package_average"
    """The package's."""
    DRAM_AVERAGE = "dram_average"
    """Its memory's, where it is measured by itself."""


_DOMAINS = {
    PowerDomain.DEVICE_INSTANT: "power",
    PowerDomain.DEVICE_AVERAGE: "average_power",
    PowerDomain.MEMORY_AVERAGE: "memory_power",
}

_CPU_SOURCES = {CPUPowerDomain.PACKAGE_AVERAGE: "cpu:", CPUPowerDomain.DRAM_AVERAGE: "dram:"}

DomainName = PowerDomain | Literal["device_instant", "device_average", "memory_average"]
CpuDomainName = CPUPowerDomain | Literal["package_average", "dram_average"]
_Domain = TypeVar("_Domain", PowerDomain, CPUPowerDomain)

PowerTimeline = list[tuple[float, float]]
"""Seconds since the epoch, and watts."""

AROUND_S = 5.0
"""A mean that was read this long before or after a span still applies to it."""


def infer_counter_update_period(gpu_indicies: Sequence[int]) -> float:
    """Half of the shortest update period of these GPUs' sensors, seconds; at most 0.1."""
    gpus = get_gpus()
    try:
        by_gpu = _node.get_client().windows([gpus[index].uuid for index in gpu_indicies])
    except ZeusIpcError as error:
        raise from_ipc(error) from error
    return min(0.1, min(one.tick_ns for one in by_gpu.values()) / 2e9)


class PowerMonitor(Configured):
    """Power of GPUs and CPUs over time, from what zeusd (or this process's own sampler) has
    recorded.

    Args:
        gpu_indices: GPUs, as the framework numbers them; None: all it sees.
        update_period: Minimum seconds between samples; None: every update of the sensors.
        max_samples_per_gpu: Maximum number of samples, the newest ones; None: all.
        power_domains: Kinds of GPUs' power; None: all that these GPUs offer.
        cpu_indices: CPU packages; None: all that can be measured; []: none.
        cpu_update_period: As `update_period`, for CPUs.
        max_samples_per_cpu: As `max_samples_per_gpu`, for CPUs.
        cpu_power_domains: Kinds of CPUs' power; None: all that these CPUs offer.
        gpu_update_period: Another name of `update_period`.
        gpu_power_domains: Another name of `power_domains`.

    Raises:
        ValueError: An index names no GPU, or a domain is unknown or not offered.
        ZeusBaseGPUError: The GPUs cannot be reached.
    """

    def __init__(
        self,
        gpu_indices: Sequence[int] | None = None,
        update_period: float | None = None,
        max_samples_per_gpu: int | None = None,
        power_domains: Sequence[DomainName] | None = None,
        *,
        cpu_indices: Sequence[int] | None = None,
        cpu_update_period: float | None = None,
        max_samples_per_cpu: int | None = None,
        cpu_power_domains: Sequence[CpuDomainName] | None = None,
        gpu_update_period: float | None = None,
        gpu_power_domains: Sequence[DomainName] | None = None,
    ) -> None:
        gpus, self.gpu_indices, self._client = resolve_gpus(gpu_indices)
        cpus = resolve_cpus(cpu_indices, self._client)
        self.cpu_indices = [cpu.index for cpu in cpus]
        self.update_period = gpu_update_period if update_period is None else update_period
        self._uuids = {index: gpus[index].uuid for index in self.gpu_indices}
        self._timelines = Timelines(
            self._client, self._uuids, self.update_period, max_samples_per_gpu
        )
        named = gpu_power_domains if power_domains is None else power_domains
        self.power_domains = _chosen("GPU", PowerDomain, named, self._offered())
        offered: dict[CPUPowerDomain, dict[int, str]] = {}
        for cpu in cpus:
            for domain, prefix in _CPU_SOURCES.items():
                if domain is CPUPowerDomain.PACKAGE_AVERAGE or cpu.dram:
                    offered.setdefault(domain, {})[cpu.index] = f"{prefix}{cpu.index}"
        self.cpu_power_domains = _chosen("CPU", CPUPowerDomain, cpu_power_domains, [*offered])
        self._cpu_timelines = {
            domain: Timelines(
                self._client, offered[domain], cpu_update_period, max_samples_per_cpu, "CPU"
            )
            for domain in self.cpu_power_domains
        }
        self._sample_cpus([name for named in offered.values() for name in named.values()])

    def get_power_timeline(
        self,
        power_domain: DomainName | None = None,
        gpu_index: int | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        *,
        cpu_power_domain: CpuDomainName | None = None,
        cpu_index: int | None = None,
        gpu_power_domain: DomainName | None = None,
    ) -> dict[int, PowerTimeline]:
        """Power of one GPU or CPU, or of each, between two times (seconds since the epoch), watts.

        The default start is when this monitor was created; earlier times are available, too.

        Args:
            power_domain: The kind of GPUs' power. Give this, or `cpu_power_domain`.
            gpu_index: A GPU; None: all.
            start_time: The beginning.
            end_time: The end; None: now.
            cpu_power_domain: The kind of CPUs' power.
            cpu_index: A CPU package; None: all.
            gpu_power_domain: Another name of `power_domain`.

        Raises:
            ValueError: The domain, the GPU or the CPU is not monitored; or not exactly one domain
                is given.
        """
        gpu_domain = gpu_power_domain if power_domain is None else power_domain
        if (gpu_domain is None) == (cpu_power_domain is None):
            raise ValueError("give one power domain, of GPUs or of CPUs (cpu_power_domain)")
        if gpu_domain is not None:
            name = _DOMAINS[_monitored(PowerDomain, gpu_domain, self.power_domains)]
            timelines = self._timelines.read(name, gpu_index, start_time, end_time)
        else:
            domain = _monitored(CPUPowerDomain, cpu_power_domain, self.cpu_power_domains)
            timelines = self._cpu_timelines[domain].read("power", cpu_index, start_time, end_time)
        return {
            index: [(t_s, milliwatts / 1000) for t_s, milliwatts in samples]
            for index, samples in timelines.items()
        }

    def get_all_power_timelines(
        self,
        gpu_index: int | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        *,
        cpu_index: int | None = None,
    ) -> dict[str, dict[int, PowerTimeline]]:
        """`get_power_timeline` for each domain, by its name."""
        read = partial(self.get_power_timeline, start_time=start_time, end_time=end_time)
        gpus = {
            power_domain.value: read(power_domain, gpu_index) for power_domain in self.power_domains
        }
        cpus = {
            cpu_power_domain.value: read(cpu_power_domain=cpu_power_domain, cpu_index=cpu_index)
            for cpu_power_domain in self.cpu_power_domains
        }
        return gpus | cpus

    def get_energy(
        self, start_time: float, end_time: float, power_domain: DomainName | None = None
    ) -> dict[int, float] | None:
        """Energy of each GPU between two times (seconds since the epoch), joules.

        For `DEVICE_INSTANT` it is what a window of `ZeusMonitor` would measure; for the averages,
        their integral, accurate to about a second at both ends. None: that time is unknown.

        Raises:
            ValueError: The domain is not monitored, or the end lies before the start.
        """
        domain = _monitored(PowerDomain, power_domain or self.power_domains[0], self.power_domains)
        if end_time < start_time:
            raise ValueError(f"the end, {end_time}, lies before the start, {start_time}")
        if end_time > time.time() + 0.1:
            return None  # it has not happened
        if domain is PowerDomain.DEVICE_INSTANT:
            return self._window_j(start_time, end_time)
        energies: dict[int, float] = {}
        timelines = self._timelines.read(
            _DOMAINS[domain], None, start_time - AROUND_S, end_time + AROUND_S
        )
        for index, samples in timelines.items():
            if not samples:
                return None
            energies[index] = _integral_j(samples, start_time, end_time)
        return energies

    def get_power(
        self,
        time: float | None = None,
        power_domain: DomainName = PowerDomain.DEVICE_INSTANT,
    ) -> dict[int, float] | None:
        """Power of each GPU at a time (seconds since the epoch), watts; None: not known."""
        domain = _monitored(PowerDomain, power_domain, self.power_domains)
        power_mw = self._timelines.at(_DOMAINS[domain], time)
        if power_mw is None:
            return None
        return {index: milliwatts / 1000 for index, milliwatts in power_mw.items()}

    def stop(self) -> None:
        """Does nothing: there is nothing to stop."""

    # --------------------------------------------------------------------------------- internals

    def _window_j(self, start_time: float, end_time: float) -> dict[int, float] | None:
        if self._client is None:
            return {}
        shift_ns = offset_ns()
        begin_ns, end_ns = (max(0, round(t * 1e9) - shift_ns) for t in (start_time, end_time))
        try:
            by_gpu = self._client.windows(list(self._uuids.values()), [(begin_ns, end_ns, False)])
        except ZeusIpcError as error:
            raise from_ipc(error) from error
        energies: dict[int, float] = {}
        for index, uuid in self._uuids.items():
            energy_uj = by_gpu[uuid].energy_uj[0]
            if energy_uj is None:
                return None
            energies[index] = energy_uj / 1e6
        return energies

    def _offered(self) -> list[PowerDomain]:
        uuids = list(self._uuids.values())
        if self._client is None or not uuids:
            return list(PowerDomain)
        try:
            self._client.windows(uuids)  # starts sampling if nobody has
            readings = self._client.power(uuids)
        except ZeusIpcError as error:
            raise from_ipc(error) from error
        offered = {
            PowerDomain.DEVICE_INSTANT: [reading.instant_mw for reading in readings.values()],
            PowerDomain.DEVICE_AVERAGE: [reading.average_mw for reading in readings.values()],
            PowerDomain.MEMORY_AVERAGE: [
                reading.memory_average_mw for reading in readings.values()
            ],
        }
        return [domain for domain, values in offered.items() if None not in values]

    def _sample_cpus(self, sources: list[str]) -> None:
        """Begins to sample CPUs, if nobody has."""
        if self._client is None or not sources:
            return
        try:
            self._client.windows(sources)
        except ZeusIpcError as error:
            raise from_ipc(error) from error


def _chosen(
    kind: str, domains: type[_Domain], names: Sequence[object] | None, offered: list[_Domain]
) -> list[_Domain]:
    """The domains of these names; None: all that are offered.

    Raises:
        ValueError: One is unknown or not offered, or none is named.
    """
    if names is None:
        return offered
    named = [_domain(domains, name) for name in names]
    missing = [one for one in named if one not in offered]
    if missing or not named:
        what = f"these {kind}s do not offer {_names(missing)}" if named else "no domain is named"
        raise ValueError(f"{what}; name power domains of {_names(offered)}, or None for all")
    return named


def _monitored(domains: type[_Domain], name: object, monitored: list[_Domain]) -> _Domain:
    domain = _domain(domains, name)
    if domain not in monitored:
        raise ValueError(f"{domain.value} is not monitored; these are: {_names(monitored)}")
    return domain


def _domain(domains: type[_Domain], name: object) -> _Domain:
    try:
        return domains(name)
    except ValueError:
        names = _names(domains)
        raise ValueError(f"{name!r} is not a power domain; there are: {names}") from None


def _names(domains: Iterable[Enum]) -> str:
    return ", ".join(domain.value for domain in domains) or "none"


def _integral_j(samples: list[tuple[float, int]], start_s: float, end_s: float) -> float:
    """Each mean covers the time since the sample before it; the last one is assumed to continue."""
    total = 0.0
    from_s = start_s
    for position, (t_s, milliwatts) in enumerate(samples):
        until_s = end_s if position + 1 == len(samples) else min(t_s, end_s)
        if until_s > from_s:
            total += milliwatts / 1000 * (until_s - from_s)
            from_s = until_s
    return total

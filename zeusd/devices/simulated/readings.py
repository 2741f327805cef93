"""Properties and sensor readings of the GPUs of a simulated node."""

from __future__ import annotations

import time
from collections.abc import Iterable

from zeus_ipc.overriding import override
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import (
    GpuProcess,
    Handle,
    MigInstance,
    ProcessUse,
    SensorValues,
)
from zeusd.devices.simulated import tenants
from zeusd.devices.simulated.driver import SimulatedDriver
from zeusd.devices.simulated.gpu import SimulatedGpu
from zeusd.devices.simulated.models import AMD
from zeusd.devices.simulated.work import Work


class SimulatedReadings(SimulatedDriver):
    """The reading part of `zeusd.devices.port.Backend`."""

    @override
    def uuid(self, gpu: Handle) -> str:
        return self._enter(gpu, "uuid").spec.uuid

    @override
    def name(self, gpu: Handle) -> str:
        return self._enter(gpu, "name").model.name

    @override
    def vbios(self, gpu: Handle) -> str:
        return f"{self._enter(gpu, 'vbios').model.architecture}.simulated"

    @override
    def pci_address(self, gpu: Handle) -> str:
        return self._enter(gpu, "pci_address").spec.pci_address

    @override
    def device_file(self, gpu: Handle) -> str:
        spec = self._enter(gpu, "device_file").spec
        amd = spec.model.architecture == AMD
        return f"/dev/dri/renderD{128 + spec.index}" if amd else f"/dev/nvidia{spec.index}"

    @override
    def architecture(self, gpu: Handle) -> int:
        return self._enter(gpu, "architecture").model.architecture

    @override
    def memory_mib(self, gpu: Handle) -> int:
        return self._enter(gpu, "memory_mib").model.memory_mib

    @override
    def mig_enabled(self, gpu: Handle) -> bool:
        spec = self._enter(gpu, "mig_enabled").spec
        return spec.partitions > 1 or bool(spec.mig)

    @override
    def runtime_indices(self, gpu: Handle) -> list[int]:
        """HIP's indices, which follow the PCI addresses here."""
        own = self._enter(gpu, "runtime_indices").spec
        if own.model.architecture != AMD:
            return []
        before = sum(
            one.partitions for one in self._specs[: own.index] if one.model.architecture == AMD
        )
        return list(range(before, before + own.partitions))

    @override
    def power_domain(self, gpu: Handle) -> list[int]:
        first = self._enter(gpu, "power_domain").first
        if first.second is None:
            return []
        return [first.spec.index, first.second.spec.index]

    @override
    def module(self, gpu: Handle) -> int | None:
        return self._enter(gpu, "module").spec.module

    @override
    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        return list(self._enter(gpu, "supported_memory_clocks").model.memory_clocks_mhz)

    @override
    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        model = self._enter(gpu, "supported_gpu_clocks").model
        if memory_clock_mhz not in model.memory_clocks_mhz:
            raise nvml_error(Return.NOT_FOUND, "nvmlDeviceGetSupportedGraphicsClocks")
        return list(model.clocks_at(memory_clock_mhz))

    @override
    def gpu_clock_mhz(self, gpu: Handle) -> int:
        return self._enter(gpu, "gpu_clock_mhz").point.clock_mhz

    @override
    def memory_clock_mhz(self, gpu: Handle) -> int:
        return self._enter(gpu, "memory_clock_mhz").memory_clock_mhz

    @override
    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        state = self._enter(gpu, "enforced_power_limit_mw")
        with self.lock:
            self._settle(state)
            return state.enforced_limit_mw

    @override
    def sensors(self, gpu: Handle, counter: bool = True, averages: bool = True) -> SensorValues:
        state = self._enter(gpu, "sensors")
        with self.lock:
            now_ns = self._clock_ns()
            now_s = self.advance(now_ns)
            model = state.model
            lacks = state.spec.lacks
            if state.first is not state or "power" in lacks:
                return SensorValues(now_ns, None, None, None, None)
            values = SensorValues(
                t_ns=now_ns,
                energy_mj=state.sensor.energy_mj(now_s)
                if counter and model.energy_counter and "counter" not in lacks
                else None,
                power_instant_mw=state.sensor.instant_mw(now_s),
                power_average_mw=state.sensor.average_mw(now_s) if model.sensor.average else None,
                memory_power_average_mw=None,
                limited_ns=_limited_ns(state, now_s) if averages else (),
                requested_limit_mw=state.limit_mw,
                current_limit_mw=state.enforced_limit_mw,
            )
            if model.superchip is None:
                return values
            module = (other for other in self._gpus if other.spec.module == state.spec.module)
            return with_module(values, state, module, now_s)

    @override
    def power_samples(self, gpu: Handle, since_ns: int) -> list[tuple[int, int]]:
        state = self._enter(gpu, "power_samples")
        if state.model.sensor.samples_ms is None or "power" in state.spec.lacks:
            raise nvml_error(Return.NOT_SUPPORTED, "nvmlDeviceGetSamples")
        with self.lock:
            return state.sensor.samples(self.advance(), since_ns)

    @override
    def temperature_c(self, gpu: Handle) -> int:
        state = self._enter(gpu, "temperature_c")
        with self.lock:
            return round(state.temperature_c(self.advance()))

    @override
    def throttle_reasons(self, gpu: Handle) -> int:
        return self._enter(gpu, "throttle_reasons").reasons()

    @override
    def processes(self, gpu: Handle) -> list[GpuProcess]:
        state = self._enter(gpu, "processes")
        work = state.work
        if state.tenants:
            return tenants.processes(state.tenants, state.work_memory_mib * 1024 * 1024)
        if not isinstance(work, Work) or work.pid is None:
            return []
        return [GpuProcess(work.pid, state.work_memory_mib * 1024 * 1024, compute=True)]

    @override
    def process_utilization(self, gpu: Handle, since_us: int) -> list[ProcessUse]:
        state = self._enter(gpu, "process_utilization")
        now_us = time.time_ns() // 1000
        return tenants.process_uses(state.spec, state.tenants, state.busy, since_us, now_us)

    @override
    def mig_instances(self, gpu: Handle, measure: bool = False) -> list[MigInstance]:
        state = self._enter(gpu, "mig_instances")
        return tenants.mig_instances(state.spec, state.tenants, state.busy, measure)

    @override
    def utilization_percent(self, gpu: Handle) -> int:
        return 100 if self._enter(gpu, "utilization_percent").busy else 0

    @override
    def memory_used_mib(self, gpu: Handle) -> int:
        return self._enter(gpu, "memory_used_mib").memory_used_mib


def _limited_ns(gpu: SimulatedGpu, now_s: float) -> tuple[int | None, ...]:
    counted = gpu.limited_ns(now_s)
    if "limited" in gpu.spec.lacks:
        return ()
    return (*counted[:2], None, None, None) if gpu.model.architecture == AMD else counted


def with_module(
    values: SensorValues, gpu: SimulatedGpu, module: Iterable[SimulatedGpu], now_s: float
) -> SensorValues:
    """A GPU's readings with those of its memory and of its superchip.

    Args:
        found: The reading of its own sensor.
        gpu: The GPU.
        module: All GPUs of the superchip.
        now_s: The time.
    """
    superchip = gpu.model.superchip
    assert superchip is not None
    noise = (gpu.sensor.last_tick_s * 1000 + 37 * gpu.spec.index) % 17 / 8 - 1
    gpus_mw = sum(other.sensor.instant_mw(now_s) for other in module)
    energy_mj = values.energy_mj
    if energy_mj is not None and superchip.counts_module:
        energy_mj += round(superchip.rest_w * gpu.sensor.last_tick_s * 1000)
    # Largest error of a module's power as reported by a GPU: each GPU samples it separately.
    return values._replace(
        energy_mj=energy_mj,
        memory_power_average_mw=round((values.power_average_mw or 0) * superchip.memory_share),
        module_power_mw=gpus_mw + round(superchip.rest_w * 1000 + noise * 4_000),
    )

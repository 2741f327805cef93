"""Drivers and GPUs as a probe sees them through one of zeusd's backends: simulated, or AMD's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zeus_ipc.controls import Control
from zeus_ipc.overriding import override
from zeusctl.probe.driver import (
    CallError,
    Clock,
    Driver,
    GpuReader,
    NoDriverError,
    Question,
    Reading,
)
from zeusd.devices.amd.backend import AmdBackend
from zeusd.devices.port import Backend, DeviceError
from zeusd.devices.vendors import AMD, NVIDIA, SYSFS, has_gpu

_OF_SENSORS = {
    "power_instant_mw": "power_instant_mw",
    "power_average_mw": "power_average_mw",
    "power_usage_mw": None,
    "energy_counter_mj": "energy_mj",
    "energy_field_mj": "energy_mj",
    "module_power_instant_mw": "module_power_mw",
    "memory_power_average_mw": "memory_power_average_mw",
}
"""The field of `zeusd.devices.port.Sensors` for each sensor."""

_NOT_SUPPORTED = 3


class BackendGpu:
    """Implements `zeusctl.probe.driver.GpuReader`.

    Args:
        backend: The vendor's.
        handle: The GPU.
        clock: The probe's time.
    """

    def __init__(self, backend: Backend, handle: Any, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._handle = handle
        limits = self._limits

        def question(call: str, then: Callable[[Any], Any] = lambda found: found) -> Question:
            return Question(call, lambda: then(self._call(call)))

        self.questions: dict[str, Question] = {
            **{name: question(name) for name in ("name", "architecture", "memory_mib", "uuid")},
            "pci_address": question("pci_address"),
            "persistence_mode": Question("persistence_mode", self._persistence),
            "mig_mode": question("mig_enabled", lambda on: [int(on), int(on)]),
            "power_limit_range_mw": Question("power_limits", lambda: list(limits()[:2])),
            "default_power_limit_mw": Question("power_limits", lambda: limits()[2]),
            "power_limit_mw": Question("power_limit_mw", self._power_limit),
            "enforced_power_limit_mw": question("enforced_power_limit_mw"),
            "supported_clocks_mhz": Question("supported_gpu_clocks", self._supported),
            "gpu_clock_mhz": question("gpu_clock_mhz"),
            "memory_clock_mhz": question("memory_clock_mhz"),
            "temperature_c": question("temperature_c"),
            "throttle_reasons": question("throttle_reasons"),
            "utilization_percent": question("utilization_percent"),
            "memory_used_mib": question("memory_used_mib"),
            "compute_processes": question(
                "processes", lambda found: [(one.pid, one.memory_bytes) for one in found]
            ),
            **{name: Question("sensors", partial(self._sensor, name)) for name in _OF_SENSORS},
        }

    def read(self, sensors: Sequence[str]) -> dict[str, Reading]:
        """Reads several of `SENSORS` in one call."""
        try:
            found = self._backend.sensors(self._handle)
        except DeviceError as error:
            return dict.fromkeys(sensors, Reading(self._clock.now_ns(), call_error(error)))
        read: dict[str, Reading] = {}
        for name in sensors:
            where = _OF_SENSORS[name]
            if where is None:  # on these boards the call returns the average, if there is one
                value = found.power_average_mw
                value = found.power_instant_mw if value is None else value
            else:
                value = getattr(found, where)
            absent = CallError(_NOT_SUPPORTED, "not supported")
            read[name] = Reading(found.t_ns, absent if value is None else value)
        return read

    def _sensor(self, name: str) -> int:
        value = self.read([name])[name].value
        if isinstance(value, CallError):
            raise value
        return value

    def _persistence(self) -> int:
        return int(self._call("read_control", Control.PERSISTENCE_MODE)[0])

    def _power_limit(self) -> int:
        return int(self._call("read_control", Control.POWER_LIMIT)[0])

    def _limits(self) -> tuple[int, int, int]:
        return tuple(self._call("power_limits"))

    def _supported(self) -> dict[int, list[int]]:
        return {
            memory: self._call("supported_gpu_clocks", memory)
            for memory in self._call("supported_memory_clocks")
        }

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._backend, name)(self._handle, *arguments)
        except DeviceError as error:
            raise call_error(error) from None


def call_error(error: DeviceError) -> CallError:
    """Converts a backend's error to the probe's."""
    return CallError(error.code or 0, error.text.partition(" (NVML")[0])


class BackendDriver(Driver):
    """The part of `zeusctl.probe.driver.Driver` that is the same for all of zeusd's backends.

    Attributes:
        backend: The vendor's, initialised.
        binding: Its name in the report.
    """

    backend: Backend
    binding: str

    @override
    def versions(self) -> dict[str, str]:
        return {"driver": self.backend.driver_version(), "binding": self.binding}

    @override
    def gpus(self) -> dict[int, GpuReader | CallError]:
        found: dict[int, GpuReader | CallError] = {}
        for index in range(self.backend.device_count()):
            try:
                handle = self.backend.device_handle(index)
                found[index] = BackendGpu(self.backend, handle, self.clock)
            except DeviceError as error:
                found[index] = call_error(error)
        return found

    @override
    def close(self) -> None:
        self.backend.shutdown()


LIBRARY = "libamd_smi"


def is_amd(library: str | None, sysfs: str = SYSFS) -> bool:
    """Whether to probe AMD's GPUs: the library is AMD's, or the bus has AMD GPUs and none of
    NVIDIA's.
    """
    if library is not None:
        return LIBRARY in library
    return has_gpu(sysfs, AMD) and not has_gpu(sysfs, NVIDIA)


class AmdDriver(BackendDriver):
    """Implements `zeusctl.probe.driver.Driver`.

    Args:
        library: The libamd_smi to load; None: the one that is found.
        sysfs: Where sysfs is.

    Raises:
        NoDriverError: It cannot be initialised.
    """

    simulated: str | None = None
    binding = "zeusd's"

    def __init__(self, library: str | None = None, sysfs: str = SYSFS) -> None:
        self.clock = Clock(time.monotonic_ns, time.sleep)
        self.backend = AmdBackend(library, sysfs)
        try:
            self.backend.init()
        except DeviceError as error:
            raise NoDriverError(
                f"libamd_smi cannot be initialised: {error.text}; load the amdgpu driver, and "
                "check that `amd-smi list` works as this user"
            ) from None

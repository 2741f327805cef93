"""Drivers and GPUs as a probe sees them: through zeusd's backends, opened in this process. Only
reads are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from zeus_ipc.controls import Control
from zeusctl.probe.driver import CallError, Clock, NoDriverError, ProbeReading, Question
from zeusd.devices.amd.backend import AmdBackend
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import Backend, DeviceError
from zeusd.devices.vendors import SYSFS, amd_only

_OF_SENSORS = {
    "power_instant_mw": ("power_instant_mw",),
    "power_average_mw": ("power_average_mw",),
    "power_usage_mw": ("power_average_mw", "power_instant_mw"),
    "energy_counter_mj": ("energy_mj",),
    "energy_field_mj": ("energy_mj",),
    "module_power_instant_mw": ("module_power_mw",),
    "memory_power_average_mw": ("memory_power_average_mw",),
}
"""The fields of `port.SensorValues` for each sensor: the first one that there is. The call for
power returns the average where there is one."""

_SAME = (
    *("name", "architecture", "memory_mib", "uuid", "pci_address", "enforced_power_limit_mw"),
    *("gpu_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons"),
    *("utilization_percent", "memory_used_mib"),
)
"""Questions that are methods of the port."""


def call_error(error: DeviceError) -> CallError:
    """Converts a backend's error to the probe's."""
    return CallError(error.code or 0, error.text.partition(" (NVML")[0])


def called(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a backend.

    Raises:
        CallError: It failed.
    """
    try:
        return call(*arguments)
    except DeviceError as error:
        raise call_error(error) from None


class BackendGpu:
    """One GPU."""

    def __init__(self, backend: Any, handle: Any, clock: Clock) -> None:
        self.backend = backend
        self.handle = handle
        self.clock = clock
        self.questions = self.all_questions()

    def all_questions(self) -> Mapping[str, Question]:
        """All getters of the device port, by name."""

        def question(call: str, *arguments: Any, then: Callable[[Any], Any] = _same) -> Question:
            return Question(call, lambda: then(self.call(call, *arguments)))

        first = partial(question, "read_control", then=lambda value: int(value[0]))
        return {
            **{name: question(name) for name in _SAME},
            "persistence_mode": first(Control.PERSISTENCE_MODE)._replace(call="persistence_mode"),
            "mig_mode": question("mig_enabled", then=lambda on: [int(on), int(on)]),
            "power_limit_range_mw": question("power_limits", then=lambda limits: [*limits[:2]]),
            "default_power_limit_mw": question("power_limits", then=lambda limits: limits[2]),
            "power_limit_mw": first(Control.POWER_LIMIT)._replace(call="power_limit_mw"),
            "supported_clocks_mhz": self.clocks("supported_memory_clocks", "supported_gpu_clocks"),
            "compute_processes": question(
                "processes",
                then=lambda processes: [
                    (process.pid, process.memory_bytes) for process in processes
                ],
            ),
            **{name: Question("sensors", partial(self.sensor, name)) for name in _OF_SENSORS},
        }

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the backend for this GPU.

        Raises:
            CallError: It failed.
        """
        return called(getattr(self.backend, name), self.handle, *arguments)

    def read(self, sensors: Sequence[str]) -> Mapping[str, ProbeReading]:
        """Reads several of `SENSORS`, in as few calls as the driver allows. A call that may take
        milliseconds reads one."""
        try:
            values_read = self.call("sensors")
        except CallError as error:
            return dict.fromkeys(sensors, ProbeReading(self.clock.now_ns(), error))
        absent = CallError(Return.NOT_SUPPORTED, "not supported")
        read: dict[str, ProbeReading] = {}
        for name in sensors:
            values = (getattr(values_read, field) for field in _OF_SENSORS[name])
            value = next((value for value in values if value is not None), absent)
            read[name] = ProbeReading(values_read.t_ns, value)
        return read

    def sensor(self, name: str) -> int:
        """Reads one of `SENSORS`."""
        value = self.read([name])[name].value
        if isinstance(value, CallError):
            raise value
        return value

    def clocks(self, of_memory: str, at: str) -> Question:
        """The supported clocks: memory clock to graphics clocks."""
        return Question(at, lambda: {mhz: self.call(at, mhz) for mhz in self.call(of_memory)})


def _same(answer: Any) -> Any:
    return answer


class ProbedNode:
    """A node.

    Attributes:
        simulated: The simulated node; None: real GPUs.

    Raises:
        NoDriverError: It cannot be opened.
    """

    simulated: str | None = None
    binding = "zeusd's"
    gpu = BackendGpu

    def __init__(
        self, backend: Backend, clock: Clock | None, needs: tuple[str, str, str] = ("", "", "")
    ) -> None:
        self.clock = clock or Clock(time.monotonic_ns, time.sleep)
        self.backend: Any = backend
        library, module, command = needs
        try:
            backend.init()
        except DeviceError as error:
            raise NoDriverError(
                f"{library} cannot be initialised: {error.text}; load the {module} driver, and "
                f"check that `{command}` works as this user"
            ) from None

    def versions(self) -> dict[str, str]:
        """Versions of driver, library and binding."""
        return {"driver": self.backend.driver_version(), "binding": self.binding}

    def gpus(self) -> dict[int, BackendGpu | CallError]:
        """Each GPU by index, or why it cannot be opened."""
        gpus: dict[int, BackendGpu | CallError] = {}
        for index in range(called(self.backend.device_count)):
            try:
                handle = called(self.backend.device_handle, index)
                gpus[index] = self.gpu(self.backend, handle, self.clock)
            except CallError as error:
                gpus[index] = error
        return gpus

    def close(self) -> None:
        """Frees what was opened."""
        self.backend.shutdown()


LIBRARY = "libamd_smi"


def is_amd(library: str | None, sysfs: str = SYSFS) -> bool:
    """Whether to probe AMD's GPUs: the library is AMD's, or the bus has AMD GPUs and none of
    NVIDIA's.
    """
    return amd_only(sysfs) if library is None else LIBRARY in library


class AmdDriver(ProbedNode):
    """AMD's GPUs of this machine."""

    def __init__(self, library: str | None = None, sysfs: str = SYSFS) -> None:
        super().__init__(AmdBackend(library, sysfs), None, (LIBRARY, "amdgpu", "amd-smi list"))

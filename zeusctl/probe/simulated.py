"""A simulated node as a probe sees it: in this process, on a clock that passes when it is told to.

Two minutes of probing take as long as they take to compute. Calls take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zeusctl.probe.driver import CallError, Clock, Gpu, Question, Readings
from zeusctl.probe.load import Load, SimulatedLoad
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import SimulatedBackend, VirtualClock

_OF_SENSORS = {
    "power_instant_mw": "power_instant_mw",
    "power_average_mw": "power_average_mw",
    "power_usage_mw": None,
    "energy_counter_mj": "energy_mj",
    "energy_field_mj": "energy_mj",
    "memory_power_average_mw": "memory_power_average_mw",
}
"""Where `zeusd.devices.port.Sensors` has each sensor."""

_NOT_SUPPORTED = 3

WORKLOAD = "model/compute"
"""What draws power when load is wanted."""


class SimulatedDriver:
    """Implements `zeusctl.probe.driver.Driver`.

    Args:
        spec: What is simulated, as `zeusd serve --simulate` takes it.

    Raises:
        ValueError: The spec is not one; the message says what is.
    """

    def __init__(self, spec: str) -> None:
        time = VirtualClock()
        self.simulated: str | None = spec
        self.backend = SimulatedBackend(spec, clock_ns=time, sleep=time.sleep)
        self.clock = Clock(time, time.sleep)
        self.backend.init()

    def versions(self) -> dict[str, str]:
        """See `Driver`."""
        return {"driver": self.backend.driver_version(), "binding": "zeusd's simulated node"}

    def gpus(self) -> dict[int, Gpu | CallError]:
        """See `Driver`."""
        found: dict[int, Gpu | CallError] = {}
        for index in range(self.backend.device_count()):
            try:
                found[index] = SimulatedGpu(
                    self.backend, self.backend.device_handle(index), self.clock
                )
            except DeviceError as error:
                found[index] = _error(error)
        return found

    def load_on(self, index: int) -> Load:
        """Work on one GPU."""
        work = self.backend.open_work([index], WORKLOAD)
        begin_ns = self.clock.now_ns()
        work.launch(1.0)
        _, end_ns = work.progress()
        assert end_ns is not None
        work.wait()
        return SimulatedLoad(work, 1e9 / (end_ns - begin_ns), self.clock.now_ns)

    def close(self) -> None:
        """See `Driver`."""
        self.backend.shutdown()


class SimulatedGpu:
    """Implements `zeusctl.probe.driver.Gpu`."""

    def __init__(self, backend: SimulatedBackend, handle: Any, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._handle = handle
        limits = self._limits

        def question(call: str, then: Callable[[Any], Any] = lambda found: found) -> Question:
            return Question(call, lambda: then(self._call(call)))

        self.questions: dict[str, Question] = {
            **{name: question(name) for name in ("name", "architecture", "memory_mib", "uuid")},
            "pci_address": question("pci_address"),
            "persistence_mode": question("persistence_mode", int),
            "mig_mode": question("mig_enabled", lambda on: [int(on), int(on)]),
            "power_limit_range_mw": Question("power_limits", lambda: list(limits()[:2])),
            "default_power_limit_mw": Question("power_limits", lambda: limits()[2]),
            "power_limit_mw": question("power_limit_mw"),
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

    def read(self, sensors: Sequence[str]) -> Readings:
        """See `Gpu`."""
        try:
            found = self._backend.sensors(self._handle)
        except DeviceError as error:
            return Readings(self._clock.now_ns(), dict.fromkeys(sensors, _error(error)))
        values: dict[str, int | CallError] = {}
        for name in sensors:
            where = _OF_SENSORS[name]
            if where is None:  # on these boards the call is the average, where there is one
                value = found.power_average_mw
                value = found.power_instant_mw if value is None else value
            else:
                value = getattr(found, where)
            values[name] = CallError(_NOT_SUPPORTED, "not supported") if value is None else value
        return Readings(found.t_ns, values)

    def _sensor(self, name: str) -> int:
        value = self.read([name]).values[name]
        if isinstance(value, CallError):
            raise value
        return value

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
            raise _error(error) from None


def _error(error: DeviceError) -> CallError:
    return CallError(error.code or 0, error.text.partition(" (NVML")[0])

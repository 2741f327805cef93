"""NVIDIA GPUs, through nvidia-ml-py; it calls getters only."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

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

_GPU, _MODULE, _MEMORY = 0, 1, 2
"""Power scopes of nvml.h."""

FIELDS: dict[str, tuple[int, int]] = {
    "energy_field_mj": (83, _GPU),
    "power_instant_mw": (186, _GPU),
    "power_average_mw": (185, _GPU),
    "module_power_instant_mw": (186, _MODULE),
    "module_power_average_mw": (185, _MODULE),
    "memory_power_average_mw": (185, _MEMORY),
}
"""Field id and scope of the sensors that are fields (nvml.h)."""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a field's value, by nvmlValueType_t."""

_NO_MEMORY = 0xFFFFFFFFFFFFFFFF
_UNCHECKED = "NVML Error with code"


class NvmlDriver(Driver):
    """The GPUs of this machine.

    Args:
        library: The libnvidia-ml to load; None: libnvidia-ml.so.1 as the system finds it.
        clock: The time.

    Raises:
        NoDriverError: The binding is missing, or NVML cannot be initialised.
    """

    simulated: str | None = None

    def __init__(self, library: str | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock(time.monotonic_ns, time.sleep)
        try:
            import pynvml
        except ImportError:
            raise NoDriverError(
                "nvidia-ml-py is not installed; run `pip install nvidia-ml-py` and try again"
            ) from None
        self.binding: Any = pynvml
        if library is not None:
            try:
                pynvml.nvmlLib = ctypes.CDLL(library)
            except OSError as error:
                raise NoDriverError(f"cannot load {library}: {error}") from None
            pynvml._nvmlGetFunctionPointer_cache.clear()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDriverError(
                f"NVML cannot be initialised: {_text(error)} ({error.value}); load the NVIDIA "
                "driver, and check that `nvidia-smi` works as this user"
            ) from None

    @override
    def versions(self) -> dict[str, str]:
        nvml, found = self.binding, {"binding": f"nvidia-ml-py {_binding_version()}"}
        calls: dict[str, Callable[[], Any]] = {
            "driver": lambda: nvml.nvmlSystemGetDriverVersion(),
            "nvml": lambda: nvml.nvmlSystemGetNVMLVersion(),
            "cuda_driver": lambda: "{}.{}".format(
                *divmod(nvml.nvmlSystemGetCudaDriverVersion_v2() // 10, 100)
            ),
        }
        for name, call in calls.items():
            try:
                found[name] = _decoded(self.checked(call))
            except CallError as error:
                found[name] = f"unknown: {error}"
        return found

    @override
    def gpus(self) -> dict[int, GpuReader | CallError]:
        found: dict[int, GpuReader | CallError] = {}
        for index in range(self.checked(self.binding.nvmlDeviceGetCount)):
            try:
                handle = self.checked(self.binding.nvmlDeviceGetHandleByIndex, index)
            except CallError as error:
                found[index] = error
            else:
                found[index] = NvmlGpu(self, self.binding, handle)
        return found

    @override
    def close(self) -> None:
        self.binding.nvmlShutdown()

    def checked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the binding.

        Raises:
            CallError: It failed.
        """
        try:
            return call(*arguments)
        except self.binding.NVMLError as error:
            raise CallError(int(error.value), _text(error)) from None


class NvmlGpu:
    """Implements `zeusctl.probe.driver.GpuReader`."""

    def __init__(self, driver: NvmlDriver, nvml: Any, handle: Any) -> None:
        self._driver = driver
        self._nvml = nvml
        self._handle = handle
        self._fields: dict[tuple[str, ...], Any] = {}
        self.questions = self._questions()

    def read(self, sensors: Sequence[str]) -> dict[str, Reading]:
        """Reads several of `SENSORS`: the fields of power in one call, and each other one in its
        own, as a read of the energy counter takes milliseconds on some boards."""
        now_ns = self._driver.clock.now_ns
        powers = tuple(name for name in sensors if name in FIELDS and name != "energy_field_mj")
        found: dict[str, Reading] = {}
        for names in (powers, *((name,) for name in sensors if name not in powers)):
            before_ns = now_ns()
            values = self._values(names)
            t_ns = (before_ns + now_ns()) // 2
            found.update((name, Reading(t_ns, value)) for name, value in values.items())
        return found

    def _values(self, names: tuple[str, ...]) -> dict[str, int | CallError]:
        """Values of several fields, or of one other sensor."""
        if not names:
            return {}
        if names[0] in FIELDS:
            return self._read_fields(names)
        try:
            return {names[0]: int(self.questions[names[0]].ask())}
        except CallError as error:
            return {names[0]: error}

    def _read_fields(self, names: tuple[str, ...]) -> dict[str, int | CallError]:
        array = self._fields.get(names)
        if array is None:
            array = self._fields[names] = (self._nvml.c_nvmlFieldValue_t * len(names))()
            for value, name in zip(array, names, strict=True):
                value.fieldId, value.scopeId = FIELDS[name]
        try:
            function = self._driver.checked(
                self._nvml._nvmlGetFunctionPointer, "nvmlDeviceGetFieldValues"
            )
            code = function(self._handle, len(names), array)
            if code:
                raise CallError(code, self._error_text(code))
        except CallError as error:
            return dict.fromkeys(names, error)
        found: dict[str, int | CallError] = {}
        for value, name in zip(array, names, strict=True):
            if value.nvmlReturn:
                found[name] = CallError(value.nvmlReturn, self._error_text(value.nvmlReturn))
            else:
                found[name] = int(getattr(value.value, _MEMBERS[value.valueType]))
        return found

    def _error_text(self, code: int) -> str:
        return _text(self._nvml.NVMLError(code))

    def _questions(self) -> dict[str, Question]:
        nvml, handle, checked = self._nvml, self._handle, self._driver.checked

        def plain(call: str, *arguments: Any, then: Callable[[Any], Any] = int) -> Question:
            def ask() -> Any:
                function = getattr(nvml, call, None)
                if function is None:
                    raise CallError(13, "this nvidia-ml-py is too old")
                return then(checked(function, handle, *arguments))

            return Question(call, ask)

        def field(name: str) -> Question:
            def ask() -> int:
                value = self._read_fields((name,))[name]
                if isinstance(value, CallError):
                    raise value
                return value

            number, scope = FIELDS[name]
            return Question(f"nvmlDeviceGetFieldValues({number}, scope {scope})", ask)

        def supported() -> dict[int, list[int]]:
            memory = checked(nvml.nvmlDeviceGetSupportedMemoryClocks, handle)
            return {
                int(one): [
                    int(mhz)
                    for mhz in checked(nvml.nvmlDeviceGetSupportedGraphicsClocks, handle, one)
                ]
                for one in memory
            }

        def listed(found: Any) -> list[tuple[int, int | None]]:
            return [
                (
                    int(one.pid),
                    None if one.usedGpuMemory in (None, _NO_MEMORY) else one.usedGpuMemory,
                )
                for one in found
            ]

        def pair(found: Any) -> list[int]:
            return [int(found[0]), int(found[1])]

        return {
            "name": plain("nvmlDeviceGetName", then=_decoded),
            "vbios_version": plain("nvmlDeviceGetVbiosVersion", then=_decoded),
            "architecture": plain("nvmlDeviceGetArchitecture"),
            "compute_capability": plain("nvmlDeviceGetCudaComputeCapability", then=pair),
            "pci_device_id": plain(
                "nvmlDeviceGetPciInfo", then=lambda found: f"{found.pciDeviceId:08x}"
            ),
            "memory_mib": plain(
                "nvmlDeviceGetMemoryInfo", then=lambda found: int(found.total) // 2**20
            ),
            "memory_used_mib": plain(
                "nvmlDeviceGetMemoryInfo", then=lambda found: int(found.used) // 2**20
            ),
            "uuid": plain("nvmlDeviceGetUUID", then=_decoded),
            "serial": plain("nvmlDeviceGetSerial", then=_decoded),
            "pci_address": plain("nvmlDeviceGetPciInfo", then=lambda found: _decoded(found.busId)),
            "persistence_mode": plain("nvmlDeviceGetPersistenceMode"),
            "mig_mode": plain("nvmlDeviceGetMigMode", then=pair),
            "ecc_mode": plain("nvmlDeviceGetEccMode", then=pair),
            "compute_mode": plain("nvmlDeviceGetComputeMode"),
            "power_management_mode": plain("nvmlDeviceGetPowerManagementMode"),
            "power_limit_range_mw": plain(
                "nvmlDeviceGetPowerManagementLimitConstraints", then=pair
            ),
            "default_power_limit_mw": plain("nvmlDeviceGetPowerManagementDefaultLimit"),
            "power_limit_mw": plain("nvmlDeviceGetPowerManagementLimit"),
            "enforced_power_limit_mw": plain("nvmlDeviceGetEnforcedPowerLimit"),
            "supported_clocks_mhz": Question("nvmlDeviceGetSupportedGraphicsClocks", supported),
            "gpu_clock_mhz": plain("nvmlDeviceGetClockInfo", 1),
            "memory_clock_mhz": plain("nvmlDeviceGetClockInfo", 2),
            "temperature_c": plain("nvmlDeviceGetTemperature", 0),
            "throttle_reasons": plain("nvmlDeviceGetCurrentClocksThrottleReasons"),
            "clock_event_reasons": plain("nvmlDeviceGetCurrentClocksEventReasons"),
            "performance_state": plain("nvmlDeviceGetPerformanceState"),
            "fan_percent": plain("nvmlDeviceGetFanSpeed"),
            "utilization_percent": plain(
                "nvmlDeviceGetUtilizationRates", then=lambda found: int(found.gpu)
            ),
            "compute_processes": plain("nvmlDeviceGetComputeRunningProcesses", then=listed),
            "graphics_processes": plain("nvmlDeviceGetGraphicsRunningProcesses", then=listed),
            "power_usage_mw": plain("nvmlDeviceGetPowerUsage"),
            "energy_counter_mj": plain("nvmlDeviceGetTotalEnergyConsumption"),
            "power_samples": plain("nvmlDeviceGetSamples", 0, 0, then=lambda found: len(found[1])),
            **{name: field(name) for name in FIELDS},
        }


def _decoded(value: Any) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _text(error: Any) -> str:
    text = str(error)
    return "unknown error" if text.startswith(_UNCHECKED) else text.lower()


def _binding_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nvidia-ml-py")
    except PackageNotFoundError:
        return "of unknown version"

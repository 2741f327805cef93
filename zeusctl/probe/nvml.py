"""NVIDIA GPUs, by zeusd's backend; each question is one getter of the driver, to time it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from zeus_ipc.overriding import override
from zeusctl.probe.backend import BackendGpu, ProbedNode, call_error, called
from zeusctl.probe.driver import CallError, Clock, NoDriverError, ProbeReading, Question
from zeusctl.probe.estimates import estimates_of
from zeusd.devices.nvml.backend import NvmlBackend
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import driver_text
from zeusd.energy.probed.report import DriverEstimates

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

_PLATFORM = ("nvmlDeviceGetPlatformInfo", "c_nvmlPlatformInfo_v2_t")
_FABRIC = ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t")
"""Getters, and nvidia-ml-py's structures that they fill."""

_SAMPLES = "nvmlDevicePerfMetricsGetSamples_v1"
_SAMPLES_BYTES = 1 << 18
"""Its structure has 115,344 bytes in nvml.h, but a constant of nvidia-ml-py says 42,024: no driver
fills more than this."""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a field's value, by nvmlValueType_t."""

_NO_MEMORY = 0xFFFFFFFFFFFFFFFF


class NvmlGpu(BackendGpu):
    """One GPU of NVIDIA's."""

    @override
    def call(self, name: str, *arguments: Any) -> Any:
        """Calls nvidia-ml-py for this GPU."""
        return called(self.backend.call, name, self.handle, *arguments)

    @override
    def read(self, sensors: Sequence[str]) -> Mapping[str, ProbeReading]:
        """Reads the fields of power in one call, and each other sensor in its own, as a read of the
        energy counter takes milliseconds on some boards."""
        powers = [name for name in sensors if name in FIELDS and name != "energy_field_mj"]
        others = [[name] for name in sensors if name not in powers]
        readings: dict[str, ProbeReading] = {}
        for names in [powers, *others] if powers else others:
            before_ns = self.clock.now_ns()
            values = self._values(names)
            t_ns = (before_ns + self.clock.now_ns()) // 2
            readings.update((name, ProbeReading(t_ns, value)) for name, value in values.items())
        return readings

    def _values(self, names: Sequence[str]) -> dict[str, int | CallError]:
        """Values of several fields, or of one other sensor."""
        try:
            if names[0] not in FIELDS:
                return {names[0]: int(self.questions[names[0]].ask())}
            answers = self.call("nvmlDeviceGetFieldValues", [FIELDS[name] for name in names])
        except CallError as error:
            return dict.fromkeys(names, error)
        return {name: _value(one) for name, one in zip(names, answers, strict=True)}

    def _structure(self, getter: str, kind: str) -> Callable[[str], bytes]:
        """Fills a structure by a getter of the driver, and returns how to read its members:
        nvidia-ml-py itself makes texts of bytes that are numbers.
        """
        import pynvml

        made = getattr(pynvml, kind, None)
        if made is None:
            raise CallError(Return.FUNCTION_NOT_FOUND, "this nvidia-ml-py is too old")
        filled = made()
        self.call(getter, ctypes.byref(filled))
        raw = bytes(filled)

        def member(name: str) -> bytes:
            part = getattr(made, name)
            return raw[part.offset : part.offset + part.size]

        return member

    def _filled(self, of: tuple[str, str], **members: str) -> Question:
        """Some members of a structure, by their names in the report."""

        def ask() -> dict[str, int]:
            read = self._structure(*of)
            return {name: int.from_bytes(read(one), "little") for name, one in members.items()}

        return Question(of[0], ask)

    def _named(
        self, of: tuple[str, str], member: str, then: Callable[[bytes], str] = bytes.hex
    ) -> Question:
        """A member of a structure that identifies something."""
        return Question(of[0], lambda: then(self._structure(*of)(member)))

    def _samples(self) -> DriverEstimates:
        """The driver's estimates of power and speed at other clocks."""
        import pynvml

        made = getattr(pynvml, "c_nvmlPerfMetricsSamples_v1_t", None)
        if made is None:
            raise CallError(Return.FUNCTION_NOT_FOUND, "this nvidia-ml-py is too old")
        buffer = ctypes.create_string_buffer(_SAMPLES_BYTES)
        self.call(_SAMPLES, buffer)
        return estimates_of(made.from_buffer(buffer))

    @override
    def all_questions(self) -> Mapping[str, Question]:
        def plain(call: str, *arguments: Any, then: Callable[[Any], Any] = int) -> Question:
            return Question(call, lambda: then(self.call(call, *arguments)))

        text, pair = partial(plain, then=driver_text), partial(plain, then=_pair)
        memory = partial(plain, "nvmlDeviceGetMemoryInfo")
        pci = partial(plain, "nvmlDeviceGetPciInfo")
        limit, listed = "nvmlDeviceGetPowerManagement", partial(plain, then=_listed)
        return {
            "name": text("nvmlDeviceGetName"),
            "vbios_version": text("nvmlDeviceGetVbiosVersion"),
            "architecture": plain("nvmlDeviceGetArchitecture"),
            "compute_capability": pair("nvmlDeviceGetCudaComputeCapability"),
            "pci_device_id": pci(then=lambda info: f"{info.pciDeviceId:08x}"),
            "memory_mib": memory(then=lambda info: int(info.total) // 2**20),
            "memory_used_mib": memory(then=lambda info: int(info.used) // 2**20),
            "uuid": text("nvmlDeviceGetUUID"),
            "serial": text("nvmlDeviceGetSerial"),
            "pci_address": pci(then=lambda info: driver_text(info.busId)),
            "persistence_mode": plain("nvmlDeviceGetPersistenceMode"),
            "mig_mode": pair("nvmlDeviceGetMigMode"),
            "ecc_mode": pair("nvmlDeviceGetEccMode"),
            "compute_mode": plain("nvmlDeviceGetComputeMode"),
            "power_management_mode": plain(f"{limit}Mode"),
            "power_limit_range_mw": pair(f"{limit}LimitConstraints"),
            "default_power_limit_mw": plain(f"{limit}DefaultLimit"),
            "power_limit_mw": plain(f"{limit}Limit"),
            "enforced_power_limit_mw": plain("nvmlDeviceGetEnforcedPowerLimit"),
            "supported_clocks_mhz": self.clocks(
                "nvmlDeviceGetSupportedMemoryClocks", "nvmlDeviceGetSupportedGraphicsClocks"
            ),
            "gpu_clock_mhz": plain("nvmlDeviceGetClockInfo", 1),
            "memory_clock_mhz": plain("nvmlDeviceGetClockInfo", 2),
            "temperature_c": plain("nvmlDeviceGetTemperature", 0),
            "throttle_reasons": plain("nvmlDeviceGetCurrentClocksThrottleReasons"),
            "clock_event_reasons": plain("nvmlDeviceGetCurrentClocksEventReasons"),
            "performance_state": plain("nvmlDeviceGetPerformanceState"),
            "fan_percent": plain("nvmlDeviceGetFanSpeed"),
            "utilization_percent": plain(
                "nvmlDeviceGetUtilizationRates", then=lambda rates: int(rates.gpu)
            ),
            "compute_processes": listed("nvmlDeviceGetComputeRunningProcesses"),
            "graphics_processes": listed("nvmlDeviceGetGraphicsRunningProcesses"),
            "power_usage_mw": plain("nvmlDeviceGetPowerUsage"),
            "energy_counter_mj": plain("nvmlDeviceGetTotalEnergyConsumption"),
            "power_samples": plain(
                "nvmlDeviceGetSamples", 0, 0, then=lambda samples: len(samples[1])
            ),
            "performance_samples": Question(_SAMPLES, self._samples),
            "platform": self._filled(
                _PLATFORM,
                slot="slotNumber",
                tray="trayIndex",
                host="hostId",
                peer_type="peerType",
                module="moduleId",
            ),
            "fabric": self._filled(
                _FABRIC, state="state", status="status", clique="cliqueId", health="healthMask"
            ),
            "chassis": self._named(
                _PLATFORM,
                "chassisSerialNumber",
                then=lambda text: driver_text(text.partition(b"\0")[0]),
            ),
            "fabric_cluster": self._named(_FABRIC, "clusterUuid"),
            **{
                name: Question(
                    f"nvmlDeviceGetFieldValues({number}, scope {scope})",
                    partial(self.sensor, name),
                )
                for name, (number, scope) in FIELDS.items()
            },
        }


class NvmlDriver(ProbedNode):
    """NVIDIA's GPUs of this machine.

    Raises:
        NoDriverError: The binding is missing, or NVML cannot be initialised.
    """

    gpu = NvmlGpu

    def __init__(self, library: str | None = None, clock: Clock | None = None) -> None:
        try:
            super().__init__(NvmlBackend(library), clock, ("NVML", "NVIDIA", "nvidia-smi"))
        except ImportError:
            raise NoDriverError(
                "nvidia-ml-py is not installed; run `pip install nvidia-ml-py` and try again"
            ) from None

    @override
    def versions(self) -> dict[str, str]:
        try:
            versions = {"binding": f"nvidia-ml-py {version('nvidia-ml-py')}"}
        except PackageNotFoundError:
            versions = {"binding": "nvidia-ml-py of unknown version"}
        for name, call, then in (
            ("driver", "nvmlSystemGetDriverVersion", driver_text),
            ("nvml", "nvmlSystemGetNVMLVersion", driver_text),
            ("cuda_driver", "nvmlSystemGetCudaDriverVersion_v2", _cuda_version),
        ):
            try:
                versions[name] = then(called(self.backend.call, call))
            except CallError as error:
                versions[name] = f"unknown: {error}"
        return versions


def _value(field: Any) -> int | CallError:
    if field.nvmlReturn:
        return call_error(nvml_error(field.nvmlReturn, "nvmlDeviceGetFieldValues"))
    return int(getattr(field.value, _MEMBERS[field.valueType]))


def _pair(pair: Any) -> list[int]:
    return [int(pair[0]), int(pair[1])]


def _listed(processes: Any) -> list[tuple[int, int | None]]:
    """Pid and memory of each process."""
    return [
        (int(process.pid), None if memory in (None, _NO_MEMORY) else memory)
        for process in processes
        for memory in (process.usedGpuMemory,)
    ]


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"

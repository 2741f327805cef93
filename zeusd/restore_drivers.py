"""Vendor library calls for `zeusd restore`, with the standard library only.

NVML is called directly through ctypes. AMD GPUs use zeusd's backend, whose rules are long and which
needs no packages. All errors are `DeviceError`s, as in the daemon.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from zeus_ipc.controls import Control
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import CallOutcome, DeviceError
from zeusd.records import Entry
from zeusd.restore_rule import Value


class RestoreDriver(Protocol):
    """The driver calls that `zeusd restore` needs."""

    def handle(self, uuid: str) -> Any:
        """The handle of the GPU with this UUID."""

    def read_control(self, gpu: Any, control: Control) -> Value:
        """The present value of a control that can be read."""

    def write_control(self, gpu: Any, control: Control, value: Value) -> None:
        """Sets a control."""

    def control_range(self, gpu: Any, control: Control) -> tuple[int, int]:
        """Smallest and largest value that the control takes."""

    def shutdown(self) -> None:
        """Shuts the library down."""


class _Nvml:
    """Calls libnvidia-ml directly."""

    def __init__(self, library: str | None) -> None:
        self._library = ctypes.CDLL(library or "libnvidia-ml.so.1")
        self("nvmlInit_v2")

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        code = Return.FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code != Return.SUCCESS:
            raise nvml_error(code, name)

    def handle(self, uuid: str) -> ctypes.c_void_p:
        gpu = ctypes.c_void_p()
        self("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(gpu))
        return gpu

    def read_control(self, gpu: Any, control: Control) -> Value:
        """The present value of a control that can be read."""
        if control is Control.POWER_PROFILE:
            return tuple(self._profiles(gpu).requested())
        value = ctypes.c_uint()
        self(_GETTERS[control], gpu, ctypes.byref(value))
        return (value.value,)

    def _profiles(self, gpu: Any) -> Any:
        from zeusd.devices.nvml.profiles import ProfileTable

        return ProfileTable(self, gpu)

    def write_control(self, gpu: Any, control: Control, value: Value) -> None:
        if control is Control.POWER_PROFILE:
            self._profiles(gpu).write(value)
            return
        setter, reset = _SETTERS[control]
        if value or reset is None:
            self(setter, gpu, *(ctypes.c_uint(part) for part in value))
        else:
            self(reset, gpu)

    def control_range(self, gpu: Any, control: Control) -> tuple[int, int]:
        """Smallest and largest value that the control takes."""
        low, high = ctypes.c_uint(), ctypes.c_uint()
        self(_RANGES[control], gpu, ctypes.byref(low), ctypes.byref(high))
        return low.value, high.value

    def shutdown(self) -> None:
        self("nvmlShutdown")


def _amd(library: str | None, sysfs: str) -> RestoreDriver:
    """AMD GPUs, through zeusd's own backend, which needs no packages."""
    from zeusd.devices.amd.backend import AmdBackend

    class Amd(AmdBackend):
        def handle(self, uuid: str) -> Any:
            for index in range(self.device_count()):
                gpu = self.device_handle(index)
                if self.uuid(gpu) == uuid:
                    return gpu
            raise DeviceError(CallOutcome.LOST, "handle", f"there is no GPU {uuid}")

    backend = Amd(library, sysfs)
    backend.init()
    return backend


def open_driver(names: Entry, library: str | None) -> RestoreDriver:
    """The driver that a journal names."""
    library = library or names.get("library")
    if names.get("vendor") == "amd":
        return _amd(library, str(names.get("sysfs", "/sys")))
    return _Nvml(library)


_GETTERS = {
    Control.POWER_LIMIT: "nvmlDeviceGetPowerManagementLimit",
    Control.PERSISTENCE_MODE: "nvmlDeviceGetPersistenceMode",
}
_SETTERS = {
    Control.POWER_LIMIT: ("nvmlDeviceSetPowerManagementLimit", None),
    Control.GPU_CLOCKS: ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"),
    Control.MEMORY_CLOCKS: ("nvmlDeviceSetMemoryLockedClocks", "nvmlDeviceResetMemoryLockedClocks"),
    Control.PERSISTENCE_MODE: ("nvmlDeviceSetPersistenceMode", None),
}
_RANGES = {Control.POWER_LIMIT: "nvmlDeviceGetPowerManagementLimitConstraints"}
"""NVML's functions, by control."""

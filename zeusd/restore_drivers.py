"""Vendor library calls for `zeusd restore`, with the standard library only.

NVML is called directly through ctypes. AMD GPUs use zeusd's backend, whose rules are long and which
needs no packages.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

from zeus_ipc.controls import Control
from zeusd.records import Entry
from zeusd.restore_rule import Value

_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 2, 3, 13


class DriverError(Exception):
    """A call failed.

    Attributes:
        invalid: Whether the device does not accept the value.
        missing: Whether the library lacks the function, or the GPU the feature.
    """

    def __init__(self, text: str, invalid: bool, missing: bool = False) -> None:
        super().__init__(text)
        self.invalid = invalid
        self.missing = missing


class RestoreDriver(Protocol):
    """The driver calls that `zeusd restore` needs."""

    def handle(self, uuid: str) -> Any:
        """The handle of the GPU with this UUID."""

    def read(self, gpu: Any, control: str) -> Value:
        """The present value of a control that can be read."""

    def write(self, gpu: Any, control: str, value: Value) -> None:
        """Sets a control."""

    def range(self, gpu: Any, control: str) -> tuple[int, int]:
        """Smallest and largest value that the control takes."""

    def close(self) -> None:
        """Shuts the library down."""


class _Nvml:
    """Calls libnvidia-ml directly."""

    def __init__(self, library: str | None) -> None:
        self._library = ctypes.CDLL(library or "libnvidia-ml.so.1")
        self("nvmlInit_v2")

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        code = _FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code != 0:
            missing = code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
            raise DriverError(f"{name} returned {code}", code == _INVALID_ARGUMENT, missing)

    def handle(self, uuid: str) -> ctypes.c_void_p:
        gpu = ctypes.c_void_p()
        self("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(gpu))
        return gpu

    def read(self, gpu: Any, control: str) -> Value:
        """The present value of a control that can be read."""
        if control == Control.POWER_PROFILE.value:
            return tuple(self._profiles(gpu).requested())
        value = ctypes.c_uint()
        self(_GETTERS[control], gpu, ctypes.byref(value))
        return (value.value,)

    def _profiles(self, gpu: Any) -> Any:
        from zeusd.devices.nvml.profiles import ProfileTable

        return ProfileTable(self, gpu, lambda error: getattr(error, "missing", False))

    def write(self, gpu: Any, control: str, value: Value) -> None:
        if control == Control.POWER_PROFILE.value:
            self._profiles(gpu).write(value)
            return
        setter, reset = _SETTERS[control]
        if value or reset is None:
            self(setter, gpu, *(ctypes.c_uint(part) for part in value))
        else:
            self(reset, gpu)

    def range(self, gpu: Any, control: str) -> tuple[int, int]:
        """Smallest and largest value that the control takes."""
        low, high = ctypes.c_uint(), ctypes.c_uint()
        self(_RANGES[control], gpu, ctypes.byref(low), ctypes.byref(high))
        return low.value, high.value

    def close(self) -> None:
        self("nvmlShutdown")


class _Amd:
    """AMD GPUs, through zeusd's own backend, which needs no packages."""

    def __init__(self, library: str | None, sysfs: str) -> None:
        from zeusd.devices.amd.backend import AmdBackend
        from zeusd.devices.port import DeviceError, Outcome

        self._error, self._invalid = DeviceError, Outcome.INVALID
        self._backend = AmdBackend(library, sysfs)
        with self._translated():
            self._backend.init()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise DriverError(str(error), error.outcome is self._invalid) from None

    def handle(self, uuid: str) -> Any:
        with self._translated():
            for index in range(self._backend.device_count()):
                gpu = self._backend.device_handle(index)
                if self._backend.uuid(gpu) == uuid:
                    return gpu
        raise DriverError(f"there is no GPU {uuid}", invalid=False)

    def read(self, gpu: Any, control: str) -> Value:
        with self._translated():
            return self._backend.read_control(gpu, Control(control))

    def write(self, gpu: Any, control: str, value: Value) -> None:
        with self._translated():
            self._backend.write_control(gpu, Control(control), value)

    def range(self, gpu: Any, control: str) -> tuple[int, int]:
        with self._translated():
            return self._backend.control_range(gpu, Control(control))

    def close(self) -> None:
        with self._translated():
            self._backend.shutdown()


def open_driver(names: Entry, library: str | None) -> RestoreDriver:
    """The driver that a journal names; journals of 0.1 name no vendor, which means NVIDIA."""
    library = library or names.get("library")
    if names.get("vendor") == "amd":
        return _Amd(library, str(names.get("sysfs", "/sys")))
    return _Nvml(library)


_GETTERS = {
    "power_limit": "nvmlDeviceGetPowerManagementLimit",
    "persistence_mode": "nvmlDeviceGetPersistenceMode",
}
_SETTERS = {
    "power_limit": ("nvmlDeviceSetPowerManagementLimit", None),
    "gpu_clocks": ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"),
    "memory_clocks": ("nvmlDeviceSetMemoryLockedClocks", "nvmlDeviceResetMemoryLockedClocks"),
    "persistence_mode": ("nvmlDeviceSetPersistenceMode", None),
}
_RANGES = {"power_limit": "nvmlDeviceGetPowerManagementLimitConstraints"}
"""NVML's functions, by control."""

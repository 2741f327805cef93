"""libamd_smi.so through ctypes: loading, locking, and the calls that zeusd makes.

AMD's Python package is not used, because each release needs the library of its own ROCm and fails
on import with any other.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

from zeusd.devices.amd.codes import Status, amd_error
from zeusd.devices.amd.layouts import BUFFER, MAJORS, SAFE_THREADS, Layouts, layouts_of
from zeusd.devices.port import CallOutcome, DeviceError, driver_text

CANDIDATES = (
    *(f"libamd_smi.so.{major}" for major in reversed(MAJORS)),
    "/opt/rocm/lib/libamd_smi.so",
    "libamd_smi.so",
)
"""Where to look for the library: as the linker finds it, then where ROCm installs it."""

INIT_S = 30.0
"""Time limit for initialising. If the driver hangs, it never returns."""

CALL_S = 10.0
"""How long a call waits for another call that must end first."""

_AMD_GPUS = 2
_GPU = 1

_P = ctypes.c_void_p
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "init": (_U64,),
    "shut_down": (),
    "get_lib_version": (_P,),
    "get_socket_handles": (_P, _P),
    "get_processor_handles": (_P, _P, _P),
    "get_processor_type": (_P, _P),
    "get_gpu_device_bdf": (_P, _P),
    "get_gpu_kfd_info": (_P, _P),
    "get_gpu_asic_info": (_P, _P),
    "get_power_cap_info": (_P, _U32, _P),
    "set_power_cap": (_P, _U32, _U64),
    "get_power_info": (_P, _P),
    "get_energy_count": (_P, _P, _P, _P),
    "get_clock_info": (_P, _U32, _P),
    "get_clk_freq": (_P, _U32, _P),
    "set_gpu_clk_limit": (_P, _U32, _U32, _U64),
    "get_gpu_perf_level": (_P, _P),
    "set_gpu_perf_level": (_P, _U32),
    "get_gpu_od_volt_info": (_P, _P),
    "get_gpu_power_profile_presets": (_P, _U32, _P),
    "set_gpu_power_profile": (_P, _U32, _U64),
    "get_temp_metric": (_P, _U32, _U32, _P),
    "get_gpu_activity": (_P, _P),
    "get_violation_status": (_P, _P),
    "get_gpu_process_list": (_P, _P, _P),
}
"""Argument types of the calls, without the prefix `amdsmi_`. Each returns a u32 status."""


class Buffer:
    """An output buffer that is larger than any version's structure."""

    __slots__ = ("data",)

    def __init__(self, size: int = BUFFER) -> None:
        self.data = ctypes.create_string_buffer(size)

    def number(self, form: str, offset: int = 0) -> int:
        """One integer, in a format of `struct`."""
        value: int = struct.unpack_from(form, self.data, offset)[0]
        return value

    def numbers(self, form: str, offset: int = 0) -> tuple[int, ...]:
        """Several integers, in a format of `struct`."""
        return struct.unpack_from(form, self.data, offset)

    def text(self, offset: int, size: int) -> str:
        """A text that ends with a zero byte."""
        raw = self.data.raw[offset : offset + size].split(b"\0", 1)[0]
        return driver_text(raw)


class Library:
    """The loaded library.

    Args:
        path: The file; None: the first of `CANDIDATES` that loads.

    Attributes:
        version: Its first two numbers; the first is that of its SONAME.
        layouts: The layouts of its structures.

    Raises:
        DeviceError: It was not found, or zeusd does not know the structures of its version.
    """

    def __init__(self, path: str | None = None) -> None:
        self._loaded = _load(path)
        self._functions: dict[str, Any] = {}
        self._guard: threading.Lock | None = threading.Lock()
        version = Buffer()
        self.call("get_lib_version", version.data)
        major, minor = version.numbers("<II")
        self.version = major, minor
        layouts = layouts_of(major)
        if layouts is None:
            raise amd_error(
                Status.LIBRARY_NOT_FOUND,
                "amdsmi_get_lib_version",
                f"{self._loaded._name} is version {major}.{minor}, and zeusd knows versions "
                f"{MAJORS[0]} to {MAJORS[-1]}; update zeusd, or install another ROCm",
            )
        self.layouts: Layouts = layouts
        if self.version >= SAFE_THREADS:
            self._guard = None

    def call(self, name: str, *arguments: Any) -> None:
        """Makes a call.

        Raises:
            DeviceError: It failed, the library lacks it, or another call does not return.
        """
        code = self.status(name, *arguments)
        if code != Status.SUCCESS:
            raise amd_error(code, f"amdsmi_{name}")

    def status(self, name: str, *arguments: Any) -> int:
        """Makes a call, and returns its status.

        Raises:
            DeviceError: The library lacks it, or another call does not return.
        """
        function = self._functions.get(name) or self._function(name)
        guard = self._guard
        if guard is None:
            return int(function(*arguments))
        if not guard.acquire(timeout=CALL_S):
            raise amd_error(
                Status.TIMEOUT,
                f"amdsmi_{name}",
                f"another call into libamd_smi has not returned for {CALL_S:g} s; look at the "
                "kernel log, and for other processes that use the library",
            )
        try:
            return int(function(*arguments))
        finally:
            guard.release()

    def read(self, name: str, handle: Any, *arguments: Any) -> Buffer:
        """Makes a call that fills a structure."""
        buffer = Buffer()
        self.call(name, handle, *arguments, buffer.data)
        return buffer

    def handles(self, name: str, *of: Any) -> list[int]:
        """The handles that one of the two enumerating calls lists."""
        count = _U32(0)
        self.call(name, *of, ctypes.byref(count), None)
        room = count.value + 64  # the library may count devices that appeared since
        handles = (_P * room)()
        count = _U32(room)
        self.call(name, *of, ctypes.byref(count), handles)
        return [handle for handle in handles[: min(count.value, room)] if handle]

    def gpus_of(self, socket: int) -> list[int]:
        """Handles of a socket's GPU partitions."""
        gpus = []
        for handle in self.handles("get_processor_handles", socket):
            kind = self.read("get_processor_type", handle).number("<I")
            if kind == _GPU:
                gpus.append(handle)
        return gpus

    def _function(self, name: str) -> Any:
        try:
            function = getattr(self._loaded, f"amdsmi_{name}")
        except AttributeError:
            raise amd_error(Status.NO_SYMBOL, f"amdsmi_{name}") from None
        function.argtypes, function.restype = _SIGNATURES[name], _U32
        self._functions[name] = function
        return function


class Opener:
    """Loads and initialises the library on a thread, because the call may never return.

    Args:
        path: The library; None: the first one found.
        within_s: Time limit.
    """

    def __init__(self, path: str | None, within_s: float = INIT_S) -> None:
        self._path = path
        self._within_s = within_s
        self._thread: threading.Thread | None = None
        self._result: Library | DeviceError | None = None

    def open(self) -> Library:
        """Returns the initialised library.

        Raises:
            DeviceError: It cannot be loaded or initialised in time. If an attempt is still running,
                the next call waits for it and does not start another.
        """
        if self._thread is None:
            self._result = None
            self._thread = threading.Thread(target=self._run, name="amdsmi-init", daemon=True)
            self._thread.start()
        self._thread.join(self._within_s)
        if self._thread.is_alive():
            raise amd_error(
                Status.TIMEOUT,
                "amdsmi_init",
                f"initialising libamd_smi has not returned for {self._within_s:g} s; the amdgpu "
                "driver may hang, look at the kernel log",
            )
        self._thread = None
        if isinstance(self._result, Library):
            return self._result
        raise self._result or amd_error(Status.INIT_ERROR, "amdsmi_init")

    def _run(self) -> None:
        try:
            library = Library(self._path)
            library.call("init", _AMD_GPUS)
            self._result = library
        except DeviceError as error:
            self._result = error


def _load(path: str | None) -> Any:
    paths: Sequence[str] = CANDIDATES if path is None else (path,)
    text = ""
    for candidate in paths:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            if path is not None:
                text = f"cannot load {path} ({error})"
    raise amd_error(Status.LIBRARY_NOT_FOUND, "amdsmi_init", text, CallOutcome.TRANSIENT)

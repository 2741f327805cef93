"""Status codes of libamd_smi, and the `CallOutcome` of each."""

from __future__ import annotations

from zeusd.devices.port import CallOutcome, DeviceError


class Status:
    """Codes that zeusd handles (amdsmi.h, amdsmi_status_t)."""

    SUCCESS = 0
    INVALID = 1
    NOT_SUPPORTED = 2
    NO_SYMBOL = 5
    DRM_ERROR = 6
    TIMEOUT = 8
    RETRY = 9
    NO_PERMISSION = 10
    INTERRUPTED = 11
    IO = 12
    FILE = 14
    OUT_OF_RESOURCES = 15
    OUT_OF_BOUNDS = 17
    INIT_ERROR = 18
    BUSY = 30
    NOT_FOUND = 31
    NOT_INITIALISED = 32
    DRIVER_NOT_LOADED = 34
    MORE_DATA = (39, 57)
    """Its number changed with library 26."""
    UNEXPECTED_SIZE = 42
    UNEXPECTED_DATA = 43
    LIBRARY_NOT_FOUND = 4
    UNKNOWN = 0xFFFFFFFF


_OUTCOMES = {
    Status.INVALID: CallOutcome.INVALID,
    Status.OUT_OF_BOUNDS: CallOutcome.INVALID,
    53: CallOutcome.INVALID,
    Status.NOT_SUPPORTED: CallOutcome.UNSUPPORTED,
    3: CallOutcome.UNSUPPORTED,
    Status.NO_SYMBOL: CallOutcome.UNSUPPORTED,
    48: CallOutcome.UNSUPPORTED,
    49: CallOutcome.UNSUPPORTED,
    55: CallOutcome.UNSUPPORTED,
    Status.NO_PERMISSION: CallOutcome.DENIED,
    Status.TIMEOUT: CallOutcome.BUSY,
    Status.RETRY: CallOutcome.BUSY,
    Status.INTERRUPTED: CallOutcome.BUSY,
    Status.BUSY: CallOutcome.BUSY,
    50: CallOutcome.BUSY,
}
"""Every other code is `TRANSIENT`."""

GONE = frozenset({Status.NOT_SUPPORTED, Status.DRM_ERROR, Status.IO, Status.FILE, Status.NOT_FOUND})
"""Codes of a GPU that may have left the bus. If it has, its folder in sysfs is gone too."""

_TEXTS = {
    1: "an argument is invalid",
    2: "not supported by this GPU or driver, or not at the moment",
    3: "not implemented by this library",
    4: "libamd_smi.so was not found; install ROCm's amd-smi-lib, or set library under [amd]",
    5: "this libamd_smi lacks the function",
    6: "the kernel's graphics driver reported an error",
    8: "the driver timed out",
    9: "the driver asks to try again",
    10: "insufficient permissions: libamd_smi sets only for root (capabilities do not count)",
    11: "the call was interrupted",
    12: "an input or output error occurred",
    14: "a file of the driver cannot be read",
    17: "the value is out of bounds",
    18: "libamd_smi could not be initialised",
    30: "the GPU is busy",
    31: "not found",
    32: "libamd_smi is not initialised",
    34: "the amdgpu driver is not loaded",
    42: "the library read data of an unexpected size; it may be older than the GPU or its driver",
    43: "the library read unexpected data; it may be older than the GPU or its driver",
    Status.UNKNOWN: "an internal error occurred, as where sysfs is mounted read-only",
}


def amd_error(
    code: int, call: str, text: str = "", outcome: CallOutcome | None = None
) -> DeviceError:
    """The error of a call of libamd_smi that returned `code`."""
    said = text or _TEXTS.get(code, "unknown error")
    kind = outcome or _OUTCOMES.get(code, CallOutcome.TRANSIENT)
    return DeviceError(kind, call, f"{said} (AMD SMI {code})", code)

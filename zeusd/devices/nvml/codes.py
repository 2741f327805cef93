"""NVML's return codes, and the `CallOutcome` of each."""

from __future__ import annotations

from zeusd.devices.port import CallOutcome, DeviceError


class Return:
    """NVML return codes that zeusd handles (nvml.h, nvmlReturn_t)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    UNKNOWN = 999


_TEXTS: dict[int, str] = {
    1: "NVML is not initialised",
    2: "invalid argument",
    3: "not supported by this GPU or driver",
    4: "insufficient permissions",
    6: "not found",
    7: "a buffer is too small",
    9: "the NVIDIA driver is not loaded",
    10: "the driver timed out",
    12: "libnvidia-ml.so.1 was not found",
    13: "this driver's libnvidia-ml lacks the function",
    15: "the GPU has fallen off the bus",
    16: "the GPU requires a reset",
    17: "the control device was blocked by the operating system",
    18: "the driver and libnvidia-ml versions differ",
    19: "the GPU is in use",
    20: "out of memory",
    25: "the structure version is not known to this driver",
    26: "the function is deprecated",
    999: "an internal driver error occurred",
}


_COMMANDS = {
    Return.NO_PERMISSION: "sudo systemctl restart zeusd",
    Return.DRIVER_NOT_LOADED: "sudo modprobe nvidia",
    Return.LIBRARY_NOT_FOUND: "ldconfig -p | grep libnvidia-ml",
    Return.LIB_RM_VERSION_MISMATCH: "sudo reboot",
}
"""What mends it; for every other code, the kernel's log says more."""

_OUTCOMES = {
    Return.INVALID_ARGUMENT: CallOutcome.INVALID,
    Return.NOT_SUPPORTED: CallOutcome.UNSUPPORTED,
    Return.FUNCTION_NOT_FOUND: CallOutcome.UNSUPPORTED,
    Return.ARGUMENT_VERSION_MISMATCH: CallOutcome.UNSUPPORTED,
    Return.DEPRECATED: CallOutcome.UNSUPPORTED,
    Return.NO_PERMISSION: CallOutcome.DENIED,
    Return.IN_USE: CallOutcome.BUSY,
    Return.TIMEOUT: CallOutcome.BUSY,
    Return.GPU_IS_LOST: CallOutcome.LOST,
    Return.RESET_REQUIRED: CallOutcome.LOST,
}
"""Every other code is `TRANSIENT`."""


def nvml_error(code: int, call: str, text: str = "") -> DeviceError:
    """The error of an NVML call that returned `code`."""
    said = text or _TEXTS.get(code, "unknown error")
    outcome = _OUTCOMES.get(code, CallOutcome.TRANSIENT)
    return DeviceError(outcome, call, f"{said} (NVML {code})", code, _COMMANDS.get(code, ""))

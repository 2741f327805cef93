"""All exceptions of `zeus`, in one small tree."""

from __future__ import annotations

from zeus_common.text import named
from zeus_ipc.errors import ErrorCode, SeveralGpusFailed, ZeusIpcError


class ZeusBaseError(Exception):
    """Base of all errors of this package.

    Attributes:
        message: One sentence: what failed, why, and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ZeusArgumentError(ZeusBaseError, TypeError, ValueError):
    """An argument has a wrong type or value; the message says what to give."""


class PipelineFrequencyError(ZeusBaseError, ValueError):
    """A pipeline's profile, plan or request is not valid; the message says what and where."""


class ZeusBaseGPUError(ZeusBaseError):
    """An operation on a GPU failed.

    Attributes:
        nvml_code: NVML's return code (`nvmlReturn_t`) where NVML refused, else None.
    """

    def __init__(self, message: str, nvml_code: int | None = None) -> None:
        super().__init__(message)
        self.nvml_code = nvml_code


class ZeusdError(ZeusBaseGPUError):
    """zeusd refused, or cannot be reached."""


class ZeusGPULeaseHeldError(ZeusdError):
    """Another process holds the lease on this control."""


class ZeusGPULeaseExpiredError(ZeusdError):
    """This process lost its lease on this control."""


class ZeusGPUInitError(ZeusBaseGPUError):
    """The GPUs cannot be reached or identified."""


class ZeusGPUHeterogeneousError(ZeusBaseGPUError, ValueError):
    """The visible GPUs are not all of one model."""


class ZeusGPUInvalidArgError(ZeusBaseGPUError):
    """An argument is outside the GPU's range (NVML 2)."""


class ZeusGPUNotSupportedError(ZeusBaseGPUError):
    """The GPU or its driver does not offer this (NVML 3)."""


class ZeusGPUNoPermissionError(ZeusBaseGPUError):
    """The driver, or the site's policy, does not allow it (NVML 4)."""


class ZeusGPUAlreadyInitializedError(ZeusBaseGPUError):
    """NVML 5."""


class ZeusGPUNotFoundError(ZeusBaseGPUError):
    """There is no such GPU (NVML 6)."""


class ZeusGPUInsufficientSizeError(ZeusBaseGPUError):
    """NVML 7."""


class ZeusGPUInsufficientPowerError(ZeusBaseGPUError):
    """A power cable is not attached properly (NVML 8)."""


class ZeusGPUDriverNotLoadedError(ZeusBaseGPUError):
    """NVML 9."""


class ZeusGPUTimeoutError(ZeusBaseGPUError):
    """The driver, or zeusd, did not answer in time (NVML 10)."""


class ZeusGPUIRQError(ZeusBaseGPUError):
    """NVML 11."""


class ZeusGPULibraryNotFoundError(ZeusBaseGPUError):
    """NVML 12."""


class ZeusGPUFunctionNotFoundError(ZeusBaseGPUError):
    """The driver is too old for this (NVML 13)."""


class ZeusGPUCorruptedInfoROMError(ZeusBaseGPUError):
    """NVML 14."""


class ZeusGPULostError(ZeusBaseGPUError):
    """The GPU fell off the bus (NVML 15)."""


class ZeusGPUResetRequiredError(ZeusBaseGPUError):
    """The GPU needs a reset (NVML 16)."""


class ZeusGPUOperatingSystemError(ZeusBaseGPUError):
    """The operating system blocked the device (NVML 17)."""


class ZeusGPULibRMVersionMismatchError(ZeusBaseGPUError):
    """Driver and library differ in version (NVML 18)."""


class ZeusGPUInUseError(ZeusBaseGPUError):
    """NVML 19."""


class ZeusGPUMemoryError(ZeusBaseGPUError):
    """NVML 20."""


class ZeusGPUDeprecatedError(ZeusBaseGPUError):
    """NVML 26."""


class ZeusGPUUnknownError(ZeusBaseGPUError):
    """Any other return code of NVML; see `nvml_code`."""


_BY_NVML: dict[int, type[ZeusBaseGPUError]] = {
    2: ZeusGPUInvalidArgError,
    3: ZeusGPUNotSupportedError,
    4: ZeusGPUNoPermissionError,
    5: ZeusGPUAlreadyInitializedError,
    6: ZeusGPUNotFoundError,
    7: ZeusGPUInsufficientSizeError,
    8: ZeusGPUInsufficientPowerError,
    9: ZeusGPUDriverNotLoadedError,
    10: ZeusGPUTimeoutError,
    11: ZeusGPUIRQError,
    12: ZeusGPULibraryNotFoundError,
    13: ZeusGPUFunctionNotFoundError,
    14: ZeusGPUCorruptedInfoROMError,
    15: ZeusGPULostError,
    16: ZeusGPUResetRequiredError,
    17: ZeusGPUOperatingSystemError,
    18: ZeusGPULibRMVersionMismatchError,
    19: ZeusGPUInUseError,
    20: ZeusGPUMemoryError,
    26: ZeusGPUDeprecatedError,
}

_BY_CODE: dict[str, type[ZeusBaseGPUError]] = {
    ErrorCode.OUT_OF_RANGE: ZeusGPUInvalidArgError,
    ErrorCode.NOT_SUPPORTED: ZeusGPUNotSupportedError,
    ErrorCode.PERMISSION_DENIED: ZeusGPUNoPermissionError,
    ErrorCode.UNKNOWN_GPU: ZeusGPUNotFoundError,
    ErrorCode.GPU_LOST: ZeusGPULostError,
    ErrorCode.DEADLINE_EXCEEDED: ZeusGPUTimeoutError,
    ErrorCode.LEASE_HELD: ZeusGPULeaseHeldError,
    ErrorCode.RESTORE_PENDING: ZeusGPULeaseHeldError,
    ErrorCode.LEASE_EXPIRED: ZeusGPULeaseExpiredError,
    ErrorCode.UNCHANGED: ZeusGPUUnknownError,
    ErrorCode.DEVICE_BUSY: ZeusGPUUnknownError,
    ErrorCode.DEVICE_ERROR: ZeusGPUUnknownError,
}


GPU_INDICES: dict[str, int] = {}
"""The framework's index of each GPU that this process sees, by UUID, once it has been asked."""


def from_ipc(error: ZeusIpcError) -> ZeusBaseGPUError:
    """The exception of this package for one of `zeus_ipc`, with names of users and indices of GPUs.
    NVML's code is kept.
    """
    message = named(error.message, GPU_INDICES)
    if isinstance(error, SeveralGpusFailed):
        first = from_ipc(next(iter(error.errors.values())))
        return type(first)(message, first.nvml_code)
    if error.device_code is not None:
        cls = _BY_NVML.get(error.device_code, ZeusGPUUnknownError)
    else:
        cls = _BY_CODE.get(error.code, ZeusdError)
    return cls(message, error.device_code)

"""The GPU exceptions, where other code looks for them."""

from zeus.exceptions import (
    ZeusBaseError,
    ZeusBaseGPUError,
    ZeusdError,
    ZeusGPUInitError,
    ZeusGPUInvalidArgError,
    ZeusGPULostError,
    ZeusGPUNoPermissionError,
    ZeusGPUNotFoundError,
    ZeusGPUNotSupportedError,
    ZeusGPUUnknownError,
)

__all__ = [
    "ZeusBaseError",
    "ZeusBaseGPUError",
    "ZeusGPUInitError",
    "ZeusGPUInvalidArgError",
    "ZeusGPULostError",
    "ZeusGPUNoPermissionError",
    "ZeusGPUNotFoundError",
    "ZeusGPUNotSupportedError",
    "ZeusGPUUnknownError",
    "ZeusdError",
]

"""NVIDIA's workload power profiles, by direct calls of libnvidia-ml, for the backend and `zeusd
restore`.

Standard library only. One mask per GPU holds the profiles that all programs have requested, without
saying which program requested which. So zeusd adds profiles to the mask and removes them, and never
overwrites it. The structures are those of nvml.h (API 13).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from zeusd.devices.port import CallOutcome, DeviceError, WorkloadProfile, after_a_write

Call = Callable[..., None]
"""Calls a function of the library by its name; raises `DeviceError`."""

_PREFIX = "nvmlDeviceWorkloadPowerProfile"
_MOST = 255
_CLEAR, _SET = 0, 1
"""nvmlPowerProfileOperation_t. 2 would overwrite the requests of other programs."""

_Mask = ctypes.c_uint32 * 8


class _Info(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("profile", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("conflicts", _Mask),
    ]


class _Table(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("valid", _Mask),
        ("profiles", _Info * _MOST),
    ]


class _Current(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("valid", _Mask),
        ("requested", _Mask),
        ("enforced", _Mask),
    ]


class _Requested(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("mask", _Mask)]


class _Update(ctypes.Structure):
    """A structure without a version: its first field is the operation."""

    _fields_ = [("operation", ctypes.c_uint32), ("mask", _Mask)]


class ProfileTable:
    """The profiles that one GPU offers, and which of them are requested.

    Args:
        call: Calls the library.
        gpu: The GPU's handle.

    Attributes:
        profiles: The profiles that it offers, by number.
    """

    def __init__(self, call: Call, gpu: Any) -> None:
        self._call = call
        self._gpu = gpu
        table = _versioned(_Table)
        call(f"{_PREFIX}GetProfilesInfo", gpu, ctypes.byref(table))
        self._number = {bit: int(table.profiles[bit].profile) for bit in _bits(table.valid)}
        self._bit = {number: bit for bit, number in self._number.items()}
        self.profiles = sorted(
            WorkloadProfile(
                number,
                int(table.profiles[bit].priority),
                tuple(sorted(self._numbers(table.profiles[bit].conflicts))),
            )
            for bit, number in self._number.items()
        )

    def requested(self) -> tuple[int, ...]:
        """Profiles that any program has requested."""
        return tuple(sorted(self._numbers(self._current().requested)))

    def enforced(self) -> tuple[int, ...]:
        """The requested profiles that are in force."""
        return tuple(sorted(self._numbers(self._current().enforced)))

    def write(self, wanted: tuple[int, ...]) -> None:
        """Changes the requested profiles to these: removes some, then adds some."""
        before = set(self.requested())
        leaving = before - set(wanted)
        self._change(_CLEAR, leaving)
        with after_a_write() if leaving else contextlib.nullcontext():
            self._change(_SET, set(wanted) - before)

    def _change(self, operation: int, numbers: set[int]) -> None:
        if not numbers:
            return
        mask = _mask(self._bit.get(number, number) for number in numbers)
        update = _Update(operation, mask)
        try:
            self._call(f"{_PREFIX}UpdateProfiles_v1", self._gpu, ctypes.byref(update))
        except DeviceError as error:
            if error.outcome is not CallOutcome.UNSUPPORTED:
                raise
            older = _versioned(_Requested)
            older.mask = mask
            verb = "Set" if operation == _SET else "Clear"
            self._call(f"{_PREFIX}{verb}RequestedProfiles", self._gpu, ctypes.byref(older))

    def _current(self) -> Any:
        current = _versioned(_Current)
        self._call(f"{_PREFIX}GetCurrentProfiles", self._gpu, ctypes.byref(current))
        return current

    def _numbers(self, mask: Any) -> list[int]:
        return [self._number.get(bit, bit) for bit in _bits(mask)]


def _versioned(kind: Any) -> Any:
    """An empty structure with its version: its size, and 1 in the highest byte."""
    made = kind()
    made.version = ctypes.sizeof(kind) | 1 << 24
    return made


def _bits(mask: Any) -> list[int]:
    return [bit for bit in range(_MOST) if mask[bit // 32] >> bit % 32 & 1]


def _mask(bits: Any) -> Any:
    made = _Mask()
    for bit in bits:
        made[bit // 32] |= 1 << bit % 32
    return made

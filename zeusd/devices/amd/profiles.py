"""AMD's power profile presets, behind the control of workload power profiles.

A GPU has one preset at a time, so a set of them has at most one member; none is the default of the
driver. The library sets performance level `manual` with it, and level `auto` drops it.
"""

from __future__ import annotations

from zeus_ipc.controls import AMD_PROFILES, MAX_PROFILE
from zeusd.devices.amd import layouts
from zeusd.devices.amd.codes import Status, amd_error
from zeusd.devices.amd.library import Library
from zeusd.devices.port import CallOutcome, DeviceError, WorkloadProfile

_CALL = "set_gpu_power_profile"
_DEFAULT = 64
"""AMDSMI_PWR_PROF_PRST_BOOTUP_DEFAULT."""

_CUSTOM = min(AMD_PROFILES)
"""Its parameters are someone else's, so it is not offered."""


class Presets:
    """The result of amdsmi_get_gpu_power_profile_presets.

    Attributes:
        offered: Numbers of the presets that the GPU has, see `AMD_PROFILES`.
        mask: The present one, as the library has it.
        requested: The present one; empty: the default.
    """

    def __init__(self, library: Library, gpu: int) -> None:
        presets = library.read("get_gpu_power_profile_presets", gpu, 0)
        available = presets.number("<Q", layouts.PRESETS)
        self.mask = presets.number("<Q", layouts.PRESET)
        self.offered = [
            profile
            for profile in AMD_PROFILES
            if profile != _CUSTOM and available & _mask_of(profile)
        ]
        number = _CUSTOM + self.mask.bit_length() - 1
        known = self.mask not in (0, _DEFAULT) and number <= MAX_PROFILE
        self.requested = (number,) if known and self.mask == _mask_of(number) else ()

    @property
    def profiles(self) -> list[WorkloadProfile]:
        """The presets, each of which excludes all others."""
        return [
            WorkloadProfile(one, 0, tuple(other for other in self.offered if other != one))
            for one in self.offered
        ]


def write_profile(library: Library, gpu: int, value: tuple[int, ...]) -> None:
    """Sets one preset, or the default.

    Raises:
        DeviceError: The GPU has no such preset; or someone else has set another one, which would be
            lost.
    """
    presets = Presets(library, gpu)
    if not presets.offered:
        raise amd_error(Status.NOT_SUPPORTED, f"amdsmi_{_CALL}", "this GPU has no power profiles")
    if len(value) > 1:
        names = ", ".join(AMD_PROFILES.get(one, str(one)) for one in value)
        text = (
            f"an AMD GPU has one profile at a time, not {names}; `amd-smi reset --profile` ends "
            "one that someone else has set"
        )
        raise amd_error(Status.INVALID, f"amdsmi_{_CALL}", text)
    if set(value) - {*presets.offered}:
        raise amd_error(Status.INVALID, f"amdsmi_{_CALL}", "this GPU has no such power profile")
    set_preset(library, gpu, _mask_of(value[0]) if value else _DEFAULT)


def set_preset(library: Library, gpu: int, mask: int) -> None:
    """Sets a preset, and with it performance level `manual`."""
    level = library.read("get_gpu_perf_level", gpu).number("<I")
    code = library.status(_CALL, gpu, 0, mask)
    if code == Status.SUCCESS:
        return
    library.status("set_gpu_perf_level", gpu, level)  # a refused write leaves it at manual
    if code == Status.NOT_SUPPORTED:
        text = "the driver refused the power profile"
        raise amd_error(code, f"amdsmi_{_CALL}", text, CallOutcome.TRANSIENT)
    raise amd_error(code, f"amdsmi_{_CALL}")


def preset_to_keep(library: Library, gpu: int) -> int:
    """The preset that level `auto` would drop; 0: none, or not known: no failure of an optional
    read may keep clocks from being unlocked.
    """
    try:
        presets = Presets(library, gpu)
    except DeviceError:
        return 0
    return presets.mask if presets.requested else 0


def _mask_of(number: int) -> int:
    return 1 << (number - _CUSTOM)

"""Offsets of the fields that zeusd reads in libamd_smi's structures, by the library's version.

Structures changed within a SONAME and between them, and the library writes as many bytes as its own
headers say. So every buffer is larger than any version's structure (`BUFFER`), and fields are read
by offset. Offsets are from the headers of releases 6.1 to 10.1. zeusd prefers calls whose
structures never changed, and reads the rest from sysfs.
"""

from __future__ import annotations

from dataclasses import dataclass

BUFFER = 8192
"""Bytes of an output buffer; the largest structure that zeusd reads has 6016."""

MAJORS = (24, 25, 26, 27)
"""Versions whose layouts are known: ROCm 6.1 to 6.3, 6.4, 7, and 10."""

SAFE_THREADS = (26, 2)
"""First version whose calls may overlap. Earlier ones crash, or return another GPU's values."""

ABSENT_32 = (0xFFFF, 0xFFFFFFFF)
"""Value of a field that the driver does not have."""

CAP, CAP_DEFAULT, CAP_MIN, CAP_MAX = 0, 8, 24, 32
"""amdsmi_power_cap_info_t: u64, microwatts. The same in all versions."""

CLOCK = 0
"""amdsmi_clk_info_t: u32, MHz. The same in all versions."""

LEVEL_COUNT, LEVELS, LEVELS_MAX = 4, 16, 33
"""amdsmi_frequencies_t: u32, and u64 Hz each."""

SCLK, MCLK, SCLK_LIMITS, MCLK_LIMITS = 0, 16, 32, 48
"""amdsmi_od_volt_freq_data_t as the library fills it: lower and upper u64, in Hz."""

PRESETS, PRESET = 0, 8
"""amdsmi_power_profile_status_t: u64 mask of all presets, and u64 of the present one."""

KFD_NODE = 8
"""amdsmi_kfd_info_t: u32, number of the partition's node in /sys/class/kfd/kfd/topology."""

VIOLATIONS = 16
"""amdsmi_violation_status_t: u64 each, how many samples the firmware has taken, and how many of
them were in violation, in the order of `Layouts.violations`. The same in all versions."""

ACTIVITY = 0
"""amdsmi_engine_usage_t: u32, percent."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """The offsets that differ between versions.

    Attributes:
        power: Offsets of the instant and average socket power, u32 W.
        violations: Offsets of the active violations: prochot, power, socket, regulators, memory.
        process: Size of a process's entry, and offsets of its pid (u32) and memory (u64).
    """

    power: tuple[int, int]
    violations: int
    process: tuple[int, int, int]


def layouts_of(major: int) -> Layouts | None:
    """The layouts of a library version; None: the version is not known.

    The first number of amdsmi_get_lib_version is that of the SONAME in all versions, even if the
    structure calls it a year.
    """
    if major == 24:
        return Layouts(power=(0, 4), violations=104, process=(224, 32, 40))
    if major in MAJORS:
        return Layouts(power=(8, 12), violations=120, process=(704, 256, 264))
    return None

"""Checks of the doctor below zeusd, for AMD GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from zeusctl.reports import Check
from zeusd.devices.amd.library import CANDIDATES
from zeusd.devices.amd.sysfs import driver_loaded, driver_version
from zeusd.devices.vendors import AMD, NVIDIA, SYSFS, has_gpu


def gpus_are_amds(sysfs: str = SYSFS) -> bool:
    """Whether zeusd would look for AMD GPUs on this machine."""
    return has_gpu(sysfs, AMD) and not has_gpu(sysfs, NVIDIA)


def vendors_check(sysfs: str = SYSFS) -> Iterator[Check]:
    """Returns a note if the node has GPUs of two vendors: zeusd manages those of one."""
    if has_gpu(sysfs, AMD) and has_gpu(sysfs, NVIDIA):
        yield Check(
            name="vendors",
            state="note",
            found="this node has NVIDIA and AMD GPUs; zeusd manages those of one vendor",
            remedy="those are NVIDIA's, unless you set library under [amd] in zeusd.toml",
        )


def amd_checks(sysfs: str = SYSFS, libraries: Sequence[str] = CANDIDATES) -> tuple[Check, Check]:
    """Checks driver and library."""
    driver = Check(
        name="driver", state="ok", found=f"amdgpu {driver_version(sysfs)} is loaded", remedy=""
    )
    if not driver_loaded(sysfs):
        driver = Check(
            name="driver",
            state="fault",
            found="the amdgpu driver is not loaded",
            remedy="install it, or `modprobe amdgpu`",
        )
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return driver, Check(
            name="library", state="ok", found=f"{library} can be loaded", remedy=""
        )
    return driver, Check(
        name="library",
        state="fault",
        found="no libamd_smi of a known version can be loaded",
        remedy="install ROCm's amd-smi-lib, or set library under [amd] in zeusd.toml",
    )

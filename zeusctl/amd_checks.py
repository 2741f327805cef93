"""What `zeusctl doctor` looks at below zeusd where the GPUs are AMD's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from zeusctl.reports import Check
from zeusd.devices.amd.library import CANDIDATES
from zeusd.devices.amd.sysfs import driver_loaded, driver_version
from zeusd.devices.vendors import AMD, NVIDIA, SYSFS, has_gpu


def gpus_are_amds(sysfs: str = SYSFS) -> bool:
    """Whether zeusd would look for AMD's GPUs on this machine."""
    return has_gpu(sysfs, AMD) and not has_gpu(sysfs, NVIDIA)


def vendors_check(sysfs: str = SYSFS) -> Iterator[Check]:
    """A note where the node has GPUs of two vendors, of which zeusd manages one's."""
    if has_gpu(sysfs, AMD) and has_gpu(sysfs, NVIDIA):
        yield Check(
            name="vendors",
            state="note",
            found="this node has GPUs of NVIDIA and of AMD; one zeusd manages those of one vendor",
            remedy="NVIDIA's are managed, unless library under [amd] in zeusd.toml names AMD's",
        )


def amd_checks(sysfs: str = SYSFS, libraries: Sequence[str] = CANDIDATES) -> tuple[Check, Check]:
    """Driver and library."""
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

"""Checks of the doctor on the machine: AMD's driver, and what prevents correct accounting."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeus_ipc.checks import Check, fault, note, ok
from zeusd.devices.amd.library import CANDIDATES
from zeusd.devices.amd.sysfs import driver_loaded, driver_version
from zeusd.devices.vendors import AMD, NVIDIA, SYSFS, has_gpu

SLURM_CONF = "/etc/slurm/slurm.conf"
MOUNTS = "/proc/self/mounts"


def accounting_checks(slurm_conf: str = SLURM_CONF, mounts: str = MOUNTS) -> Iterator[Check]:
    """Yields a check for each problem; nothing if all is well."""
    flags = _setting(slurm_conf, "prologflags")
    if flags is not None and "contain" not in flags.lower().split(","):
        yield note(
            "slurm",
            f"{slurm_conf} lacks PrologFlags=Contain: a job's control group may vanish between its "
            "steps, and its GPUs are then charged to nobody",
            "set PrologFlags=Contain",
        )
    hidden = [line for line in _lines(mounts) if " proc " in line and "hidepid=" in line]
    if hidden and "hidepid=0" not in hidden[0] and "hidepid=off" not in hidden[0]:
        yield note(
            "processes",
            "/proc is mounted with hidepid: whose a process is may be hidden from zeusd",
            "give zeusd's group access with the mount option gid=",
        )


def _setting(path: str, name: str) -> str | None:
    """Returns a setting of slurm.conf: empty if it is not set, None if there is no such file."""
    if not Path(path).is_file():
        return None
    found = ""
    for line in _lines(path):
        key, _, value = line.partition("#")[0].partition("=")
        if key.strip().lower() == name:
            found = value.strip()
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def gpus_are_amds(sysfs: str = SYSFS) -> bool:
    """Whether zeusd would look for AMD GPUs on this machine."""
    return has_gpu(sysfs, AMD) and not has_gpu(sysfs, NVIDIA)


def vendors_check(sysfs: str = SYSFS) -> Iterator[Check]:
    """Returns a note if the node has GPUs of two vendors: zeusd manages those of one."""
    if has_gpu(sysfs, AMD) and has_gpu(sysfs, NVIDIA):
        yield note(
            "vendors",
            "this node has NVIDIA and AMD GPUs; zeusd manages those of one vendor",
            "those are NVIDIA's, unless you set library under [amd] in zeusd.toml",
        )


def amd_checks(sysfs: str = SYSFS, libraries: Sequence[str] = CANDIDATES) -> tuple[Check, Check]:
    """Checks driver and library."""
    driver = fault("driver", "the amdgpu driver is not loaded", "install it, or `modprobe amdgpu`")
    if driver_loaded(sysfs):
        driver = ok("driver", f"amdgpu {driver_version(sysfs)} is loaded")
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return driver, ok("library", f"{library} can be loaded")
    return driver, fault(
        "library",
        "no libamd_smi of a known version can be loaded",
        "install ROCm's amd-smi-lib, or set library under [amd] in zeusd.toml",
    )

"""Checks of the doctor on the machine: AMD's driver, what prevents correct accounting, and programs
of others that set limits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zeus_ipc.checks import Check, fault, note, ok
from zeus_ipc.processes import PROC
from zeusctl.exits import CommandError
from zeusctl.slurm import read_settings
from zeusd.devices.amd.library import CANDIDATES
from zeusd.devices.amd.sysfs import driver_loaded, driver_version
from zeusd.devices.vendors import AMD, NVIDIA, SYSFS, has_gpu

MOUNTS = Path("/proc/self/mounts")

DYNAMO = b"power_agent.py"
"""The program of the Power Agent of NVIDIA Dynamo, a DaemonSet that sees the node's processes."""


def accounting_checks(
    environment: Mapping[str, str] = os.environ, root: str = "/", mounts: Path = MOUNTS
) -> Iterator[Check]:
    """Yields a check for each problem; nothing if all is well."""
    try:
        path, settings = read_settings(environment, root)
    except CommandError as error:
        yield note("slurm", str(error), "ask as root")
    else:
        flags = {*settings.get("prologflags", "").lower().split(",")}
        if path.is_file() and not {"contain", "runinjob", "x11"} & flags:  # these imply it
            yield note(
                "slurm",
                f"{path} lacks PrologFlags=Contain: a job's control group may vanish between its "
                "steps, and its GPUs are then charged to nobody",
                "set PrologFlags=Contain",
            )
        if "gpufreqdef" in settings:
            yield note(
                "slurm",
                f"{path} sets GpuFreqDef={settings['gpufreqdef']}: where Slurm itself sets clocks "
                "(AutoDetect=nvml or rsmi), it resets those of all GPUs of the node when a job "
                "ends, also clocks under a lease",
                "delete it; what a job asks with --gpu-freq is set and restored by zeusd",
            )
    lines = mounts.read_text().splitlines()
    hidden = [line for line in lines if " proc " in line and "hidepid=" in line]
    if hidden and "hidepid=0" not in hidden[0] and "hidepid=off" not in hidden[0]:
        yield note(
            "processes",
            "/proc is mounted with hidepid: whose a process is may be hidden from zeusd",
            "give zeusd's group access with the mount option gid=",
        )


def other_agents_check(proc: Path = PROC) -> Iterator[Check]:
    """Yields a note if a known program runs here that sets power limits too."""
    for command in sorted(proc.glob("[0-9]*/cmdline")):
        try:
            python, *words = map(os.path.basename, command.read_bytes().split(b"\0"))
        except OSError:
            continue  # it has ended
        if python.startswith(b"python") and DYNAMO in words:
            yield note(
                "others",
                f"Dynamo's Power Agent (process {command.parent.name}) sets power limits too, "
                "every 15 s: of it and zeusd, the last one to write decides, and a limit may "
                "outlast its pod",
                "remove its DaemonSet; zeusd-kubernetes obeys dynamo.nvidia.com/gpu-power-limit",
            )


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

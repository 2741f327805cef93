"""Checks of the doctor on the machine: AMD's driver, what prevents correct accounting, and programs
of others that set limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zeus_common.checks import Check, fault, note, ok
from zeus_common.processes import PROC
from zeus_common.text import group_name, user_name
from zeus_ipc import diagnosis
from zeusctl.exits import CommandError
from zeusctl.slurm import read_settings
from zeusd.devices.amd.library import CANDIDATES
from zeusd.devices.amd.sysfs import driver_loaded, driver_version
from zeusd.devices.vendors import AMD, SYSFS, amd_only, has_gpu

MOUNTS = Path("/proc/self/mounts")

_NUMBER = re.compile(r"^(\w+): ([0-9]+)$", re.MULTILINE)
"""A line of a capability's file."""

CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
_OF_PROFILES = re.compile("wpps|power.*profile", re.IGNORECASE)
"""In the name of the capability with which programs may change workload power profiles (from R615
on). NVIDIA has not published the name: its change log says "WPPS capability"."""

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


def profiles_check(folder: Path = CAPABILITIES, devices: Path = Path("/dev")) -> Iterator[Check]:
    """Yields who may change workload power profiles without zeusd, by a capability of the driver:
    all who may read its device file.
    """
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        try:
            numbers = dict(_NUMBER.findall(file.read_text(errors="replace")))
        except OSError:
            continue  # a folder, or it has just gone
        named = _OF_PROFILES.search(name) is not None
        if not (named and {"DeviceFileMinor", "DeviceFileMode"} <= numbers.keys()):
            continue
        device = devices / "nvidia-caps" / f"nvidia-cap{numbers['DeviceFileMinor']}"
        who = _readers(device, int(numbers["DeviceFileMode"]))
        text = (
            f"workload power profiles without zeusd, by the driver's capability {name} ({device})"
        )
        if not who:
            yield ok("profiles", f"only root may change {text}")
            continue
        yield note(
            "profiles",
            f"{who} may change {text}: what a lease has set may be cleared, and no limit of "
            "zeusd.toml holds for them",
            f"`chmod 0400 {device}`, if only zeusd should",
        )


def _readers(device: Path, mode: int) -> str:
    """Who may read a device file, beside root; empty: nobody.

    Args:
        device: The file; the driver's tools make it, owned by root, when it is first used.
        mode: Its permissions while it does not exist.
    """
    uid = gid = 0
    more = ""
    with contextlib.suppress(OSError):
        state = device.stat()
        mode, uid, gid = state.st_mode, state.st_uid, state.st_gid
        if "system.posix_acl_access" in os.listxattr(device):
            more = f"who its access list names (`getfacl {device}`)"
    if mode & stat.S_IROTH:
        return "everyone"
    users = f"user {user_name(uid)}" if uid and mode & stat.S_IRUSR else ""
    group = f"group {group_name(gid)}" if gid and mode & stat.S_IRGRP else ""
    return ", ".join(filter(None, (users, group, more)))


def hardware_checks(
    sysfs: str = SYSFS, proc: str = "/proc", libraries: Sequence[str] = ()
) -> Iterator[Check]:
    """Checks driver and library of the vendor whose GPUs zeusd manages here."""
    amd = amd_only(sysfs)
    if has_gpu(sysfs, AMD) and not amd:
        yield note(
            "vendors",
            "this node has NVIDIA and AMD GPUs; zeusd manages those of one vendor",
            "those are NVIDIA's, unless you set library under [amd] in zeusd.toml",
        )
    loaded = _amd_driver(sysfs) if amd else _nvidia_driver(sysfs, proc)
    name, module = ("amdgpu", "amdgpu") if amd else ("NVIDIA", "nvidia")
    remedy = f"install it, or `modprobe {module}`"
    if not amd:
        remedy += "; on a machine without GPUs try `zeusd serve --simulate 4xv100-pcie`"
    missing = fault("driver", f"the {name} driver is not loaded", remedy)
    yield ok("driver", loaded) if loaded else missing
    errors = []
    for library in libraries or (CANDIDATES if amd else (LIBRARY,)):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            errors.append(f"{library} cannot be loaded ({error})")
        else:
            yield ok("library", f"{library} can be loaded")
            return
    yield fault("library", errors[-1], _GET_AMDS if amd else _GET_NVIDIAS)


LIBRARY = "libnvidia-ml.so.1"
_GET_AMDS = "install ROCm's amd-smi-lib, or set library under [amd] in zeusd.toml"
_GET_NVIDIAS = (
    "install the driver's libraries; in a container start it with the NVIDIA toolkit (--gpus, or "
    "NVIDIA_DRIVER_CAPABILITIES=utility)"
)


def _amd_driver(sysfs: str) -> str:
    return f"amdgpu {driver_version(sysfs)} is loaded" if driver_loaded(sysfs) else ""


def _nvidia_driver(sysfs: str, proc: str) -> str:
    try:
        text = Path(proc, "driver/nvidia/version").read_text().splitlines()[0]
        return text.removeprefix("NVRM version: ").strip()
    except (OSError, IndexError):
        loaded = Path(sysfs, "module/nvidia").exists()
        return "the kernel module nvidia is loaded" if loaded else ""


_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's number for it, PROC_PID_INIT_INO."""

_INIT = frozenset({"systemd", "init"})
"""Programs that are pid 1 in containers that are whole systems, such as nodes of LXC or kind."""

_EVERYBODY = ["0", "0", "4294967295"]


def container() -> str:
    """Describes the container of this process, for a person; empty outside containers."""
    if Path("/run/.containerenv").exists():
        return "in a podman container"
    if Path("/.dockerenv").exists():
        return "in a Docker container"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "in a Kubernetes pod"
    if os.environ.get("APPTAINER_NAME") or os.environ.get("SINGULARITY_NAME"):
        return "in an Apptainer container"
    return ""


def mount_point_of(path: str) -> str:
    """Returns the mount point of a path; `/` if it belongs to the container's own file system.

    `os.path.ismount` does not see a folder that is mounted from the same file system.
    """
    path = os.path.abspath(path)
    mount_point = "/"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, _, _, mounted, *_ = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), mounted)
        if len(point) > len(mount_point) and (path == point or path.startswith(point + "/")):
            mount_point = point
    return mount_point


def listener_of(path: str) -> int | None:
    """Returns the process that listens at a socket; None if it is gone or not visible from here."""
    pid = diagnosis.listener_of(path, 1.0)
    return pid if pid is not None and Path(f"/proc/{pid}").exists() else None


def in_host_pid_namespace() -> bool:
    """Whether this process sees all processes of the machine."""
    try:
        if os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE:
            return True
        return Path("/proc/1/comm").read_text().strip() in _INIT
    except OSError:
        return False


def in_user_namespace(pid: int) -> bool:
    """Whether a process's rights end at a user namespace, as in rootless containers.

    Raises:
        OSError: It is gone.
    """
    return Path(f"/proc/{pid}/uid_map").read_text().split() != _EVERYBODY

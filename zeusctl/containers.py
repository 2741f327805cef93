"""Facts about the container of this process, and about a zeusd in the same container."""

from __future__ import annotations

import os
import re
from pathlib import Path

from zeus_ipc import processes

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's number for it, PROC_PID_INIT_INO."""

_INIT = frozenset({"systemd", "init"})
"""Programs that are pid 1 in containers that are whole systems, such as nodes of LXC or kind."""

_EVERYBODY = ["0", "0", "4294967295"]
_SOCKET_WAIT_S = 1.0
_MOUNT_POINT = 4
"""Field of a line in mountinfo."""


def kind() -> str:
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
    found = "/"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(
            r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), line.split()[_MOUNT_POINT]
        )
        if len(point) > len(found) and (path == point or path.startswith(point + "/")):
            found = point
    return found


def listener_of(path: str) -> int | None:
    """Returns the process that listens at a socket; None if it is gone or not visible from here."""
    pid = processes.listener_of(path, _SOCKET_WAIT_S)
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

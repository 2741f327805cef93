"""Explains why a daemon that listens does not answer, and where to find its log."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")


def silent_daemon(path: str) -> str:
    """Says what is known about a daemon that does not answer, and what to do: the rest of a
    sentence.

    Args:
        path: Its socket.
    """
    pid = _listener(path)
    if pid is None:
        return "look at zeusd's log"
    if pid == 1 or _is_service(pid):
        return "look at its log (journalctl -u zeusd)"
    if _state(pid) in ("T", "t"):
        return f"process {pid} is stopped; continue it with `kill -CONT {pid}`"
    log = _log_of(pid)
    return f"look at its log, {log}" if log else f"look at what process {pid} has printed"


def _listener(path: str) -> int | None:
    """Returns the process that called listen(2), from the kernel; None if it is not visible."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(path)
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
    pid = int(_CREDENTIALS.unpack(raw)[0])
    return pid if pid > 0 else None


def _is_service(pid: int) -> bool:
    """Whether a process belongs to a systemd unit, not to a user's session."""
    try:
        group = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("/")[2]
    except OSError:
        return False
    return group.endswith(".service") and not group.startswith("user@")


def _state(pid: int) -> str:
    """The state letter of proc(5): T is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _log_of(pid: int) -> str | None:
    """The file that a process's standard error goes to, if it is one."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/2")
        return target if stat.S_ISREG(os.stat(target).st_mode) else None
    except OSError:
        return None

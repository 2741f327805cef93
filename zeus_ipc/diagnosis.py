"""Explains why a daemon cannot be reached or does not answer, and where to find its log."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import time
from pathlib import Path

from zeus_ipc.errors import AccessRefused, DaemonUnavailable, RequestTimeout
from zeus_ipc.sockets import peer_of


def check_deadline(path: str, deadline_ns: int, sent: bool, timeout_s: float) -> None:
    """Ends a request whose time is over.

    Args:
        path: The daemon's socket.
        deadline_ns: When that is, CLOCK_MONOTONIC.
        sent: Whether the request was sent.
        timeout_s: What the caller gave it.

    Raises:
        DaemonUnavailable: It is over; the message says why, as far as known.
    """
    if time.monotonic_ns() < deadline_ns:
        return
    if not sent:
        diagnose(path)
    raise RequestTimeout(
        f"zeusd at {path} did not answer within {timeout_s:g} s; {silent_daemon(path)}"
    )


def diagnose(path: str) -> None:
    """Raises an error that says why no daemon answers at `path`; none if the cause is unknown.

    Raises:
        DaemonUnavailable: The cause.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except OSError as error:
        reason = unreachable(path, error)
        if reason is not None:
            raise reason from None


def unreachable(path: str, error: OSError) -> DaemonUnavailable | AccessRefused | None:
    """What a failed attempt to connect means; None: the daemon is slow to accept, or has closed the
    connection."""
    if isinstance(error, FileNotFoundError):
        return DaemonUnavailable(
            f"no zeusd listens at {path}: there is no such socket; start zeusd, or name its "
            "socket in ZEUSD_SOCK_PATH"
        )
    if isinstance(error, ConnectionRefusedError):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                return DaemonUnavailable(
                    f"{path} is not a socket; name zeusd's socket in ZEUSD_SOCK_PATH"
                )
        return DaemonUnavailable(
            f"no zeusd listens at {path}: its old socket is still there; start zeusd"
        )
    if isinstance(error, PermissionError):
        return AccessRefused(
            f"you may not connect to zeusd at {path}; ask the administrator {access_remedy(path)}"
        )
    if isinstance(error, (TimeoutError, BlockingIOError, BrokenPipeError, ConnectionResetError)):
        return None
    return DaemonUnavailable(
        f"cannot connect to zeusd at {path}: {error.strerror or error}; check the path"
    )


def access_remedy(path: str) -> str:
    """What to ask the administrator for if one may not connect to a socket."""
    with contextlib.suppress(OSError, KeyError):
        status = os.stat(path)
        if status.st_gid != 0 and status.st_mode & stat.S_IWGRP:
            group = grp.getgrgid(status.st_gid).gr_name
            return f"to add you to the group {group}, then log in again"
    return "for the right to use it"


def silent_daemon(path: str) -> str:
    """Says what is known about a daemon that does not answer, and what to do: the rest of a
    sentence.

    Args:
        path: Its socket.
    """
    pid = listener_of(path, 0.2)
    if pid is None:
        return "look at zeusd's log"
    if pid == 1 or _is_service(pid):
        return "look at its log (journalctl -u zeusd)"
    if _state(pid) in ("T", "t"):
        return f"process {pid} is stopped; continue it with `kill -CONT {pid}`"
    log = _log_of(pid)
    return f"look at its log, {log}" if log else f"look at what process {pid} has printed"


def listener_of(path: str, wait_s: float) -> int | None:
    """Returns the process that listens at a Unix socket; None if nobody does, or it is not visible
    from here.

    Args:
        path: The socket.
        wait_s: How long to wait for a connection.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(wait_s)
        try:
            probe.connect(path)
            return peer_of(probe)[0] or None
        except OSError:
            return None


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

"""Processes, the programs that they start, their standard streams, and sockets that they open."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_ipc.overriding import override

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PROC = Path("/proc")

_SYS_ADMIN = 21
"""CAP_SYS_ADMIN, capabilities(7)."""


def has_sys_admin(pid: int | str = "self") -> bool:
    """Whether a process has CAP_SYS_ADMIN, which a driver requires to set limits.

    With zeusd only zeusd needs it.

    Args:
        pid: The process; this one by default.

    Raises:
        OSError: It is gone; /proc is not mounted, or is another system's.
    """
    status = PROC / str(pid) / "status"
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _SYS_ADMIN & 1)
    raise OSError(f"{status} has no capabilities")


class UnixListener:
    """A listening Unix socket. Its path appears when clients can connect to it, with its mode and
    group, and replaces a socket that was left behind.

    Args:
        path: Its path; for a moment it has a `~` at the end.
        kind: Its type, such as `socket.SOCK_STREAM`.
        mode: Its permission bits.
        backlog: Length of the queue of pending connections.
        gid: The group that owns it; -1: the process's own.
        prepare: Called with the socket before it listens.

    Attributes:
        socket: The socket; it does not block.

    Raises:
        OSError: It cannot be opened. EADDRINUSE: another process listens there, or no socket is
            there.
    """

    def __init__(
        self,
        path: str,
        kind: int,
        mode: int,
        backlog: int,
        *,
        gid: int = -1,
        prepare: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._path, new = path, f"{path}~"
        self.socket = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        with contextlib.ExitStack() as opened:
            opened.callback(self.socket.close)
            if _is_socket(new):  # of a process that was killed here
                os.unlink(new)
            self.socket.bind(new)
            self._own = os.lstat(new)
            opened.callback(self._remove, new)
            os.chmod(new, mode)
            if gid >= 0:
                os.chown(new, -1, gid)
            if prepare is not None:
                prepare(self.socket)
            self.socket.listen(backlog)
            if not _in_use(path, kind):
                os.rename(new, path)
            # Another process may have used the same name at the same time.
            if not os.path.samestat(os.lstat(path), self._own):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
            opened.pop_all()

    def close(self) -> None:
        """Stops listening and removes the path, unless it is another's by now."""
        self._remove(self._path)
        self.socket.close()

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(path), self._own):
                os.unlink(path)


def _is_socket(path: str) -> bool:
    return os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode)


def _in_use(path: str, kind: int) -> bool:
    if not _is_socket(path):
        return os.path.lexists(path)
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)


def is_missing(program: str, error: OSError, path: str | None = None) -> bool:
    """Whether a program could not be started because it does not exist.

    If a folder of the PATH cannot be searched and no other folder has the program, `subprocess`
    raises PermissionError. A shell says "command not found", and ends with 127.

    Args:
        program: Its name, or its path.
        error: What `subprocess` raised.
        path: The PATH that was searched; None: this process's.
    """
    if isinstance(error, PermissionError) and os.path.dirname(program):
        return False
    # A file that exists and is "not found" names an interpreter that does not exist.
    missing = isinstance(error, (FileNotFoundError, PermissionError))
    return missing and shutil.which(program, os.F_OK, path) is None


def output_of(*command: str, timeout_s: float = 10.0) -> str | None:
    """What a program prints; None: it cannot be run, fails, or does not end in time."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class _Unfailing(io.FileIO):
    @override
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def discard_output() -> None:
    """Makes standard output take everything: Python writes what is left when it exits, and would
    fail again, with exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """Opens standard streams that were closed by who started this process, to read and write
    nothing: else the next file or connection gets their numbers, and is written to as output. From
    then on, what cannot be written to standard error is lost, and stops nothing."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_Unfailing(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            raw, sys.stderr.encoding, "backslashreplace", line_buffering=True
        )


def sd_notify(state: str) -> None:
    """Sends a line such as `READY=1`, `WATCHDOG=1` or `STATUS=...`, if systemd set
    $NOTIFY_SOCKET.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect(path.replace("@", "\0", 1) if path[0] == "@" else path)
        manager.sendall(state.encode())

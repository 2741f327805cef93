"""Identifies the process at the other end of a socket, says what it runs, and detects its end,
through the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from os.path import basename
from pathlib import Path

from zeus_ipc.sockets import peer_of
from zeusd import identity
from zeusd.core.model import Peer, ProcessIdentity, ProcessUsage
from zeusd.devices.port import printable
from zeusd.identity import has_exited, pidfd_inodes_are_unique, process_cookie
from zeusd.runtime.control_groups import ControlGroups, job_of
from zeusd.runtime.reactor import Reactor

_SO_PEERGROUPS = 59
_MAX_GROUPS = 65536
_SO_PEERPIDFD = 77


class NoSuchPeer(Exception):
    """The peer cannot be identified: it has exited, or is in another pid namespace."""


@lru_cache(maxsize=1)
def _unique_inodes() -> bool:
    return pidfd_inodes_are_unique()


@lru_cache(maxsize=1)
def _control_groups() -> ControlGroups:
    return ControlGroups()


def identify_peer(conn: int, connection: socket.socket) -> tuple[Peer, int]:
    """The peer's identity from the kernel, and a pidfd of the process, which the caller owns.

    Raises:
        NoSuchPeer: It has exited, or is invisible in this pid namespace.
    """
    pid, uid, gid = peer_of(connection)
    if pid <= 0:
        raise NoSuchPeer("the client is in another pid namespace; run zeusd in the host's")
    try:
        (pidfd,) = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
    except OSError:
        pidfd = -1
    try:
        if pidfd < 0:  # before Linux 6.5
            pidfd = os.pidfd_open(pid)
        process = ProcessIdentity(pid, process_cookie(pid, pidfd, _unique_inodes()))
        groups = frozenset({gid, *_groups(connection)})
        on_host, command = _is_on_host(pidfd), command_of(pid)
        job = job_of_process(pid)
        if has_exited(pidfd):  # the data read for its pid may be another process's
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return Peer(conn, process, uid, gid, groups, on_host, command, job), pidfd
    except (OSError, ValueError, IndexError) as error:
        if pidfd >= 0:
            os.close(pidfd)
        raise NoSuchPeer(f"process {pid} has exited: {error}") from None


def _groups(connection: socket.socket) -> tuple[int, ...]:
    """The process's groups when it connected: up to 65536, more than Python's call supports."""
    try:
        # Largest buffer of Python's getsockopt.
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
        return struct.unpack(f"{len(raw) // 4}I", raw)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
    room = ctypes.c_uint32(4 * _MAX_GROUPS)
    groups = (ctypes.c_uint32 * _MAX_GROUPS)()
    libc = _libc()
    level = socket.SOL_SOCKET
    size = ctypes.byref(room)
    if libc.getsockopt(connection.fileno(), level, _SO_PEERGROUPS, groups, size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return tuple(groups[: room.value // 4])


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _is_on_host(pidfd: int) -> bool:
    """Whether the process is in zeusd's own pid namespace: in a container it has a second pid."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) == 2
    return False


def job_of_process(pid: int) -> str:
    """The job or pod in a process's control groups; empty: none, or it has exited."""
    return job_of(_control_groups().of(read_proc(pid, "cgroup")))


def read_proc(pid: int, name: str) -> str:
    """A file of a process in /proc; empty if it cannot be read.

    A process's name may be any bytes: none of them must become a newline.
    """
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def own_process() -> ProcessIdentity:
    """This process."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        return ProcessIdentity(os.getpid(), process_cookie(os.getpid(), pidfd, _unique_inodes()))
    finally:
        os.close(pidfd)


def open_process(process: ProcessIdentity) -> int | None:
    """A pidfd for exactly this process, or None if it has exited. A zombie counts as exited."""
    return identity.open_process(process.pid, process.cookie, _unique_inodes())


def usage_of(process: ProcessIdentity) -> ProcessUsage | None:
    """The activity of a process; None if it has exited."""
    pidfd = open_process(process)
    if pidfd is None:
        return None
    try:
        fields = read_proc(process.pid, "stat").rpartition(")")[2].split()
        state, user, system = fields[0], int(fields[11]), int(fields[12])
    except (ValueError, IndexError):
        return None
    finally:
        os.close(pidfd)
    cpu_ns = (user + system) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    cpu_ns += _waited_for_cpu_ns(process.pid)
    return ProcessUsage(time.monotonic_ns(), cpu_ns, state in _STOPPED)


def _waited_for_cpu_ns(pid: int) -> int:
    """How long its first thread was runnable but had no CPU, as on an overloaded node.

    See Documentation/scheduler/sched-stats.rst of the kernel.
    """
    try:
        return int(read_proc(pid, "schedstat").split()[1])
    except (ValueError, IndexError):  # a kernel without this statistic
        return 0


_STOPPED = ("T", "t")
"""Process states in proc(5): stopped by a signal, or by a tracer."""


def owner_of(pid: int) -> int | None:
    """The user of a process; None if it has exited."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


class ProcessWatch:
    """Keeps a pidfd for each process that is connected or holds a lease, and reports their ends."""

    def __init__(self, reactor: Reactor, on_gone: Callable[[ProcessIdentity], None]) -> None:
        self._reactor = reactor
        self._on_gone = on_gone
        self._pidfds: dict[ProcessIdentity, int] = {}
        self._references: dict[ProcessIdentity, int] = {}
        self._leases: dict[ProcessIdentity, int] = {}

    def attach(self, process: ProcessIdentity, pidfd: int) -> None:
        """Adds a connection, or a recovered lease, of a process. Takes over the pidfd."""
        if process in self._pidfds:
            os.close(pidfd)
        else:
            self._pidfds[process] = pidfd
        self._references[process] = self._references.get(process, 0) + 1

    def detach(self, process: ProcessIdentity) -> None:
        """Reverts one `attach`."""
        self._references[process] -= 1
        self._drop_if_unused(process)

    def has_exited(self, process: ProcessIdentity) -> bool:
        """Whether a connected process has exited."""
        pidfd = self._pidfds.get(process)
        return pidfd is None or has_exited(pidfd)

    def watch(self, process: ProcessIdentity) -> None:
        """Counts one more lease of the process."""
        held = self._leases.get(process, 0)
        self._leases[process] = held + 1
        if held == 0:
            pidfd = self._pidfds.get(process)
            if pidfd is None:
                # No longer attached: it ended while its request was in progress.
                self._reactor.post(lambda: self._on_gone(process))
            else:
                self._reactor.add_reader(pidfd, lambda: self._died(process))

    def unwatch(self, process: ProcessIdentity) -> None:
        """Counts one lease less of the process."""
        self._leases[process] -= 1
        if self._leases[process] == 0:
            del self._leases[process]
            pidfd = self._pidfds.get(process)
            if pidfd is not None:
                self._reactor.remove(pidfd)
            self._drop_if_unused(process)

    def close(self) -> None:
        """Closes all pidfds."""
        for pidfd in self._pidfds.values():
            self._reactor.remove(pidfd)
            with contextlib.suppress(OSError):
                os.close(pidfd)
        self._pidfds.clear()

    def _died(self, process: ProcessIdentity) -> None:
        self._reactor.remove(self._pidfds[process])
        self._on_gone(process)

    def _drop_if_unused(self, process: ProcessIdentity) -> None:
        if self._references.get(process, 0) == 0 and process not in self._leases:
            self._references.pop(process, None)
            pidfd = self._pidfds.pop(process, None)
            if pidfd is not None:
                os.close(pidfd)


_INTERPRETER = re.compile(r"(python|pypy|perl|ruby|bash|dash|sh|node|pt_main_thread)[0-9.]*")
"""Names of programs that run scripts; the last is PyTorch's name for a Python that imported it."""

_WRAPPER = "zeusctl"


def command_of(pid: int) -> str:
    """The command of a process: its program, and an interpreter's script or module.

    For `zeusctl set` and `zeusctl measure` it is the command that they run. A process chooses this
    text, so control characters and newlines are removed: it must not affect a terminal or imitate a
    line of a log. Empty: the process has exited.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            # Bytes of a command line that are read.
            text = file.read(4096).decode(errors="replace")
        with open(f"/proc/{pid}/comm", "rb") as file:
            name = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    # Most characters of a command.
    return printable(describe(text.rstrip("\0").split("\0"), name), 64)


def describe(words: Sequence[str], name: str) -> str:
    """A command line in readable form."""
    if not words or not words[0]:
        return name
    wrapped = _wrapped(words)
    if wrapped:
        return describe(wrapped, basename(wrapped[0]))
    if not _INTERPRETER.fullmatch(name):  # a script, or a process that set its name
        return name
    script = _script(words[1:])
    return f"{basename(words[0])} {script}" if script else name


def _script(words: Sequence[str]) -> str:
    """The script or module that an interpreter runs, without its folder; empty: neither."""
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return f"-m {next(rest, '')}"
        if word == "-c":
            return ""
        if word in ("-W", "-X"):
            next(rest, "")
        elif not word.startswith("-"):
            return basename(word)
    return ""


def _wrapped(words: Sequence[str]) -> Sequence[str]:
    """The command that zeusctl runs; empty: this is not zeusctl, or it runs none."""
    script = _script(words[1:]) if _INTERPRETER.fullmatch(basename(words[0])) else words[0]
    ours = basename(script.removeprefix("-m ")) == _WRAPPER
    if not ours or "--" not in words:
        return ()
    return words[list(words).index("--") + 1 :]

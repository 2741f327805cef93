"""The listening socket. Replaces that of a dead daemon, never that of a running one."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from pathlib import Path

from zeus_common.processes import UnixListener
from zeusd.identity import flock_within
from zeusd.server import descriptors

MAX_PATH = 106
"""One less than Linux allows: the socket is made under its path with a `~` at the end."""


class ListenError(Exception):
    """The socket cannot be opened; the message is one sentence that says why and what to do."""


class Listener:
    """A bound, listening Unix socket, and the lock on its path.

    The path appears when clients can connect to it, with its mode and owner.
    """

    def __init__(self, path: str, mode: int, group: str | None) -> None:
        self.path = path
        if len(os.fsencode(path)) > MAX_PATH:
            raise ListenError(
                f"the socket path {path} is longer than {MAX_PATH} bytes; choose a shorter one "
                "with --socket"
            )
        gid = _group_id(group)
        self._must_be_socket(path)
        try:
            Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._lock_fd = os.open(
                f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise ListenError(
                f"cannot listen at {path} ({error.strerror}); run zeusd as root, or choose a path "
                "you may write with --socket"
            ) from None
        try:
            self._listener = self._open(mode, gid)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.socket = self._listener.socket

    def close(self) -> None:
        """Stops listening and removes the path, unless it is another's by now."""
        self._listener.close()
        os.close(self._lock_fd)

    def _open(self, mode: int, gid: int) -> UnixListener:
        # How long to wait for the lock: a killed daemon keeps it until the kernel has ended its
        # threads.
        if not flock_within(self._lock_fd, 1.0):
            raise self._taken()
        self._must_be_socket(f"{self.path}~")  # only the owner of the lock uses this name
        try:
            # Length of the queue of pending connections. In a longer queue a client would wait
            # behind a connection storm; a client that finds it full retries within milliseconds.
            return UnixListener(
                self.path,
                socket.SOCK_STREAM,
                mode,
                128,
                gid=gid,
                prepare=descriptors.refuse,  # connections inherit it
            )
        except OSError as error:
            # Another process may listen there without this lock, such as systemd.
            if error.errno == errno.EADDRINUSE:
                raise self._taken() from None
            raise ListenError(
                f"cannot listen at {self.path} ({error.strerror}); check --socket and "
                "--socket-group"
            ) from None

    def _must_be_socket(self, path: str) -> None:
        """Nothing but a socket may be in its place."""
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ListenError(
                f"{path} exists and is not a socket; remove it, or choose another path with "
                "--socket"
            )

    def _taken(self) -> ListenError:
        return ListenError(
            f"another daemon listens at {self.path}; stop it, or choose another path with --socket"
        )


class InheritedListener:
    """A listening socket that systemd created and keeps."""

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        descriptors.refuse(listening)
        self.socket = listening

    def close(self) -> None:
        """Closes zeusd's descriptor. systemd keeps its own, so new connections wait."""
        self.socket.close()


def _group_id(group: str | None) -> int:
    if group is None:
        return -1
    if group.isdecimal() and int(group) < 2**32 - 1:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ListenError(
            f"the group {group} does not exist; create it (groupadd --system {group}) or choose "
            "another with --socket-group"
        ) from None

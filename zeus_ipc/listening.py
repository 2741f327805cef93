"""A listening Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable


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

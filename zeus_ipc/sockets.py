"""Unix sockets: where the daemon listens, and which process is at the other end."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

SOCKET_ENV = "ZEUSD_SOCK_PATH"
DEFAULT_SOCKET_PATH = "/run/zeusd/zeusd.sock"


def socket_path(explicit: str | os.PathLike[str] | None = None) -> str:
    """The daemon's socket: the first of `explicit`, `$ZEUSD_SOCK_PATH` and the default that is not
    empty.
    """
    return os.fspath(explicit or "") or os.environ.get(SOCKET_ENV) or DEFAULT_SOCKET_PATH


def stream_path(path: str) -> str:
    """Where a daemon that listens at `path` publishes its samples."""
    return f"{path}.stream"


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Returns the pid, uid and gid of the process at the other end of a Unix socket, as they were
    when it called connect(2) or listen(2). The pid is 0 if it is not visible from here.

    Raises:
        OSError: The socket is closed.
    """
    import socket  # who needs only a path, as `zeus` at its import, does not pay for it

    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid

"""Unix sockets: where the daemon listens, and which process is at the other end."""

from __future__ import annotations

import os
import socket
import struct

SOCKET_ENV = "ZEUSD_SOCK_PATH"
DEFAULT_SOCKET_PATH = "/run/zeusd/zeusd.sock"

_CREDENTIALS = struct.Struct("3i")


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
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


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
            pid = peer_of(probe)[0]
        except OSError:
            return None
    return pid if pid > 0 else None

"""What the kernel says about processes: their capabilities, and whose a socket's other end is."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

PROC = Path("/proc")

_SYS_ADMIN = 21
"""CAP_SYS_ADMIN, capabilities(7)."""

_CREDENTIALS = struct.Struct("3i")


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

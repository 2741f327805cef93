"""Notifies the service manager, like systemd's sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket


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

"""Tells the service manager how a service is, as systemd's sd_notify(3) does."""

from __future__ import annotations

import contextlib
import os
import socket


def sd_notify(state: str) -> None:
    """Sends a line such as `READY=1`, `WATCHDOG=1` or `STATUS=...`, if systemd wants to hear it."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect(path.replace("@", "\0", 1) if path[0] == "@" else path)
        manager.sendall(state.encode())

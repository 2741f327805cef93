"""Tells systemd that a service is ready (sd_notify): what is ordered after it may start."""

from __future__ import annotations

import os
import socket


def tell_systemd() -> None:
    """Says READY=1; nothing if systemd does not wait for it."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.sendto(b"READY=1", path.replace("@", "\0", 1))

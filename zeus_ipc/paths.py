"""Where the daemon and other servers listen."""

from __future__ import annotations

import os

SOCKET_ENV = "ZEUSD_SOCK_PATH"
DEFAULT_SOCKET_PATH = "/run/zeusd/zeusd.sock"


def socket_path(explicit: str | os.PathLike[str] | None = None) -> str:
    """The daemon's socket: the first of `explicit`, `$ZEUSD_SOCK_PATH` and the default that is not
    empty.
    """
    return os.fspath(explicit or "") or os.environ.get(SOCKET_ENV) or DEFAULT_SOCKET_PATH


def stream_path(socket: str) -> str:
    """Where a daemon that listens at `socket` publishes its samples."""
    return f"{socket}.stream"


def host_and_port(text: str) -> tuple[str, int] | None:
    """Splits `HOST:PORT`; None: it is not one. The host may be empty, or in brackets."""
    host, _, port = text.rpartition(":")
    return (host, int(port)) if port.isdecimal() and int(port) <= 65535 else None

"""`python -m zeusd.front`: started by zeusd or by its own unit, never by hand."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import time

CONNECT_S = 2.0
"""How long clients wait for a zeusd that is being started again, before they are told of it."""


def main() -> int:
    """Becomes unprivileged, then serves until the link to zeusd ends."""
    parser = argparse.ArgumentParser(prog="zeusd.front", description=__doc__)
    parser.add_argument("--listen-fd", type=int, help="where clients connect; else systemd's")
    parser.add_argument("--stream-fd", type=int, help="where subscribers connect; else systemd's")
    parser.add_argument("--link-fd", type=int, help="one end of a socketpair with zeusd")
    parser.add_argument("--link-path", help="where zeusd listens for its front, instead")
    parser.add_argument("--user")
    parser.add_argument("--memory-mib", type=int)
    parser.add_argument("--max-files", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    options = parser.parse_args()

    # zeusd decides when to stop, by closing the link; a Ctrl-C in its terminal is not for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # Imported before privileges are dropped: the new user may be unable to read these files.
    from zeusd import logs, systemd
    from zeusd.front import privileges
    from zeusd.front.server import Front, FrontWithoutCore

    logs.configure(options.log_level, options.log_format, "zeusd-front")
    privileges.require_kernel_credentials()
    privileges.limit_resources(options.memory_mib, options.max_files)
    if options.link_path is None:
        # Who stops a container may signal all of it: the end of the link is what ends a child.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        privileges.drop(options.user)
        privileges.die_with_parent()
        listen_fd, stream_fd = options.listen_fd, options.stream_fd
        link: socket.socket | None = socket.socket(fileno=options.link_fd)
    else:
        sockets = systemd.listening_sockets()
        listen_fd = sockets[systemd.CLIENTS].detach()
        os.set_blocking(listen_fd, False)
        stream_fd = None
        if systemd.STREAM in sockets:
            stream_fd = sockets[systemd.STREAM].detach()
            os.set_blocking(stream_fd, False)
        link = _connect(options.link_path, CONNECT_S)

    # libzmq never seeds rand(), and predictable routing ids let any client abort it.
    seed = options.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    ctypes.CDLL(None).srand(seed)

    front: Front | FrontWithoutCore
    if link is not None:
        front = Front(listen_fd, link, stream_fd)
    else:
        path = options.link_path
        front = FrontWithoutCore(listen_fd, lambda: _connect(path, 0.0) is not None)
    systemd.notify("READY=1")
    try:
        front.run()
    finally:
        front.close()
    return 0


def _connect(path: str, within_s: float) -> socket.socket | None:
    """The link to zeusd; None if there is no zeusd for this long."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            link.connect(path)
        except OSError:
            if time.monotonic() > give_up_at:
                link.close()
                return None
            time.sleep(0.02)
        else:
            return link


if __name__ == "__main__":
    sys.exit(main())

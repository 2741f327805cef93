"""`python -m zeusd.front`: started by zeusd or by its own unit, never by hand."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import time

CONNECT_S = 30.0
"""How long a front of its own waits for zeusd to take its link."""


def main() -> int:
    """Becomes unprivileged, then serves until the link to zeusd ends."""
    parser = argparse.ArgumentParser(prog="zeusd.front", description=__doc__)
    parser.add_argument("--listen-fd", type=int, help="where clients connect; else systemd's")
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
    from zeusd.front.server import Front

    logs.configure(options.log_level, options.log_format, "zeusd-front")
    privileges.require_kernel_credentials()
    privileges.limit_resources(options.memory_mib, options.max_files)
    if options.link_path is None:
        privileges.drop(options.user)
        privileges.die_with_parent()
        listen_fd = options.listen_fd
        link = socket.socket(fileno=options.link_fd)
    else:
        listen_fd = systemd.listening_sockets()[systemd.CLIENTS].detach()
        os.set_blocking(listen_fd, False)
        link = _connect(options.link_path)

    # libzmq never seeds rand(), and predictable routing ids let any client abort it.
    seed = options.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    ctypes.CDLL(None).srand(seed)

    front = Front(listen_fd, link)
    systemd.notify("READY=1")
    try:
        front.run()
    finally:
        front.close()
    return 0


def _connect(path: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    give_up_at = time.monotonic() + CONNECT_S
    while True:
        try:
            link.connect(path)
        except OSError as error:
            if time.monotonic() > give_up_at:
                raise SystemExit(
                    f"zeusd-front: cannot reach zeusd at {path} ({error.strerror}); look at its log"
                ) from None
            time.sleep(0.05)
        else:
            return link


if __name__ == "__main__":
    sys.exit(main())

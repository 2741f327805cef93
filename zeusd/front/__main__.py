"""`python -m zeusd.front`: started by zeusd, never by hand."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys


def main() -> int:
    """Becomes unprivileged, then serves until the link to zeusd ends."""
    parser = argparse.ArgumentParser(prog="zeusd.front", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--user")
    parser.add_argument("--max-connections-per-user", type=int, default=256)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--max-files", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    options = parser.parse_args()

    # zeusd decides when to stop, by closing the link; a Ctrl-C in its terminal is not for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # Imported before privileges are dropped: the new user may be unable to read these files.
    from zeusd import logs
    from zeusd.front import privileges
    from zeusd.front.server import Front

    logs.configure(options.log_level, options.log_format)
    privileges.limit_resources(options.memory_mib, options.max_files)
    privileges.drop(options.user)
    privileges.die_with_parent()

    # libzmq never seeds rand(), and predictable routing ids let any client abort it.
    seed = options.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    ctypes.CDLL(None).srand(seed)

    link = socket.socket(fileno=options.link_fd)
    front = Front(options.listen_fd, link, options.max_connections_per_user)
    try:
        front.run()
    finally:
        front.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

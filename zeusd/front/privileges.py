"""Gives up what the front does not need."""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import signal
import socket
import struct

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38

DEFAULT_USERS = ("zeusd-front", "nobody")


def require_kernel_credentials() -> None:
    """Makes sure that libzmq can tell who a peer is.

    It prints the peer's credentials with getnameinfo(); where that fails for Unix sockets (musl),
    it hands on what the client says of itself instead.

    Raises:
        SystemExit: It cannot tell.
    """
    address = struct.pack("H108s", socket.AF_UNIX, b"")
    host = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    if libc.getnameinfo(address, len(address), host, len(host), None, 0, 1) != 0:
        raise SystemExit(
            "zeusd-front: this system's C library cannot name Unix sockets, so ZeroMQ would take "
            "clients' own word for who they are; use a system with glibc"
        )


def limit_resources(memory_mib: int | None, max_files: int | None) -> None:
    """Bounds memory, which libzmq alone does not, and raises the limit of open files."""
    if memory_mib is not None:
        limit = memory_mib * 1024 * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = hard_files if max_files is None else min(max_files, hard_files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard_files))


def drop(user: str | None) -> None:
    """Becomes an ordinary user for good, if this process is root.

    Args:
        user: Whom to become; None: `zeusd-front` if there is such a user, else `nobody`.

    Raises:
        SystemExit: There is no such user, or this process may not become another.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if os.getuid() != 0:
        return
    account = None
    for name in DEFAULT_USERS if user is None else (user,):
        try:
            account = pwd.getpwnam(name)
            break
        except KeyError:
            continue
    if account is None:
        raise SystemExit(
            f"zeusd: the user {user or DEFAULT_USERS[0]} does not exist; create it, or name "
            "another under [front] user in zeusd.toml"
        )
    try:
        os.setgroups([])
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    except PermissionError:
        raise SystemExit(
            f"zeusd: its front may not become {account.pw_name}; start zeusd with CAP_SETUID and "
            "CAP_SETGID (in a container: --cap-add SETUID --cap-add SETGID)"
        ) from None


def die_with_parent() -> None:
    """The kernel kills this process when zeusd dies, even while it is stuck."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

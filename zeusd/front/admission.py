"""Whose connections are let in: a bounded number of each user, and none of who was cut off."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator

from zeusd.core.rates import RateLimiter

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")

PENALTY_NS = 1_000_000_000
"""How long the connections of a user who was cut off are closed as they come."""


class Admission:
    """Counts the connections of each user, by descriptor.

    Attributes:
        max_per_user: Connections beyond this are closed at once.
        logged: Bounds the records about each user.
    """

    def __init__(self, max_per_user: int) -> None:
        self.max_per_user = max_per_user
        self.logged = RateLimiter(1.0, 10)
        self._penalty_ns: dict[int, int] = {}
        self._uid_of_fd: dict[int, int] = {}
        self._count_of_uid: dict[int, int] = {}

    def accepted(self, fd: int) -> None:
        """libzmq has accepted a connection; it is closed again if it is one too many."""
        self.ended(fd)
        try:
            with socket.socket(fileno=os.dup(fd)) as stream:
                _, uid, _ = credentials_of(stream)
        except OSError:
            return  # gone already
        self._uid_of_fd[fd] = uid
        count = self._count_of_uid.get(uid, 0) + 1
        self._count_of_uid[uid] = count
        now_ns = time.monotonic_ns()
        if count > self.max_per_user:
            if self.logged.take(uid, now_ns):
                log.warning(
                    "user %d has over %d connections",
                    uid,
                    self.max_per_user,
                    extra={"event": "too_many_connections", "uid": uid},
                )
            kick(fd)
        elif self._penalty_ns and now_ns < self._penalty_ns.get(uid, 0):
            kick(fd)

    def ended(self, fd: int) -> None:
        """A connection has ended."""
        uid = self._uid_of_fd.pop(fd, None)
        if uid is not None:
            self._count_of_uid[uid] -= 1
            if self._count_of_uid[uid] == 0:
                del self._count_of_uid[uid]

    def uid_of(self, fd: int) -> int | None:
        """The user of a connection; None if it has ended."""
        return self._uid_of_fd.get(fd)

    def shut_out(self, uid: int, now_ns: int) -> None:
        """Lets no connection of this user in for a moment."""
        self._penalty_ns[uid] = now_ns + PENALTY_NS


def credentials_of(stream: socket.socket) -> tuple[int, int, int]:
    """`(pid, uid, gid)` of the process that connected."""
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


_NO_DESCRIPTOR_LEFT = (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def _looked_at(fd: int) -> Iterator[socket.socket]:
    """A connection's descriptor as a socket: a duplicate, unless there is none left to have."""
    try:
        duplicate = os.dup(fd)
    except OSError as error:
        if error.errno not in _NO_DESCRIPTOR_LEFT:
            raise
        stream = socket.socket(fileno=fd)
        try:
            yield stream
        finally:
            stream.detach()  # it is libzmq's to close
        return
    with socket.socket(fileno=duplicate) as stream:
        yield stream


def kick(fd: int, uid: int | None = None) -> None:
    """libzmq has no call for it: ending the stream makes it drop the peer.

    With a uid only that user's: the descriptor may be somebody else's connection by now.
    """
    try:
        with _looked_at(fd) as stream:
            if uid is None or credentials_of(stream)[1] == uid:
                stream.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("peer was gone already: %s", error, extra={"event": "peer_gone"})

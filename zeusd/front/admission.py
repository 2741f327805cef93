"""Whose connections are let in: a bounded number of each user, and none of who was cut off."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time

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


def kick(fd: int, uid: int | None = None) -> None:
    """libzmq has no call for it: ending the stream makes it drop the peer.

    With a uid only that user's: the descriptor may be somebody else's connection by now.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as stream:
            if uid is None or credentials_of(stream)[1] == uid:
                stream.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("peer was gone already: %s", error, extra={"event": "peer_gone"})

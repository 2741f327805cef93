"""Takes connections in: a few at a time, a bounded number of each user and of all.

With a short queue in the kernel and pauses while nothing but refusals comes, a storm of connections
costs little, and an honest one finds its place.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct
from collections.abc import Callable

from zeusd.runtime.reactor import Reactor
from zeusd.server import descriptors
from zeusd.server.connection import Connection
from zeusd.server.fairness import Turns
from zeusd.server.reports import Reports
from zeusd.server.subuids import SubordinateUids
from zeusd.server.zmtp import Engine, Role

log = logging.getLogger(__name__)

BATCH = 4
"""Connections that are accepted before others have their turn."""

REFUSALS = 16
PAUSE_NS = 2_000_000
"""After so many refusals: fewer and longer pauses disturb fewer of the requests beside them."""

EXHAUSTED_NS = 50_000_000
"""After the system had no descriptor or memory left."""

SEND_BUFFER = 32 * 1024
"""The kernel's room for what waits to be read by the peer, which is charged to zeusd."""

MAX_CLOSING = 128
"""Connections that wait for their close, on a kernel where it may sleep, before more are taken."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_CREDENTIALS = struct.Struct("3i")


class Acceptor:
    """Accepts on listening sockets.

    Args:
        reactor: The loop.
        turns: The users' accounts.
        reports: Where refusals are written.
        closer: Closes what may carry descriptors.
        accepted: Called with each new connection.
        soon: Asks for a call of `run`, as soon as other events had their turn.
        maximum: Connections of all users together.

    Attributes:
        ready: The listening sockets where someone has connected, by descriptor.
        due_ns: When `run` may accept again.
        open: Connections at present.
    """

    def __init__(
        self,
        reactor: Reactor,
        turns: Turns[Connection],
        reports: Reports,
        closer: descriptors.Closer,
        accepted: Callable[[Connection], None],
        soon: Callable[[], None],
        maximum: int,
    ) -> None:
        self._reactor = reactor
        self._turns = turns
        self._reports = reports
        self._closer = closer
        self._accepted = accepted
        self._soon = soon
        self._maximum = maximum
        self._subuids = SubordinateUids()
        self._listening: dict[int, tuple[socket.socket, Role]] = {}
        self.ready: list[int] = []
        self.due_ns = 0
        self._refused = 0
        self._number = 0
        self.open = 0

    def listen(self, listening: socket.socket, role: Role) -> None:
        """Accepts on this socket from now on."""
        fd = listening.fileno()
        self._listening[fd] = (listening, role)
        self._reactor.add(fd, select.EPOLLIN | select.EPOLLET, lambda _: self._readable(fd))

    def stop(self) -> None:
        """Accepts no more. The sockets stay open."""
        for fd in self._listening:
            self._reactor.remove(fd)
        self._listening.clear()
        self.ready.clear()

    def run(self, now_ns: int) -> None:
        """Accepts a few connections, if it is time."""
        if now_ns < self.due_ns:
            return
        if self._closer.backlog > MAX_CLOSING:
            self.due_ns = now_ns + EXHAUSTED_NS
            return
        for fd in list(self.ready):
            listening, role = self._listening[fd]
            for _ in range(BATCH):
                try:
                    stream, _ = listening.accept()
                except BlockingIOError:
                    self.ready.remove(fd)
                    break
                except OSError as error:
                    if error.errno in _EXHAUSTED:
                        self.due_ns = now_ns + EXHAUSTED_NS
                    break
                if not self._take(stream, role, now_ns):
                    self._refused += 1
        if self._refused >= REFUSALS:
            self._refused = 0
            self.due_ns = now_ns + PAUSE_NS

    def _readable(self, fd: int) -> None:
        if fd not in self.ready:
            self.ready.append(fd)
            self._soon()

    def _take(self, stream: socket.socket, role: Role, now_ns: int) -> bool:
        """Whether a connection was let in."""
        guarded = descriptors.may_carry(stream)
        try:
            credentials = stream.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        except OSError:
            stream.close()
            return False
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        user = self._turns.user(self._subuids.owner(uid), now_ns)
        why: str | None
        if self.open >= self._maximum and user.connections:
            # The last ones are for users who have none yet.
            why = f"is refused another connection: all users together have {self.open}"
            user.refused += 1
        else:
            why = self._turns.admit(user, now_ns)
        if why is not None:
            self._reports.add(user.uid, "connection_refused", f"{why}; more are closed at once")
            if guarded:
                self._closer.close(stream)
            else:
                stream.close()
            return False
        self._number += 1
        self.open += 1
        engine = Engine(role)
        self._accepted(Connection(self._number, stream, user, uid, engine, now_ns, guarded))
        return True

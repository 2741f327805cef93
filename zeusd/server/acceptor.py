"""Accepts connections: a few at a time, with limits per user and in total.

With a short queue in the kernel, and pauses while it refuses every connection, a connection storm
costs little and leaves room for other clients.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Callable

from zeus_ipc.sockets import peer_of
from zeusd.runtime.reactor import Reactor
from zeusd.server import descriptors
from zeusd.server.connection import ClientConnection
from zeusd.server.fairness import Turns
from zeusd.server.reports import Reports
from zeusd.server.subuids import SubordinateUids
from zeusd.server.zmtp import Role, ZmtpEngine

log = logging.getLogger(__name__)

EXHAUSTED_NS = 50_000_000
"""Pause after the system ran out of descriptors or memory."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Acceptor:
    """Accepts on listening sockets."""

    def __init__(
        self,
        reactor: Reactor,
        turns: Turns[ClientConnection],
        reports: Reports,
        closer: descriptors.Closer,
        accepted: Callable[[ClientConnection], None],
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
        """Starts to accept on this socket."""
        fd = listening.fileno()
        self._listening[fd] = (listening, role)
        self._reactor.add(fd, select.EPOLLIN | select.EPOLLET, lambda _: self._readable(fd))

    def stop(self) -> None:
        """Stops accepting. The sockets stay open."""
        for fd in self._listening:
            self._reactor.remove(fd)
        self._listening.clear()
        self.ready.clear()

    def run(self, now_ns: int) -> None:
        """Accepts a few connections, if due."""
        if now_ns < self.due_ns:
            return
        # Most connections that wait to be closed, on a kernel where closing may sleep.
        if self._closer.backlog > 128:
            self.due_ns = now_ns + EXHAUSTED_NS
            return
        for fd in list(self.ready):
            listening, role = self._listening[fd]
            # Connections that are accepted before other events are handled.
            for _ in range(4):
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
        if self._refused >= 16:
            self._refused = 0
            # Pause after this many refusals. Fewer, longer pauses delay fewer requests.
            self.due_ns = now_ns + 2_000_000

    def _readable(self, fd: int) -> None:
        if fd not in self.ready:
            self.ready.append(fd)
            self._soon()

    def _take(self, stream: socket.socket, role: Role, now_ns: int) -> bool:
        """Accepts or refuses one connection; returns whether it was accepted."""
        guarded = descriptors.may_carry(stream)
        try:
            _, uid, _ = peer_of(stream)
            # Size of the kernel's buffer for data that the peer has not read, which is charged to
            # zeusd.
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
        except OSError:
            stream.close()
            return False
        user = self._turns.user(self._subuids.owner(uid), now_ns)
        why: str | None
        if self.open >= self._maximum and user.connections:
            # The last ones are reserved for users without a connection.
            why = f"is refused another connection: all users together have {self.open}"
            user.refused += 1
        else:
            why = self._turns.admit(user, now_ns)
        if why is not None:
            user.reason = why
            self._reports.add(user.uid, "connection_refused", f"{why}; more are closed at once")
            if guarded:
                self._closer.close(stream)
            else:
                stream.close()
            return False
        self._number += 1
        self.open += 1
        engine = ZmtpEngine(role)
        self._accepted(ClientConnection(self._number, stream, user, uid, engine, now_ns, guarded))
        return True

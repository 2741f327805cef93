"""One client's connection: its socket, its protocol engine, and its unsent data."""

from __future__ import annotations

import socket
from collections import deque
from enum import Enum

from zeusd.server import descriptors
from zeusd.server.fairness import User
from zeusd.server.visibility import Unusable
from zeusd.server.zmtp import READ_BYTES, ZmtpEngine

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Sent(Enum):
    """The result of sending bytes."""

    ALL = "all"
    WAITING = "waiting"
    """Some wait until the peer reads more."""
    GONE = "gone"
    """The peer has closed the connection. What it sent before is still valid."""


class Connection:
    """An accepted connection.

    Attributes:
        uid: The peer's uid, which may be a subordinate uid of `user`.
        guarded: Whether the peer may have sent descriptors.
        drained: Whether the last `receive` read everything, so that epoll reports new data.
        waiting: Bytes that wait until the peer reads.
        hung_up: Whether the peer has stopped sending; earlier data may still be unread.
        refusal: Why none of its requests can be served; None: they can.
    """

    __slots__ = (
        "_mute",
        "_out",
        "accepted_ns",
        "after_exit",
        "closed",
        "drained",
        "engine",
        "guarded",
        "hung_up",
        "identified",
        "number",
        "queued",
        "refusal",
        "stream",
        "topics",
        "uid",
        "user",
        "waiting",
    )

    def __init__(
        self,
        number: int,
        stream: socket.socket,
        user: User[Connection],
        uid: int,
        engine: ZmtpEngine,
        accepted_ns: int,
        guarded: bool,
    ) -> None:
        self.number = number
        self.stream = stream
        self.user = user
        self.uid = uid
        self.engine = engine
        self.accepted_ns = accepted_ns
        self.guarded = guarded
        self._out: deque[bytes] = deque()
        self._mute = False
        self.waiting = 0
        self.after_exit = 0
        self.queued = False
        self.closed = False
        self.hung_up = False
        self.drained = False
        self.identified = False
        self.refusal: Unusable | None = None
        self.topics: set[bytes] = set()

    def receive(self) -> bytes | None:
        """Received bytes, at most the size of one request; None: none; empty: the peer has ended.

        Raises:
            DescriptorsSent: The peer sent descriptors.
        """
        try:
            if self.guarded:
                data = descriptors.receive_guarded(self.stream, READ_BYTES)
            else:
                data = self.stream.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.drained = len(data) < READ_BYTES and not self.hung_up
        return data

    def send(self, data: bytes) -> Sent:
        """Sends bytes, and keeps those that the peer does not accept yet."""
        if self._mute:
            return Sent.ALL
        if not self._out:
            try:
                sent = self.stream.send(data, _FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError:
                return self._silence()
            if sent == len(data):
                return Sent.ALL
            data = data[sent:]
        self._out.append(data)
        self.waiting += len(data)
        return Sent.WAITING

    def flush(self) -> Sent:
        """Sends waiting bytes."""
        while self._out:
            data = self._out[0]
            try:
                sent = self.stream.send(data, _FLAGS)
            except BlockingIOError:
                return Sent.WAITING
            except OSError:
                return self._silence()
            self.waiting -= sent
            if sent < len(data):
                self._out[0] = data[sent:]
                return Sent.WAITING
            self._out.popleft()
        return Sent.ALL

    def _silence(self) -> Sent:
        self._mute = True
        self._out.clear()
        self.waiting = 0
        return Sent.GONE

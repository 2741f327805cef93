"""One client's connection: its socket, its protocol engine, and what waits to be sent."""

from __future__ import annotations

import socket
from collections import deque
from enum import Enum

from zeusd.server import descriptors
from zeusd.server.fairness import User
from zeusd.server.visibility import Unusable
from zeusd.server.zmtp import READ_BYTES, Engine

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Sent(Enum):
    """What became of bytes to send."""

    ALL = "all"
    WAITING = "waiting"
    """Some wait until the peer has read more."""
    GONE = "gone"
    """The peer is gone. What it sent before still counts."""


class Connection:
    """A connection that was accepted.

    Args:
        number: Never used again for another.
        stream: Its socket.
        user: Its user's account.
        uid: The user's own uid, which may be subordinate to the account's.
        engine: Its conversation.
        guarded: Whether the peer may send descriptors along.

    Attributes:
        queued: Whether it waits for its turn to be read.
        closed: Whether it has ended, or is about to.
        hung_up: Whether the peer sends no more; what it sent before may still wait.
        drained: Whether the last `receive` took all there was: epoll reports what comes after.
        refusal: Why none of its requests can be served; None: they can.
        topics: What it subscribes to.
        identified: Whether its process is known, to the core as well.
        waiting: Bytes that wait until the peer reads.
    """

    __slots__ = (
        "_guarded",
        "_mute",
        "_out",
        "accepted_ns",
        "closed",
        "drained",
        "engine",
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
        engine: Engine,
        accepted_ns: int,
        guarded: bool,
    ) -> None:
        self.number = number
        self.stream = stream
        self.user = user
        self.uid = uid
        self.engine = engine
        self.accepted_ns = accepted_ns
        self._guarded = guarded
        self._out: deque[bytes] = deque()
        self._mute = False
        self.waiting = 0
        self.queued = False
        self.closed = False
        self.hung_up = False
        self.drained = False
        self.identified = False
        self.refusal: Unusable | None = None
        self.topics: set[bytes] = set()

    @property
    def guarded(self) -> bool:
        """Whether the peer may have sent descriptors along."""
        return self._guarded

    def receive(self) -> bytes | None:
        """What has come, at most one request's worth; None: nothing has; empty: the peer ended.

        Raises:
            DescriptorsSent: The peer sent descriptors along.
        """
        try:
            if self._guarded:
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
        """Sends, or keeps what the peer does not take yet."""
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
        """Sends what waits."""
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

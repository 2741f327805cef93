"""One client's connection: its socket, its protocol engine, and its unsent data."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from zeusd.server import descriptors
from zeusd.server.fairness import UserShare
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


@dataclass(slots=True, eq=False)
class ClientConnection:
    """An accepted connection.

    Attributes:
        uid: The peer's uid, which may be a subordinate uid of `user`.
        guarded: Whether the peer may have sent descriptors.
        waiting: Bytes that wait until the peer reads.
        after_exit: Messages that were read after its process had exited.
        queued: Whether it is queued to be read.
        hung_up: Whether the peer has stopped sending; earlier data may still be unread.
        drained: Whether the last `receive` read everything, so that epoll reports new data.
        identified: Whether its process was identified and reported to the core.
        refusal: Why none of its requests can be served; None: they can.
    """

    number: int
    stream: socket.socket
    user: UserShare[ClientConnection]
    uid: int
    engine: ZmtpEngine
    accepted_ns: int
    guarded: bool
    waiting: int = 0
    after_exit: int = 0
    queued: bool = False
    closed: bool = False
    hung_up: bool = False
    drained: bool = False
    identified: bool = False
    refusal: Unusable | None = None
    topics: set[bytes] = field(default_factory=set)
    _out: deque[bytes] = field(default_factory=deque)
    _mute: bool = False

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

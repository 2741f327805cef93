"""What front and ring say to each other over their SOCK_SEQPACKET socketpair.

One message is one kernel message: a kind, a connection number, a body. The front sends OPEN (with
the connection's descriptor, so that the ring asks the kernel itself who the peer is), REQUEST (the
client's bytes, found valid), CLOSE, PONG and TOPICS (what is subscribed to); the ring sends LIMITS
(first of all, and after a reload), SOURCES (what can be subscribed to), REPLY (the bytes for the
client), KICK, PING and SAMPLE (a topic and the bytes for its subscribers). Neither believes more of
the other than it must: the ring decodes and validates again, and a front that answers no PING is
replaced.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

OPEN, REQUEST, CLOSE, PONG, TOPICS = b"O", b"R", b"C", b"o", b"T"
LIMITS, REPLY, KICK, PING, SOURCES, SAMPLE = b"L", b"P", b"K", b"i", b"N", b"S"

MAX_BYTES = 256 * 1024
"""Largest message on the link; replies that list many clocks are the largest."""

HEADER = struct.Struct("=cI")
HEADER_SIZE = HEADER.size

_FLAGS = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_FD_SPACE = socket.CMSG_SPACE(array.array("i", [0]).itemsize)


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What one user may ask of the front.

    Attributes:
        max_connections_per_user: Connections beyond this are closed at once.
        requests_per_second: What comes faster waits, then is refused, then the connection closed.
    """

    max_connections_per_user: int = 128
    requests_per_second: float = 2000.0

    def to_map(self) -> dict[str, Any]:
        """As it crosses the link."""
        return asdict(self)


def pair() -> tuple[socket.socket, socket.socket]:
    """A new link: the ring's end and the front's."""
    ring, front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ring, front):
        prepare(end)
    return ring, front


def prepare(end: socket.socket) -> None:
    """Gives one end room for the largest messages."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_BYTES)


def join_sample(topic: str, payload: bytes) -> bytes:
    """The body of a SAMPLE."""
    name = topic.encode()
    return bytes((len(name),)) + name + payload


def split_sample(body: bytes) -> tuple[bytes, bytes]:
    """Topic and payload of a SAMPLE's body."""
    end = 1 + body[0]
    return body[1:end], body[end:]


class Receiver:
    """Takes messages off a link without allocating a buffer for each."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = bytearray(MAX_BYTES)
        self._view = memoryview(self._buffer)

    def receive(self) -> tuple[bytes, int, bytes, int | None] | None:
        """The next message, without waiting: `(kind, connection, body, descriptor or None)`.

        None at the end of the link, or after a message that breaks its form.

        Raises:
            BlockingIOError: There is none at the moment.
        """
        size, ancillary, flags, _ = self._link.recvmsg_into([self._buffer], _FD_SPACE, _FLAGS)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        # There is room for two where one belongs.
        for surplus in fds[1:]:
            os.close(surplus)
        if size < HEADER_SIZE or flags & socket.MSG_TRUNC:
            return None
        kind, conn = HEADER.unpack_from(self._buffer)
        return kind, conn, bytes(self._view[HEADER_SIZE:size]), fds[0] if fds else None

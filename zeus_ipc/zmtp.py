"""ZeroMQ's wire protocol, without I/O: both ends' messages, and how a client reads replies.

ZMTP 3.0 and 3.1 with the NULL mechanism (https://rfc.zeromq.org/spec/23/ and /37/).
"""

from __future__ import annotations

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""

GREETING_BYTES = 64
MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + MECHANISM + bytes(32)


class ProtocolError(Exception):
    """The peer violated ZMTP, or a rule of this end. The text names the rule."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame."""
    size = len(body)
    if size < 256:
        return bytes((flags, size)) + body
    return bytes((flags | LONG,)) + size.to_bytes(8, "big") + body


def command(name: bytes, body: bytes = b"") -> bytes:
    """One command."""
    return frame(bytes((len(name),)) + name + body, COMMAND)


def metadata(name: bytes, value: bytes) -> bytes:
    """One property of a READY command."""
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


DEALER_HELLO = GREETING + command(
    b"READY", metadata(b"Socket-Type", b"DEALER") + metadata(b"Identity", b"")
)
"""The handshake of a DEALER. It waits for the peer's READY before the first message."""

PING = command(b"PING", b"\0\0")
"""The peer answers with PONG when it has read all that was sent before."""


class Replies:
    """The bodies of the messages that a ROUTER sends, from the bytes of one connection.

    Attributes:
        ready: Whether the handshake is over.
        pongs: Number of received PONG commands.
    """

    def __init__(self) -> None:
        self.ready = False
        self.pongs = 0
        self._buffer = b""
        self._greeted = False

    def receive(self, data: bytes) -> list[bytes]:
        """Takes bytes; returns the messages that they complete.

        Raises:
            ProtocolError: The peer is not a ROUTER that sends messages of one frame.
        """
        buffer, at = self._buffer + data, 0
        if not self._greeted:
            if buffer and (buffer[0] != 0xFF or (len(buffer) > 10 and buffer[10] < 3)):
                raise ProtocolError("not ZMTP 3")
            if len(buffer) < GREETING_BYTES:
                self._buffer = buffer
                return []
            if buffer[12:32] != MECHANISM:
                raise ProtocolError("mechanism other than NULL")
            self._greeted, at = True, GREETING_BYTES
        bodies = []
        while len(buffer) - at >= 2:
            flags = buffer[at]
            begin = at + (9 if flags & LONG else 2)
            if len(buffer) < begin:
                break
            size = int.from_bytes(buffer[at + 1 : begin], "big")
            # Longer frames do not come from zeusd.
            if flags & ~(LONG | COMMAND) or size > 64 * 1024 * 1024:
                raise ProtocolError("message of several parts, or too long")
            if len(buffer) < begin + size:
                break
            at = begin + size
            if not flags & COMMAND:
                bodies.append(buffer[begin:at])
            elif buffer[begin : begin + 6] == b"\x05ERROR":
                raise ProtocolError("ERROR from the peer")
            elif buffer[begin : begin + 6] == b"\x05READY":
                self.ready = True
            elif buffer[begin : begin + 5] == b"\x04PONG":
                self.pongs += 1
        self._buffer = buffer[at:]
        return bodies

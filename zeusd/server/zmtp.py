"""The server's side of ZeroMQ's wire protocol, without I/O: bytes in, events out.

ZMTP 3.0 and 3.1 with the NULL mechanism (https://rfc.zeromq.org/spec/23/ and /37/). One
`ZmtpEngine` is one connection. It has no socket or clock, holds at most one incomplete frame
besides the bytes passed to `receive`, and raises `ProtocolError` at the first byte that breaks a
rule: it checks lengths and flags in a frame's header before the body arrives. After an error, close
the connection without sending anything: an ERROR command or malformed bytes end libzmq's session
permanently, while after a plain close libzmq connects again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeus_ipc.zmtp import (
    COMMAND,
    GREETING,
    GREETING_BYTES,
    LONG,
    MECHANISM,
    MORE,
    ProtocolError,
    command,
    frame,
    metadata,
)


class Role(Enum):
    """What this end is."""

    ROUTER = b"ROUTER"
    """Answers requests of DEALER and REQ peers; each is a message of one frame."""
    PUB = b"PUB"
    """Publishes to SUB and XSUB peers, and receives only their subscriptions."""


class ZmtpState(Enum):
    """How far the conversation has come."""

    GREETING = "greeting"
    HANDSHAKE = "handshake"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """The handshake is complete."""

    socket_type: bytes


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """A request: the one frame of a message, without REQ's delimiter."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Subscribe:
    """The peer subscribes to this topic."""

    topic: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """The peer unsubscribes from this topic."""

    topic: bytes


@dataclass(frozen=True, slots=True)
class Ignored:
    """A command without an effect for the caller: a PING (answered), a PONG, an unknown one."""


Event: TypeAlias = HandshakeDone | RequestFrame | Subscribe | Cancel | Ignored

MAX_TOPIC_BYTES = 96
"""Longest topic: a GPU's UUID."""

MAX_COMMAND_BYTES = 1024
"""Longest command: READY with an Identity of 255 bytes and some metadata."""

READ_BYTES = MAX_REQUEST_BYTES + 9
"""Size of the largest request with its header: bytes to read from a socket at a time."""

_SIGNATURE_BYTES = 10
_PEERS = {Role.ROUTER: (b"DEALER", b"REQ"), Role.PUB: (b"SUB", b"XSUB")}
_DELIMITER = bytes((MORE, 0))
_IGNORED = Ignored()


def publication(topic: bytes, payload: bytes) -> bytes:
    """The message of a publisher to the subscribers of a topic."""
    return frame(topic, MORE) + frame(payload)


class ZmtpEngine:
    """One connection.

    Attributes:
        unread: Whether received bytes are left that are not part of an event yet.
    """

    __slots__ = (
        "_buffer",
        "_delimited",
        "_max_frame",
        "_out",
        "_position",
        "_req",
        "role",
        "state",
        "unread",
    )

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = ZmtpState.GREETING
        # A subscription in ZMTP 3.0 is a message: one byte and the topic.
        self._max_frame = MAX_REQUEST_BYTES if role is Role.ROUTER else 1 + MAX_TOPIC_BYTES
        self._buffer = b""
        self._position = 0
        # Sends the whole greeting: libzmq waits for the signature before it sends its version.
        self._out = [GREETING]
        self._req = False
        self._delimited = False
        self.unread = False

    def receive(self, data: bytes) -> None:
        """Adds bytes from the peer. Call `next_event` until it returns None before the next
        call."""
        self._buffer = self._buffer[self._position :] + data if self.unread else data
        self._position = 0
        self.unread = True

    def data_to_send(self) -> bytes:
        """Bytes that the protocol itself sends: greeting, READY, PONG. Empty: none."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def reply(self, body: bytes) -> bytes:
        """The bytes of a reply to this peer."""
        return _DELIMITER + frame(body) if self._req else frame(body)

    def next_event(self) -> Event | None:
        """The next event; None: more bytes are needed.

        Raises:
            ProtocolError: The peer broke a rule; close the connection.
        """
        if self.state is ZmtpState.GREETING and not self._greeting():
            return None
        buffer, start = self._buffer, self._position
        have = len(buffer) - start
        if have < 2:
            return None
        flags = buffer[start]
        if flags & ~(MORE | LONG | COMMAND):
            raise ProtocolError("reserved flag")
        if flags & LONG:
            if have < 9:
                return None
            size, begin = int.from_bytes(buffer[start + 1 : start + 9], "big"), start + 9
        else:
            size, begin = buffer[start + 1], start + 2
        self._judge_header(flags, size)
        end = begin + size
        if end > len(buffer):
            return None
        self._position = end
        self.unread = end < len(buffer)
        body = buffer[begin:end]
        if flags & COMMAND:
            return self._command(body)
        if flags & MORE:
            self._delimited = True
            return self.next_event()
        return self._message(body)

    # --------------------------------------------------------------------------------- internals

    def _greeting(self) -> bool:
        """Whether the greeting is complete. Checks the received part of it."""
        got = self._buffer
        have = len(got)
        if (have and got[0] != 0xFF) or (have >= _SIGNATURE_BYTES and not got[9] & 1):
            raise ProtocolError("not ZMTP")
        if have > _SIGNATURE_BYTES and got[10] < 3:
            raise ProtocolError("ZMTP below 3.0")
        if have >= 32 and got[12:32] != MECHANISM:
            raise ProtocolError("mechanism other than NULL")
        if have < GREETING_BYTES:
            return False
        self._position = GREETING_BYTES
        self.unread = have > GREETING_BYTES
        self.state = ZmtpState.HANDSHAKE
        return True

    def _judge_header(self, flags: int, size: int) -> None:
        if flags & COMMAND:
            if flags & MORE:
                raise ProtocolError("command in parts")
            if not 0 < size <= MAX_COMMAND_BYTES:
                raise ProtocolError("command size")
        elif self.state is not ZmtpState.TRAFFIC:
            raise ProtocolError("message before READY")
        elif flags & MORE:
            # Only the empty frame before a REQ's request.
            if not self._req or self._delimited or size:
                raise ProtocolError("message of several parts")
        elif size > self._max_frame:
            raise ProtocolError("frame size")

    def _message(self, body: bytes) -> Event:
        if self.role is Role.ROUTER:
            if self._req and not self._delimited:
                raise ProtocolError("REQ without delimiter")
            self._delimited = False
            return RequestFrame(body)
        # Subscriptions of ZMTP 3.0, and of an XSUB of any version.
        if not body or body[0] > 1:
            raise ProtocolError("message to a publisher")
        return Subscribe(body[1:]) if body[0] else Cancel(body[1:])

    def _command(self, body: bytes) -> Event:
        end = 1 + body[0]
        name, rest = body[1:end], body[end:]
        if len(body) < end or not name:
            raise ProtocolError("command name")
        if name == b"ERROR":
            raise ProtocolError("ERROR from the peer")
        if self.state is ZmtpState.HANDSHAKE:
            if name != b"READY":
                raise ProtocolError("command before READY")
            return self._ready(rest)
        if name == b"READY":
            raise ProtocolError("READY twice")
        if name in (b"SUBSCRIBE", b"CANCEL"):
            if self.role is not Role.PUB or len(rest) > MAX_TOPIC_BYTES:
                raise ProtocolError("subscription")
            return Subscribe(rest) if name == b"SUBSCRIBE" else Cancel(rest)
        if name == b"PING":
            if len(rest) < 2:
                raise ProtocolError("PING size")
            self._out.append(command(b"PONG", rest[2:18]))  # without the TTL, at most 16 bytes
        return _IGNORED

    def _ready(self, properties: bytes) -> Event:
        kind = _properties(properties).get(b"socket-type", b"")
        if kind not in _PEERS[self.role]:
            raise ProtocolError("socket type")
        self._req = kind == b"REQ"
        self.state = ZmtpState.TRAFFIC
        ready = metadata(b"Socket-Type", self.role.value)
        if self.role is Role.ROUTER:
            ready += metadata(b"Identity", b"")
        self._out.append(command(b"READY", ready))
        return HandshakeDone(kind)


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The properties of a READY command, by name in lower case.

    Raises:
        ProtocolError: They do not fill the command exactly.
    """
    properties: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        value = position + 1 + data[position] + 4
        name = data[position + 1 : value - 4]
        position = value + int.from_bytes(data[value - 4 : value], "big")
        if not name or value > len(data) or position > len(data):
            raise ProtocolError("metadata")
        properties[name.lower()] = data[value:position]
    return properties

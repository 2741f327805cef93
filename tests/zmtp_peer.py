"""Bytes that a peer may send over ZMTP, including those that libzmq would never send."""

from __future__ import annotations

import socket

NULL = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + NULL + bytes(32)
GREETING_30 = b"\xff" + bytes(8) + b"\x7f\x03\x00" + NULL + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, 4)


def prop(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def ready(kind: bytes = b"DEALER") -> bytes:
    return command(b"READY", prop(b"Socket-Type", kind) + prop(b"Identity", b""))


def hello(kind: bytes = b"DEALER") -> bytes:
    """Everything a peer sends before its first message."""
    return GREETING + ready(kind)


def shaken(path: str, kind: bytes = b"DEALER") -> socket.socket:
    """A connection whose handshake is over."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(60)
    try:
        stream.connect(path)
        stream.sendall(hello(kind))
        exactly(stream, 64)
        header = exactly(stream, 2)
        exactly(stream, header[1])
    except BaseException:
        stream.close()
        raise
    return stream


def exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise ConnectionError("the server closed the connection")
        data += part
    return data


def message(stream: socket.socket) -> bytes:
    """The next message of one frame."""
    flags, size = exactly(stream, 2)
    if flags & 2:
        size = int.from_bytes(bytes([size]) + exactly(stream, 7), "big")
    return exactly(stream, size)


def has_ended(stream: socket.socket) -> bool:
    """Whether the other end has closed the connection."""
    stream.setblocking(False)
    try:
        return stream.recv(65536) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True

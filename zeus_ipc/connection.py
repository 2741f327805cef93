"""One connection to the daemon: a plain Unix socket that speaks ZMTP as a DEALER.

The client does not use libzmq for requests. A request that waits for its reply takes two system
calls in the calling thread, while libzmq wakes its own thread for the request and for the reply; a
request that does not wait takes one. And libzmq aborts the process if it runs out of file
descriptors, which must not happen to a training job.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from zeus_ipc.codec import decode_reply
from zeus_ipc.errors import DaemonUnavailable
from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeus_ipc.zmtp import DEALER_HELLO, PING, ProtocolError, Replies

READ_BYTES = 16 * 1024
"""Bytes of one read; a longer reply takes several reads."""

WITHOUT_WAITING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
"""Flags of every send: a full buffer and a closed peer are errors, and must not block the caller or
raise SIGPIPE."""

_TIME = struct.Struct("@ll")  # struct timeval


class Connection:
    """A connection. One thread at a time reads from it; any thread may send.

    Args:
        stream: A new socket.

    Attributes:
        push: Sends a frame with the flags `WITHOUT_WAITING`: all of it, or with BlockingIOError
            nothing.
        sent: Number of frames that were sent without waiting for a reply; count each after `push`.
        read: How many of these the daemon is known to have read.
        reading: Held while waiting for the daemon to read them.
        reader: The thread that holds it.
        used_ns: When a request last ended, CLOCK_MONOTONIC; 0: none has.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._incoming = Replies()
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)
        self._pings = 0
        self.push: Callable[[bytes, int], int] = stream.send
        self.sent = self.read = self.used_ns = self.reader = 0
        self.reading = threading.RLock()

    def __del__(self) -> None:
        self._stream.close()

    def open(self, path: str, until_ns: int) -> None:
        """Connects, and waits for the daemon's part of the handshake. If it fails, the socket is
        closed at once: the error's frames keep this object until the next garbage collection.

        Args:
            path: The daemon's socket.
            until_ns: When to give up, CLOCK_MONOTONIC.

        Raises:
            OSError: It cannot be reached, or has closed the connection.
            ProtocolError: The listener is not zeusd.
        """
        try:
            self._connect(path, until_ns)
        except BaseException:
            self.close()
            raise

    def _connect(self, path: str, until_ns: int) -> None:
        stream = self._stream
        stream.setblocking(True)  # whatever the program's default timeout
        # Of what zeusd has not read. Frames that fit into half of it are sent completely or not at
        # all, so threads need no lock for sending.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_REQUEST_BYTES)
        # How long to wait while the socket's backlog is full. The kernel admits waiting processes
        # in order of arrival, so a retry starts at the end of that queue.
        wait_us = max(1, min(until_ns - time.monotonic_ns(), 1_000_000_000) // 1000)
        wait = _TIME.pack(*divmod(wait_us, 1_000_000))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        stream.connect(path)
        stream.send(DEALER_HELLO, WITHOUT_WAITING)
        while not self._incoming.ready:
            data = self._arrived(until_ns)
            if data is None:
                raise TimeoutError
            if self._incoming.receive(data):
                raise ProtocolError("a message before any request")

    def send(self, data: bytes, until_ns: int) -> bool:
        """Sends a frame; False: there was no room until this time.

        Raises:
            OSError: The connection has ended.
        """
        while True:
            try:
                if self.push(data, WITHOUT_WAITING) == len(data):
                    return True
            except BlockingIOError:
                if time.monotonic_ns() >= until_ns:
                    return False
                # Pause before the next attempt to send if there is no room.
                time.sleep(0.002)
            else:
                raise ConnectionResetError  # the rest would be mistaken for another frame

    def exchange(self, request_id: int, data: bytes, until_ns: int) -> dict[str, Any] | None:
        """Sends a request and waits for its reply; None: none came until this time.

        Raises:
            OSError: The connection has ended.
            ProtocolError, Malformed: The peer is not zeusd.
        """
        if not self.send(data, until_ns):
            return None
        while (arrived := self._arrived(until_ns)) is not None:
            for body in self._incoming.receive(arrived):
                reply = decode_reply(body)
                if reply.get("id") == request_id:  # else a late reply to an earlier request
                    return reply
        return None

    def settle(self, until_ns: int) -> bool:
        """Waits until the daemon has read all that was sent; False: it has not until this time.

        Raises:
            OSError, ProtocolError: As for `exchange`.
        """
        sent = self.sent
        if not self.send(PING, until_ns):
            return False
        self._pings += 1
        while self._incoming.pongs < self._pings:
            arrived = self._arrived(until_ns)
            if arrived is None:
                return False
            self._incoming.receive(arrived)
        self.read = sent
        return True

    def close(self) -> None:
        """Ends the connection. Only if no other thread uses it."""
        self._stream.close()

    def end(self) -> None:
        """Ends the connection under a thread that may be using it."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Makes all use of it raise that the client was closed."""
        self.push = _refuse

    def _arrived(self, until_ns: int) -> bytes | None:
        """Bytes that arrive by a time; None: none.

        It waits with poll(2): Linux wakes a thread that waits in recv(2) also when the peer reads
        the request, which costs both of them.
        """
        left_ms = (until_ns - time.monotonic_ns()) / 1e6
        if not self._poll.poll(max(0.0, left_ms)):
            return None
        data = self._stream.recv(READ_BYTES, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError
        return data


def client_closed() -> DaemonUnavailable:
    """The error of a closed client."""
    return DaemonUnavailable("this client was closed; make a new one")


def _refuse(data: bytes, flags: int) -> int:
    raise client_closed()

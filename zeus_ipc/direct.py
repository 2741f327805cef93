"""Carries requests to the daemon over a plain Unix socket that speaks ZMTP, without libzmq.

For loops that count microseconds: what is sent without waiting costs one system call, where libzmq
first wakes a thread of its own. To the daemon it is a DEALER like any other, and all that goes over
it, with and without an answer, arrives in the order in which it was sent.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from zeus_ipc.codec import DecodeError, decode_reply
from zeus_ipc.errors import DaemonUnavailable
from zeus_ipc.overriding import override
from zeus_ipc.transport import GRACE_NS, SocketTransport, check_time, client_closed
from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeus_ipc.zmtp import DEALER_HELLO, ProtocolError, Replies, frame

SEND_BUFFER = 4 * MAX_REQUEST_BYTES
"""The kernel's room for what zeusd has not read. Frames that fit into half of it go out whole or
not at all, so that threads need no lock between them."""

RETRY_NS = 20_000_000
"""Between two attempts to connect."""

PAUSE_S = 0.002
"""Before another look where there is no connection, or no room in it."""

NO_SIGNAL = socket.MSG_NOSIGNAL

Push = Callable[[bytes, int], int]


class Line:
    """One process's connection to the daemon, opened again when it was lost.

    Args:
        path: The daemon's socket.

    Attributes:
        push: Sends a frame with these flags, without waiting. Raises BlockingIOError where there is
            no room or no connection, and another OSError, which goes to `lost`, where the
            connection has ended. Look it up for each frame: each connection has its own.
        number: Of the connection; 0: there is none.
        replies: What has come, by the request's id; None: it is waited for.
    """

    def __init__(self, path: str) -> None:
        self.push: Push = self._open_and_push
        self.number = 0
        self.replies: dict[int, dict[str, Any] | None] = {}
        self._path = path
        self._turn = threading.Condition()
        self._stream: socket.socket | None = None
        self._read: socket.socket | None = None  # by a thread that waits for a reply
        self._incoming = Replies()
        self._count = 0
        self._tried_ns = 0
        self._ended = False

    def send(self, data: bytes) -> int:
        """Sends a frame, without waiting. Returns the connection's number; 0: not at the moment.

        Raises:
            DaemonUnavailable: This line was ended.
        """
        try:
            with self._turn:
                self._open()
                number, push = self.number, self.push
        except ProtocolError as error:
            raise not_zeusd(error) from None
        if not number:
            return 0
        try:
            if push(data, NO_SIGNAL) == len(data):
                return number
        except BlockingIOError:
            return 0
        except OSError:
            pass
        self.lost(push)  # also where a part went out: the rest would be taken for another frame
        return 0

    def lost(self, push: Push) -> None:
        """The connection of this `push` has ended."""
        with self._turn:
            if self.push == push:
                self._drop()

    def receive(self, request_id: int, until_ns: int) -> None:
        """Waits for this reply, but no longer than until the connection is lost. Takes others'
        replies, too, unless another thread does so.

        Raises:
            DaemonUnavailable: What answers is not zeusd.
        """
        with self._turn:
            while self._read is not None and self.replies[request_id] is None:
                left_s = (until_ns - time.monotonic_ns()) / 1e9
                if left_s <= 0 or not self._turn.wait(left_s):
                    return
            stream, incoming = self._stream, self._incoming
            if stream is None or self.replies[request_id] is not None:
                return
            self._read = stream
        found: list[dict[str, Any]] = []
        lost = True
        try:
            data = _arrived(stream, until_ns)
            found = [decode_reply(body) for body in incoming.receive(data or b"")]
            lost = data == b""
        except OSError:
            pass
        except (ProtocolError, DecodeError) as error:
            raise not_zeusd(error) from None
        finally:
            with self._turn:
                self._read = None
                for reply in found:
                    if reply.get("id") in self.replies:
                        self.replies[reply["id"]] = reply
                if self._stream is not stream:
                    stream.close()
                elif lost:
                    self._drop()
                self._turn.notify_all()

    def end(self) -> None:
        """Ends the connection, and opens no other."""
        with self._turn:
            self._ended = True
            self._drop()

    def abandon(self) -> None:
        """In a child of fork: the connection is the parent's. Its threads may hold the locks."""
        self._ended = True
        self.push = self._refuse
        if self._stream is not None:
            self._stream.close()

    # --------------------------------------------------------------------------------- internals

    def _open_and_push(self, data: bytes, flags: int) -> int:
        with self._turn:
            with contextlib.suppress(ProtocolError):  # a request that waits says so
                self._open()
            if not self.number:
                raise BlockingIOError
            push = self.push
        return push(data, flags)

    def _refuse(self, data: bytes, flags: int) -> int:
        raise client_closed()

    def _open(self) -> None:
        """Comes a step nearer to a connection if there is none, without waiting: connects, if it is
        time to try, or looks whether zeusd has answered the greeting.
        """
        if self._ended:
            raise client_closed()
        if self._stream is None:
            self._connect()
        elif not self.number:
            try:
                said = self._stream.recv(1 << 16)
                if self._incoming.receive(said):
                    raise ProtocolError("a message before any request")
            except BlockingIOError:
                return
            except OSError:
                said = b""
            except ProtocolError:
                self._drop()
                raise
            if not said:
                self._drop()
            elif self._incoming.ready:
                self._count += 1
                self.number, self.push = self._count, self._stream.send

    def _connect(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._tried_ns < RETRY_NS:
            return
        self._tried_ns = now_ns
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            stream.connect(self._path)
            stream.send(DEALER_HELLO, NO_SIGNAL)
        except OSError:
            stream.close()
            return
        self._stream, self._incoming = stream, Replies()

    def _drop(self) -> None:
        """Ends the present connection. A thread that reads from it hears of it, and closes it."""
        stream, self._stream, self.number = self._stream, None, 0
        self.push = self._open_and_push
        if stream is None:
            return
        if self._read is stream:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        else:
            stream.close()


class DirectTransport(SocketTransport[Line]):
    """The way to a daemon's socket, as `ZmqTransport`, without libzmq between.

    A request whose connection is lost before the reply came is sent again once there is a new
    connection: all operations may be repeated without harm.

    Args:
        path: The daemon's Unix socket.
    """

    @override
    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        line = self.connection()
        request_id, deadline_ns, data = self._numbered(message, timeout_s)
        data, until_ns = frame(data), deadline_ns + GRACE_NS
        line.replies[request_id] = None
        sent_over = 0
        try:
            while (reply := line.replies[request_id]) is None:
                if not sent_over or sent_over != line.number:
                    sent_over = line.send(data)
                if sent_over:
                    line.receive(request_id, until_ns)
                else:
                    time.sleep(PAUSE_S)
                if line.replies[request_id] is None:
                    check_time(self._path, until_ns, sent_over > 0, timeout_s)
            return reply
        finally:
            line.replies.pop(request_id, None)

    @override
    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        line = self.connection()
        _, deadline_ns, data = self._numbered(message, timeout_s)
        data = frame(data)
        while not line.send(data):
            check_time(self._path, deadline_ns, False, timeout_s)
            time.sleep(PAUSE_S)

    # --------------------------------------------------------------------------------- internals

    @override
    def _open(self) -> Line:
        return Line(self._path)

    @override
    def _end(self, connection: Line) -> None:
        connection.end()

    @override
    def _abandon(self, connection: Line) -> None:
        connection.abandon()


def not_zeusd(error: Exception) -> DaemonUnavailable:
    """The error of a request that something else has answered."""
    return DaemonUnavailable(f"what answers is not zeusd ({error}); check the socket's path")


def _arrived(stream: socket.socket, until_ns: int) -> bytes | None:
    """What has come by then; None: nothing has; empty: the peer has closed."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    left_ms = max(0, -((time.monotonic_ns() - until_ns) // 1_000_000))
    return stream.recv(1 << 16) if poll.poll(left_ms) else None

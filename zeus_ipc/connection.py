"""One process's connection to the daemon: a plain Unix socket that speaks ZMTP as a DEALER.

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
from zeus_ipc.diagnosis import check_deadline, unreachable
from zeus_ipc.errors import DaemonUnavailable
from zeus_ipc.parsing import Malformed
from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeus_ipc.zmtp import DEALER_HELLO, ProtocolError, Replies

SEND_BUFFER = 4 * MAX_REQUEST_BYTES
"""Size of the kernel's buffer for data that zeusd has not read, bytes. Frames that fit into half of
it are sent completely or not at all, so threads need no lock for sending."""

READ_BYTES = 16 * 1024
"""Bytes of one read; a longer reply takes several reads."""

QUANTUM_NS = 50_000_000
"""Time limit of one wait for a reply: a signal handler's request may receive it meanwhile."""

CONNECT_NS = 1_000_000_000
"""How long to wait while the socket's backlog is full. The kernel admits waiting processes in order
of arrival, so a retry starts at the end of that queue."""

RETRY_NS = 20_000_000
"""Pause between two attempts to connect."""

PAUSE_S = 0.002
"""Pause before the next attempt if there is no connection, or no room in it."""

WITHOUT_WAITING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
"""Flags of every send: a full buffer and a closed peer are errors, and must not block the caller or
raise SIGPIPE."""

_TIME = struct.Struct("@ll")  # struct timeval
Push = Callable[[bytes, int], int]


class Connection:
    """The connection of one process, which is reopened after a loss.

    Args:
        path: The daemon's socket.

    Attributes:
        push: Sends a frame with the flags `WITHOUT_WAITING`. Raises BlockingIOError if there is no
            room or no connection, and another OSError, to be passed to `lost`, if the connection
            has ended. Look it up for each frame, because each socket has its own.
        used: Whether the daemon was ever reached.
    """

    def __init__(self, path: str) -> None:
        self.push: Push = self._open_and_push
        self.used = False
        self._path = path
        # A signal handler may send a request while its thread holds this lock or waits for a reply.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for `_changed`
        self._replies: dict[int, dict[str, Any] | None] = {}  # None: awaited
        self._stream: socket.socket | None = None  # in the handshake, or ready
        self._ready: socket.socket | None = None
        self._reader: tuple[int, socket.socket] | None = None  # the reading thread, its socket
        self._incoming = Replies()
        self._connecting = False
        self._tried_ns = 0
        self._ended = False

    def request(
        self, request_id: int, data: bytes, until_ns: int, timeout_s: float
    ) -> dict[str, Any]:
        """Sends a frame and waits for the reply with this id.

        A request whose connection is lost before the reply is sent again over a new one: all
        operations may be repeated safely.

        Args:
            request_id: Id of the request.
            data: The frame.
            until_ns: When to give up, CLOCK_MONOTONIC.
            timeout_s: The caller's time limit, for the error's text.

        Raises:
            DaemonUnavailable: Nobody listens, or the listener is not zeusd.
            RequestTimeout: No reply came in time.
        """
        replies = self._replies
        replies[request_id] = None
        sent_over: socket.socket | None = None
        try:
            while True:
                if sent_over is None or sent_over is not self._ready:
                    sent_over = self.send(data, until_ns)
                if sent_over is not None:
                    self._receive(request_id, until_ns)
                    reply = replies[request_id]
                    if reply is not None:
                        return reply
                check_deadline(self._path, until_ns, sent_over is not None, timeout_s)
        finally:
            replies.pop(request_id, None)

    def send(self, data: bytes, until_ns: int) -> socket.socket | None:
        """Sends a frame. Returns the socket that it was sent over; None: it was not sent, after a
        pause that ends by `until_ns` (CLOCK_MONOTONIC).

        Raises:
            DaemonUnavailable: Nobody listens, the listener is not zeusd, or this was closed.
        """
        stream = self._ready
        if stream is None:
            try:
                stream = self._open(until_ns)
            except ProtocolError as error:
                raise _not_zeusd(error) from None
            if stream is None:
                return None
        push = stream.send
        try:
            if push(data, WITHOUT_WAITING) == len(data):
                return stream
        except BlockingIOError:
            time.sleep(PAUSE_S)
            return None
        except OSError:
            pass
        self.lost(push)  # also if a part was sent: the rest would be mistaken for another frame
        return None

    def lost(self, push: Push) -> None:
        """Handles the end of the socket of this `push`."""
        with self._lock:
            if self.push == push:
                self._drop()

    def end(self) -> None:
        """Closes the connection, and opens no other."""
        with self._lock:
            self._ended = True
            self._drop()

    def __del__(self) -> None:
        # A library's shared connection is open until the process ends.
        if self._stream is not None:
            self._stream.close()

    def abandon(self) -> None:
        """Resets a child of fork: the connection is the parent's, and its threads may hold the
        lock."""
        self._ended = True
        self._ready = None
        self.push = _refuse
        if self._stream is not None:
            self._stream.close()

    # ----------------------------------------------------------------------------------- replies

    def _receive(self, request_id: int, until_ns: int) -> None:
        """Waits for this reply until the connection is lost. Also receives other threads' replies,
        unless another thread is reading."""
        replies, thread = self._replies, threading.get_ident()
        stream: socket.socket | None = None
        found: list[dict[str, Any]] = []
        lost = False
        try:
            with self._lock:
                reader = self._reader
                while reader is not None and reader[0] != thread and replies[request_id] is None:
                    if not self._wait(until_ns):
                        return
                    reader = self._reader
                if self._stream is None or replies[request_id] is not None:
                    return
                stream, incoming = self._stream, self._incoming
                self._reader = (thread, stream)
            data = _arrived(stream, until_ns)
            lost = data == b""
            if data:
                found = [decode_reply(body) for body in incoming.receive(data)]
        except OSError:
            lost = True
        except (ProtocolError, Malformed) as error:
            lost = True
            raise _not_zeusd(error) from None
        finally:
            if stream is not None:
                self._read(reader, stream, found, lost)

    def _read(
        self,
        reader: tuple[int, socket.socket] | None,
        stream: socket.socket,
        found: list[dict[str, Any]],
        lost: bool,
    ) -> None:
        """Ends this thread's reading; `reader` is the previous reader: none, or one that a signal
        interrupted."""
        with self._lock:
            if self._reader is not None and self._reader[0] == threading.get_ident():
                self._reader = reader
            for reply in found:
                if reply.get("id") in self._replies:
                    self._replies[reply["id"]] = reply
            if self._stream is not stream:
                if reader is None:
                    stream.close()
            elif lost:
                self._drop()
            if self._waiting:
                self._changed.notify_all()

    def _wait(self, until_ns: int) -> bool:
        """Waits until another thread has read; False: it is too late. The caller holds the lock."""
        left_s = (until_ns - time.monotonic_ns()) / 1e9
        self._waiting += 1
        try:
            return left_s > 0 and self._changed.wait(left_s)
        finally:
            self._waiting -= 1

    # ------------------------------------------------------------------------------- connections

    def _open_and_push(self, data: bytes, flags: int) -> int:
        with contextlib.suppress(ProtocolError):  # a waiting request reports it
            stream = self._open(0)
            if stream is not None:
                return stream.send(data, flags)
        raise BlockingIOError

    def _open(self, until_ns: int) -> socket.socket | None:
        """Makes progress towards a connection: connects, or checks whether zeusd has answered the
        greeting. Waits for that, but no longer than `until_ns`. Returns the socket if it is ready.

        Raises:
            ProtocolError: The listener is not zeusd.
            DaemonUnavailable: Nobody listens, or this was closed.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            if self._ended:
                raise client_closed()
            stream = self._stream
            connects = (
                stream is None and not self._connecting and now_ns - self._tried_ns >= RETRY_NS
            )
            if connects:
                self._connecting, self._tried_ns = True, now_ns
        if connects:
            self._connect(max(0, min(until_ns - now_ns, CONNECT_NS)))
        elif stream is None:
            if until_ns > now_ns:
                time.sleep(PAUSE_S)
        elif until_ns > now_ns:
            # Another thread may close it meanwhile.
            with contextlib.suppress(OSError, ValueError):
                _readable(stream, PAUSE_S)
        with self._lock:
            return self._greeted()

    def _connect(self, wait_ns: int) -> None:
        """Connects; only one thread at a time does."""
        stream: socket.socket | None = None
        connected = False
        failure: OSError | None = None
        try:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if wait_ns:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(wait_ns))
            stream.setblocking(wait_ns > 0)
            stream.connect(self._path)
            stream.setblocking(True)
            with contextlib.suppress(OSError):  # zeusd may refuse the connection at once
                stream.send(DEALER_HELLO, WITHOUT_WAITING)
            connected = True
        except OSError as error:
            failure = error
        finally:  # also if Ctrl-C ends the wait
            with self._lock:
                self._connecting = False
                if connected and not self._ended:
                    self._stream, self._incoming = stream, Replies()
                elif stream is not None:
                    stream.close()
        # Wait for a daemon that was reached before, because it may be restarting.
        if failure is not None and wait_ns and not self.used:
            reason = unreachable(self._path, failure)
            if reason is not None:
                raise reason from None

    def _greeted(self) -> socket.socket | None:
        """The socket, if zeusd has answered the greeting. The caller holds the lock."""
        stream = self._stream
        if stream is None or self._ready is not None:
            return self._ready
        try:
            said = stream.recv(READ_BYTES, socket.MSG_DONTWAIT)
            if self._incoming.receive(said):
                raise ProtocolError("a message before any request")
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        except ProtocolError:
            self._drop()
            raise
        if not said:
            self._drop()
        elif self._incoming.ready:
            self.used = True
            self._ready, self.push = stream, stream.send
        return self._ready

    def _drop(self) -> None:
        """Ends the present socket. A thread that reads from it closes it. The caller holds the
        lock."""
        stream, self._stream, self._ready = self._stream, None, None
        self.push = self._open_and_push
        if stream is None:
            return
        if self._reader is not None and self._reader[1] is stream:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        else:
            stream.close()


def client_closed() -> DaemonUnavailable:
    """The error of a closed client."""
    return DaemonUnavailable("this client was closed; make a new one")


def _refuse(data: bytes, flags: int) -> int:
    raise client_closed()


def _not_zeusd(error: Exception) -> DaemonUnavailable:
    """The error of a request that another program has answered."""
    return DaemonUnavailable(f"what answers is not zeusd ({error}); check the socket's path")


def _arrived(stream: socket.socket, until_ns: int) -> bytes | None:
    """Bytes received within `QUANTUM_NS` and by a time; None: none; empty: the peer has closed.

    It waits with poll(2): Linux wakes a thread that waits in recv(2) also when the peer reads the
    request, which costs both of them.
    """
    left_ns = min(until_ns - time.monotonic_ns(), QUANTUM_NS)
    if not _readable(stream, max(0.0, left_ns / 1e9)):
        return None
    try:
        return stream.recv(READ_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def _readable(stream: socket.socket, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _timeval(ns: int) -> bytes:
    return _TIME.pack(ns // 1_000_000_000, max(1, ns % 1_000_000_000 // 1000))

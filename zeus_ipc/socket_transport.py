"""The way to a daemon's socket: a pool of connections, each used by one request at a time.

Requests that wait for a reply borrow a connection, so a slow one delays no other, nor the request
of a signal handler that interrupts it. What is sent without waiting travels over one more
connection, the line. zeusd reads different connections in any order, so a request first makes sure
that zeusd has read the line: it never overtakes what its client sent before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from zeus_ipc.codec import encode
from zeus_ipc.connection import Connection, client_closed
from zeus_ipc.diagnosis import check_deadline, unreachable
from zeus_ipc.errors import DaemonUnavailable, RequestRejected
from zeus_ipc.overriding import override
from zeus_ipc.parsing import Malformed
from zeus_ipc.transport import Subscription, Transport
from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeus_ipc.zmtp import ProtocolError, frame

RETRY_NS = 20_000_000
"""Pause between two attempts to connect."""

MAX_IDLE = 4
"""Connections that are kept for later requests."""

IDLE_NS = 5_000_000_000
"""All but one of them are closed when they were not used for this long."""


class _Waiter:
    """A request that waits for a connection. It is no `queue.SimpleQueue`: up to Python 3.12 that
    waits forever if its timeout is about a microsecond.
    """

    connection: Connection

    def __init__(self) -> None:
        self.came = threading.Lock()
        self.came.acquire()

    def hand(self, connection: Connection) -> None:
        self.connection = connection
        self.came.release()


class SocketTransport(Transport):
    """Connections of this process to a daemon, opened when they are needed.

    Shared by threads. It survives the daemon's restarts, and `fork`: a child never touches the
    connections that it inherited, and opens its own.

    Args:
        path: The daemon's Unix socket.
    """

    used = False
    patient = True
    """Whether to wait for a daemon that was reached before, because it may be restarting."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._ids = itertools.count(1)
        self._closed = False
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self.used = False
        self._guard = threading.RLock()  # a signal handler may interrupt its holder
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._idle: list[Connection] = []
        self._waiters: deque[_Waiter] = deque()
        self._open_after_ns = 0
        self._line: Connection | None = None

    @override
    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        data, deadline_ns = self._framed(message, timeout_s)
        # A request's deadline is the daemon's; its answer that the deadline is over needs time too.
        until_ns = deadline_ns + 100_000_000
        line = self._line
        if line is not None and line.sent != line.read:
            self._settle(line, until_ns, timeout_s)
        while True:
            connection = self._take(until_ns, timeout_s)
            try:
                reply = connection.exchange(message["id"], data, until_ns)
            except OSError:
                # All operations may be repeated safely.
                if not connection.used_ns:  # a new one
                    self._open_after_ns = time.monotonic_ns() + RETRY_NS
                continue
            except (ProtocolError, Malformed) as error:
                raise _not_zeusd(error) from None
            self._put(connection)
            if reply is not None:
                return reply
            check_deadline(self.path, until_ns, True, timeout_s)

    @override
    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        data, deadline_ns = self._framed(message, timeout_s)
        while True:
            line = self.line(deadline_ns, timeout_s)
            try:
                if line.send(data, deadline_ns):
                    line.sent += 1
                    return
            except OSError:
                self.lost(line)
            check_deadline(self.path, deadline_ns, False, timeout_s)

    def line(self, until_ns: int, timeout_s: float) -> Connection:
        """The connection for what is sent without waiting. Waits only to open it.

        Args:
            until_ns: When to give up, CLOCK_MONOTONIC.
            timeout_s: The caller's time limit, for the error's text.

        Raises:
            DaemonUnavailable: It cannot be opened, or this was closed.
        """
        line = self._line
        if line is not None:
            return line
        connection = self._take(until_ns, timeout_s)
        with self._guard:
            line = self._line = self._line or connection
        if line is not connection:
            self._put(connection)
        return line

    def lost(self, line: Connection) -> None:
        """Handles the end of a line."""
        line.end()
        with self._guard:
            if self._line is line:
                self._line = None

    @override
    def subscribe(self, names: Sequence[str], path: str | None, buffer: int) -> Subscription:
        if path is None:
            raise DaemonUnavailable(
                f"zeusd at {self.path} publishes no samples; use matching releases of zeusd and "
                "its client"
            )
        from zeus_ipc.subscription import ZmqSubscription  # few programs need libzmq

        return ZmqSubscription(path, names, buffer)

    @override
    def close(self) -> None:
        """Ends the connections, and the requests that wait for replies."""
        with self._guard:
            self._closed = True
            for connection in list(self._connections):
                connection.refuse()
                connection.end()
            self._idle.clear()
            self._line = None

    def after_fork(self) -> None:
        """In a child: the connections are the parent's."""
        for connection in list(self._connections):
            connection.refuse()
            connection.close()
        self._begin()

    # --------------------------------------------------------------------------------- internals

    def _framed(self, message: dict[str, Any], timeout_s: float) -> tuple[bytes, int]:
        """A request with its id and deadline as a frame, and the deadline."""
        message["id"] = next(self._ids)
        deadline_ns = message["deadline_ns"] = time.monotonic_ns() + int(timeout_s * 1e9)
        body = encode(message)
        if len(body) > MAX_REQUEST_BYTES:  # zeusd would close the connection
            raise RequestRejected(
                f"the request has {len(body)} bytes, and zeusd accepts {MAX_REQUEST_BYTES}; ask "
                "for less at once"
            )
        return frame(body), deadline_ns

    def _settle(self, line: Connection, until_ns: int, timeout_s: float) -> None:
        """Waits until zeusd has read what was sent over the line before."""
        thread = threading.get_ident()
        if line.reader == thread:
            return  # a signal handler has interrupted this wait
        try:
            if line.reading.acquire(timeout=max(0.0, (until_ns - time.monotonic_ns()) / 1e9)):
                line.reader = thread
                if line.sent == line.read or line.settle(until_ns):
                    return
        except (OSError, ProtocolError):
            self.lost(line)
            return
        finally:
            with contextlib.suppress(RuntimeError):  # it is another thread's
                line.reader = 0
                line.reading.release()
        check_deadline(self.path, until_ns, True, timeout_s)

    def _take(self, until_ns: int, timeout_s: float) -> Connection:
        """A connection that nobody uses: the one used last, or a new one."""
        while True:
            try:
                return self._idle.pop()
            except IndexError:
                connection = self._open(until_ns) or self._handed(until_ns)
            if connection is not None:
                return connection
            check_deadline(self.path, until_ns, False, timeout_s)

    def _handed(self, until_ns: int) -> Connection | None:
        """Waits for a connection that another thread has used, until one may be opened."""
        mine = _Waiter()
        self._waiters.append(mine)
        with contextlib.suppress(IndexError):  # it may have come before that
            came = self._idle.pop()
            try:
                self._waiters.remove(mine)
            except ValueError:  # another comes, too
                mine.came.acquire()
                self._put(mine.connection)
            return came
        wait_ns = min(self._open_after_ns, until_ns) - time.monotonic_ns()
        if not mine.came.acquire(timeout=max(0, wait_ns) / 1e9):
            with contextlib.suppress(ValueError):  # it comes now
                self._waiters.remove(mine)
                return None
            mine.came.acquire()
        return mine.connection

    def _put(self, connection: Connection) -> None:
        """Keeps a connection for the next request, and closes one that is not needed."""
        connection.used_ns = now_ns = time.monotonic_ns()
        if self._waiters:
            with contextlib.suppress(IndexError):  # it has given up
                self._waiters.popleft().hand(connection)
                return
        idle = self._idle
        idle.append(connection)
        with contextlib.suppress(IndexError):  # another thread took it
            if len(idle) > 1 and (len(idle) > MAX_IDLE or now_ns - idle[0].used_ns > IDLE_NS):
                idle.pop(0).close()
        if self._closed:
            idle.clear()

    def _open(self, until_ns: int) -> Connection | None:
        """Opens a connection; None: zeusd accepts none now, or did so only just now."""
        if time.monotonic_ns() < self._open_after_ns:
            return None
        try:
            connection = Connection(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with self._guard:
                if self._closed:
                    raise client_closed()
                self._connections.add(connection)
            connection.open(self.path, until_ns)
        except ProtocolError as error:
            raise _not_zeusd(error) from None
        except OSError as error:
            reason = None if self.used and self.patient else unreachable(self.path, error)
            if reason is not None:
                raise reason from None
            closed = isinstance(error, (BrokenPipeError, ConnectionResetError))
            # A longer pause if zeusd closes the connection: this user may have too many.
            pause_ns = 100_000_000 if closed else RETRY_NS
            self._open_after_ns = time.monotonic_ns() + pause_ns
            return None
        self.used = True
        return connection


def _not_zeusd(error: Exception) -> DaemonUnavailable:
    """The error of a request that another program has answered."""
    return DaemonUnavailable(f"what answers is not zeusd ({error}); check the socket's path")


_living: weakref.WeakSet[SocketTransport] = weakref.WeakSet()
"""Transports to reset in a child of fork."""


def _after_fork_in_child() -> None:
    for transport in list(_living):
        with contextlib.suppress(Exception):
            transport.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

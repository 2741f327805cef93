"""Carries requests of one process to the daemon and brings the replies back.

One `ZmqTransport` is one DEALER connection. It is shared by threads, and it survives the daemon's
restarts and `fork`: a child never touches the socket it inherited, and opens its own.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import itertools
import os
import socket as raw_socket
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import zmq

from zeus_ipc.codec import DecodeError, decode_reply, encode
from zeus_ipc.diagnosis import silent_daemon
from zeus_ipc.errors import AccessRefused, DaemonUnavailable, RequestTimeout
from zeus_ipc.overriding import override

_QUANTUM_MS = 2
"""How long a thread that waits for a reply keeps the socket from other threads."""

_AFTER_LOSS_NS = 1_000_000_000
_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 40
"""Short, since each attempt is a chance where others connect without end and fill the queue."""

_SILENT_NS = 5_000_000_000
"""A daemon that publishes nothing for this long is looked for."""

GRACE_NS = 100_000_000
"""A request's deadline is the daemon's; its answer that the deadline is over needs time too."""


C = TypeVar("C")
"""What a transport opens."""


class Subscription(Protocol):
    """Samples as they come."""

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next sample; None if none comes within this time.

        Raises:
            DaemonUnavailable: None can come any more.
        """

    def close(self) -> None:
        """Ends it."""


class Transport(Protocol):
    """How a client reaches a node.

    Attributes:
        in_process: Whether the node's engine runs in this process.
    """

    in_process: bool

    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a request and waits for its reply.

        Args:
            message: All of the request but `id` and `deadline_ns`.
            timeout_s: Seconds to wait, for the connection and for the reply together.

        Raises:
            DaemonUnavailable: Nobody listens, or the daemon did not answer in time.
        """

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Sends a request that gets no reply. Does not wait once there is a connection.

        Raises:
            DaemonUnavailable: There is none within `timeout_s`.
        """

    def subscribe(self, names: Sequence[str], path: str | None, buffer: int) -> Subscription:
        """Opens a subscription to the samples of these sources.

        Args:
            names: Their UUIDs.
            path: The daemon's socket for subscribers, as `NodeInfo.stream` has it.
            buffer: Samples that wait for their reader; of more, the newest are lost.
        """

    def close(self) -> None:
        """Ends the connection."""

    @property
    def used(self) -> bool:
        """Whether this process has anything to say goodbye for."""


class _FairLock:
    """A lock that threads get in the order in which they asked."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        self._guard.acquire()
        if not self._held:
            self._held = True
            self._guard.release()
            return
        mine = threading.Lock()
        mine.acquire()
        self._queue.append(mine)
        self._guard.release()
        mine.acquire()

    def __exit__(self, *exc: object) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._held = False


class _Connection:
    """The sockets of one process. Never used in another."""

    def __init__(self, path: str) -> None:
        self.lock = _FairLock()
        self.replies: dict[int, dict[str, Any] | None] = {}
        self.lost = 0
        self.lost_at_ns = 0
        self.context = zmq.Context(io_threads=1)
        self.dealer = self.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 1000),
            (zmq.RCVTIMEO, _QUANTUM_MS),
            (zmq.SNDTIMEO, _QUANTUM_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        ):
            self.dealer.setsockopt(option, value)
        self.monitor = self.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.dealer.connect(f"ipc://{path}")

    def check_lost(self) -> int:
        """How often the connection was lost so far. Call with the lock held."""
        while int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.monitor.recv_multipart(zmq.NOBLOCK)
            self.lost += 1
            self.lost_at_ns = time.monotonic_ns()
        return self.lost

    def close(self) -> None:
        self.dealer.disable_monitor()
        self.context.destroy(linger=0)


def _went_nowhere(connection: _Connection, sent_ns: int) -> bool:
    """Whether a request is unanswered that was sent soon after a connection was lost.

    libzmq reports a loss a moment before it takes the connection away; what is sent in that moment
    is gone with it, and no second loss is told of.
    """
    unanswered = time.monotonic_ns() - sent_ns > _AFTER_LOSS_NS
    return unanswered and sent_ns - connection.lost_at_ns < _AFTER_LOSS_NS


class SocketTransport(Transport, Generic[C]):
    """One connection of this process to the daemon, opened when it is first needed.

    Args:
        path: The daemon's Unix socket.
    """

    in_process = False

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids = itertools.count(1)
        self._guard = threading.Lock()
        self._opened: C | None = None
        self._closed = False
        _living.add(self)

    def _open(self) -> C:
        """Opens one."""
        raise NotImplementedError

    def _end(self, connection: C) -> None:
        """Ends one."""
        raise NotImplementedError

    def _abandon(self, connection: C) -> None:
        """In a child of fork: it is the parent's. Its threads may hold the locks."""
        raise NotImplementedError

    @property
    @override
    def used(self) -> bool:
        return self._opened is not None

    def connection(self) -> C:
        """This process's connection.

        Raises:
            DaemonUnavailable: Nobody listens.
        """
        with self._guard:
            if self._closed:
                raise client_closed()
            if self._opened is None:
                diagnose(self._path)
                self._opened = self._open()
            return self._opened

    @override
    def subscribe(self, names: Sequence[str], path: str | None, buffer: int) -> Subscription:
        if path is None:
            raise DaemonUnavailable(
                f"zeusd at {self._path} publishes no samples; use one of this client's release"
            )
        return ZmqSubscription(path, names, buffer)

    @override
    def close(self) -> None:
        """Ends the connection. Only in the process that opened it is there one to end."""
        with self._guard:
            self._closed = True
            connection, self._opened = self._opened, None
        if connection is not None:
            self._end(connection)

    def after_fork(self) -> None:
        """In a child: to touch the inherited connection would hang or mute the process."""
        self._guard = threading.Lock()
        connection, self._opened = self._opened, None
        if connection is not None:
            self._abandon(connection)

    def _numbered(self, message: dict[str, Any], timeout_s: float) -> tuple[int, int, bytes]:
        """Completes a request: its id, its deadline (ns), and all of it encoded."""
        request_id = message["id"] = next(self._ids)
        deadline_ns = message["deadline_ns"] = time.monotonic_ns() + int(timeout_s * 1e9)
        return request_id, deadline_ns, encode(message)


class ZmqTransport(SocketTransport[_Connection]):
    """The way to a daemon's socket.

    A request whose connection is lost before the reply came is sent again once there is a new
    connection, as is one that got no reply right after a loss: all operations may be repeated
    without harm.

    Args:
        path: The daemon's Unix socket.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._inherited: list[_Connection] = []

    @override
    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        connection = self._opened or self.connection()
        request_id, deadline_ns, data = self._numbered(message, timeout_s)
        replies = connection.replies
        replies[request_id] = None
        sent_at, sent_ns = -1, 0
        try:
            while True:
                with connection.lock:
                    reply = replies[request_id]
                    if reply is not None:
                        return reply
                    if sent_at < 0 and self._try_send(connection, data):
                        sent_at, sent_ns = connection.lost, time.monotonic_ns()
                    if sent_at >= 0:
                        self._receive(connection, request_id)
                        reply = replies[request_id]
                        if reply is not None:
                            return reply
                    lost = connection.check_lost() > sent_at
                    if sent_at >= 0 and (lost or _went_nowhere(connection, sent_ns)):
                        sent_at = -1
                check_time(self._path, deadline_ns + GRACE_NS, sent_at >= 0, timeout_s)
        finally:
            replies.pop(request_id, None)

    @override
    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        connection = self._opened or self.connection()
        _, deadline_ns, data = self._numbered(message, timeout_s)
        while True:
            with connection.lock:
                if self._try_send(connection, data):
                    return
            check_time(self._path, deadline_ns, False, timeout_s)

    # --------------------------------------------------------------------------------- internals

    @override
    def _open(self) -> _Connection:
        return _Connection(self._path)

    @override
    def _end(self, connection: _Connection) -> None:
        with connection.lock:
            connection.close()

    @override
    def _abandon(self, connection: _Connection) -> None:
        self._inherited.append(connection)  # collected, it would be closed

    @staticmethod
    def _try_send(connection: _Connection, data: bytes) -> bool:
        try:
            connection.dealer.send(data)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            raise client_closed() from None
        return True

    @staticmethod
    def _receive(connection: _Connection, request_id: int) -> None:
        """Takes replies until ours is among them or the quantum is over. Lock held."""
        replies = connection.replies
        try:
            while replies[request_id] is None:
                reply = decode_reply(connection.dealer.recv())
                other = reply.get("id")
                if other in replies:
                    replies[other] = reply
        except zmq.Again:
            return
        except zmq.ZMQError:
            raise client_closed() from None
        except DecodeError as error:
            raise DaemonUnavailable(
                f"what answers is not zeusd ({error}); check the socket's path"
            ) from None


class ZmqSubscription(Subscription):
    """Samples from a daemon's XPUB socket. It survives the daemon's restarts.

    Args:
        path: The socket.
        names: Topics.
        buffer: See `Transport.subscribe`.
    """

    def __init__(self, path: str, names: Sequence[str], buffer: int) -> None:
        diagnose(path)
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._sub = self._context.socket(zmq.SUB)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, buffer),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        ):
            self._sub.setsockopt(option, value)
        for name in names:
            self._sub.setsockopt(zmq.SUBSCRIBE, name.encode())
        self._sub.connect(f"ipc://{path}")
        self._heard_ns = time.monotonic_ns()

    @override
    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            if not self._sub.poll(max(0, round(timeout_s * 1000))):
                if time.monotonic_ns() - self._heard_ns > _SILENT_NS:
                    diagnose(self._path)
                return None
            _, payload = self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            raise DaemonUnavailable("this stream was closed; open a new one") from None
        self._heard_ns = time.monotonic_ns()
        try:
            return decode_reply(payload)
        except DecodeError as error:
            raise DaemonUnavailable(
                f"what publishes is not zeusd ({error}); check the socket's path"
            ) from None

    @override
    def close(self) -> None:
        self._context.destroy(linger=0)


def check_time(path: str, deadline_ns: int, sent: bool, timeout_s: float) -> None:
    """Ends a request whose time is over.

    Args:
        path: The daemon's socket.
        deadline_ns: When that is.
        sent: Whether the request was sent.
        timeout_s: What the caller gave it.

    Raises:
        DaemonUnavailable: It is over; the message says why, as far as can be told.
    """
    if time.monotonic_ns() < deadline_ns:
        return
    if not sent:
        diagnose(path)
    raise RequestTimeout(
        f"zeusd at {path} did not answer within {timeout_s:g} s; {silent_daemon(path)}"
    )


def client_closed() -> DaemonUnavailable:
    """What a closed client raises."""
    return DaemonUnavailable("this client was closed; make a new one")


def diagnose(path: str) -> None:
    """Says why nobody can be reached at `path`, if that can be told."""
    with raw_socket.socket(raw_socket.AF_UNIX, raw_socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            raise DaemonUnavailable(
                f"no zeusd listens at {path}: there is no such socket; start zeusd, or name its "
                "socket in ZEUSD_SOCK_PATH"
            ) from None
        except ConnectionRefusedError:
            raise DaemonUnavailable(
                f"no zeusd listens at {path}: the socket was left behind by one that ended; "
                "start zeusd"
            ) from None
        except PermissionError:
            raise AccessRefused(
                f"you may not connect to zeusd at {path}; ask the administrator "
                f"{access_remedy(path)}"
            ) from None
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ETIMEDOUT) or isinstance(error, TimeoutError):
                return
            raise DaemonUnavailable(
                f"cannot connect to zeusd at {path}: {error.strerror or error}"
            ) from None


def access_remedy(path: str) -> str:
    """What to ask the administrator for if one may not connect to a socket."""
    with contextlib.suppress(OSError, KeyError):
        found = os.stat(path)
        if found.st_gid != 0 and found.st_mode & stat.S_IWGRP:
            group = grp.getgrgid(found.st_gid).gr_name
            return f"to add you to the group {group}, then log in again"
    return "for the right to use it"


_living: weakref.WeakSet[SocketTransport[Any]] = weakref.WeakSet()
"""Told in each child of fork."""


def _after_fork_in_child() -> None:
    for transport in list(_living):
        with contextlib.suppress(Exception):
            transport.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Carries requests of one process to a node and brings the replies back."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from zeus_ipc.codec import encode
from zeus_ipc.connection import Connection, client_closed
from zeus_ipc.diagnosis import check_deadline
from zeus_ipc.errors import DaemonUnavailable, RequestRejected
from zeus_ipc.overriding import override
from zeus_ipc.wire import MAX_REQUEST_BYTES
from zeus_ipc.zmtp import frame

GRACE_NS = 100_000_000
"""A request's deadline is the daemon's; its answer that the deadline is over needs time too."""


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


class SocketTransport(Transport):
    """The way to a daemon's socket: one connection of this process, opened when it is first needed.

    Shared by threads. It survives the daemon's restarts, and `fork`: a child never touches the
    connection that it inherited, and opens its own.

    Args:
        path: The daemon's Unix socket.
    """

    in_process = False

    def __init__(self, path: str) -> None:
        self.path = path
        self._ids = itertools.count(1)
        self._guard = threading.Lock()
        self._opened: Connection | None = None
        self._closed = False
        _living.add(self)

    @property
    @override
    def used(self) -> bool:
        return self._opened is not None and self._opened.used

    def connection(self) -> Connection:
        """This process's connection.

        Raises:
            DaemonUnavailable: This transport was closed.
        """
        with self._guard:
            if self._closed:
                raise client_closed()
            if self._opened is None:
                self._opened = Connection(self.path)
            return self._opened

    @override
    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        connection = self._opened or self.connection()
        data, deadline_ns = self._framed(message, timeout_s)
        return connection.request(message["id"], data, deadline_ns + GRACE_NS, timeout_s)

    @override
    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        connection = self._opened or self.connection()
        data, deadline_ns = self._framed(message, timeout_s)
        while connection.send(data, deadline_ns) is None:
            check_deadline(self.path, deadline_ns, False, timeout_s)

    def _framed(self, message: dict[str, Any], timeout_s: float) -> tuple[bytes, int]:
        """A request with its id and deadline as a frame, and the deadline."""
        message["id"] = next(self._ids)
        deadline_ns = message["deadline_ns"] = time.monotonic_ns() + int(timeout_s * 1e9)
        body = encode(message)
        if len(body) > MAX_REQUEST_BYTES:  # zeusd would close the connection
            raise RequestRejected(
                f"the request has {len(body)} bytes, and zeusd takes {MAX_REQUEST_BYTES}; ask for "
                "less at once"
            )
        return frame(body), deadline_ns

    @override
    def subscribe(self, names: Sequence[str], path: str | None, buffer: int) -> Subscription:
        if path is None:
            raise DaemonUnavailable(
                f"zeusd at {self.path} publishes no samples; use one of this client's release"
            )
        from zeus_ipc.subscription import ZmqSubscription  # few programs need libzmq

        return ZmqSubscription(path, names, buffer)

    @override
    def close(self) -> None:
        """Ends the connection. Only in the process that opened it is there one to end."""
        with self._guard:
            self._closed = True
            connection, self._opened = self._opened, None
        if connection is not None:
            connection.end()

    def after_fork(self) -> None:
        """In a child: the connection is the parent's."""
        self._guard = threading.Lock()
        connection, self._opened = self._opened, None
        if connection is not None:
            connection.abandon()


_living: weakref.WeakSet[SocketTransport] = weakref.WeakSet()
"""Transports to reset in a child of fork."""


def _after_fork_in_child() -> None:
    for transport in list(_living):
        with contextlib.suppress(Exception):
            transport.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

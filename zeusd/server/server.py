"""The server: reads users in turn, hands requests on, sends replies and samples.

It runs on the reactor's thread alone. Connections that break ZeroMQ's protocol are closed; those
that send too fast are read later. The kernel identifies the peer. It knows nothing about leases.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from zeus_ipc.codec import encode
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Envelope, ErrorBody, UserLoad
from zeus_ipc.requests import Request
from zeus_ipc.zmtp import ProtocolError
from zeusd.core.model import Peer
from zeusd.runtime.processes import NoSuchPeer, identify_peer
from zeusd.runtime.reactor import Alarm, Reactor
from zeusd.runtime.sources import TickReading, describe_sample
from zeusd.server import decoding, descriptors
from zeusd.server.acceptor import Acceptor
from zeusd.server.connection import ClientConnection, Sent
from zeusd.server.fairness import Cost, Limits, Turns
from zeusd.server.reports import Reports
from zeusd.server.stream import Topics
from zeusd.server.visibility import unusable
from zeusd.server.zmtp import (
    Cancel,
    Event,
    HandshakeDone,
    RequestFrame,
    Role,
    Subscribe,
    ZmtpState,
)

log = logging.getLogger(__name__)

HANDSHAKE_NS = 2_000_000_000
"""How long a handshake may take; not counting what zeusd itself has not read yet."""

MAX_WAITING_BYTES = 1024 * 1024
"""Replies that wait for one client to read them. Its requests are not read meanwhile, so only
what it had asked for before can come to this."""

REQUEST_NS = 100_000
"""Processor time of the loop that counts as one request: that of a heartbeat."""

MAX_AFTER_EXIT = 16
"""Messages of a process that are still read after its exit: a goodbye, or sets without a reply."""

_CLOSED = Cost(0.0)
_NOTHING = Cost(0.1)
"""Cost of reading nothing, or only a part of a request."""

_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_READING = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET


class RequestHandler(Protocol):
    """Serves the requests."""

    def peer_opened(self, peer: Peer, pidfd: int) -> None:
        """A client connected. Takes over the pidfd."""

    def peer_closed(self, conn: int) -> None:
        """Its connection ended."""

    def request(self, conn: int, request: Request) -> None:
        """Handles a request; a reply may follow."""

    def invalid(self, conn: int, error: ErrorBody) -> None:
        """A request that nobody waits for was not valid."""

    def has_exited(self, conn: int) -> bool:
        """Whether its process has exited."""


class Server:
    """Serves one listening socket for requests and one for subscribers."""

    def __init__(self, reactor: Reactor, limits: Limits, max_connections: int) -> None:
        self._reactor = reactor
        self._turns: Turns[ClientConnection] = Turns(limits)
        self._reports = Reports()
        self._closer = descriptors.Closer(self._closed_on_thread)
        self._acceptor = Acceptor(
            reactor,
            self._turns,
            self._reports,
            self._closer,
            self._accepted,
            self._soon,
            max_connections,
        )
        self._topics = Topics(self._send)
        self._connections: dict[int, ClientConnection] = {}
        self._young: deque[ClientConnection] = deque()
        self._limited_ns: dict[int, int] = {}
        self._all_waiting = 0
        self._scheduled = False
        self._alarm = Alarm(reactor, self._soon)
        self._serving = False
        self._reading = False
        self._topics_changed = False
        self._application: RequestHandler
        self._stream: Callable[[frozenset[str]], None]

    # --------------------------------------------------------------------------------- lifecycle

    def attach(self, application: RequestHandler, stream: Callable[[frozenset[str]], None]) -> None:
        """Sets the application, and the callback that receives the sources with subscribers."""
        self._application = application
        self._stream = stream
        decoding.prepare()

    def start(self, clients: socket.socket, subscribers: socket.socket) -> None:
        """Begins to accept."""
        self._serving = True
        self._acceptor.listen(clients, Role.ROUTER)
        self._acceptor.listen(subscribers, Role.PUB)
        self._reactor.every(1.0, self._look)

    def stop(self) -> None:
        """Ends all connections."""
        self._serving = False
        self._acceptor.stop()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._closer.stop()
        self._reports.stop()

    def configure(self, limits: Limits) -> None:
        """Other limits from now on."""
        self._turns.configure(limits)

    # ------------------------------------------------------------------------------------ output

    def reply(self, conn: int, body: Envelope) -> None:
        """Sends a reply; drops it if its connection has ended."""
        connection = self._connections.get(conn)
        if connection is not None and not connection.closed:
            began_ns = time.thread_time_ns()
            self._send(connection, connection.engine.reply(encode(body)))
            if not self._reading:
                self.charge(conn, time.thread_time_ns() - began_ns)

    def charge(self, conn: int, cpu_ns: int) -> None:
        """Counts processor time that the loop spent for a connection after it was read."""
        connection = self._connections.get(conn)
        if connection is not None:
            self._turns.charge(connection.user, cpu_ns / REQUEST_NS)

    def publish(self, name: str, sample: TickReading) -> None:
        """Sends a sample to those who subscribe to its source."""
        topic = name.encode()
        if self._topics.wanted(topic):
            self._topics.publish(topic, encode(describe_sample(name, sample)))

    def describe(self) -> list[UserLoad]:
        """Users who were refused something, or made to wait."""
        return [
            UserLoad(
                uid=user.uid,
                connections=user.connections,
                limited_ns=user.limited_ns,
                limited=user.waiting,
                refused=user.refused,
                faults=user.faults,
                reason=user.reason,
            )
            for user in self._turns.users
            if user.limited_ns or user.waiting or user.refused or user.faults
        ]

    def _send(self, connection: ClientConnection, data: bytes) -> None:
        before = connection.waiting
        outcome = connection.send(data)
        if outcome is Sent.ALL and not before:
            return
        self._sent(connection, before, outcome)
        # All waiting replies together, however many clients they are for.
        if connection.waiting > MAX_WAITING_BYTES or (
            connection.waiting and self._all_waiting > 64 * 1024 * 1024
        ):
            self._fault(connection, "does not read its replies")

    def _sent(self, connection: ClientConnection, before: int, outcome: Sent) -> None:
        self._all_waiting += connection.waiting - before
        if outcome is Sent.WAITING and not before:
            self._reactor.modify(connection.stream.fileno(), _READING | select.EPOLLOUT)
        elif outcome is Sent.ALL and before:
            self._reactor.modify(connection.stream.fileno(), _READING)
        if (outcome is Sent.GONE or before) and not connection.waiting:
            self._readable(connection)  # it was not read while it did not read

    # -------------------------------------------------------------------------------- connections

    def _accepted(self, connection: ClientConnection) -> None:
        self._connections[connection.number] = connection
        self._young.append(connection)
        self._reactor.add(connection.stream.fileno(), _READING, partial(self._on_event, connection))
        self._send(connection, connection.engine.data_to_send())

    def _on_event(self, connection: ClientConnection, mask: int) -> None:
        if connection.waiting and mask & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
            before = connection.waiting
            self._sent(connection, before, connection.flush())
        if mask & ~select.EPOLLOUT:
            connection.drained = False
            if mask & _ENDS:
                connection.hung_up = True
            self._readable(connection)

    def _fault(self, connection: ClientConnection, rule: str) -> None:
        """Closes a connection that broke a rule of the protocol, without a reply (see `zmtp`)."""
        if connection.closed:
            return
        user = connection.user
        self._turns.fault(user, time.monotonic_ns())
        user.reason = f"broke a rule of the protocol ({rule})"
        text = f"{user.reason}; the connection was closed"
        self._reports.add(user.uid, "protocol_error", text)
        self._close(connection)

    def _close(self, connection: ClientConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        del self._connections[connection.number]
        self._reactor.remove(connection.stream.fileno())
        self._all_waiting -= connection.waiting
        if connection.engine.state is not ZmtpState.TRAFFIC:
            connection.user.handshakes -= 1
        if connection.guarded:
            self._closer.close(connection.stream, connection)
        else:
            connection.stream.close()
            self._ended(connection)
        if self._topics.leave(connection):
            self._topics_changed = True
            self._soon()
        if connection.identified:
            self._application.peer_closed(connection.number)

    def _closed_on_thread(self, connection: object) -> None:
        if isinstance(connection, ClientConnection):
            self._reactor.post(lambda: self._ended(connection))

    def _ended(self, connection: ClientConnection) -> None:
        connection.user.connections -= 1
        self._acceptor.open -= 1

    def _check_handshakes(self, now_ns: int) -> int | None:
        """Ends handshakes that take too long. Returns when to look again."""
        young = self._young
        while young:
            connection = young[0]
            if connection.closed or connection.engine.state is ZmtpState.TRAFFIC:
                young.popleft()
            elif connection.accepted_ns + HANDSHAKE_NS > now_ns:
                return connection.accepted_ns + HANDSHAKE_NS
            elif connection.queued:  # it waits for us
                young.popleft()
                connection.accepted_ns = now_ns
                young.append(connection)
            else:
                self._fault(connection, "handshake over 2 s")
        return None

    # ----------------------------------------------------------------------------------- reading

    def _readable(self, connection: ClientConnection) -> None:
        if not connection.queued and not connection.closed:
            connection.queued = True
            self._turns.add(connection.user, connection)
            self._soon()

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._reactor.call_soon(self._round)

    def _round(self) -> None:
        """One turn of each user, and some new connections."""
        self._scheduled = False
        if not self._serving:
            return
        now_ns = time.monotonic_ns()
        due_ns = self._turns.run(now_ns, self._read)
        if due_ns is not None:
            self._schedule(due_ns, now_ns)
        if self._acceptor.ready:
            self._acceptor.run(now_ns)
            if self._acceptor.ready:
                self._schedule(self._acceptor.due_ns, now_ns)
        if self._young and (due_ns := self._check_handshakes(now_ns)) is not None:
            self._schedule(due_ns, now_ns)
        if self._topics_changed:
            self._topics_changed = False
            self._stream(self._topics.names)

    def _schedule(self, due_ns: int, now_ns: int) -> None:
        if due_ns <= now_ns:
            self._soon()
        else:
            self._alarm.set(due_ns, now_ns)

    def _read(self, connection: ClientConnection) -> tuple[Cost, bool]:
        """Reads a connection once. Returns the cost, also after an error, and whether there is
        more to read."""
        if connection.closed:
            return _CLOSED, False
        if connection.hung_up and self._is_over(connection):
            self._close(connection)
            return _NOTHING, False
        if connection.waiting:  # its turn comes when it has read
            connection.queued = False
            return _NOTHING, False
        engine, size = connection.engine, 0
        began_ns, self._reading = time.thread_time_ns(), True
        try:
            event = engine.next_event() if engine.unread else None
            if event is None:
                data = connection.receive()
                if data is None:
                    connection.queued = False
                    return _NOTHING, False
                if not data:
                    self._close(connection)
                    return _NOTHING, False
                size = len(data)
                engine.receive(data)
                event = engine.next_event()
                if event is None:
                    connection.queued = not connection.drained
                    return Cost(0.25, size), connection.queued
            if type(event) is RequestFrame:
                self._request(connection, event.body)
            else:
                self._handle(connection, event)
            connection.queued = not connection.drained or engine.unread
            requests = max(1.0, (time.thread_time_ns() - began_ns) / REQUEST_NS)
            return Cost(requests, size), connection.queued and not connection.closed
        except ProtocolError as error:
            self._fault(connection, str(error))
        except descriptors.DescriptorsSent:
            self._fault(connection, "descriptors in a message")
        except Exception:  # a bug: it must cost this connection and nobody else
            log.exception(
                "a connection of user %d could not be served and was closed; please report this",
                connection.uid,
                extra={"event": "bug", "uid": connection.uid},
            )
            self._close(connection)
        finally:
            self._reading = False
        return Cost(1.0), False

    def _is_over(self, connection: ClientConnection) -> bool:
        """Whether its process has exited, and nobody waits for what it asked last."""
        if connection.identified and self._application.has_exited(connection.number):
            connection.after_exit += 1
        return connection.after_exit > MAX_AFTER_EXIT

    def _handle(self, connection: ClientConnection, event: Event) -> None:
        """Handles an event other than a request."""
        match event:
            case Subscribe():
                self._topics_changed |= self._topics.subscribe(connection, event.topic)
            case Cancel():
                self._topics_changed |= self._topics.cancel(connection, event.topic)
            case HandshakeDone():
                connection.user.handshakes -= 1
                if connection.engine.role is Role.ROUTER:
                    self._identify(connection)
        answer = connection.engine.data_to_send()
        if answer and not connection.closed:
            self._send(connection, answer)

    def _request(self, connection: ClientConnection, body: bytes) -> None:
        try:
            request = decoding.decode(body)
            refusal = connection.refusal
            if refusal is not None:
                raise decoding.Invalid(
                    request.id, ErrorCode.UNAVAILABLE, refusal.message, reason=refusal.reason
                )
        except decoding.Invalid as invalid:
            if invalid.awaited:
                self.reply(connection.number, invalid.reply)
            else:
                self._application.invalid(connection.number, invalid.error)
            return
        self._application.request(connection.number, request)

    def _identify(self, connection: ClientConnection) -> None:
        """Identifies the peer through the kernel."""
        connection.refusal = unusable(connection.stream)
        if connection.refusal is not None:
            text = f"was refused: {connection.refusal.message}"
            self._reports.add(connection.uid, "peer_refused", text)
            return
        try:
            peer, pidfd = identify_peer(connection.number, connection.stream)
        except (NoSuchPeer, OSError) as error:
            log.info("refused a connection: %s", error, extra={"event": "peer_refused"})
            self._close(connection)
            return
        connection.identified = True
        try:
            self._application.peer_opened(peer, pidfd)
        except Exception:
            os.close(pidfd)
            raise

    # ----------------------------------------------------------------------------------- reports

    def _look(self) -> None:
        """Reports users whose requests waited for the rate limit, or who do not read replies."""
        if not self._serving:
            return
        limited: dict[int, int] = {}
        for user in self._turns.users:
            limited[user.uid] = user.limited_ns
            # A user whose requests waited for so much of a second is reported.
            if user.limited_ns - self._limited_ns.get(user.uid, 0) > 250_000_000:
                self._reports.add(
                    user.uid,
                    "rate_limited",
                    f"sends over {self._turns.limits.requests_per_second:g} requests a second; "
                    "they wait for their turn",
                )
        self._limited_ns = limited
        if self._all_waiting:
            for connection in self._connections.values():
                if connection.waiting:
                    self._reports.add(
                        connection.user.uid,
                        "slow_reader",
                        "does not read what it asked for; its requests wait until it does",
                    )

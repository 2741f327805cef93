"""The ROUTER socket: learns who each peer is, lets valid requests through, sends replies back.

libzmq can be aborted by whoever may connect, so nothing here is worth keeping: the front holds no
lease, no secret and no privilege, and is started again when it dies.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from pydantic import ValidationError
from zmq.utils.monitor import recv_monitor_message

from zeus_ipc.codec import DecodeError, decode_reply, decode_request, encode
from zeus_ipc.errors import ErrorCode
from zeus_ipc.messages import MAX_REQUEST_BYTES, OPERATIONS, PROTOCOL_VERSION, request_adapter
from zeusd import systemd
from zeusd.core.rates import RateLimiter
from zeusd.front.admission import Admission, credentials_of, kick
from zeusd.front.shaper import Shaper, Verdict
from zeusd.front.stream import Stream
from zeusd.runtime import link as wire

log = logging.getLogger(__name__)

_DRAIN = 10_000

QUEUED_PER_CONNECTION = 16
"""Requests that libzmq takes of one connection before it makes the sender wait. What a flooder has
queued here, everybody else waits for."""

_LABEL = "ipc:///zeusd"
"""libzmq wants a name; the descriptor is bound already."""

_LOOK_MS = 200
_BATCH = 8
"""Messages of one direction before the other has its turn."""
_SHAPE_S = 0.002
"""How long the loop sleeps while requests wait for their user's turn."""

UNSEEN = (
    "zeusd does not see this process, since it runs in a pid namespace of its own; start zeusd's "
    "container in the host's (--pid=host, or hostPID: true)"
)

PATIENCE_PER_SECOND = 100.0
"""Requests over a user's bound that are answered with an error; who goes on is cut off."""


@dataclass(slots=True)
class _Connection:
    number: int
    routing_id: bytes
    fd: int
    address: str
    uid: int
    unseen: bool = False
    cut_off: bool = False


class Front:
    """Serves one ROUTER socket on a listening descriptor, and one link to zeusd's core.

    Args:
        listen_fd: Bound, listening Unix stream socket.
        link: The front's end of the link.
        stream_fd: The same, for subscribers; None: nothing is published.
    """

    def __init__(self, listen_fd: int, link: socket.socket, stream_fd: int | None = None) -> None:
        request_adapter.rebuild()  # now, and not while the first client waits
        self._link = link
        self._receiver = wire.Receiver(link)
        self._limits = wire.FrontLimits()
        self._shaper: Shaper[tuple[_Connection, bytes]] = Shaper(self._limits.requests_per_second)
        self._patience = RateLimiter(PATIENCE_PER_SECOND, PATIENCE_PER_SECOND)
        self._admission = Admission(self._limits.max_connections_per_user)
        self._context = zmq.Context(io_threads=1)
        self._router = _router(self._context, listen_fd)
        self._monitor = self._router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._by_id: dict[bytes, _Connection] = {}
        self._by_fd: dict[int, list[_Connection]] = {}
        self._by_number: dict[int, _Connection] = {}
        self._next_number = 1
        self._router.bind(_LABEL)
        self._stream: Stream | None = None
        if stream_fd is not None:
            self._stream = Stream(self._context, stream_fd, self._admission, self._tell_topics)

    def run(self) -> None:
        """Serves until the core closes the link."""
        router, link, monitor = self._router, self._link, self._monitor
        link_fd = link.fileno()
        epoll = select.epoll()
        for fd in (link_fd, int(router.getsockopt(zmq.FD)), int(monitor.getsockopt(zmq.FD))):
            epoll.register(fd, select.EPOLLIN)
        stream = self._stream
        for fd in () if stream is None else stream.descriptors:
            epoll.register(fd, select.EPOLLIN)
        link_ready = False
        watchdog_s = systemd.watchdog_s()
        pause_s = -1.0 if watchdog_s is None else watchdog_s / 3
        fed_s = 0.0
        while True:
            busy = False
            if watchdog_s is not None and time.monotonic() >= fed_s + pause_s:
                fed_s = time.monotonic()
                systemd.notify("WATCHDOG=1")
            if link_ready:
                for _ in range(_BATCH):
                    answer = self._from_core()
                    if answer is None:
                        return
                    if not answer:
                        break
                link_ready = False
            if _readable(monitor):
                self._drain_monitor()
            if stream is not None:
                stream.serve()
            for _ in range(_BATCH):
                if not _readable(router):
                    break
                self._from_client()
                busy = True
            if self._shaper.waiting:
                for connection, data in self._shaper.due(time.monotonic_ns()):
                    self._serve(connection, data)
            # libzmq's descriptors tell of changes only: ask both sockets once more before waiting.
            if _readable(monitor):
                busy = True
            idle_s = _SHAPE_S if self._shaper.waiting else pause_s
            for fd, _ in epoll.poll(0 if busy else idle_s):
                if fd == link_fd:
                    link_ready = True

    def close(self) -> None:
        """Closes everything without waiting."""
        self._router.disable_monitor()
        if self._stream is not None:
            self._stream.close()
        self._context.destroy(linger=0)
        self._link.close()

    # ------------------------------------------------------------------------------ from clients

    def _from_client(self) -> None:
        router = self._router
        try:
            routing_id = router.recv(zmq.NOBLOCK)
            if not router.getsockopt(zmq.RCVMORE):
                return
            frame = router.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        connection = self._identify(routing_id, frame)
        if router.getsockopt(zmq.RCVMORE):
            self._refuse_multipart(frame)
            return
        if connection is None or connection.cut_off:
            return
        now_ns = time.monotonic_ns()
        data = frame.bytes
        verdict = self._shaper.offer(connection.uid, (connection, data), now_ns)
        if verdict is Verdict.NOW:
            self._serve(connection, data)
        elif verdict is Verdict.NEVER:
            if self._patience.take(connection.uid, now_ns):
                self._send(connection, encode(self._too_fast(data, connection.uid)))
            else:
                self._cut_off(connection, now_ns)

    def _serve(self, connection: _Connection, data: bytes) -> None:
        """Passes a request on, or says what is wrong with it."""
        if connection.number not in self._by_number:
            return  # its connection ended while it waited
        fault, operation = _examine(data)
        self._shaper.charge(connection.uid, operation, time.monotonic_ns())
        if fault is None and connection.unseen:
            request_id = decode_request(data)["id"]
            fault = _error(request_id, ErrorCode.UNAVAILABLE, UNSEEN, reason="pid_namespace")
        if fault is None:
            self._link.send(wire.HEADER.pack(wire.REQUEST, connection.number) + data)
        else:
            self._send(connection, encode(fault))

    def _identify(self, routing_id: bytes, frame: zmq.Frame) -> _Connection | None:
        """The connection a message came on, by what the kernel said when it was accepted."""
        address = _property(frame, "Peer-Address")
        connection = self._by_id.get(routing_id)
        if connection is not None and connection.address == address:
            return connection
        # A connection's end is told before the first message of the next one on its descriptor.
        self._drain_monitor()
        fd = _source_fd(frame)
        if fd is None:
            return None
        if connection is not None and routing_id in self._by_id:
            log.warning("routing id was taken over", extra={"event": "routing_id_reused"})
            kick(fd)
            return None
        if _property(frame, "Identity") or not address:
            # Our clients never choose routing ids; those who do can take another's place.
            kick(fd)
            return None
        number = self._next_number
        self._next_number += 1
        try:
            # libzmq may have closed the descriptor by now, and got its number for another peer:
            # the duplicate stays what it is while it is looked at.
            with socket.socket(fileno=os.dup(fd)) as stream:
                pid, uid, gid = credentials_of(stream)
                if f"localhost:{uid}:{gid}:{pid}" != address:
                    return None
                # Nobody whose end cannot be seen may hold anything: it is told so, and the core,
                # which would turn it away without a word, does not hear of it.
                unseen = pid == 0
                if not unseen:
                    header = wire.HEADER.pack(wire.OPEN, number)
                    socket.send_fds(self._link, [header], [stream.fileno()])
        except OSError as error:
            log.debug("connection ended at once: %s", error, extra={"event": "peer_gone"})
            # Where it has not, as when descriptors have run out: nobody would answer its request,
            # but a client whose connection ends asks again.
            kick(fd)
            return None
        if unseen:
            self._tell_unseen(uid)
        connection = _Connection(number, routing_id, fd, address, uid, unseen)
        self._by_id[routing_id] = self._by_number[number] = connection
        # What an ended connection of the same process left unread may come on the descriptor of
        # its next one: two routing ids then, of one process, and each is answered as itself.
        self._by_fd.setdefault(fd, []).append(connection)
        return connection

    def _tell_unseen(self, uid: int) -> None:
        if self._admission.logged.take(uid, time.monotonic_ns()):
            log.warning(
                "refused a client of user %d: it is in a foreign pid namespace; start zeusd's "
                "container in the host's (--pid=host, or hostPID: true)",
                uid,
                extra={"event": "peer_refused", "uid": uid},
            )

    def _refuse_multipart(self, frame: zmq.Frame) -> None:
        fd = _source_fd(frame)
        if fd is not None:
            kick(fd)
        for _ in range(_DRAIN):
            if not self._router.getsockopt(zmq.RCVMORE):
                return
            try:
                self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _too_fast(self, data: bytes, uid: int) -> dict[str, Any]:
        try:
            request_id = decode_request(data).get("id")
        except DecodeError:
            request_id = 0
        return _error(
            request_id if isinstance(request_id, int) else 0,
            ErrorCode.OVERLOADED,
            f"user {uid} sends over {self._limits.requests_per_second:g} requests a second; "
            "send them more slowly",
        )

    def _cut_off(self, connection: _Connection, now_ns: int) -> None:
        """Closes all connections of a user who floods, and those he opens in the next moment."""
        uid = connection.uid
        self._admission.shut_out(uid, now_ns)
        self._shaper.drop(uid)
        for other in list(self._by_number.values()):
            if other.uid == uid:
                other.cut_off = True
                kick(other.fd, uid)
        if self._admission.logged.take(uid, now_ns):
            log.warning(
                "user %d sends over %g requests a second and was cut off",
                uid,
                self._limits.requests_per_second,
                extra={"event": "flood", "uid": uid},
            )

    def _apply(self, limits: wire.FrontLimits) -> None:
        self._limits = limits
        self._admission.max_per_user = limits.max_connections_per_user
        self._shaper.configure(limits.requests_per_second)

    def _send(self, connection: _Connection, data: bytes) -> None:
        try:
            self._router.send(connection.routing_id, zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("reply dropped: %s", error, extra={"event": "reply_dropped"})

    # -------------------------------------------------------------------------------- from core

    def _from_core(self) -> bool | None:
        """Passes on what the core says; False if it says nothing, None if it closed the link."""
        try:
            message = self._receiver.receive()
        except BlockingIOError:
            return False
        except OSError:
            return None
        if message is None:
            return None
        kind, number, body, _ = message
        if kind == wire.PING:
            self._link.send(wire.HEADER.pack(wire.PONG, 0))
            return True
        if kind == wire.SAMPLE:
            if self._stream is not None:
                self._stream.publish(*wire.split_sample(body))
            return True
        if kind == wire.SOURCES:
            if self._stream is not None:
                self._stream.offer([str(name) for name in decode_reply(body)["names"]])
            return True
        if kind == wire.LIMITS:
            self._apply(wire.FrontLimits(**decode_reply(body)))
            return True
        connection = self._by_number.get(number)
        if connection is not None and kind == wire.REPLY:
            self._send(connection, body)
        elif connection is not None and kind == wire.KICK:
            kick(connection.fd, connection.uid)
        return True

    # ------------------------------------------------------------------------------- connections

    def _drain_monitor(self) -> None:
        while _readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(fd)
            else:
                self._disconnected(fd)

    def _accepted(self, fd: int) -> None:
        self._disconnected(fd)
        self._admission.accepted(fd)

    def _disconnected(self, fd: int) -> None:
        self._admission.ended(fd)
        for connection in self._by_fd.pop(fd, []):
            self._forget(connection)

    def _tell_topics(self, topics: list[str]) -> None:
        self._link.send(wire.HEADER.pack(wire.TOPICS, 0) + encode({"topics": topics}))

    def _forget(self, connection: _Connection) -> None:
        self._by_id.pop(connection.routing_id, None)
        self._by_number.pop(connection.number, None)
        self._link.send(wire.HEADER.pack(wire.CLOSE, connection.number))


class FrontWithoutCore:
    """Tells clients that zeusd is not running, until it is; then it ends, to be started afresh.

    Args:
        listen_fd: Bound, listening Unix stream socket.
        core_is_there: Whether zeusd can be reached.
    """

    def __init__(self, listen_fd: int, core_is_there: Callable[[], bool]) -> None:
        self._core_is_there = core_is_there
        self._context = zmq.Context(io_threads=1)
        self._router = _router(self._context, listen_fd)
        self._router.bind(_LABEL)

    def run(self) -> None:
        """Serves until zeusd is there."""
        while not self._core_is_there():
            systemd.notify("WATCHDOG=1")
            if not self._router.poll(_LOOK_MS):
                continue
            routing_id, *frames = self._router.recv_multipart()
            try:
                request_id = decode_request(frames[0]).get("id") if len(frames) == 1 else 0
            except DecodeError:
                request_id = 0
            reply = _error(
                request_id if isinstance(request_id, int) else 0,
                ErrorCode.UNAVAILABLE,
                "zeusd is not running on this node; start it with `systemctl start zeusd`",
            )
            self._router.send_multipart([routing_id, encode(reply)])

    def close(self) -> None:
        """Closes everything without waiting."""
        self._context.destroy(linger=0)


def _router(context: zmq.Context[zmq.Socket[bytes]], listen_fd: int) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.MAXMSGSIZE, MAX_REQUEST_BYTES),
        (zmq.RCVHWM, QUEUED_PER_CONNECTION),
        (zmq.SNDHWM, 100),
        (zmq.LINGER, 0),
        (zmq.HANDSHAKE_IVL, 1000),
        (zmq.ROUTER_MANDATORY, 0),
        (zmq.ROUTER_HANDOVER, 0),
        (zmq.USE_FD, os.dup(listen_fd)),
    ):
        router.setsockopt(option, value)
    return router


def _readable(socket_: zmq.Socket[bytes]) -> bool:
    return bool(int(socket_.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _source_fd(frame: zmq.Frame) -> int | None:
    """The connection's descriptor; None if libzmq kept none, as after a handshake cut short."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def _examine(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """The error reply for a request that must not reach the core, or None; and its operation."""
    try:
        message = decode_request(data)
    except DecodeError as error:
        return _error(0, ErrorCode.BAD_REQUEST, f"{error}; a request is one msgpack map"), ""
    return _find_fault(message), str(message.get("op"))


def _find_fault(message: dict[str, Any]) -> dict[str, Any] | None:
    request_id = message.get("id")
    if not isinstance(request_id, int) or isinstance(request_id, bool) or request_id < 0:
        return _error(0, ErrorCode.BAD_REQUEST, "the request has no usable id; send an integer")
    if message.get("v") != PROTOCOL_VERSION:
        return _error(
            request_id,
            ErrorCode.UNSUPPORTED_VERSION,
            f"protocol version {message.get('v')!r} is not spoken here; this zeusd speaks "
            f"{PROTOCOL_VERSION}; use client and daemon of matching releases",
            protocols=[PROTOCOL_VERSION],
        )
    if message.get("op") not in OPERATIONS:
        return _error(
            request_id,
            ErrorCode.UNKNOWN_OPERATION,
            f"unknown operation {message.get('op')!r}; this zeusd knows: {', '.join(OPERATIONS)}",
            operations=list(OPERATIONS),
        )
    try:
        request_adapter.validate_python(message)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)[:3]
        text = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'][1:])}: {fault['msg']}"
            for fault in faults
        )
        return _error(request_id, ErrorCode.BAD_REQUEST, f"the request is not valid: {text}")
    return None


def _error(request_id: int, code: str, message: str, **details: Any) -> dict[str, Any]:
    error: dict[str, Any] = {"code": code, "message": message}
    if details:
        error["details"] = details
    return {"v": PROTOCOL_VERSION, "id": request_id, "error": error}

"""The XPUB socket: samples of GPUs, to whoever has subscribed to their UUIDs.

A subscriber who reads too slowly loses samples; their numbers tell how many. Nothing is sampled or
sent for GPUs that nobody has subscribed to.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from zeusd.front.admission import Admission, kick
from zeusd.front.guard import MemoryGuard

log = logging.getLogger(__name__)

SEND_QUEUE = 500
SEND_BUFFER = 32 * 1024
"""Samples, and bytes beyond them, that wait for one subscriber."""

MAX_TOPIC = 96
MAX_WAITING = 256
"""Subscriptions of one connection that may wait to be looked at."""

MAX_NONSENSE = 1000
"""Subscriptions of one user to what there is not, before his connections are closed: libzmq keeps
each as long as its connection lasts."""

UNKNOWN = -1

_LABEL = "ipc:///zeusd-stream"


class Stream:
    """Publishes what it is given.

    Args:
        context: The front's.
        listen_fd: Bound, listening Unix stream socket.
        admission: Whose connections are let in.
        on_topics: Called with all topics when the first subscribes to one or the last leaves it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen_fd: int,
        admission: Admission,
        on_topics: Callable[[list[str]], None],
    ) -> None:
        self._admission = admission
        self._on_topics = on_topics
        self._subscribers: dict[bytes, int] = {}
        self._offered: frozenset[bytes] | None = None
        self._nonsense: dict[int, int] = {}
        self._fds: set[int] = set()
        self._guard = MemoryGuard(self._end_flood)
        self._socket = context.socket(zmq.XPUB)
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_TOPIC + 1),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.SNDBUF, SEND_BUFFER),
            (zmq.RCVHWM, MAX_WAITING),
            (zmq.LINGER, 0),
            (zmq.HANDSHAKE_IVL, 1000),
            # Only what there is can be subscribed to.
            (zmq.XPUB_MANUAL, 1),
            (zmq.USE_FD, os.dup(listen_fd)),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(_LABEL)

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when there is something to do."""
        return [int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))]

    def serve(self) -> None:
        """Does what there is to do."""
        self._drain_monitor()
        if self._offered is None:
            return  # who subscribes before it is known what there is, waits
        changed = False
        # libzmq takes in all that a peer has sent, and goes on while more comes. `poll` lets go of
        # the GIL meanwhile, which getsockopt does not.
        with self._guard.watching():
            while self._socket.poll(0):
                changed |= self._subscription(self._socket.recv(zmq.NOBLOCK, copy=False))
        self._drain_monitor()  # who has subscribed just now was accepted just before
        if not self._fds:
            changed |= bool(self._subscribers)
            self._subscribers.clear()
            self._nonsense.clear()
        if changed:
            self._on_topics(self.topics)

    @property
    def topics(self) -> list[str]:
        """What is subscribed to."""
        return [topic.decode() for topic in self._subscribers]

    def offer(self, topics: list[str]) -> None:
        """What can be subscribed to from now on."""
        self._offered = frozenset(topic.encode() for topic in topics)

    def publish(self, topic: bytes, payload: bytes) -> None:
        """Sends a sample to its subscribers."""
        self._socket.send_multipart((topic, payload), zmq.NOBLOCK)

    def close(self) -> None:
        """Ends the socket."""
        self._socket.disable_monitor()

    def _drain_monitor(self) -> None:
        while _readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._fds.add(fd)
                self._admission.accepted(fd)
            else:
                self._fds.discard(fd)
                self._admission.ended(fd)

    def _subscription(self, frame: zmq.Frame) -> bool:
        """A subscription or its end. Returns whether the topics have changed."""
        message = frame.bytes
        kind, topic = message[:1], message[1:]
        assert self._offered is not None
        if topic not in self._offered and topic not in self._subscribers:
            if kind == b"\x01":
                self._count_nonsense(_uid_of(frame))
            return False
        count = self._subscribers.get(topic, 0)
        if kind == b"\x01":
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._subscribers[topic] = count + 1
            return count == 0
        if count:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)
            self._subscribers[topic] = count - 1
            if count == 1:
                del self._subscribers[topic]
                return True
        return False

    def _end_flood(self) -> None:
        """On the guard's thread. Whoever it is, others subscribe again at once."""
        for fd in [*self._fds]:
            kick(fd)

    def _count_nonsense(self, uid: int) -> None:
        count = self._nonsense[uid] = self._nonsense.get(uid, 0) + 1
        if count <= MAX_NONSENSE:
            return
        self._nonsense[uid] = 0
        now_ns = time.monotonic_ns()
        if uid != UNKNOWN:
            self._admission.shut_out(uid, now_ns)
        # Whoever it was, others subscribe again at once.
        for fd in self._fds:
            if uid in (UNKNOWN, self._admission.uid_of(fd)):
                kick(fd)
        if self._admission.logged.take(uid, now_ns):
            log.warning(
                "user %d subscribes to what there is not, and was cut off",
                uid,
                extra={"event": "stream_flood", "uid": uid},
            )


def _uid_of(frame: zmq.Frame) -> int:
    """Who sent a frame, by what the kernel said of the peer: `localhost:uid:gid:pid`."""
    try:
        return int(str(frame.get("Peer-Address")).split(":")[1])
    except (zmq.ZMQError, IndexError, ValueError):
        return UNKNOWN  # peers that speak ZMTP 1 or 2 are not told of


def _readable(socket_: zmq.Socket[bytes]) -> bool:
    return bool(int(socket_.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

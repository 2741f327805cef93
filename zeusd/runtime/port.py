"""Where requests come in: one front at a time, over its link, whoever started it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from zeus_ipc.codec import DecodeError, decode_request, encode
from zeus_ipc.messages import request_adapter
from zeusd.runtime import link
from zeusd.runtime.engine import Engine
from zeusd.runtime.processes import NoSuchPeer, identify_peer
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.sources import Sample, describe_sample

log = logging.getLogger(__name__)

PING_S = 1.0
SILENT_S = 5.0
"""A front that answers no ping for this long is stuck."""


class FrontPort:
    """Speaks with a front and brings its requests to the engine.

    Args:
        reactor: The loop.
        limits: Told to each front.
        on_end: Called when the front's link ended, with the reason, after its peers are forgotten.
    """

    def __init__(
        self, reactor: Reactor, limits: link.FrontLimits, on_end: Callable[[str], None]
    ) -> None:
        self._reactor = reactor
        self._limits = limits
        self._on_end = on_end
        self._engine: Engine | None = None
        self._link: socket.socket | None = None
        self._receiver: link.Receiver | None = None
        self._heard_ns = 0
        self._pinging = False
        self._offset = self._highest = 0

    @property
    def connected(self) -> bool:
        """Whether there is a front."""
        return self._link is not None

    def attach(self, engine: Engine) -> None:
        """Says where requests go."""
        self._engine = engine
        request_adapter.rebuild()  # now, and not while the first client waits
        engine.on_found = self._send_sources

    def connect(self, end: socket.socket) -> None:
        """A front is at the other end of this link. Takes it over."""
        end.setblocking(False)
        self._link = end
        self._receiver = link.Receiver(end)
        self._heard_ns = time.monotonic_ns()
        self._reactor.add_reader(end.fileno(), self._readable)
        self._send_limits()
        self._send_sources()
        if not self._pinging:
            self._pinging = True
            self._ping()

    def disconnect(self) -> None:
        """Forgets the front and all its connections."""
        if self._link is not None:
            self._reactor.remove_reader(self._link.fileno())
            self._link.close()
            self._link = self._receiver = None
        if self._engine is not None:
            self._engine.sampling.stream(())
            self._engine.all_peers_closed()
        # Numbers of the next front's connections begin where this one's ended: never used twice.
        self._offset = self._highest

    def configure(self, limits: link.FrontLimits) -> None:
        """Other limits from now on."""
        self._limits = limits
        self._send_limits()

    def reply(self, conn: int, body: dict[str, Any]) -> None:
        """Sends a reply; drops it if its front is gone or takes nothing any more."""
        if conn > self._offset:
            self._send(link.HEADER.pack(link.REPLY, conn - self._offset) + encode(body))

    def publish(self, name: str, sample: Sample) -> None:
        """Sends a sample; drops it if the front takes nothing more. On the reactor's thread."""
        payload = encode(describe_sample(name, sample))
        self._send(link.HEADER.pack(link.SAMPLE, 0) + link.join_sample(name, payload))

    # --------------------------------------------------------------------------------- internals

    def _send_limits(self) -> None:
        self._send(link.HEADER.pack(link.LIMITS, 0) + encode(self._limits.to_map()))

    def _send_sources(self) -> None:
        if self._engine is not None:
            names = {"names": list(self._engine.sampling.names)}
            self._send(link.HEADER.pack(link.SOURCES, 0) + encode(names))

    def _ping(self) -> None:
        if self._link is None:
            self._pinging = False
            return
        if time.monotonic_ns() - self._heard_ns > SILENT_S * 1e9:
            self._pinging = False
            self._end("front_stuck")
            return
        self._send(link.HEADER.pack(link.PING, 0))
        self._reactor.call_later(PING_S, self._ping)

    def _readable(self) -> None:
        # One message a round: the loop comes back while there are more, and everything else that
        # waits gets its turn.
        receiver, engine = self._receiver, self._engine
        assert receiver is not None
        assert engine is not None
        try:
            message = receiver.receive()
        except BlockingIOError:
            return
        except OSError:
            message = None
        if message is None:
            self._end("link_closed")
            return
        kind, number, body, fd = message
        conn = self._offset + number
        if kind == link.REQUEST:
            self._request(engine, conn, body)
        elif kind == link.OPEN and fd is not None:
            self._highest = max(self._highest, conn)
            self._open(engine, conn, fd)
            return
        elif kind == link.CLOSE:
            engine.peer_closed(conn)
        elif kind == link.TOPICS:
            self._topics(engine, body)
        elif kind == link.PONG:
            self._heard_ns = time.monotonic_ns()
        if fd is not None:
            os.close(fd)

    def _topics(self, engine: Engine, body: bytes) -> None:
        try:
            topics = decode_request(body)["topics"]
        except (DecodeError, KeyError):
            self._end("front_sent_garbage")
            return
        engine.sampling.stream(str(topic) for topic in topics)

    def _open(self, engine: Engine, conn: int, fd: int) -> None:
        with socket.socket(fileno=fd) as connection:
            try:
                peer, pidfd = identify_peer(conn, connection)
            except (NoSuchPeer, OSError) as error:
                log.info("refused a connection: %s", error, extra={"event": "peer_refused"})
                self._send(link.HEADER.pack(link.KICK, conn - self._offset))
                return
        engine.peer_opened(peer, pidfd)

    def _send(self, data: bytes) -> None:
        """Sends to the front. If it is dying or stuck, this is lost, and its clients ask again."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send(data)

    def _request(self, engine: Engine, conn: int, body: bytes) -> None:
        try:
            request = request_adapter.validate_python(decode_request(body))
        except (DecodeError, ValidationError):
            # The front let through what it must not: it is broken, or no longer ours.
            self._end("front_sent_garbage")
            return
        engine.request(conn, request)

    def _end(self, reason: str) -> None:
        self.disconnect()
        self._on_end(reason)

"""Runs the front, talks to it, and starts it again whenever it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zeus_ipc.codec import DecodeError, decode_request, encode
from zeus_ipc.messages import request_adapter
from zeusd.core.model import Peer
from zeusd.ring import link
from zeusd.ring.engine import Engine
from zeusd.ring.processes import NoSuchPeer, identify_peer
from zeusd.ring.reactor import Reactor

log = logging.getLogger(__name__)

CALM_S = 10.0
"""A front that lived this long died by accident; the next one starts at once."""

MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How the front is run.

    Attributes:
        user: User it becomes when zeusd is root; None: `zeusd-front` if it exists, else `nobody`.
        max_connections_per_user: Connections of one user; more are closed at once.
        memory_mib: Memory it may have; beyond, it dies and is started again.
        max_files: Its limit of open files; None leaves the system's.
        seed: Seeds libzmq's routing ids; None: at random. For tests.
        log_level: As for the daemon.
        log_format: As for the daemon.
    """

    user: str | None = None
    max_connections_per_user: int = 256
    memory_mib: int = 512
    max_files: int | None = None
    seed: int | None = None
    log_level: str = "info"
    log_format: str = "auto"


class FrontSupervisor:
    """The front as the ring sees it.

    Args:
        reactor: The loop.
        listening: The socket clients connect to; stays open here whatever happens to the front.
        options: How to run it.
    """

    def __init__(self, reactor: Reactor, listening: socket.socket, options: FrontOptions) -> None:
        self._reactor = reactor
        self._listening = listening
        self._options = options
        self._engine: Engine | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._link: socket.socket | None = None
        self._receiver: link.Receiver | None = None
        self._started_ns = 0
        self._deaths = 0
        self._stopping = False
        self._offset = self._highest = 0

    def attach(self, engine: Engine) -> None:
        """Says where requests go."""
        self._engine = engine

    def start(self) -> None:
        """Starts the front."""
        ring_end, front_end = link.pair()
        ring_end.setblocking(False)
        options = self._options
        command = [sys.executable, "-m", "zeusd.front"]
        command += ["--listen-fd", str(self._listening.fileno())]
        command += ["--link-fd", str(front_end.fileno())]
        command += ["--max-connections-per-user", str(options.max_connections_per_user)]
        command += ["--memory-mib", str(options.memory_mib)]
        command += ["--log-level", options.log_level, "--log-format", options.log_format]
        if options.user is not None:
            command += ["--user", options.user]
        if options.max_files is not None:
            command += ["--max-files", str(options.max_files)]
        if options.seed is not None:
            command += ["--seed", str(options.seed)]
        self._process = subprocess.Popen(
            command,
            pass_fds=(self._listening.fileno(), front_end.fileno()),
            stdin=subprocess.DEVNULL,
            close_fds=True,
        )
        front_end.close()
        self._started_ns = time.monotonic_ns()
        self._link = ring_end
        self._receiver = link.Receiver(ring_end)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._reactor.add_reader(self._pidfd, self._died)
        self._reactor.add_reader(ring_end.fileno(), self._readable)
        log.info("front started", extra={"event": "front_started", "pid": self._process.pid})

    def stop(self) -> None:
        """Ends the front for good."""
        self._stopping = True
        self._detach()

    def reply(self, conn: int, body: dict[str, Any]) -> None:
        """Sends a reply; drops it if its front is gone or takes nothing any more."""
        if self._link is None or conn <= self._offset:
            return
        self._send(link.HEADER.pack(link.REPLY, conn - self._offset) + encode(body))

    # --------------------------------------------------------------------------------- internals

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
        if fd is not None:
            os.close(fd)

    def _open(self, engine: Engine, conn: int, fd: int) -> None:
        with socket.socket(fileno=fd) as connection:
            try:
                process, uid, gid, pidfd = identify_peer(connection)
            except (NoSuchPeer, OSError) as error:
                log.info("refused a connection: %s", error, extra={"event": "peer_refused"})
                self._send(link.HEADER.pack(link.KICK, conn - self._offset))
                return
        engine.peer_opened(Peer(conn, process, uid, gid), pidfd)

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

    def _died(self) -> None:
        self._end("front_died")

    def _end(self, reason: str) -> None:
        process = self._process
        self._detach()
        if self._stopping:
            return
        status = None if process is None else process.returncode
        lived_s = (time.monotonic_ns() - self._started_ns) / 1e9
        self._deaths = 1 if lived_s > CALM_S else self._deaths + 1
        pause_s = 0.0 if self._deaths <= 3 else min(MAX_PAUSE_S, 0.05 * 2 ** (self._deaths - 4))
        log.error(
            "the front ended after %.1f s (%s, status %s); starting it again",
            lived_s,
            reason,
            status,
            extra={"event": reason, "status": status, "pause_s": pause_s},
        )
        self._reactor.call_later(pause_s, self._start_again)

    def _start_again(self) -> None:
        if self._stopping:
            return
        try:
            self.start()
        except OSError as error:
            log.error(
                "cannot start the front (%s); trying again in %g s",
                error.strerror,
                MAX_PAUSE_S,
                extra={"event": "front_start_failed"},
            )
            self._reactor.call_later(MAX_PAUSE_S, self._start_again)

    def _detach(self) -> None:
        if self._link is not None:
            self._reactor.remove_reader(self._link.fileno())
            self._link.close()
            self._link = self._receiver = None
        if self._process is not None:
            self._reactor.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._engine is not None:
            self._engine.all_peers_closed()
        # Numbers of the next front's connections begin where this one's ended: never used twice.
        self._offset = self._highest

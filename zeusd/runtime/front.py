"""How a front comes to be: started here as a child, or by systemd as a unit of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

from zeusd.runtime import link
from zeusd.runtime.engine import Engine
from zeusd.runtime.port import FrontPort
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.sources import Sample

log = logging.getLogger(__name__)

CALM_S = 10.0
"""A front that lived this long died by accident; the next one starts at once."""

MAX_PAUSE_S = 1.0
END_S = 2.0
"""How long a front has to end that zeusd may not kill."""


class FrontSupervisor(Protocol):
    """Where requests come from, as main sees it."""

    def attach(self, engine: Engine) -> None:
        """Says where requests go."""

    def start(self) -> None:
        """Begins."""

    def stop(self) -> None:
        """Ends for good."""

    def configure(self, limits: link.FrontLimits) -> None:
        """Other limits from now on."""

    def reply(self, conn: int, body: dict[str, Any]) -> None:
        """Sends a reply to a connection."""

    def publish(self, name: str, sample: Sample) -> None:
        """Sends a sample to its subscribers."""


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How a front is run as a child.

    Attributes:
        user: User it becomes when zeusd is root; None: `zeusd-front` if it exists, else `nobody`.
        memory_mib: Memory it may have; beyond, it dies and is started again.
        max_files: Its limit of open files; None leaves the system's.
        seed: Seeds libzmq's routing ids; None: at random. For tests.
        log_level: As for the daemon.
        log_format: As for the daemon.
    """

    user: str | None = None
    memory_mib: int = 512
    max_files: int | None = None
    seed: int | None = None
    log_level: str = "info"
    log_format: str = "auto"


class ChildFront:
    """A front that zeusd starts, watches, and starts again whenever it dies.

    Args:
        reactor: The loop.
        listening: The socket clients connect to; stays open here whatever happens to the front.
        options: How to run it.
        limits: What it allows each user.
        subscribing: The socket that subscribers connect to; None: nothing is published.
    """

    def __init__(
        self,
        reactor: Reactor,
        listening: socket.socket,
        options: FrontOptions,
        limits: link.FrontLimits,
        subscribing: socket.socket | None = None,
    ) -> None:
        self._reactor = reactor
        self._listening = listening
        self._subscribing = subscribing
        self._options = options
        self._port = FrontPort(reactor, limits, self._end)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._started_ns = 0
        self._deaths = 0
        self._stopping = False

    def attach(self, engine: Engine) -> None:
        """See `FrontSupervisor`."""
        self._port.attach(engine)

    def configure(self, limits: link.FrontLimits) -> None:
        """See `FrontSupervisor`."""
        self._port.configure(limits)

    def reply(self, conn: int, body: dict[str, Any]) -> None:
        """See `FrontSupervisor`."""
        self._port.reply(conn, body)

    def publish(self, name: str, sample: Sample) -> None:
        """See `FrontSupervisor`."""
        self._port.publish(name, sample)

    def start(self) -> None:
        """See `FrontSupervisor`."""
        ring_end, front_end = link.pair()
        options = self._options
        command = [sys.executable, "-m", "zeusd.front"]
        command += ["--listen-fd", str(self._listening.fileno())]
        command += ["--link-fd", str(front_end.fileno())]
        command += ["--memory-mib", str(options.memory_mib)]
        command += ["--log-level", options.log_level, "--log-format", options.log_format]
        passed = [self._listening.fileno(), front_end.fileno()]
        if self._subscribing is not None:
            passed.append(self._subscribing.fileno())
            command += ["--stream-fd", str(self._subscribing.fileno())]
        if options.user is not None:
            command += ["--user", options.user]
        if options.max_files is not None:
            command += ["--max-files", str(options.max_files)]
        if options.seed is not None:
            command += ["--seed", str(options.seed)]
        self._process = subprocess.Popen(
            command,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            close_fds=True,
        )
        front_end.close()
        self._started_ns = time.monotonic_ns()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._reactor.add_reader(self._pidfd, self._died)
        self._port.connect(ring_end)
        log.info("front started", extra={"event": "front_started", "pid": self._process.pid})

    def stop(self) -> None:
        """See `FrontSupervisor`."""
        self._stopping = True
        self._port.disconnect()
        self._reap()

    # --------------------------------------------------------------------------------- internals

    def _died(self) -> None:
        self._port.disconnect()
        self._end("front_died")

    def _end(self, reason: str) -> None:
        status = self._reap()
        if self._stopping:
            return
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

    def _reap(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        status = process.poll()
        self._reactor.remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            process.kill()
            process.wait()
        except PermissionError:
            # Without CAP_KILL, as in a container: it ends by itself, since its link has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        return status


class UnitFront:
    """A front that systemd runs as a unit of its own, and that connects to zeusd.

    Only the front's user may, by the kernel's word.

    Args:
        reactor: The loop.
        path: Where it connects to. Whoever has the journal has this path, too.
        uid: The front's user.
        limits: What it allows each user.
    """

    def __init__(self, reactor: Reactor, path: str, uid: int, limits: link.FrontLimits) -> None:
        self._reactor = reactor
        self._path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._uid = uid
        self._port = FrontPort(reactor, limits, self._end)

    def attach(self, engine: Engine) -> None:
        """See `FrontSupervisor`."""
        self._port.attach(engine)

    def configure(self, limits: link.FrontLimits) -> None:
        """See `FrontSupervisor`."""
        self._port.configure(limits)

    def reply(self, conn: int, body: dict[str, Any]) -> None:
        """See `FrontSupervisor`."""
        self._port.reply(conn, body)

    def publish(self, name: str, sample: Sample) -> None:
        """See `FrontSupervisor`."""
        self._port.publish(name, sample)

    def start(self) -> None:
        """See `FrontSupervisor`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        before = os.umask(0o111)
        try:
            self._listening.bind(self._path)
        finally:
            os.umask(before)
        self._listening.listen(8)
        self._listening.setblocking(False)
        self._reactor.add_reader(self._listening.fileno(), self._accept)

    def stop(self) -> None:
        """See `FrontSupervisor`."""
        self._reactor.remove_reader(self._listening.fileno())
        self._listening.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._port.disconnect()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            end, _ = self._listening.accept()
            raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _gid = struct.unpack("3i", raw)
            if uid != self._uid:
                log.error(
                    "user %d tried to be the front, and was turned away",
                    uid,
                    extra={"event": "front_refused", "uid": uid, "pid": pid},
                )
                end.close()
                return
            # A new one comes when the old one is dead or about to be: its word is the newest.
            self._port.disconnect()
            link.prepare(end)
            self._port.connect(end)
            log.info("front connected", extra={"event": "front_started", "pid": pid})

    def _end(self, reason: str) -> None:
        log.error(
            "the front's link ended (%s); systemd starts it again", reason, extra={"event": reason}
        )

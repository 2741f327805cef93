"""The engine inside a training process, where no daemon runs.

It has the core, journal and workers of zeusd, but no socket. Reading does not need root; setting
needs CAP_SYS_ADMIN. It restores everything when the process exits normally. After a kill, the next
embedded engine or zeusd that starts on the node does.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zeus_common.units import SECOND_NS
from zeus_ipc import __version__
from zeus_ipc.client import Client
from zeus_ipc.codec import decode_reply, encode
from zeus_ipc.errors import DaemonUnavailable, RequestRejected, RequestTimeout
from zeus_ipc.overriding import override
from zeus_ipc.replies import Envelope
from zeus_ipc.sockets import socket_path
from zeus_ipc.transport import Subscription, Transport
from zeusd.core.access import OPEN
from zeusd.core.core import Core
from zeusd.core.model import PRIVILEGE_OF_ZEUSD, Peer
from zeusd.core.policy import CoreSettings, LeaseTerms
from zeusd.identity import EMBEDDED_PREFIX, EMBEDDED_STATE_DIR, boot_id
from zeusd.nodes import OpenedNode, real_node
from zeusd.runtime import devices
from zeusd.runtime.engine import Engine
from zeusd.runtime.journal import Journal, JournalError
from zeusd.runtime.power_sources import HWMON
from zeusd.runtime.powercap import POWERCAP
from zeusd.runtime.processes import own_process
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.sampling import Histories, Sampling
from zeusd.runtime.sources import TickReading, describe_sample
from zeusd.server.decoding import Invalid, decode

STATE_DIR_ENV = "ZEUSD_STATE_DIR"
_CONNECTION = 1
_TERMS = LeaseTerms(*[86_400 * SECOND_NS] * 3)
"""No hang detection: if this process hangs, so does the engine that would detect it."""

_START_S = 30.0
_STOP_S = 5.0

PRIVILEGE = (
    "no zeusd runs, and setting limits in this process needs root or CAP_SYS_ADMIN; install zeusd "
    "(https://zeusd-project.github.io/zeusd/operate/install/)"
)
"""Remedy if the driver refuses a change to an embedded engine."""


def connect(node: OpenedNode | None = None, *, state_dir: str | None = None) -> Client:
    """A client of an engine in this process.

    Where zeusd runs, it is a client of zeusd instead: a GPU has one engine.

    Raises:
        DaemonUnavailable: No devices are available; the message says why.
    """
    if node is None and os.path.exists(socket_path()):
        client = Client()
        try:
            client.node()
        except DaemonUnavailable:
            client.close()  # its socket is left over
        else:
            return client
    return Client(transport=EmbeddedTransport(node or real_node(), state_dir or _state_dir()))


def _state_dir() -> str:
    configured = os.environ.get(STATE_DIR_ENV)
    if configured:
        return configured
    if os.geteuid() == 0:
        return EMBEDDED_STATE_DIR
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return str(Path(runtime, "zeusd"))
    return str(Path(tempfile.gettempdir(), f"zeusd-{os.geteuid()}"))


class EmbeddedTransport(Transport):
    """Sends requests to an engine on a thread of this process.

    A child has no such thread after `fork`: its first request starts its own engine.
    """

    def __init__(self, node: OpenedNode, state_dir: str) -> None:
        self._node = node
        self._state_dir = state_dir
        self._ids = itertools.count(1)
        self._guard = threading.Lock()
        self._running: _Running | None = _Running(node, state_dir)
        self._closed = False
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    @property
    def used(self) -> bool:
        """Whether this process has an engine."""
        return self._running is not None

    @override
    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        request_id = message["id"] = next(self._ids)
        message["deadline_ns"] = time.monotonic_ns() + int(timeout_s * 1e9)
        return self._engine().ask(message, request_id, timeout_s)

    @override
    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        message["id"] = next(self._ids)
        message["deadline_ns"] = time.monotonic_ns() + int(timeout_s * 1e9)
        self._engine().tell(message)

    @override
    def subscribe(self, names: Sequence[str], path: str | None, buffer: int) -> Subscription:
        return self._engine().subscribe(names, buffer)

    def close(self) -> None:
        """Restore everything and end the engine."""
        atexit.unregister(self.close)
        with self._guard:
            self._closed = True
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _engine(self) -> _Running:
        with self._guard:
            if self._closed:
                raise DaemonUnavailable("this client was closed; create a new one")
            if self._running is None:
                self._running = _Running(self._node, self._state_dir)
            return self._running

    def _forget(self) -> None:
        self._guard = threading.Lock()
        self._running = None


class _Subscription(Subscription):
    """Samples of the sampler in this process."""

    def __init__(self, names: frozenset[str], buffer: int, ended: Callable[[], None]) -> None:
        self.names = names
        self._ended = ended
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(buffer)

    def push(self, name: str, sample: TickReading) -> None:
        """Queues a sample. If nobody reads, it is dropped; the samples' numbers show that."""
        if name in self.names:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(vars(describe_sample(name, sample)))

    @override
    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    @override
    def close(self) -> None:
        self._ended()


class _Running:
    """One engine and its thread."""

    def __init__(self, node: OpenedNode, state_dir: str) -> None:
        self._reactor = Reactor()
        self._replies: dict[int, tuple[threading.Event, list[dict[str, Any]]]] = {}
        self._subscriptions: list[_Subscription] = []
        boot = boot_id()
        self._journal = Journal(state_dir, f"{EMBEDDED_PREFIX}{os.getpid()}-{id(self):x}", boot)
        self._engine = Engine(
            core=Core(
                CoreSettings(access=OPEN, terms=_TERMS),
                daemon_version=__version__,
                simulated=node.device_socket,
            ),
            reactor=self._reactor,
            node=node,
            journal=self._journal,
            reply=self._reply,
            boot=boot,
            orphan_directories=(state_dir,),
            sampling=partial(
                Sampling,
                histories=Histories(None, boot),
                lazy=True,
                powercap=POWERCAP if node.device_socket is None else None,
                hwmon=HWMON if node.device_socket is None else None,
                clock=node.clock,
                publish=self._publish,
            ),
        )
        self._thread = threading.Thread(target=self._engine.run, name="zeusd-engine", daemon=True)
        with _unlogged("no_driver"):  # the exception has the message
            self._start()
        failure = self._engine.finder.error
        if failure is not None:
            self.close()
            raise DaemonUnavailable(
                f"no zeusd runs here, and this process cannot reach the GPUs itself: {failure}",
                details={"device_code": failure.code},
            )

    def _start(self) -> None:
        try:
            self._engine.start()
        except JournalError as error:
            raise DaemonUnavailable(str(error)) from None
        process = own_process()
        self._engine.peer_opened(
            Peer(_CONNECTION, process, os.geteuid(), os.getegid()), os.pidfd_open(process.pid)
        )
        self._thread.start()
        self._engine.finder.first_attempt_over.wait(_START_S)
        turning = threading.Event()
        self._reactor.post(turning.set)  # a request must not wait for the thread to start
        turning.wait(_START_S)

    def ask(self, message: dict[str, Any], request_id: int, timeout_s: float) -> dict[str, Any]:
        answered, box = self._replies[request_id] = threading.Event(), []
        try:
            self.tell(message)
            if not answered.wait(timeout_s + 0.1):
                raise RequestTimeout(
                    f"the GPUs did not answer within {timeout_s:g} s; see `nvidia-smi` and the "
                    "kernel log"
                )
            return box[0]
        finally:
            self._replies.pop(request_id, None)

    def tell(self, message: dict[str, Any]) -> None:
        try:
            request = decode(encode(message))
        except Invalid as error:
            raise RequestRejected(str(error)) from None
        self._reactor.post(lambda: self._engine.request(_CONNECTION, request))

    def subscribe(self, names: Sequence[str], buffer: int) -> _Subscription:
        def ended() -> None:
            self._subscriptions = [
                other for other in self._subscriptions if other is not subscription
            ]
            self._stream()

        subscription = _Subscription(frozenset(names), buffer, ended)
        self._subscriptions = [*self._subscriptions, subscription]
        self._stream()
        return subscription

    def _stream(self) -> None:
        names = frozenset[str]().union(
            *(subscription.names for subscription in self._subscriptions)
        )
        self._reactor.post(lambda: self._engine.sampling.stream(names))

    def _publish(self, name: str, sample: TickReading) -> None:
        for subscription in self._subscriptions:
            subscription.push(name, sample)

    def close(self) -> None:
        self._reactor.post(lambda: self._engine.stop(_STOP_S, then=self._reactor.stop))
        self._thread.join(_STOP_S + self._engine.settle_s + 1.0)
        settled = self._journal.empty
        self._engine.close()
        if not self._thread.is_alive():
            self._reactor.close()
        if settled:
            self._journal.delete()

    def _reply(self, conn: int, body: Envelope) -> None:
        waiting = self._replies.get(body["id"])
        if waiting is not None:
            waiting[1].append(_as_said_here(decode_reply(encode(body))))
            waiting[0].set()


def _as_said_here(part: Any) -> Any:
    """A reply with the remedies that apply without zeusd."""
    if isinstance(part, dict):
        return {key: _as_said_here(value) for key, value in part.items()}
    return part.replace(PRIVILEGE_OF_ZEUSD, PRIVILEGE) if isinstance(part, str) else part


@contextlib.contextmanager
def _unlogged(event: str) -> Iterator[None]:
    """Drop an event's log records."""

    def keep(record: logging.LogRecord) -> bool:
        return getattr(record, "event", None) != event

    logger = logging.getLogger(devices.__name__)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)

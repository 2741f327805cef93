"""The process that keeps the ledgers of engines: steps from engines, energy from zeusd.

    python -m zeus.serving serve --model NAME --log requests.jsonl --listen 127.0.0.1:9462

You may start, stop or kill it at any time: meanwhile the engine drops its steps. It continues after
a restart of zeusd; energy that was not measured is not attributed to requests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, FiniteFloat

from zeus.serving.fit import Weights
from zeus.serving.forward_pass import follow
from zeus.serving.gpus import EVERY_S, Tenants, engines_of
from zeus.serving.ledger import Ledger
from zeus.serving.receiver import MOST_ENGINES, Receiver
from zeus.serving.rows import RequestEnergy, Totals
from zeus.serving.wire import Message, Owner, socket_paths
from zeus_common.atomic import append_text, write_text
from zeus_common.http_guard import WebServer
from zeus_ipc.client import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.parsing import host_and_port

if TYPE_CHECKING:
    from zeus.serving.metrics import EnergyCollector
    from zeus.serving.telemetry import Telemetry
    from zeus_ipc.replies import Sample

log = logging.getLogger(__name__)

POLL_S = 0.5
RECEIVE_S = 0.1
RECONNECT_S = 2.0
MOST_SAMPLES = 100_000
MOST_UNWRITTEN = 500_000
"""Lines of the log that are kept until it can be written."""
SHARED_NS = round(2 * EVERY_S * 1e9)
"""Time before another tenant was seen: it may have started right after the previous check."""

Shared = tuple[str, int, int, str]
"""A GPU, and start, end and tenant of a span in which another tenant computed on it."""


class SampleReceiver:
    """Receives samples of GPUs from zeusd in a thread, across its restarts.

    Args:
        connect: Makes a connection to zeusd.
        gpus: UUIDs.
    """

    def __init__(self, connect: Callable[[], Client], gpus: Sequence[str]) -> None:
        self._connect = connect
        self._gpus = list(gpus)
        self._stop = threading.Event()
        self._arrived: deque[Sample | Shared] = deque(maxlen=MOST_SAMPLES)
        self._watches = {gpu: Tenants([gpu]) for gpu in gpus}
        self._thread = threading.Thread(target=self._run, name="zeus-serving", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> list[Sample | Shared]:
        """What arrived since the last call."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        warned = False
        while not self._stop.is_set():
            try:
                with self._connect() as client, client.stream(self._gpus) as stream:
                    warned = False
                    while not self._stop.is_set():
                        sample = stream.receive(0.2)
                        if sample is not None:
                            self._arrived.append(sample)
                        self._look_around(client)
            except (ZeusIpcError, OSError) as error:
                if not warned:
                    warned = True
                    log.warning("no energy is measured at the moment: %s", error)
                self._stop.wait(RECONNECT_S)

    def _look_around(self, client: Client) -> None:
        for gpu, watch in self._watches.items():
            if watch.due:
                shared, now_ns = watch.look(client), time.monotonic_ns()
                if shared is not None:
                    self._arrived.append((gpu, now_ns - SHARED_NS, now_ns, shared))


class Service:
    """Owns the ledgers of engines: feeds them, writes the log, and answers by HTTP.

    Args:
        path: Socket that receives the engines' messages.
        ledgers: By engine.
        log_path: Settled requests are appended to it.
        collector: Counts requests for Prometheus.
        telemetry: Sends spans of requests.
        learned: Called with an engine and new weights of its ledger.

    Raises:
        OSError: The socket cannot be listened on.
    """

    def __init__(
        self,
        path: str,
        ledgers: Mapping[str, Ledger],
        sensors: SampleReceiver,
        log_path: Path | None = None,
        model: str = "",
        *,
        collector: EnergyCollector | None = None,
        telemetry: Telemetry | None = None,
        learned: Callable[[str, Weights], None] = lambda engine, weights: None,
    ) -> None:
        self._ledgers, self._sensors = ledgers, sensors
        self._log_path, self._model = log_path, model
        self._collector, self._telemetry, self._learned = collector, telemetry, learned
        self._unwritten: deque[str] = deque(maxlen=MOST_UNWRITTEN)
        # Requests of the open period, by name and start.
        self._counted: dict[str, set[tuple[str, int]]] = {engine: set() for engine in ledgers}
        self._unknown: set[str] = set()
        self._stop = threading.Event()
        self._guard = threading.Lock()  # held while ledgers change
        self.receiver = Receiver(path, self._take)
        """Of the engines' messages."""

    def run(self) -> None:
        """Runs until `stop`, then settles everything."""
        self._sensors.start()
        try:
            while not self._stop.is_set():
                deadline = time.monotonic() + POLL_S
                # Messages wait in the socket meanwhile: waking this process for each one would slow
                # the engine.
                while (left := deadline - time.monotonic()) > 0 and not self._stop.wait(
                    min(left, RECEIVE_S)
                ):
                    self._receive()
                self.poll(time.monotonic_ns())
        finally:
            self._sensors.close()
            self._receive()
            self._take_samples()
            with self._guard:
                for engine, ledger in self._ledgers.items():
                    done = ledger.settle()
                    self._tell(engine, ledger, done.rows, done.totals)
            self.receiver.close()

    def stop(self) -> None:
        """Makes `run` return."""
        self._stop.set()

    def poll(self, now_ns: int) -> None:
        """Does the periodic work."""
        self._take_samples()
        with self._guard:
            for engine, ledger in self._ledgers.items():
                self._tell(engine, ledger, *ledger.poll(now_ns))

    def take(self, message: Message) -> None:
        """Handles a message of another feed than the socket."""
        with self._guard:
            self._take(message)

    def respond(self, wsgi: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers an HTTP request, as a WSGI application.

        `GET /energy/{request id}`: the energy of a finished request, 404 if it is not known (yet).
        `GET /totals`: sums of settled periods by engine. `GET /metrics`: for Prometheus.
        """
        path = wsgi["PATH_INFO"].encode("latin-1").decode(errors="replace")
        with self._guard:
            if path == "/metrics" and self._collector is not None:
                page: Iterable[bytes] = self._collector.app(wsgi, start_response)
                return page
            status, body = self._answer(path)
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        start_response(f"{status} {HTTPStatus(status).phrase}", headers)
        return [data]

    def _answer(self, path: str) -> tuple[int, str | dict[str, Any]]:
        """Status and body for a path."""
        if path.startswith("/energy/"):
            wanted = path[len("/energy/") :]
            for engine, ledger in self._ledgers.items():
                row = ledger.energy(wanted)
                if row is not None:
                    return 200, row.as_json(engine)
            return 404, {
                "error": f"the energy of request {wanted!r} is not known; it is available about "
                "two seconds after the request's end"
            }
        if path == "/totals":
            return 200, {name: dict(vars(one.totals)) for name, one in self._ledgers.items()}
        if path == "/metrics":
            return 501, {"error": "metrics need prometheus_client: pip install 'zeusd[metrics]'"}
        return 404, {"error": "the paths are /energy/{request id}, /totals and /metrics"}

    def _take_samples(self) -> None:
        with self._guard:
            for one in self._sensors.take():
                for ledger in self._ledgers.values():
                    if not isinstance(one, tuple):
                        ledger.sample(one)
                    elif one[0] in ledger.gpus:
                        ledger.foreign(*one[1:])

    def _receive(self) -> None:
        with self._guard:
            self.receiver.receive()

    def _take(self, message: Message) -> bool:
        ledgers = self._ledgers
        if isinstance(message, Owner):  # of a front end, which does not know the engine
            for one in ledgers.values():
                one.take(message)
        elif message.engine in ledgers:
            ledgers[message.engine].take(message)
        else:
            if len(self._unknown) < MOST_ENGINES and message.engine not in self._unknown:
                self._unknown.add(message.engine)
                log.warning(
                    "steps of engine %r are ignored; name its GPUs with --engine %s=GPU,GPU",
                    message.engine,
                    message.engine,
                )
            return False
        return True

    def _tell(
        self, engine: str, ledger: Ledger, rows: list[RequestEnergy], totals: Totals | None
    ) -> None:
        """Passes on what became known; totals: a period was settled."""
        counted = self._counted[engine]
        # A refusal is provisional, too: a settled fit may have a figure.
        new = [
            row
            for row in rows
            if (row.request, row.begin_ns) not in counted
            and (totals is not None or not row.refused)
        ]
        if self._collector is not None:
            self._collector.finished(engine, new)
        if self._telemetry is not None:
            self._telemetry.finished(engine, new, ledger.trace)
        if totals is None:
            counted.update((row.request, row.begin_ns) for row in new)
            return
        counted.clear()
        self._learned(engine, ledger.weights)
        if self._log_path is None:
            return
        stamp = {"settled_s": time.time(), "settled_ns": time.monotonic_ns(), "model": self._model}
        self._unwritten.extend(row.as_json(engine, stamp) for row in rows)
        self._unwritten.append(json.dumps({"settled": vars(totals), "engine": engine, **stamp}))
        try:
            append_text(self._log_path, "".join(f"{line}\n" for line in self._unwritten))
            self._unwritten.clear()
        except OSError as error:
            log.warning(
                "%s cannot be written (%s); its lines are kept until the next attempt, in an hour "
                "or at the end",
                self._log_path,
                error.strerror,
            )


# -------------------------------------------------------------------------------------- the command


class StoredWeights(BaseModel):
    """A file of weights by GPU model, number of GPUs and model, and by clock in MHz, so that a
    server's first requests need not wait for a new fit."""

    version: Literal[2] = 2
    """Of features and format; weights of another version are ignored."""
    weights: dict[str, dict[FiniteFloat, list[FiniteFloat]]] = {}

    @classmethod
    def read(cls, path: Path | None) -> StoredWeights:
        """The weights in a file; none if there is none or it is unreadable."""
        try:
            return cls() if path is None else cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        """Stores the weights. Logs if the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.model_dump_json() + "\n")
        except OSError as error:
            log.warning("weights cannot be written to %s: %s", path, error.strerror)


def run(
    engines: Sequence[str] = (),
    *,
    model: str = "",
    socket: str | None = None,
    log_path: Path | None = None,
    listen: str = "",
    weights: Path | None = None,
    front_end: bool = False,
    otlp: str = "",
    feed: str = "",
) -> None:
    """Runs a service until SIGINT or SIGTERM; see the help of `python -m zeus.serving serve`.

    Raises:
        ValueError: An option is not valid; the message says which.
        ZeusIpcError: zeusd does not report the node's GPUs.
        OSError: The socket or the address cannot be listened on, or the log cannot be written.
    """
    address = host_and_port(listen) if listen else ("", 0)
    if address is None:
        raise ValueError(f"--listen {listen!r} must be HOST:PORT, such as 127.0.0.1:9462")
    if log_path is not None:
        log_path.open("a").close()  # now, not after an hour
    with Client() as client:
        gpus = {gpu.uuid: gpu for gpu in client.node().gpus}
    stored = StoredWeights.read(weights)
    uuids = engines_of(engines, list(gpus.values()))
    keys = {name: f"{gpus[one[0]].name}|{len(one)}|{model}" for name, one in uuids.items()}
    ledgers = {
        name: Ledger(one, prior=stored.weights.get(keys[name]), front_end=front_end)
        for name, one in uuids.items()
    }

    def learned(engine: str, learned_weights: Weights) -> None:
        if weights is not None and learned_weights:
            newest = StoredWeights.read(weights)
            newest.weights[keys[engine]] = {mhz: list(row) for mhz, row in learned_weights.items()}
            newest.write(weights)

    with contextlib.ExitStack() as stack:
        telemetry = None
        if otlp:
            from zeus.serving.telemetry import over_http

            def boards() -> dict[str, float]:
                return {u: j for one in ledgers.values() for u, j in one.meter.boards_j.items()}

            telemetry = over_http(otlp, boards, model)
            stack.callback(telemetry.close)
        service = Service(
            socket_paths()[0] if socket is None else socket,
            ledgers,
            SampleReceiver(Client, [uuid for one in uuids.values() for uuid in one]),
            log_path,
            model,
            collector=_collector(model, ledgers),
            telemetry=telemetry,
            learned=learned,
        )
        if feed:
            stack.callback(follow(feed, service.take))
        if listen:
            try:
                web = WebServer(address[0] or "127.0.0.1", address[1], service.respond)
            except OSError as error:
                raise OSError(error.errno, error.strerror, listen) from None
            stack.callback(web.close)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        service.run()


def _collector(model: str, ledgers: Mapping[str, Ledger]) -> EnergyCollector | None:
    """The ledgers' metrics; None: prometheus_client is not installed."""
    try:
        from zeus.serving.metrics import EnergyCollector

        return EnergyCollector(model, ledgers)
    except ImportError:
        return None

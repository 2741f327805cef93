"""The process that keeps an instance's ledger: steps from the engine, energy from zeusd.

    python -m zeus.serving serve --model NAME --log requests.jsonl --port 9462

You may start, stop or kill it at any time: meanwhile the engine drops its steps. It continues after
a restart of zeusd; energy that was not measured is not attributed to requests.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zeus.serving.accountant import Accountant
from zeus.serving.receiver import MOST_ENGINES, Receiver
from zeus.serving.rows import RequestEnergy
from zeus.serving.tenants import EVERY_S, Tenants
from zeus.serving.wire import Arrival, EngineStep, Message, Owner
from zeus.utils.atomic import append_text
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import Sample

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5
RECEIVE_S = 0.1
RECONNECT_S = 2.0
MOST_SAMPLES = 100_000
MOST_UNWRITTEN = 500_000
"""Lines of the log that are kept until it can be written."""
SHARED_NS = round(2 * EVERY_S * 1e9)
"""Time before another tenant was seen: it may have started right after the previous check."""


class Sensors:
    """Receives samples of GPUs from zeusd in a thread, across its restarts."""

    def __init__(self, connect: Callable[[], Client], gpus: Sequence[str]) -> None:
        self._connect = connect
        self._gpus = list(gpus)
        self._stop = threading.Event()
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._watches = {gpu: Tenants([gpu]) for gpu in gpus}
        self._shared: deque[tuple[str, int, int, str]] = deque(maxlen=MOST_SAMPLES)
        self._thread = threading.Thread(target=self._run, name="zeus-serving", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> list[Sample]:
        """Samples that arrived since the last call."""
        return _drained(self._samples)

    def take_shared(self) -> list[tuple[str, int, int, str]]:
        """Spans since the last call in which another tenant computed: GPU, start, end and
        tenant."""
        return _drained(self._shared)

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
                            self._samples.append(sample)
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
                    self._shared.append((gpu, now_ns - SHARED_NS, now_ns, shared))


def _drained(queue: deque[T]) -> list[T]:
    return [queue.popleft() for _ in range(len(queue))]


class Service:
    """Receives messages, accounts energy, and writes the log.

    Raises:
        OSError: The socket cannot be listened on.
    """

    def __init__(
        self,
        path: str,
        accountants: dict[str, Accountant],
        sensors: Sensors,
        log_path: Path | None = None,
        model: str = "",
        on_rows: Callable[[str, list[RequestEnergy]], None] | None = None,
    ) -> None:
        self._accountants = accountants
        self._sensors = sensors
        self._log_path = log_path
        self._model = model
        self._logged = dict.fromkeys(accountants, 0)
        self._unwritten: deque[str] = deque(maxlen=MOST_UNWRITTEN)
        self._on_rows = on_rows
        self._unknown: set[str] = set()
        self._stop = threading.Event()
        self.guard = threading.Lock()
        """Held while accountants change."""
        self._receiver = Receiver(path, self._take)

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
            with self.guard:
                for engine, accountant in self._accountants.items():
                    self._tell(engine, accountant, accountant.close())
            self._receiver.close()

    def stop(self) -> None:
        """Makes `run` return."""
        self._stop.set()

    def poll(self, now_ns: int) -> None:
        """Does the periodic work."""
        self._take_samples()
        with self.guard:
            for engine, accountant in self._accountants.items():
                self._tell(engine, accountant, accountant.poll(now_ns))

    def _take_samples(self) -> None:
        with self.guard:
            for gpu, begin_ns, end_ns, reason in self._sensors.take_shared():
                for accountant in self._accountants.values():
                    if gpu in accountant.gpus:
                        accountant.ledger.foreign(begin_ns, end_ns, reason)
            for sample in self._sensors.take():
                for accountant in self._accountants.values():
                    accountant.sample(sample)

    def take(self, message: Message) -> None:
        """Handles a message from another source."""
        with self.guard:
            self._take(message)

    def _receive(self) -> None:
        with self.guard:
            self._receiver.receive()

    def _take(self, message: Message) -> bool:
        if isinstance(message, Owner):
            for one in self._accountants.values():
                one.owner(message)
            return True
        accountant = self._accountants.get(message.engine)
        if accountant is None:
            if len(self._unknown) < MOST_ENGINES and message.engine not in self._unknown:
                self._unknown.add(message.engine)
                log.warning(
                    "steps of engine %r are ignored; name its GPUs with --engine %s=GPU,GPU",
                    message.engine,
                    message.engine,
                )
            return False
        if isinstance(message, EngineStep):
            accountant.step(message)
        elif isinstance(message, Arrival):
            accountant.arrived(message)
        else:
            accountant.finish(message)
        return True

    def _tell(self, engine: str, accountant: Accountant, rows: list[RequestEnergy]) -> None:
        if self._on_rows is not None and rows:
            self._on_rows(engine, rows)
        if self._log_path is None or accountant.settlements == self._logged[engine]:
            return
        self._logged[engine] = accountant.settlements
        stamp = {"settled_s": time.time(), "settled_ns": time.monotonic_ns(), "model": self._model}
        self._unwritten.extend(as_json(engine, row, stamp) for row in rows)
        end = {"settled": vars(accountant.newest), "engine": engine, **stamp}
        self._unwritten.append(json.dumps(end))
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


def as_json(engine: str, row: RequestEnergy, more: dict[str, Any] | None = None) -> str:
    """A request's energy as one line of JSON; the figures of a refused request are null."""
    found = {"engine": engine, **vars(row), **(more or {})}
    return json.dumps(
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in found.items()
        }
    )

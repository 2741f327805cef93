"""Connects the parts of a service: zeusd's samples, the engine's socket, the log, HTTP and
metrics."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from zeus.serving.rows import RequestEnergy
from zeus.serving.wire import socket_paths
from zeus_ipc import Client
from zeus_ipc.paths import host_and_port

if TYPE_CHECKING:
    from zeus.serving.accountant import Accountant
    from zeus.serving.service import Service
    from zeus_ipc.replies import GpuInfo


import json
import logging
import math
from collections.abc import Mapping

from zeus.utils.atomic import write_text

log = logging.getLogger(__name__)

VERSION = 2
"""Version of features and format; weights of another version are ignored."""


class WeightStore:
    """A JSON file of weights by GPU model, number of GPUs, model, and clock, so that a server's
    first requests need not wait for a new fit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, *key: str) -> dict[float, list[float]]:
        """The weights of a key by clock, MHz; empty if there are none or the file is unreadable."""
        found = self._read().get("|".join(key))
        try:
            weights = {float(mhz): [float(one) for one in row] for mhz, row in found.items()}  # type: ignore[attr-defined]  # anything may stand in the file
        except (AttributeError, TypeError, ValueError):
            return {}
        numbers = [one for row in weights.values() for one in row]
        sizes = {len(row) for row in weights.values()}
        return weights if all(map(math.isfinite, numbers)) and len(sizes) == 1 else {}

    def put(self, weights: Mapping[float, Sequence[float]], *key: str) -> None:
        """Stores weights. Logs if the file cannot be written."""
        known = self._read()
        known["|".join(key)] = {f"{mhz:g}": list(row) for mhz, row in weights.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps({"version": VERSION, "weights": known}) + "\n")
        except OSError as error:
            log.warning("weights cannot be written to %s: %s", self._path, error.strerror)

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict) or found.get("version") != VERSION:
            return {}
        weights = found.get("weights")
        return dict(weights) if isinstance(weights, dict) else {}


FEED_S = 0.2


@dataclass(frozen=True)
class Options:
    """Options of `python -m zeus.serving serve`; see its help."""

    model: str
    engines: Sequence[str]
    socket: str | None
    log: Path | None
    listen: str
    weights: Path | None
    method: str
    front_end: bool
    otlp: str = ""
    feed: str = ""


def run(options: Options) -> None:
    """Runs a service until SIGINT or SIGTERM.

    Raises:
        ValueError: An option is not valid; the message says which.
        ZeusIpcError: zeusd does not report the node's GPUs.
        OSError: The socket or the address cannot be listened on, or the log cannot be written.
    """
    # These compute with NumPy.
    from zeus.serving.accountant import Accountant
    from zeus.serving.service import Sensors, Service

    if options.log is not None:
        options.log.open("a").close()  # now, not after an hour
    with Client() as client:
        gpus = client.node().gpus
    engines = engines_of(options.engines, gpus)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    store = None if options.weights is None else WeightStore(options.weights)
    accountants: dict[str, Accountant] = {}
    keys = {}
    for name, uuids in engines.items():
        keys[name] = (by_uuid[uuids[0]].name, str(len(uuids)), options.model)
        accountants[name] = Accountant(
            uuids,
            method=options.method,
            prior=None if store is None else store.get(*keys[name]),
            front_end=options.front_end,
        )
    registry, collectors = _metrics(options.model, accountants)
    telemetry = None
    if options.otlp:
        from zeus.serving.telemetry import over_http

        def boards() -> dict[str, float]:
            return {u: j for one in accountants.values() for u, j in one.meter.boards_j.items()}

        telemetry = over_http(options.otlp, boards, options.model)
    counted: dict[str, set[str]] = {name: set() for name in accountants}

    def on_rows(engine: str, rows: list[RequestEnergy]) -> None:
        seen = counted[engine]
        new = [row for row in rows if row.request not in seen]
        if engine in collectors:
            collectors[engine].finished(new)
        if telemetry is not None:
            telemetry.finished(engine, new, accountants[engine].trace)
        if rows and not rows[0].provisional:
            seen.clear()
            weights = accountants[engine].ledger.weights
            if store is not None and weights:
                store.put(weights, *keys[engine])
        else:
            seen.update(row.request for row in rows)

    every = [uuid for uuids in engines.values() for uuid in uuids]
    service = Service(
        options.socket or socket_paths()[0],
        accountants,
        Sensors(Client, every),
        options.log,
        options.model,
        on_rows,
    )
    with contextlib.ExitStack() as stack:
        if telemetry is not None:
            stack.callback(telemetry.close)
        if options.feed:
            stack.callback(_follow(options.feed, service))
        if options.listen:
            from zeus.serving.web import Web

            where = address(options.listen)
            try:
                web = Web(where, service, accountants, registry)
            except OSError as error:
                raise OSError(error.errno, error.strerror, options.listen) from None
            stack.callback(web.close)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        service.run()


def _follow(address: str, service: Service) -> Callable[[], None]:
    """Feeds forward-pass metrics to a service, in a thread; returns a function that stops it."""
    from zeus.serving.forward_pass import LedgerFeed, Subscriber

    try:
        subscriber = Subscriber(address)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot listen to {address}: {error}; check --feed") from None
    ended, feed = threading.Event(), LedgerFeed(subscriber, service.take)

    def run() -> None:
        while not ended.is_set():
            feed.receive(FEED_S)
        subscriber.close()

    thread = threading.Thread(target=run, name="zeus-serving-feed", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def engines_of(named: Sequence[str], gpus: Sequence[GpuInfo]) -> dict[str, list[str]]:
    """UUIDs by engine, from `NAME=GPU,GPU`.

    Raises:
        ValueError: An engine is malformed, or has a GPU that does not exist or that another engine
            has.
    """
    if not named:
        return {"0": chosen(gpus, ())}
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for one in named:
        name, equals, rest = one.partition("=")
        if not equals or not name or name in found:
            raise ValueError(f"--engine {one!r} must be NAME=GPU,GPU with a unique name")
        found[name] = chosen(gpus, rest.split(","))
        if taken.intersection(found[name]):
            raise ValueError(f"--engine {one!r} has a GPU of another engine")
        taken.update(found[name])
    return found


def chosen(gpus: Sequence[GpuInfo], wanted: Sequence[str]) -> list[str]:
    """UUIDs of GPUs by index or UUID, each once; all GPUs if none is named.

    Raises:
        ValueError: The GPU does not exist, or there is none at all.
    """
    by_name = {gpu.uuid: gpu.uuid for gpu in gpus} | {str(gpu.index): gpu.uuid for gpu in gpus}
    if not gpus:
        raise ValueError("this node has no GPU; see zeusctl status")
    for one in wanted:
        if one not in by_name:
            raise ValueError(f"there is no GPU {one}; GPUs are 0 to {len(gpus) - 1}, or UUIDs")
    return list(dict.fromkeys(by_name[one] for one in wanted)) or [gpu.uuid for gpu in gpus]


def address(text: str) -> tuple[str, int]:
    """Host and port from `HOST:PORT` or `:PORT`.

    Raises:
        ValueError: It is neither.
    """
    address = host_and_port(text)
    if address is None:
        raise ValueError(f"--listen {text!r} must be HOST:PORT, such as 127.0.0.1:9462")
    return address[0] or "127.0.0.1", address[1]


def _metrics(model: str, accountants: dict[str, Accountant]) -> tuple[Any, dict[str, Any]]:
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        return None, {}
    from zeus.serving.metrics import EnergyCollector

    registry = CollectorRegistry()
    collectors = {name: EnergyCollector(model, name, one) for name, one in accountants.items()}
    registry.register(_Joined(list(collectors.values())))
    return registry, collectors


class _Joined:
    """Several engines' metrics, each family once."""

    def __init__(self, collectors: Sequence[Any]) -> None:
        self._collectors = collectors

    def collect(self) -> Any:
        """The metrics; called by the registry."""
        families: dict[str, Any] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()

"""The web page and metrics of a fleet. Reads etcd once a second, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus.utils import web
from zeus_common.outage import Outage
from zeus_fleet.allocator import Snapshot
from zeus_fleet.records import Record
from zeus_fleet.store import StoreUnavailable
from zeus_fleet.view import FleetView, Watcher
from zeus_ipc.overriding import override

STATES = ("ok", "waits", "leaving", "stuck", "silent", "absent", "unreadable")


class FleetMetrics(Collector):
    """All metric families.

    Args:
        view: The newest view; None: etcd has not responded yet.
        up: Whether the last request to etcd succeeded.
    """

    def __init__(self, view: FleetView | None, up: bool) -> None:
        self._view = view
        self._up = up

    def collect(self) -> Iterator[Metric]:
        """The families; without a view, only whether etcd responds."""
        yield GaugeMetricFamily(
            "zeus_fleet_up", "0: the last request to etcd failed.", value=float(self._up)
        )
        if self._view is None:
            return
        yield from _of_each("domain", self._view.domains, _OF_DOMAINS)
        yield from _of_nodes(self._view)
        yield _gauge("standing_budget_watts", "Limit outside of events.", self._view.standing_w)
        yield _gauge("busy_gpus", "GPUs of jobs.", self._view.busy_gpus)
        yield _gauge(
            "lost_gpus",
            "Loss of jobs' progress by limits, in GPUs at full speed, by profiles.",
            self._view.lost_gpus,
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"zeus_fleet_{name}", text, value=value)


_OF_DOMAINS = (
    ("budget_watts", "Limit of a domain: the site, a row or a rack.", "limit_w"),
    ("reserve_watts", "Reserve for GPUs that cannot be lowered.", "reserve_w"),
    ("floor_watts", "Sum of the minimum limits.", "floors_w"),
    ("granted_watts", "Sum of grants.", "granted_w"),
    ("held_watts", "Sum of the power limits that GPUs may have.", "held_w"),
    ("drawn_watts", "Sum of power drawn by GPUs.", "drawn_w"),
)
_OF_NODES = (
    ("node_granted_watts", "A node's grant.", "granted_w"),
    ("node_held_watts", "Sum of the power limits that a node's GPUs may have.", "held_w"),
    ("node_drawn_watts", "Power drawn by a node's GPUs.", "drawn_w"),
    ("node_wanted_watts", "A node's demand.", "wanted_w"),
    ("node_stuck_watts", "Power above the minimum of GPUs that cannot be lowered.", "stuck_w"),
    ("node_silent_seconds", "Time since a node's last heartbeat.", "silent_s"),
)
"""Name and meaning of each metric, and the field that has it."""


def _of_each(
    label: str, rows: Iterable[Any], figures: Iterable[tuple[str, str, str]]
) -> Iterator[Metric]:
    for name, text, field in figures:
        family = GaugeMetricFamily(f"zeus_fleet_{name}", text, labels=[label])
        for row in rows:
            value = getattr(row, field)
            if value is not None:
                family.add_metric([row.name], value)
        yield family


def _of_nodes(view: FleetView) -> Iterator[Metric]:
    yield from _of_each("fleet_node", view.nodes, _OF_NODES)
    states = GaugeMetricFamily(
        "zeus_fleet_node_state", "1: the node is in this state.", labels=["fleet_node", "state"]
    )
    for node in view.nodes:
        for state in STATES:
            states.add_metric([node.name, state], float(node.state == state))
    yield states


log = logging.getLogger("zeus_fleet")


class StoreReader(Protocol):
    """The part of a `FleetStore` that the server needs."""

    async def read(self) -> tuple[Snapshot | None, dict[str, int]]:
        """Reads the contents of the store, as `FleetStore.read`."""
        ...


class FleetServer(web.Application):
    """The web application.

    Args:
        store: The store with the budget.
        every_s: Period of reading.
        keep: Called with each view.
    """

    def __init__(
        self,
        store: StoreReader,
        every_s: float = 1.0,
        keep: Callable[[FleetView], None] | None = None,
    ) -> None:
        super().__init__("zeus-fleet")
        self.view: FleetView | None = None
        self.trouble = "etcd has not responded yet"
        # Number of records that the page shows.
        self.history: deque[Record] = deque(maxlen=3600)
        self._store = store
        self._every_s = every_s
        self._keep = keep
        self._recording = Outage(log, "records are written again")
        self._task: asyncio.Task[None] | None = None
        _add(self)

    @override
    async def opens(self) -> None:
        self._task = asyncio.create_task(self._look_on())

    @override
    async def closes(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look_on(self) -> None:
        watcher = Watcher()
        while True:
            try:
                read, _ = await self._store.read()
                if read is None:
                    self.view, self.trouble = None, "there is no budget yet"
                else:
                    self.view = watcher.look(read, time.monotonic(), time.time())
                    self.trouble = ""
                    if self.history and self.view.at_s < self.history[-1].at_s:
                        self.history.clear()  # the clock was set back
                    self.history.append(Record.of(self.view))
                    self._record(self.view)
            except (StoreUnavailable, ValueError) as error:
                self._fails(str(error))
            except Exception as error:  # a bug: the page must say so, and not stop at this view
                if self._fails(f"zeus-fleet failed ({type(error).__name__}); please report it"):
                    log.exception("the view failed")
            await asyncio.sleep(self._every_s)

    def _fails(self, trouble: str) -> bool:
        """Notes why there is no present view; returns whether that is new."""
        new, self.trouble = trouble != self.trouble, trouble
        if new:
            log.warning("%s", trouble)
        return new

    def _record(self, view: FleetView) -> None:
        try:
            if self._keep is not None:
                self._keep(view)
            self._recording.succeeded()
        except ValueError as error:  # such as a full disk, which is no trouble of etcd
            self._recording.failed(str(error))


def _add(app: FleetServer) -> None:
    @app.get("/state")
    async def state() -> JSONResponse:
        view = app.view
        answer: dict[str, Any] = {"trouble": app.trouble, "view": None}
        if view is not None:
            nodes = [{**asdict(node), "state": node.state} for node in view.nodes]
            answer["view"] = {**asdict(view), "nodes": nodes}
        return web.fresh(answer)

    @app.get("/history")
    async def history(after: float = 0.0) -> JSONResponse:
        rows = [asdict(one) for one in app.history if one.at_s > after]
        return web.fresh(rows)

    @app.get("/metrics")
    async def figures() -> PlainTextResponse:
        return web.figures(FleetMetrics(app.view, not app.trouble))

    @app.get("/healthz")
    async def health() -> JSONResponse:
        trouble = app.trouble
        return JSONResponse({"status": trouble or "ok"}, status_code=503 if trouble else 200)

"""The web page and metrics of a fleet. Reads etcd once a second, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from fastapi.responses import JSONResponse, PlainTextResponse

from zeus.utils import web
from zeus_fleet import metrics
from zeus_fleet.allocator import Snapshot
from zeus_fleet.records import Record
from zeus_fleet.store import StoreUnavailable
from zeus_fleet.view import View, Watcher
from zeus_ipc.outage import Outage
from zeus_ipc.overriding import override

KEPT = 3600
"""Number of records that the page shows."""

log = logging.getLogger("zeus_fleet")


class Reader(Protocol):
    """The part of a `Store` that the server needs."""

    async def read(self) -> tuple[Snapshot | None, dict[str, int]]:
        """Reads the contents of the store, as `Store.read`."""
        ...


class FleetServer(web.Application):
    """The web application.

    Args:
        store: The store with the budget.
        every_s: Period of reading.
        keep: Called with each view.
    """

    def __init__(
        self, store: Reader, every_s: float = 1.0, keep: Callable[[View], None] | None = None
    ) -> None:
        super().__init__("zeus-fleet")
        self.view: View | None = None
        self.trouble = "etcd has not responded yet"
        self.history: deque[Record] = deque(maxlen=KEPT)
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
                if str(error) != self.trouble:
                    log.warning("%s", error)
                self.trouble = str(error)
            await asyncio.sleep(self._every_s)

    def _record(self, view: View) -> None:
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
        return web.figures(metrics.text(app.view, not app.trouble))

    @app.get("/healthz")
    async def health() -> JSONResponse:
        trouble = app.trouble
        return JSONResponse({"status": trouble or "ok"}, status_code=503 if trouble else 200)

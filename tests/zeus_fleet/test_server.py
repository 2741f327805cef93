"""The page in a real browser, and the metrics."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.browser import Page, browser
from tests.support import TIMEOUT_S, wait_for
from tests.zeus_fleet.test_etcd import awaited
from tests.zeus_fleet.test_view import BEAT, READ
from zeus_fleet.allocator import Snapshot
from zeus_fleet.messages import Grant
from zeus_fleet.server import FleetServer
from zeus_fleet.store import StoreUnavailable
from zeus_fleet.view import FleetView

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
EVIL = "<img src=x onerror=\"document.title='owned'\">"


class FleetStore:
    """What etcd has; set by hand."""

    def __init__(self) -> None:
        self.now: Snapshot | None = None
        self.failure: str = ""

    async def read(self) -> tuple[Snapshot | None, dict[str, int]]:
        if self.failure:
            raise StoreUnavailable(self.failure)
        return self.now, {}


class Running:
    """A server in a thread."""

    def __init__(self) -> None:
        self.store = FleetStore()
        self.app = FleetServer(self.store, every_s=0.05)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self._socket]))
        )
        self._thread.start()
        wait_for(lambda: self._server.started, "the server to start")

    def has(self, snapshot: Snapshot | None) -> None:
        """The server has seen this."""
        before, self.store.now = self.app.view, snapshot
        wait_for(lambda: self.app.view is not before or snapshot is None, "the server to look")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


def healthz(server: Running) -> int:
    return httpx.get(f"{server.url}/healthz", timeout=TIMEOUT_S, verify=False).status_code


def metrics(server: Running) -> dict[str, float]:
    found = {}
    text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S, verify=False).text
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_metrics_have_budget_granted_held_and_drawn(server: Running) -> None:
    assert metrics(server) == {"zeus_fleet_up": 0.0}
    assert healthz(server) == 503
    server.has(READ)
    wait_for(lambda: healthz(server) == 200, "the server to be well")
    found = metrics(server)
    assert found["zeus_fleet_up"] == 1
    assert found['zeus_fleet_budget_watts{domain="site"}'] == 900
    assert found['zeus_fleet_granted_watts{domain="rack"}'] == 300
    assert found['zeus_fleet_held_watts{domain="site"}'] == 700
    assert found['zeus_fleet_node_drawn_watts{fleet_node="a"}'] == 250
    assert found['zeus_fleet_node_state{fleet_node="a",state="waits"}'] == 1
    assert found['zeus_fleet_node_state{fleet_node="c",state="absent"}'] == 1
    assert 'zeus_fleet_node_silent_seconds{fleet_node="c"}' not in found
    server.store.failure = "etcd is gone"
    wait_for(lambda: metrics(server)["zeus_fleet_up"] == 0, "the failure to be seen")
    server.store.failure = ""


@awaited
async def test_records_that_cannot_be_written_are_no_trouble_of_etcd(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = "records cannot be written: No space left on device"
    written: list[FleetView] = []

    def keep(view: FleetView) -> None:
        if len(caplog.records) == 0:
            raise ValueError(full)
        written.append(view)

    store = FleetStore()
    store.now = READ
    app = FleetServer(store, every_s=0.01, keep=keep)
    await app.opens()
    while not written:
        await asyncio.sleep(0.01)
    await app.closes()
    assert app.trouble == ""
    assert [one.message for one in caplog.records] == [full, "records are written again"]


@awaited
async def test_a_clock_that_is_set_back_begins_another_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FleetStore()
    store.now = READ
    app = FleetServer(store, every_s=0.01)
    await app.opens()
    while len(app.history) < 3:
        await asyncio.sleep(0.01)
    later_s, real = app.history[-1].at_s, time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    while app.history[-1].at_s >= later_s or len(app.history) < 3:
        await asyncio.sleep(0.01)
    await app.closes()
    assert all(one.at_s < later_s for one in app.history)


def text(page: Page, selector: str) -> str:
    found: str = page.run(f"document.querySelector({selector!r}).innerText")
    return found


@pytest.mark.needs("chromium")
def test_the_page_shows_nodes_the_budget_and_a_cut(server: Running, tmp_path: Path) -> None:
    evil = replace(READ.works["a"][0], job=EVIL)
    full = replace(BEAT, held_mw=600_000, drawn_mw=500_000)
    assert READ.plan is not None
    plan = replace(READ.plan, grants={"a": Grant(1, 600_000, 600_000)})
    before = replace(READ, heartbeats={"a": full, "b": BEAT}, plan=plan, works={"a": (evil,)})
    server.has(before)
    with browser(tmp_path) as page:
        page.see(1300, 1000)
        page.open(server.url)
        page.wait_for("document.querySelectorAll('#nodes button').length === 3")
        page.wait_for("document.querySelectorAll('#chart path').length === 5")
        assert "900 W" in text(page, "#tiles")
        assert page.run("document.querySelector('[data-node=c]').className") == "absent"
        page.click("[data-node=a]")
        page.wait_for("document.querySelector('#detail').innerText.includes('Jobs: <img')")
        assert page.run("document.title") == "Fleet power budget"
        assert "rack" in text(page, "#domains")
        assert "e" in text(page, "#events")

        site = replace(before.budget.site, limit_mw=700_000)
        cut = replace(before.budget, domains=(site, *before.budget.domains[1:]))
        server.has(replace(before, budget=cut))
        page.wait_for("document.querySelector('#tiles').innerText.includes('being lowered')")
        low = {name: replace(beat, held_mw=250_000) for name, beat in before.heartbeats.items()}
        server.has(replace(before, budget=cut, heartbeats=low))
        page.wait_for("document.querySelector('#tiles').innerText.includes('below the limit')")

        server.store.failure = "etcd at x does not answer"
        page.wait_for("document.querySelector('#away').innerText.includes('does not answer')")
        server.store.failure = ""
        page.see(500, 900, "dark")
        assert page.run("document.documentElement.scrollWidth <= 500")
        letters = "document.querySelector('#chart text').getBoundingClientRect().height"
        assert page.run(letters) > 10, "they can be read on a phone"


def test_rules_and_dashboard_name_only_metrics_that_there_are(server: Running) -> None:
    server.has(READ)
    page = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S, verify=False).text
    there = set(re.findall(r"# TYPE (\S+)", page))
    dashboard = (MONITORING / "grafana-fleet.json").read_text()
    asked = set(re.findall(r"zeus_fleet_[a-z_]+", dashboard))
    assert len(json.loads(dashboard)["panels"]) == 6
    assert len(asked) > 9
    asked |= set(re.findall(r"zeus_fleet_[a-z_]+", (MONITORING / "alerts.yml").read_text()))
    assert asked <= there

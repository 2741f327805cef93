"""The live view: what fits, in which order, and the keys; in process, without a terminal."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.support import TIMEOUT_S, RunningDaemon, running_daemon, wait_for
from tests.zeusctl.conftest import READINGS
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeusctl.session import Session
from zeusctl.text import bar, resample, sparkline
from zeusctl.top.app import LiveTable, TopApp
from zeusctl.top.model import COLUMNS, SORTS, View, fitting
from zeusctl.top.screens import GpuScreen, HelpScreen
from zeusctl.top.source import NodeSource

GPUS = 12


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    """Twelve GPUs: the second one works, capped; another has locked clocks."""
    with running_daemon("--simulate", f"{GPUS}xa100-sxm-80", gpus=GPUS) as daemon:
        with daemon.client() as client:
            gpus = client.node().gpus
            work = SimulatedWork(client.node().simulated or "", [gpus[1].uuid], "model/compute")
            work.launch(1e9)
            client.set_power_limit(gpus[1].uuid, 200_000)
            client.set_gpu_clocks(gpus[7].uuid, 600, 900)
            client.set_ceiling(gpus[7].uuid, "fleet", 300_000)

            def works() -> bool:
                state = client.state(gpus[1].uuid)[gpus[1].uuid]
                return bool(state.utilization_percent) and (state.power_mw or 0) > 150_000

            wait_for(works, "work")
            yield daemon
        work.close()


@pytest.fixture
def source(node: RunningDaemon) -> Iterator[NodeSource]:
    session = Session(node.socket)
    yield NodeSource(session, "all")
    session.close()


def run(
    source: NodeSource, size: tuple[int, int], script: Callable[[TopApp, Any], Awaitable[None]]
) -> int | None:
    """The live view in a terminal of this size, with a script of keys."""

    async def session() -> int | None:
        app = TopApp(source, 60.0, None)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: shown(app, "gpus"))
            await script(app, pilot)
        return app.return_value

    return asyncio.run(session())


async def until(pilot: Pilot[Any], condition: Callable[[], object]) -> None:
    """Waits until a condition holds: where the machine is busy, the pilot takes a pause of this
    process for the end of what a key has begun.
    """
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {TIMEOUT_S:g} s in vain"
        await pilot.pause(0.01)


def said(app: TopApp, name: str) -> str:
    """The text of a widget in front, empty where there is none or it is hidden."""
    found = app.screen.query(f"#{name}")
    return str(found.first().render()) if found and found.first().display else ""


def shown(app: TopApp, table: str, column: int = 0) -> list[str]:
    rows = app.screen_stack[0].query_one(f"#{table}", LiveTable)
    return [str(rows.get_row_at(row)[column]).strip() for row in range(rows.row_count)]


# ------------------------------------------------------------------------------------------- pure


def test_columns_fit_any_width() -> None:
    for width in range(40, 301):
        columns = fitting(width)
        assert sum(taken + 1 for _, taken in columns) <= width, width
        assert all(10 <= taken <= 60 for column, taken in columns if not column.width), width
        names = [column.heading for column, _ in columns]
        assert {"GPU", "UTIL", "MEM USED", "POWER", "LIMIT"} <= set(names), width
        assert names == [column.heading for column in COLUMNS if column.heading in names]


def test_wide_terminals_show_all_columns() -> None:
    assert [column for column, _ in fitting(200)] == list(COLUMNS)
    headings = " ".join(column.heading for column in COLUMNS)
    assert "POWER WITHIN LIMIT" in headings
    assert "ENERGY POWER, 2 MIN HELD BY" in headings


def test_lines_and_bars() -> None:
    assert sparkline([0, None, 5, 10, 99], 0, 10) == "▁ ▅██"
    assert resample([(1.0, 10.0), (1.5, 20.0), (3.5, 40.0)], 0.0, 4.0, 4) == [10, 20, 20, 40]
    assert bar(0.5, 8) == "━━━━────"
    assert bar(0.5, 8, mark=1.0) == "━━━━───|"
    assert bar(None, 3) == "---"


def test_orders_and_patterns(source: NodeSource) -> None:
    view = View(source.report)
    assert [gpu.index for gpu in view.gpus()] == list(range(GPUS))
    assert [process.gpu for process in view.processes()] == [1]
    first = {}
    for view.sort in SORTS:
        first[view.sort] = view.gpus()[0].index
    most = {
        "temp": max(view.gpus(), key=lambda gpu: (gpu.temperature_c, -gpu.index)).index,
        "energy": max(view.gpus(), key=lambda gpu: gpu.energy_j).index,
    }
    assert first == {**dict.fromkeys(SORTS, 1), **most, "gpu": 0}, "most often, the one that works"
    view.sort, view.inverted = "power", True
    assert view.gpus()[-1].index == 1
    view.sort, view.inverted = "holder", False
    assert {gpu.index for gpu in view.gpus()[:2]} == {1, 7}
    view.pattern = "gpu_clocks"
    assert [gpu.index for gpu in view.gpus()] == [7]
    assert [lease.gpu for lease in view.leases()] == [7]
    assert view.processes() == []
    view.pattern = "no such thing"
    assert (view.gpus(), view.leases(), view.processes()) == ([], [], [])
    seen = set()
    for _ in SORTS:
        view.sort_by(1)
        seen.add(view.sort)
    assert seen == set(SORTS)


# ------------------------------------------------------------------------------------------- keys


def test_rows_that_do_not_fit_are_counted_and_can_be_scrolled_to(source: NodeSource) -> None:
    async def script(app: TopApp, pilot: Pilot[int]) -> None:
        table = app.query_one("#gpus", LiveTable)

        def counted() -> bool:
            assert table.styles.height is not None
            hidden = GPUS + 1 - int(table.styles.height.value)
            title = said(app, "gpus-title")
            return hidden > 0 and title.startswith(f" {GPUS - hidden} of {GPUS} GPUs,")

        await until(pilot, counted)
        await until(pilot, lambda: "2 leases" in said(app, "leases-title"))
        await pilot.press("end")
        await until(pilot, lambda: (table.cursor_row, app.focused) == (GPUS - 1, table))
        await pilot.press("up", "pageup", "home", "down")
        await until(pilot, lambda: table.cursor_row == 1)
        before = app.view.report
        await pilot.press("space")
        await until(pilot, lambda: app.view.report is not before)
        await pilot.pause()
        assert table.cursor_row == 1, "a look keeps the cursor"

    assert run(source, (60, 18), script) is None


def test_a_new_order_shows_its_first_rows(source: NodeSource) -> None:
    async def script(app: TopApp, pilot: Pilot[int]) -> None:
        table = app.query_one("#gpus", LiveTable)
        await pilot.press("end")
        await until(pilot, lambda: table.cursor_row == GPUS - 1 and table.scroll_y > 0)
        await pilot.press("P")
        await until(pilot, lambda: (table.cursor_row, table.scroll_y) == (0, 0))
        await until(pilot, lambda: table.selected == app.view.gpus()[0].uuid)

    run(source, (60, 18), script)


def test_sorting_filtering_and_what_is_chosen(source: NodeSource) -> None:
    async def script(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("P")
        await until(pilot, lambda: shown(app, "gpus")[0] == "1")
        await pilot.press("I")
        await until(pilot, lambda: shown(app, "gpus")[-1] == "1")
        await pilot.press("N", "slash", *"gpu_clocks", "enter")
        await until(pilot, lambda: shown(app, "gpus") == shown(app, "leases") == ["7"])
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, GpuScreen))
        await until(pilot, lambda: "600-900 MHz" in said(app, "page"))
        await until(pilot, lambda: "The last hour" in said(app, "page"))
        assert "AT MOST" in said(app, "page"), "its ceiling"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, GpuScreen))
        await pilot.press("escape")
        await until(pilot, lambda: shown(app, "gpus") == [str(index) for index in range(GPUS)])
        await pilot.press("h")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        frame = app.screen.query_one(".overlay")
        titles = (frame.border_title, frame.border_subtitle)
        assert titles == ("zeusctl top", "up, down scroll; Esc closes")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))
        await pilot.press("q")

    assert run(source, (120, 40), script) == 0


def test_ctrl_c_ends_it(source: NodeSource) -> None:
    async def script(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("h")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("ctrl+c")

    assert run(source, (80, 24), script) == 130


def test_processes_have_their_leases_and_tab_leads_to_them(source: NodeSource) -> None:
    async def script(app: TopApp, pilot: Pilot[int]) -> None:
        table = app.query_one("#processes", LiveTable)
        await until(pilot, lambda: shown(app, "processes") == ["1"])
        assert "power_limit 200 W" in " ".join(map(str, table.get_row_at(0)))
        head = rf" \d\d:\d\d:\d\d  [1-9]\d* W  {GPUS} GPUs, 2 leases, simulated, zeusd .*"
        assert re.fullmatch(head, said(app, "head"))
        await until(pilot, lambda: len(source.power) == GPUS)
        await pilot.press("tab", "tab")
        await until(pilot, lambda: app.focused is table)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, GpuScreen))
        await until(pilot, lambda: "The last hour" in said(app, "page"))
        assert "AT MOST" not in said(app, "page"), "another GPU's ceiling"

    run(source, (140, 40), script)


def test_a_zeusd_that_stops_shows_and_the_last_figures_stay() -> None:
    with running_daemon("--simulate", "1xa100-sxm-80") as daemon:
        session = Session(daemon.socket)
        source = NodeSource(session, "all")

        async def script(app: TopApp, pilot: Pilot[int]) -> None:
            def after_a_look(part: str, name: str) -> bool:
                app.action_look()
                return part in said(app, name)

            with daemon.client() as client:
                gpu = client.node().gpus[0].uuid
                simulated = SimulatedNode(client.node().simulated or "")
                client.set_power_limit(gpu, 200_000)
                simulated.inject(0, "set_power_limit", 999)
            await until(pilot, lambda: after_a_look("  1 control not restored yet", "head"))
            for call in READINGS:
                simulated.inject(0, call, 15)
            await until(pilot, lambda: after_a_look("no new samples of GPU 0", "trouble"))
            simulated.clear_faults()
            await until(pilot, lambda: after_a_look("", "head") and not said(app, "trouble"))
            daemon.process.send_signal(signal.SIGSTOP)
            app.action_look()
            await until(pilot, lambda: "zeusd has not answered for" in said(app, "trouble"))
            daemon.process.send_signal(signal.SIGCONT)
            daemon.stop()
            await until(pilot, lambda: "zeusd has stopped" in said(app, "trouble"))
            assert shown(app, "gpus") == ["0"]
            await pilot.press("enter")
            await until(pilot, lambda: "zeusd has stopped" in said(app, "warning"))

        run(source, (80, 24), script)
        session.close()

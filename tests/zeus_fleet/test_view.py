"""The view of a budget, and the report of an event."""

from __future__ import annotations

import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from zeus_fleet.allocator import Snapshot
from zeus_fleet.commands import main
from zeus_fleet.messages import (
    Budget,
    BudgetDomain,
    Grant,
    GrantPlan,
    LimitEvent,
    NodeReport,
    NodeWork,
)
from zeus_fleet.profiles import ProgressProfile
from zeus_fleet.records import Record, read, reports
from zeus_fleet.view import FleetView, NodeView, Watcher

BUDGET = Budget(
    (
        BudgetDomain("site", 900_000, frozenset("abc")),
        BudgetDomain("rack", 500_000, frozenset("a")),
    ),
    dict.fromkeys("abc", 200_000),
    frozenset("b"),
    1_000_000,
    (LimitEvent("e", 900_000, 100.0, 200.0),),
)
BEAT = NodeReport(5, 1, 300_000, 200_000, 600_000, 600_000, 0, 250_000)
WORK = NodeWork(
    "7", "V100", (0, 1), 100_000, 300_000, ProgressProfile((100_000, 300_000), (0.5, 1.0))
)
READ = Snapshot(
    1,
    BUDGET,
    1,
    GrantPlan(1, dict(BUDGET.spare_mw), {"a": Grant(1, 300_000, 300_000)}),
    1,
    {"a": BEAT, "b": replace(BEAT, held_mw=200_000, wanted_mw=200_000)},
    {"a": (WORK,)},
)


def states(view: FleetView) -> dict[str, str]:
    return {node.name: node.state for node in view.nodes}


def test_nodes_are_seen_by_their_heartbeats() -> None:
    watcher = Watcher()
    view = watcher.look(READ, 0.0, 150.0)
    assert states(view) == {"a": "waits", "b": "leaving", "c": "absent"}
    watts = {"floor_w": 200, "capacity_w": 600, "granted_w": 300, "held_w": 300, "drawn_w": 250}
    watts |= {"wanted_w": 600, "stuck_w": 0}
    assert view.nodes[0] == NodeView(
        "a", **watts, silent_s=0.0, leaving=False, jobs=("7",), reclaimed=False, unreadable=""
    )
    site, rack = view.domains
    assert (site.limit_w, site.granted_w, site.held_w, site.drawn_w) == (900, 700, 700, 500)
    assert (rack.granted_w, rack.held_w) == (300, 300)
    assert (view.standing_w, view.busy_gpus) == (1000, 2)
    assert view.lost_gpus == pytest.approx(2 * 0.375), "150 W of 300 W are 0.625 of the speed"
    beat = replace(BEAT, number=6, stuck_mw=50_000)
    later = watcher.look(replace(READ, heartbeats={**READ.heartbeats, "a": beat}), 20.0, 170.0)
    assert states(later) == {"a": "stuck", "b": "silent", "c": "absent"}
    last = watcher.look(replace(READ, heartbeats={**READ.heartbeats, "a": beat}), 40.0, 190.0)
    assert last.nodes[0].held_w == 250, "its floor, and what is stuck"


def test_the_status_shows_whose_watts_were_granted_to_others() -> None:
    """Without having waited: an allocator has."""
    plan = GrantPlan(1, dict(BUDGET.spare_mw), {"a": Grant(2, 200_000, 200_000)})
    view = Watcher().look(replace(READ, plan=plan), 0.0, 0.0)
    assert (view.nodes[0].state, view.nodes[0].held_w) == ("silent", 200)
    lowering = GrantPlan(1, dict(BUDGET.spare_mw), {"a": Grant(2, 200_000, 300_000)})
    view = Watcher().look(replace(READ, plan=lowering), 0.0, 0.0)
    assert (view.nodes[0].state, view.nodes[0].held_w) == ("waits", 300)


def test_a_node_that_lost_nothing_is_at_full_speed() -> None:
    beat = replace(BEAT, held_mw=600_000)
    view = Watcher().look(replace(READ, heartbeats={"a": beat}), 0.0, 0.0)
    assert (view.busy_gpus, view.lost_gpus) == (2, 0.0)
    assert Watcher().look(replace(READ, works={}), 0.0, 0.0).lost_gpus == 0.0


def records() -> list[Record]:
    """An hour: before at 900 W, half of it 10 W above a limit of 600 W for one minute, after."""
    found = []
    for second in range(0, 3600, 10):
        low = 1200 <= second < 3000
        held = 610.0 if 1200 <= second < 1260 else 600.0 if low else 1000.0
        drawn, lost = (500.0, 0.5) if low else (900.0, 0.0)
        found.append(
            Record(1e9 + second, 600.0 if low else 1000.0, 1000.0, held, held, drawn, 2, lost)
        )
    return found


def test_a_report_says_what_was_promised_and_what_was_delivered(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("".join(record.line() for record in records()))
    (one,) = reports(read(tmp_path / "records"))
    assert (one.end_s - one.start_s, one.limit_w, one.standing_w) == (1800, 600, 1000)
    assert one.promised_kwh == pytest.approx(0.2)
    assert (one.before_w, one.drawn_w) == (900, 500)
    assert one.delivered_kwh == pytest.approx(0.2)
    assert (one.most_held_w, one.above_s, one.most_above_w) == (610, 60, 10)
    assert (one.lost_gpu_h, one.busy_gpu_h) == pytest.approx((0.25, 1.0))
    assert one.unknown_s == 0


def test_time_without_records_is_reported_as_unknown() -> None:
    some = [one for one in records() if not 1500 <= one.at_s - 1e9 < 1800]
    (one,) = reports(some)
    assert one.unknown_s == 310
    assert one.promised_kwh == pytest.approx(0.2 * 1490 / 1800)
    (still,) = reports([one for one in records() if 1200 <= one.at_s - 1e9 < 2000])
    assert still.before_w is still.delivered_kwh is None


def test_the_command_prints_and_draws_a_report(tmp_path: Path) -> None:
    file, picture = tmp_path / "records", tmp_path / "picture.svg"
    file.write_text("".join(one.line() for one in records()) + '{"at_s": 1')
    done = CliRunner().invoke(main, ["report", str(file), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    assert "promised   0.6 kW, 0.4 kW below the standing limit: 0.2 kWh" in done.output
    assert "at most 0.61 kW in sum; above the limit for 60 s, by at most 0.01 kW" in done.output
    assert "0.5 kW drawn, 0.9 kW in the 15 minutes before: 0.2 kWh less" in done.output
    assert "0.25 of 1 GPU-hours (25.0 %)" in done.output
    tags = [node.tag.rpartition("}")[2] for node in xml.etree.ElementTree.parse(picture).iter()]
    assert tags.count("path") > 8
    for text, says in (
        ("nothing\n{}\n", "records, line 1: this is not a line of JSON"),
        ('{"time_s": 1}', "records, line 1: at_s is missing"),
        ("", "has no records"),
        (records()[0].line().replace('"drawn_w":', '"drawn_w":-'), "line 1: drawn_w: "),
    ):
        file.write_text(text)
        done = CliRunner().invoke(main, ["report", str(file)])
        assert (done.exit_code, says in done.output) == (1, True), done.output
    assert CliRunner().invoke(main, ["report", str(tmp_path / "no")]).exit_code == 1
    file.write_text("".join(one.line() for one in records()))
    done = CliRunner().invoke(main, ["report", str(file), "--picture", str(file)])
    assert (done.exit_code, "is read by this command" in done.output) == (1, True)


def test_a_report_of_a_large_site_has_no_exponents(tmp_path: Path) -> None:
    file = tmp_path / "records"
    large = [
        replace(
            one,
            **{name: 40_000 * getattr(one, name) for name in vars(one) if name != "at_s"},
        )
        for one in records()
    ]
    file.write_text("".join(one.line() for one in large))
    done = CliRunner().invoke(main, ["report", str(file)])
    assert "24000 kW, 16000 kW below the standing limit: 8000 kWh" in done.output
    assert "10000 of 40000 GPU-hours (25.0 %)" in done.output

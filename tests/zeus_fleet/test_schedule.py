"""Scheduled budgets, and the writes of operators and signals."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest

from tests.seeds import fresh
from zeus_fleet import wire
from zeus_fleet.messages import Budget, BudgetDomain, LimitEvent
from zeus_fleet.quantities import power_mw, ramp_mw_per_s, time_s
from zeus_fleet.schedule import LEAD_S, STEP_S, _EventLimit, due, scheduled, with_standing
from zeus_fleet.signals import events_from, merged

NOON = datetime(2026, 11, 23, 12).timestamp()
HOUR = 3600.0


def site(watts: int = 1000) -> Budget:
    return Budget(
        (BudgetDomain("site", watts * 1000, frozenset("ab")),), {"a": 200_000, "b": 200_000}
    )


def event(watts: int = 600, name: str = "e", ramp_w_per_s: int = 0) -> LimitEvent:
    return LimitEvent(name, watts * 1000, NOON + HOUR, NOON + 2 * HOUR, ramp_w_per_s * 1000)


def limit_at(standing_mw: int, events: Iterable[LimitEvent], now_s: float) -> int:
    return min([standing_mw, *(_EventLimit(event, standing_mw).at(now_s) for event in events)])


def limit_w(budget: Budget, at_s: float) -> int:
    return due(budget, at_s).site.limit_mw // 1000


def test_a_limit_is_in_force_when_its_event_begins_and_until_it_ends() -> None:
    budget = scheduled(site(), [event()], NOON)
    assert (budget.site.limit_mw, budget.standing_mw) == (1_000_000, 1_000_000)
    assert limit_w(budget, NOON + HOUR - LEAD_S - 2 * STEP_S) == 1000
    assert limit_w(budget, NOON + HOUR - LEAD_S) == 600
    low = due(budget, NOON + HOUR - LEAD_S)
    assert due(low, NOON + HOUR + 1) is low, "nothing to write"
    assert limit_w(low, NOON + 2 * HOUR - 1) == 600
    over = due(low, NOON + 2 * HOUR + STEP_S)
    assert (over.site.limit_mw, over.standing_mw, over.events) == (1_000_000, None, ())


def test_a_ramp_falls_before_the_event_and_rises_after_it() -> None:
    budget = scheduled(site(), [event(ramp_w_per_s=2)], NOON)
    assert limit_at(1_000_000, budget.events, NOON + HOUR - 100) == 800_000
    assert limit_at(1_000_000, budget.events, NOON + 2 * HOUR + 50) == 700_000
    assert limit_w(budget, NOON + HOUR - 100) == 1000 - 2 * (100 + int(LEAD_S + STEP_S))
    assert limit_w(budget, NOON + 2 * HOUR + 50) == 700
    assert due(budget, NOON + 2 * HOUR + 201).events == ()


def test_a_written_limit_never_exceeds_events_before_it_is_in_force() -> None:
    generator = random.Random(fresh())
    for _ in range(50):
        events = []
        for index in range(generator.randint(1, 4)):
            start = NOON + generator.uniform(0, HOUR)
            end = start + generator.uniform(1, HOUR)
            ramp = generator.choice((0, 100, 5000))
            events.append(
                LimitEvent(str(index), generator.randint(400, 900) * 1000, start, end, ramp)
            )
        budget = scheduled(site(), events, NOON)
        now = NOON
        while now < NOON + 3 * HOUR:
            budget = due(budget, now)
            for ahead in (0.0, STEP_S, LEAD_S):
                allowed = limit_at(1_000_000, events, now + ahead)
                assert budget.site.limit_mw <= allowed
            now += generator.uniform(0.5, 30)
            if not budget.events and all(now > one.end_s + 6000 for one in events):
                break


def test_another_standing_limit_counts_outside_of_events() -> None:
    budget = with_standing(scheduled(site(), [event()], NOON), 900_000, NOON)
    assert limit_w(budget, NOON) == 900
    assert limit_w(budget, NOON + 1.5 * HOUR) == 600
    assert due(budget, NOON + 3 * HOUR).site.limit_mw == 900_000
    assert with_standing(site(), 800_000, NOON).standing_mw is None


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (event(399), "site: 399 W is below the minimum limits"),
        (LimitEvent("e", 600_000, NOON, NOON), "e ends before it begins"),
        (LimitEvent("e", 600_000, NOON, NOON + 1, -1), "negative ramp"),
    ],
)
def test_an_event_that_cannot_be_kept_is_refused(bad: LimitEvent, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scheduled(site(), [bad], NOON)
    with pytest.raises(ValueError, match="same name"):
        scheduled(site(), [event(), event()], NOON)


def test_a_schedule_is_read_back_as_it_was_written() -> None:
    budget = scheduled(site(), [event(ramp_w_per_s=2)], NOON)
    assert wire.budget_from(wire.budget_bytes(budget)) == budget


# -------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("text", "mw"), [("80kW", 80_000_000), ("60000", 60_000_000), ("0.5 MW", 500_000_000)]
)
def test_power(text: str, mw: int) -> None:
    assert power_mw(text) == mw


def test_ramps_and_times() -> None:
    assert ramp_mw_per_s("5kW/min") == 83_333
    assert time_s("13:30", NOON) == NOON + 1.5 * HOUR
    assert time_s("11:00", NOON) > NOON + 22 * HOUR, "tomorrow"
    assert time_s("2026-11-23T17:00:00Z", NOON) == 1_795_453_200
    for use, text in ((power_mw, "much"), (ramp_mw_per_s, "5kW"), (ramp_mw_per_s, "1 W/h")):
        with pytest.raises(ValueError, match=text):
            use(text)
    with pytest.raises(ValueError, match="25:00"):
        time_s("25:00", NOON)


def test_a_time_of_day_is_of_the_day_on_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last day of summer time, and the next one."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        saturday = time_s("2026-10-24T20:00:00+02:00", 0)
        assert time_s("17:00", saturday) == time_s("2026-10-25T17:00:00+01:00", 0)
        assert time_s("23:00", saturday) == saturday + 3 * HOUR
    finally:
        monkeypatch.undo()
        time.tzset()


def test_without_events_the_limit_is_the_standing_one() -> None:
    budget = scheduled(site(), [event()], NOON)
    assert scheduled(budget, [], NOON) == site()


# ---------------------------------------------------------------------------------------- signals


def signal(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"events": rows}).encode()


def row(name: str, limit: object = "600W", **more: object) -> dict[str, Any]:
    times = {"start": "2026-11-23T13:00:00", "end": "2026-11-23T14:00:00"}
    return {"name": name, "limit": limit, **times, **more}


def test_a_signal_s_events_take_the_place_of_its_former_ones() -> None:
    mine = scheduled(site(), [event(700, "operator/x")], NOON)
    both = events_from(signal(row("a"), row("b", 650, ramp="60W/min")), NOON)
    budget = merged(mine, "grid", both, NOON)
    assert {one.name for one in budget.events} == {"operator/x", "grid/a", "grid/b"}
    assert [one.ramp_mw_per_s for one in budget.events if one.name == "grid/b"] == [1000]
    assert merged(budget, "grid", both, NOON) is budget
    assert {one.name for one in merged(budget, "grid", (), NOON).events} == {"operator/x"}
    assert merged(mine, "grid", both, NOON + 9 * HOUR) is mine, "what is over is not taken"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{}", "not as documented: events is missing"),
        (b"[]", "not as documented"),
        (b"nothing", "not as documented"),
        (b'{"events": [["a", 700]]}', "not as documented: events.0: "),
        (signal({"name": "a"}), "not as documented: events.0.limit is missing"),
        (signal(row("a", "lots")), "'lots' is not a power"),
        (signal(row("a", start="soon")), "'soon' is not a time"),
        (signal(row("a", 7)).replace(b"7", b"1e999"), "not as documented"),
        (b"[" * 100_000, "not as documented"),
    ],
)
def test_an_invalid_signal_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        events_from(data, NOON)

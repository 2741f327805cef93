"""The table of a control's states is the code that runs, and is in the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.zeusd.core import schedules
from zeusd.core.lifecycle import (
    IN_FLIGHT,
    PHASES,
    READY,
    TABLE,
    ControlEvent,
    Lifecycle,
    Phase,
    State,
)

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "write_tables"


def test_every_state_is_in_the_table_can_be_reached_and_can_become_free() -> None:
    assert set(TABLE) == set(State) == set(PHASES)
    reached = freed = {State.FREE}
    for _ in State:
        reached = reached.union(*(TABLE[state].values() for state in reached))
        freed = freed | {state for state in State if freed & set(TABLE[state].values())}
    assert reached == set(State)
    assert freed == set(State), "a control is stuck forever"


def test_a_set_has_its_turn_only_where_no_call_is_in_flight() -> None:
    assert not READY & IN_FLIGHT
    for state in READY:
        assert PHASES[state] is not Phase.RESTORING


def test_an_event_that_the_table_does_not_have_changes_nothing_and_is_an_error() -> None:
    life = Lifecycle()
    with pytest.raises(AssertionError, match="ANSWER in FREE"):
        life.on(ControlEvent.ANSWER)
    assert life.state is State.FREE


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[State, ControlEvent]]:
    """Transitions that were taken."""
    steps: set[tuple[State, ControlEvent]] = set()
    plain = Lifecycle.on

    def on(life: Lifecycle, event: ControlEvent) -> None:
        steps.add((life.state, event))
        plain(life, event)

    monkeypatch.setattr(Lifecycle, "on", on)
    return steps


EVENTFUL = (1985, 2570, 434, 622, 193)
"""Schedules that come to what others hardly ever do; if they no longer do, others follow."""


def test_every_entry_of_the_table_is_used(taken: set[tuple[State, ControlEvent]]) -> None:
    rows = {(state, event) for state, events in TABLE.items() for event in events}
    for seed in (*EVENTFUL, *range(4000)):
        if taken >= rows:
            return
        schedules.run_schedule(seed)
    left = sorted(f"{state.name} {event.name}" for state, event in rows - taken)
    pytest.fail(f"no schedule takes {left}")


def test_the_documentation_shows_the_table_that_runs() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr

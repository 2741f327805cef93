"""The table of a control's states is what runs, and what the documentation shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.zeusd.core import schedules
from zeusd.core.lifecycle import IN_FLIGHT, PHASES, READY, TABLE, Event, Lifecycle, Phase, State

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "write_tables"


def test_every_state_is_in_the_table_can_be_reached_and_can_become_free() -> None:
    assert set(TABLE) == set(State) == set(PHASES)
    reached = {State.FREE}
    while True:
        more = {after for state in reached for after in TABLE[state].values()} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)
    free = {State.FREE}
    while True:
        more = {state for state in State if free & set(TABLE[state].values())} - free
        if not more:
            break
        free |= more
    assert free == set(State), "a control is stuck for ever"


def test_a_set_has_its_turn_only_where_no_call_is_in_flight() -> None:
    assert not READY & IN_FLIGHT
    for state in READY:
        assert PHASES[state] is not Phase.RESTORING


def test_an_event_that_the_table_does_not_have_changes_nothing_and_is_an_error() -> None:
    life = Lifecycle()
    with pytest.raises(AssertionError, match="WRITTEN in FREE"):
        life.on(Event.WRITTEN)
    assert life.state is State.FREE


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[State, Event]]:
    """Transitions that were taken."""
    steps: set[tuple[State, Event]] = set()
    plain = Lifecycle.on

    def on(life: Lifecycle, event: Event) -> None:
        steps.add((life.state, event))
        plain(life, event)

    monkeypatch.setattr(Lifecycle, "on", on)
    return steps


def test_nothing_in_the_table_is_dead(taken: set[tuple[State, Event]]) -> None:
    """Random schedules take every transition sooner or later."""
    rows = {(state, event) for state, events in TABLE.items() for event in events}
    for seed in range(20_000):
        schedules.run_schedule(seed)
        if taken >= rows:
            return
    left = sorted(f"{state.name} {event.name}" for state, event in rows - taken)
    pytest.fail(f"no schedule takes {left}")


def test_the_documentation_shows_the_table_that_runs() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr

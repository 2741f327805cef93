"""The table of a control's states is the code that runs, and is in the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.zeusd.core import schedules
from tests.zeusd.core.world import ADMIN, ALICE, CLOCKS, GPU0, POWER, World, site, staffed
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
    assert free == set(State), "a control is stuck forever"


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


def fits(world: World) -> World:
    """A restore requests the device's range, and its answer is in flight."""
    world.set_power(ALICE, 150)
    world.range_mw = (100_000, 250_000)
    world.hold = True
    world.die(ALICE)
    world.run_next()  # the reading
    world.run_next()  # the target is refused
    assert world.machine(GPU0).life.state is State.RESTORING
    return world


EVENTFUL = (1985, 2570, 434, 622, 276, 170, 17, 23, 24, 46, 104, 193, 369, 775)
"""Schedules that came to what others hardly ever do; if they no longer do, others follow."""


def rare_stories() -> None:
    """What random schedules hardly ever come to."""
    world = fits(staffed())
    world.ask(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=[200_000])
    world.run_held()
    assert world.limit_w() == 200
    world = fits(staffed())
    world.ask(ADMIN, "quiesce")
    world.advance(6)
    assert world.machine(GPU0).life.state is State.AWAY_BUSY
    world.ask(ADMIN, "resume")
    world.run_held()
    assert world.limit_w() == 250
    world = staffed()
    world.set_power(ALICE, 280)
    world.faults[POWER], world.reads_fail = 999, True
    world.call(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=[200_000])
    world.faults.clear()
    world.advance(1)
    assert world.limit_w() == 200
    world.faults[POWER], world.reads_fail = 2, False
    world.call(ALICE, "release")
    world.faults.clear()
    world.call(ADMIN, "acquire", gpus=[GPU0], controls=["gpu_clocks", "persistence_mode"])
    world.set_power(ALICE, 150)
    world.call(ADMIN, "restore")
    world = staffed(site(clocks=(300, 1200)))
    world.lock_clocks(ALICE, 600, 900)
    world.refused_values = {(300, 1200)}
    world.call(ALICE, "release")
    assert world.values[CLOCKS] == ()
    world = fits(staffed())
    world.faults[POWER], world.reads_fail = 999, True
    world.run_held()
    assert world.machine(GPU0).life.state is State.PENDING
    for ends_first in (True, False):  # a call is in flight when the driver is closed
        world = staffed()
        world.set_power(ALICE, 150)
        world.hold = True
        if ends_first:
            world.ask_power(ALICE, 160)
        world.die(ALICE)
        world.ask(ADMIN, "quiesce")
        world.advance(6)
        assert world.machine(GPU0).life.state is State.AWAY_BUSY


def test_every_entry_of_the_table_is_used(taken: set[tuple[State, ControlEvent]]) -> None:
    rows = {(state, event) for state, events in TABLE.items() for event in events}
    rare_stories()
    for seed in (*EVENTFUL, *range(4000)):
        if taken >= rows:
            return
        schedules.run_schedule(seed)
    left = sorted(f"{state.name} {event.name}" for state, event in rows - taken)
    pytest.fail(f"no schedule takes {left}")


def test_the_documentation_shows_the_table_that_runs() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr

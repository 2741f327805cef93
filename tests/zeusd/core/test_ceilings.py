"""Named ceilings: the lowest of them is the highest value that may be set, and is restored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zeusd.core.world import (
    ADMIN,
    ALICE,
    CLOCKS,
    GPU0,
    POWER,
    Odd,
    World,
    site,
    staffed,
)
from zeus_ipc.controls import Control
from zeusd.core.bounds import Ceilings
from zeusd.core.entries import PENDING, CeilingEntry, key_of
from zeusd.core.model import GpuFacts
from zeusd.core.policy import SitePolicy


@pytest.fixture
def world() -> World:
    return staffed()


LOCKING = site(clocks=(300, 1200), enforce=True)


def bound(world: World, watts: int | None, name: str = "fleet", **more: Any) -> dict[str, Any]:
    value = None if watts is None else [watts * 1000]
    return world.result(ADMIN, "set_ceiling", name=name, value=value, **more)


def test_the_least_of_the_ceilings_counts() -> None:
    ceilings = Ceilings()
    assert ceilings.lowest((300,)) == (300,)
    ceilings["fleet"] = CeilingEntry((250,), 0)
    ceilings["job:1"] = CeilingEntry((200,), 0, deadline_ns=10, fallback=(150,))
    assert ceilings.lowest((300,)) == (200,)
    assert ceilings.lowest((300,), without="job:1") == (250,)
    assert ceilings.expire(9) == []
    assert ceilings.expire(10) == ["job:1"]
    assert ceilings.lowest((300,)) == (150,)
    assert ceilings.next_deadline_ns() is None


def test_an_idle_gpu_is_lowered_to_a_ceiling_and_raised_again(world: World) -> None:
    assert bound(world, 250) == {"highest": [250_000]}
    assert world.limit_w() == 250
    assert bound(world, 200, "job:7") == {"highest": [200_000]}
    assert world.limit_w() == 200
    assert bound(world, None, "job:7") == {"highest": [250_000]}
    assert world.limit_w() == 250
    bound(world, None)
    assert world.limit_w() == 300
    assert world.journaled("pending", "ceiling", "resting") == []


def test_a_refusal_names_what_bounds_the_value(world: World) -> None:
    def refusal(watts: float) -> str:
        asked = world.result(ALICE, "set", control="power_limit", value=[round(watts * 1000)])
        return str(asked["error"]["message"])

    assert "is outside 100 to 300 W: this GPU accepts no less; choose" in refusal(50)
    assert "this GPU accepts no more" in refusal(350)
    assert refusal(0.2).endswith("; did you mean 200 W (200000 in the protocol)?")
    bound(world, 250, "job:7")
    until = "ceiling job:7 of user 1001 allows at most 250 W until the job ends"
    assert f"is outside 100 to 250 W: {until}; choose a value in between" in refusal(280)
    bound(world, 200, ttl_ms=30_000, fallback=[150_000])
    assert "allows at most 200 W for 30 s more, then 150 W; choose" in refusal(280)
    gpu = world.call(ALICE, "hello")["result"]["gpus"][0]
    assert (gpu["power_limit_site_mw"], gpu["power_limit_highest_mw"]) == (300_000, 200_000)


def test_what_is_offered_is_what_is_accepted(world: World) -> None:
    info = world.core.node.gpus[GPU0].facts.info
    clocks = {"gpu_clock_range_mhz": [210, 1410], "memory_clocks_mhz": [1593, 810]}
    world.core.node.gpus[GPU0].facts = GpuFacts(info.model_copy(update=clocks))
    offered = world.call(ADMIN, "policy")["result"]["gpus"][GPU0]
    assert offered["gpu_clocks"]["ranges"] == [[210, 1410]]
    for span, wanted in (((210, 1410), "ok"), ((0, 300), "ok"), ((3000, 3000), "out_of_range")):
        assert world.lock_clocks(ADMIN, *span) == wanted
    for span, wanted in (((810, 810), "ok"), ((2000, 2000), "out_of_range")):
        assert world.code(ADMIN, "set", control="memory_clocks", value=[*span]) == wanted


def test_a_lease_stays_below_it_and_gets_its_requested_value_later(world: World) -> None:
    world.set_power(ALICE, 240)
    bound(world, 200)
    assert world.limit_w() == 200
    assert world.set_power(ALICE, 210)["error"]["code"] == "out_of_range"
    (lease,) = world.call(ALICE, "leases")["result"]["leases"]
    assert (lease["value"], lease["asked"]) == ([200_000], [240_000])
    bound(world, 260)
    assert world.limit_w() == 240, "what its holder asked for, and no more"
    world.call(ALICE, "release")
    assert world.limit_w() == 260, "a restore does not raise it above the ceiling"


def test_a_value_left_by_a_ceiling_is_forgotten_once_it_is_changed_outside(world: World) -> None:
    bound(world, 240)
    world.values[POWER] = (215_000,)
    bound(world, 230)
    assert world.limit_w() == 215, "it is lower"
    bound(world, None)
    assert world.limit_w() == 215
    assert world.journaled("resting") == []


def test_at_its_deadline_it_falls_to_its_floor_also_over_a_restart(world: World) -> None:
    bound(world, 280, ttl_ms=30_000, fallback=[150_000])
    world.set_power(ALICE, 270)
    world.advance(10)
    world.call(ALICE, "heartbeat")
    world.advance(10)
    bound(world, 280, ttl_ms=30_000, fallback=[150_000])
    world.call(ALICE, "heartbeat")
    world.advance(14)
    world.call(ALICE, "heartbeat")
    assert world.limit_w() == 270
    world.core.machine_slept(20_000_000_000)  # it counts while the machine sleeps
    due_ns = world.core.next_deadline_ns()
    assert due_ns is not None
    assert due_ns < world.now_ns
    world.advance(0.001)
    assert world.limit_w() == 150
    assert world.set_power(ALICE, 200)["error"]["code"] == "out_of_range"
    world.restart()
    assert world.limit_w() == 150
    assert world.set_power(ALICE, 200)["error"]["code"] == "out_of_range"
    bound(world, None)
    assert world.limit_w() == 300


def test_a_deadline_that_passes_while_zeusd_is_down_counts_at_its_start(world: World) -> None:
    bound(world, 280, ttl_ms=30_000, fallback=[150_000])
    world.now_ns += 40_000_000_000
    world.restart()
    assert world.limit_w() == 150


@pytest.mark.parametrize("held", [False, True])
def test_a_stop_lowers_at_once_what_a_deadline_would_lower_later(world: World, held: bool) -> None:
    """Nobody is there then to keep the deadline; a restart keeps it."""
    bound(world, 280, ttl_ms=30_000, fallback=[150_000])
    if held:
        world.set_power(ALICE, 270)
    world.apply(world.core.stop(world.now_ns, restore=False))
    assert world.limit_w() == (270 if held else 280)
    world.restart()
    assert world.limit_w() == 280
    world.apply(world.core.stop(world.now_ns))
    assert world.limit_w() == 150
    world.restart()
    assert world.limit_w() == 150
    bound(world, 260, ttl_ms=30_000)
    world.apply(world.core.stop(world.now_ns))
    assert world.limit_w() == 260, "one that would end raises nothing"


def test_a_ceiling_that_is_held_up_ends_no_later(world: World) -> None:
    until_ns = world.now_ns + 30_000_000_000
    bound(world, 280, until_boot_ns=until_ns, fallback=[150_000])
    world.advance(29)
    bound(world, 280, until_boot_ns=until_ns, ttl_ms=30_000, fallback=[150_000])
    assert world.limit_w() == 280
    world.advance(1)
    assert world.limit_w() == 150
    late = bound(world, 290, until_boot_ns=until_ns, fallback=[150_000])
    assert late["error"]["code"] == "deadline_exceeded"
    assert world.limit_w() == 150


def test_a_value_left_by_a_ceiling_is_restored_although_zeusd_is_killed_on_the_way(
    world: World,
) -> None:
    bound(world, 200)
    world.call(ALICE, "acquire", gpus=[GPU0], controls=["power_limit"])  # and sets nothing
    world.hold = True
    world.ask(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=None)
    world.hold = False
    assert not world.journaled("ceiling")
    world.restart()
    assert world.limit_w() == 300


def test_a_jobs_ceiling_ends_with_its_control_group_or_its_grace_time(world: World) -> None:
    bound(world, 200, "job:7")
    assert world.core.jobs == {"7"}
    world.apply(world.core.jobs_present(world.now_ns, set()))
    assert world.limit_w() == 200, "the prolog runs before there is a control group"
    world.apply(world.core.jobs_present(world.now_ns, {"7"}))
    world.apply(world.core.jobs_present(world.now_ns, set()))
    assert world.limit_w() == 300
    bound(world, 200, "job:8")
    world.apply(world.core.jobs_present(world.now_ns, set()))
    world.advance(61)
    world.apply(world.core.jobs_present(world.now_ns, set()))
    assert world.limit_w() == 300
    bound(world, 200, "job:9")
    world.call(ADMIN, "release", whose="all", job="9")
    assert world.limit_w() == 300


def test_a_jobs_group_may_have_its_sluid_as_its_name(world: World) -> None:
    """As from Slurm 26.05 on: else a job lost its limit after the grace time."""
    for group in ("s1X", "7"):
        bound(world, 200, "job:7", control_group="s1X")
        assert world.core.jobs == {"7", "s1X"}
        world.apply(world.core.jobs_present(world.now_ns, {group}))
        world.advance(61)
        world.apply(world.core.jobs_present(world.now_ns, {group}))
        assert world.limit_w() == 200
        world.apply(world.core.jobs_present(world.now_ns, set()))
        assert world.limit_w() == 300


@pytest.mark.parametrize(
    ("watts", "more", "code"),
    [
        (50, {}, "out_of_range"),
        (400, {}, "out_of_range"),
        (200, {"ttl_ms": 1000, "fallback": [250_000]}, "bad_request"),
        (200, {"control": "gpu_clocks"}, "not_supported"),
    ],
)
def test_an_invalid_ceiling_is_refused(
    world: World, watts: int, more: dict[str, Any], code: str
) -> None:
    assert bound(world, watts, **more)["error"]["code"] == code
    assert world.limit_w() == 300


def test_a_holder_that_dies_while_its_limit_is_lowered_leaves_the_ceiling(world: World) -> None:
    world.set_power(ALICE, 280)
    world.hold = True
    asked = world.ask(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=[200_000])
    world.die(ALICE)
    world.run_held()
    assert world.limit_w() == 200
    assert world.outcome(ADMIN, asked) == {"highest": [200_000]}


def test_a_rounding_driver_rests_where_it_can(world: World) -> None:
    world.odd[GPU0] = Odd(round_to_mw=4000)
    bound(world, 250)
    assert world.limit_w() == 248
    assert world.set_power(ALICE, 200) == {}
    world.call(ALICE, "release")
    assert world.limit_w() == 248
    assert world.events("outside_change") == []
    bound(world, None)
    assert world.limit_w() == 300


@pytest.mark.parametrize(("enforce", "watts"), [(True, 220), (False, 300)])
def test_a_site_limit_is_written_without_any_lease_if_it_is_enforced(
    enforce: bool, watts: int
) -> None:
    world = staffed(site(220, enforce=enforce))
    assert world.limit_w() == watts
    world.call(ADMIN, "quiesce")
    world.values[POWER] = (300_000,)
    world.call(ADMIN, "resume")
    assert world.limit_w() == watts
    world.values[POWER] = (300_000,)  # the GPU was reset, or someone has set it
    world.look_around()
    assert world.limit_w() == watts
    world.values[POWER] = (300_000,)  # it was lost, and has returned
    world.find_gpus()
    world.look_around()
    assert world.limit_w() == watts


def test_an_enforced_site_limit_leaves_a_lower_one_alone_and_follows_a_reload() -> None:
    world = staffed(site(220, enforce=True))
    world.values[POWER] = (180_000,)
    world.look_around()
    assert world.limit_w() == 180
    world.reload(site(150, enforce=True))
    assert world.limit_w() == 150
    world.reload(site(200, enforce=True))
    assert world.limit_w() == 200, "what zeusd itself lowered follows the limit up"
    world.reload(site(170))
    world.values[POWER] = (250_000,)
    world.look_around()
    assert world.limit_w() == 250, "it is not enforced any more"


@pytest.mark.parametrize("enforce", [True, False])
def test_clocks_of_a_rule_are_written_without_any_lease_if_they_are_enforced(enforce: bool) -> None:
    clocks = (300, 1200) if enforce else ()
    world = staffed(site(clocks=(300, 1200), enforce=enforce))
    assert world.values[CLOCKS] == clocks
    assert world.core.node.unreadable(GPU0)["gpu_clocks"] == list(clocks), "what is shown is true"
    world.call(ADMIN, "quiesce")
    world.values[CLOCKS] = ()
    world.call(ADMIN, "resume")
    assert world.values[CLOCKS] == clocks
    world.values[CLOCKS] = ()  # the GPU was lost, and has returned
    world.faults[GPU0, None] = 15
    world.set_power(ALICE, 200)
    world.faults.clear()
    world.find_gpus()
    assert world.values[CLOCKS] == clocks


def test_a_value_that_a_ceiling_left_in_force_is_followed_after_the_lease_is_released() -> None:
    world = staffed(site(210, enforce=True))
    world.hold = True
    world.ask_power(ALICE, 200)
    world.reload(site(220))
    world.values[POWER] = (250_000,)
    world.hold = False
    world.journal_broken = True
    world.restart(ALICE)  # a value above 220 W cannot be lowered yet
    world.journal_broken = False
    world.advance(70)
    assert world.limit_w() == 220
    assert not world.core.node.gpus[GPU0].machines[Control.POWER_LIMIT].bounds.rests_elsewhere


@pytest.mark.parametrize("newest_w", [190, 300])
def test_what_a_driver_made_of_a_ceiling_that_a_full_disk_did_not_record_is_zeusds(
    world: World, newest_w: int
) -> None:
    bound(world, 190)
    world.hold = True
    world.ask(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=[170_000])
    entry = dict(world.journal[key_of(PENDING, *POWER)])
    entry |= {"target": [190_000], "values": [[newest_w * 1000]], "doubts": []}
    world.journal[key_of(PENDING, *POWER)] = entry
    world.values[POWER] = (168_000,)  # rounded up from 165 W
    world.hold = False
    world.restart()
    world.advance(10)
    assert world.limit_w() == 170
    bound(world, None)
    world.advance(10)
    assert world.limit_w() == 300


def test_a_target_that_the_last_zeusd_wrote_is_zeusds_also_if_it_moves_before_it_is_seen() -> None:
    world = staffed(site(280))
    world.set_power(ALICE, 200)
    world.hold = True
    world.ask(ALICE, "release")
    world.values[POWER] = (280_000,)  # zeusd was killed before it knew that
    world.hold = False
    world.faults[POWER], world.reads_fail = 999, True
    world.restart(ALICE)
    world.reload(SitePolicy())
    world.faults.clear()
    world.advance(10)
    assert world.limit_w() == 300
    assert not world.events("outside_change")


def test_a_control_that_is_found_while_the_driver_is_closed_waits_for_resume() -> None:
    world = staffed()
    world.hidden[GPU0] = frozenset({Control.GPU_CLOCKS})
    world.restart()
    world.hold = True
    world.ask(ALICE, "acquire", gpus=[GPU0], controls=["power_limit"])
    world.ask_power(ALICE, 200)
    world.ask(ADMIN, "quiesce")  # a call is in flight, so the driver is not closed yet
    world.hidden.clear()
    world.find_gpus()
    world.hold = False
    world.run_held()
    assert not world.driver_open
    world.reload(LOCKING)
    assert world.values[CLOCKS] == ()
    world.call(ADMIN, "resume")
    assert world.values[CLOCKS] == (300, 1200)


def test_a_restart_writes_no_clocks_again_and_a_reload_others() -> None:
    world = staffed(LOCKING)
    writes = len(world.writes)
    world.restart()
    assert len(world.writes) == writes
    world.reload(site(clocks=(300, 900), enforce=True))
    assert world.values[CLOCKS] == (300, 900)
    world.lock_clocks(ALICE, 400, 500)
    world.call(ALICE, "release")
    assert world.values[CLOCKS] == (300, 900)
    world.reload(SitePolicy())
    assert world.values[CLOCKS] == (), "the site wants none any more"


@pytest.mark.parametrize("by", ["a lease that set nothing", "a reset that failed", "a full disk"])
def test_clocks_that_a_reload_enforces_are_written_as_soon_as_nothing_is_in_the_way(
    by: str,
) -> None:
    world = staffed()
    if by == "a reset that failed":
        world.hold = True
        world.ask(ADMIN, "restore", gpus=[GPU0], controls=["gpu_clocks"])
        world.reload(LOCKING)
        world.faults[CLOCKS] = 2
        world.run_next()
        world.faults.clear()
        world.hold = False
        world.run_held()
    elif by == "a full disk":
        world.journal_broken = True
        world.reload(LOCKING)
        assert world.values[CLOCKS] == ()
        world.journal_broken = False
        world.advance(30)
    else:
        world.call(ALICE, "acquire", gpus=[GPU0], controls=["gpu_clocks"])
        world.reload(LOCKING)
        assert world.values[CLOCKS] == ()
        world.call(ALICE, "release")
    assert world.values[CLOCKS] == (300, 1200)


def test_clocks_that_the_site_wants_no_more_are_unlocked_after_a_lease_that_set_nothing() -> None:
    world = staffed(LOCKING)
    world.hold = True
    world.ask(ALICE, "set", gpus=[GPU0], control="gpu_clocks", value=[400, 500])
    world.reload(SitePolicy())
    world.faults[CLOCKS] = 4
    world.hold = False
    world.run_next()
    world.faults.clear()
    world.advance(30)
    assert world.values[CLOCKS] == ()


@pytest.mark.parametrize("trouble", ["journal", "lost"])
def test_enforced_clocks_that_could_not_be_written_again_are_not_forgotten(trouble: str) -> None:
    world = staffed(LOCKING)
    world.call(ADMIN, "quiesce")
    world.journal_broken = trouble == "journal"
    if trouble == "lost":
        world.faults[CLOCKS] = 15
    world.call(ADMIN, "resume")
    world.journal_broken = False
    world.faults.clear()
    world.reload(SitePolicy())
    world.advance(30)
    assert world.values[CLOCKS] == ()


def test_a_device_that_cannot_go_as_low_is_not_written_again_and_again() -> None:
    world = staffed(site(100, enforce=True))
    world.odd[GPU0] = Odd(clamp_mw=(130_000, 300_000))
    world.values[POWER] = (300_000,)
    world.look_around()
    assert world.limit_w() == 130
    writes = len(world.writes)
    world.look_around()
    assert len(world.writes) == writes


def test_a_ceiling_that_cannot_be_recorded_is_refused_and_leaves_nothing(world: World) -> None:
    """The next zeusd would not know it, and take what it lowered for a change from outside."""
    world.set_power(ALICE, 240)
    world.journal_broken = True
    assert bound(world, 200)["error"]["code"] == "journal_failed"
    world.call(ALICE, "release")
    world.restart()
    assert world.limit_w() == 300


@pytest.mark.parametrize("trouble", ["journal", "setter", "getter"])
@pytest.mark.parametrize("held", [True, False])
def test_who_sets_a_ceiling_learns_that_the_device_is_above_it(
    world: World, held: bool, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power budget counts on what the reply says."""
    bound(world, 250)
    if held:
        world.set_power(ALICE, 240)
    with monkeypatch.context() as broken:
        if trouble == "journal":  # the disk is full once the ceiling is recorded
            broken.setattr(world, "announce", lambda write: False)
        else:
            world.faults[POWER] = 15
            broken.setattr(world, "reads_fail", trouble == "getter")
        assert "error" in bound(world, 200)
    world.faults.clear()
    world.advance(10)
    assert world.limit_w() == 200
    if held:
        assert world.set_power(ALICE, 195) == {}, "the lease goes on"
    assert "error" not in bound(world, 190)
    assert world.limit_w() == 190


def test_what_cannot_be_recorded_is_not_persisted(world: World) -> None:
    world.set_power(ADMIN, 240)
    world.journal_broken = True
    assert world.code(ADMIN, "persist", controls=["power_limit"]) == "journal_failed"
    assert world.limit_w() == 240
    world.call(ADMIN, "release")
    assert world.limit_w() == 300

"""Heartbeats, losses, outside changes, shrunken limits: leases that end without being asked."""

from __future__ import annotations

import pytest

from tests.zeusd.core.world import CLOCKS, GPU0, POWER, World, site
from zeus_ipc.controls import Control
from zeusd.core.access import Access, AllowRule
from zeusd.core.core import RECONNECT_NS
from zeusd.core.policy import LeaseTerms, SitePolicy

TTL_S = 15


# ------------------------------------------------------------------------------------ heartbeats


def test_heartbeats_keep_all_leases_of_the_process(world: World) -> None:
    world.set_power(1, 200)
    world.lock_clocks(1)
    world.connect(2, pid=1)  # another connection of the same process
    for _ in range(10):
        world.advance(TTL_S - 1)
        reply = world.call(2, "heartbeat")["result"]
        assert reply == {"leases": 2, "ttl_ms": TTL_S * 1000, "lost": []}
    assert world.limit_w() == 200


def test_a_set_counts_as_a_heartbeat_of_that_lease(world: World) -> None:
    world.set_power(1, 200)
    world.advance(TTL_S - 1)
    world.set_power(1, 210)
    world.advance(TTL_S - 1)
    assert world.limit_w() == 210


def test_the_core_asks_to_be_woken_when_a_lease_ends(world: World) -> None:
    assert world.core.next_deadline_ns() is None
    world.set_power(1, 200)
    begun_ns = world.now_ns
    assert world.core.next_deadline_ns() == begun_ns + TTL_S * 8 * 10**8, "a first look"
    world.advance(TTL_S * 0.85)
    assert world.core.next_deadline_ns() == begun_ns + TTL_S * 10**9
    world.call(1, "release")
    assert world.core.next_deadline_ns() is None


def test_every_set_of_a_lost_lease_fails_until_it_is_acquired_again(world: World) -> None:
    world.set_power(1, 200)
    world.advance(TTL_S + 0.1)
    for _ in range(3):
        answer = world.set_power(1, 180)
        assert answer["error"]["code"] == "lease_expired"
        assert "heartbeat stopped for 15 s" in answer["error"]["message"]
    assert world.limit_w() == 300
    assert world.call(1, "heartbeat")["result"]["lost"] == [[GPU0, "power_limit"]]
    assert world.set_power(2, 150) == {}, "others may lease it"
    assert world.set_power(1, 180)["error"]["code"] == "lease_expired"
    world.call(2, "release")
    world.call(1, "acquire", gpus=[GPU0], controls=["power_limit"])
    assert world.set_power(1, 180) == {}
    assert world.limit_w() == 180


def test_a_reset_and_a_set_that_nobody_waits_for_are_refused_as_well(world: World) -> None:
    world.set_power(1, 200)
    world.advance(TTL_S + 0.1)
    world.ask_power(1, 150, block=False)
    reply = world.call(1, "reset", gpus=[GPU0], control="power_limit")
    assert reply["result"]["gpus"][GPU0]["error"]["code"] == "lease_expired"
    assert reply["deferred"]["last"]["code"] == "lease_expired"
    assert world.limit_w() == 300


def test_a_release_ends_the_loss_too(world: World) -> None:
    process = world.connect(1)
    world.set_power(1, 200)
    world.advance(TTL_S + 0.1)
    assert world.call(1, "release")["result"] == {"released": 0}
    assert world.set_power(1, 180) == {}
    assert process in world.watched


def test_a_process_that_waits_for_a_loss_is_told_at_once_and_of_all(world: World) -> None:
    world.call(1, "acquire", gpus=[GPU0], controls=["power_limit", "gpu_clocks"])
    asked = world.ask(1, "heartbeat", losses=0)
    world.connect(2, pid=1)
    world.ask(2, "release", controls=["power_limit"])  # its own: no loss

    def lost(request_id: int) -> list[list[list[str]]]:
        said = world.replies[1]
        return [one["result"]["lost"] for one in said if one["id"] == request_id]

    assert lost(asked) == []
    world.call(1, "acquire", gpus=[GPU0], controls=["power_limit"])
    world.apply(world.core.stop(world.now_ns))
    both = [[GPU0, "gpu_clocks"], [GPU0, "power_limit"]]
    assert [sorted(one) for one in lost(asked)] == [both]
    assert sorted(world.call(1, "heartbeat", losses=0)["result"]["lost"]) == both
    assert lost(world.ask(1, "heartbeat", losses=2)) == []


def test_a_loss_is_remembered_over_a_restart_and_forgotten_with_the_process(world: World) -> None:
    world.set_power(1, 200)
    world.advance(TTL_S + 0.1)
    world.restart(1)
    assert world.set_power(1, 180)["error"]["code"] == "lease_expired"
    world.die(1)
    assert not world.journaled("loss")
    assert not world.watched
    world.set_power(2, 200)
    world.advance(TTL_S + 0.1)
    assert world.journaled("loss")
    world.restart()
    assert not world.journaled("loss"), "it is dead meanwhile"


def test_a_ttl_may_be_asked_for_within_the_bounds() -> None:
    world = World(terms=LeaseTerms(ttl_min_ns=2 * 10**9, ttl_max_ns=60 * 10**9))
    for wanted_s, granted_s in ((1, 2), (30, 30), (600, 60)):
        world.call(1, "acquire", gpus=[GPU0], controls=["power_limit"], ttl_ms=int(wanted_s * 1000))
        assert world.call(1, "heartbeat")["result"]["ttl_ms"] == granted_s * 1000
        world.set_power(1, 200)
        world.advance(granted_s - 0.1)
        assert world.limit_w() == 200
        world.advance(0.2)
        assert world.limit_w() == 300


def test_a_ttl_survives_a_restart_and_starts_over(world: World) -> None:
    world.call(1, "acquire", gpus=[GPU0], controls=["power_limit"], ttl_ms=60_000)
    world.set_power(1, 200)
    world.advance(50)
    world.restart(1)
    world.advance(59)
    assert world.limit_w() == 200
    world.advance(2)
    assert world.limit_w() == 300


def test_a_process_that_lost_its_last_connection_has_a_moment_to_reconnect(world: World) -> None:
    """exec() closes the connection, and the pidfd does not report it."""
    world.connect(2, pid=1)
    world.set_power(1, 200)
    world.close(1)
    world.advance(RECONNECT_NS / 1e9 + 1)
    assert world.limit_w() == 200, "its other connection is still there"
    world.close(2)
    world.advance(1)
    world.connect(3, pid=1)
    world.advance(RECONNECT_NS / 1e9 + 1)
    assert world.limit_w() == 200, "it came back"
    world.close(3)
    world.advance(RECONNECT_NS / 1e9 + 0.1)
    assert world.limit_w() == 300


def test_a_zeusd_that_was_stopped_reads_waiting_messages_before_it_expires_leases(
    world: World,
) -> None:
    process = world.connect(1)
    world.set_power(1, 200)
    world.stall(100)  # SIGSTOP of zeusd, not of the client
    assert world.limit_w() == 200
    world.call(1, "heartbeat")
    world.advance(TTL_S - 1)
    assert world.limit_w() == 200
    assert world.events("stalled")
    world.advance(2)
    assert world.limit_w() == 300
    assert process in world.watched


def test_a_stall_is_forgiven_once_for_each_heartbeat(world: World) -> None:
    world.set_power(1, 200)
    for _ in range(10):  # a zeusd that stands still again and again
        world.stall(TTL_S - 1)
    assert world.limit_w() == 300
    assert len(world.events("lease_expired")) == 1


def test_a_restart_is_forgiven_once_for_each_heartbeat(world: World) -> None:
    """Restarting zeusd does not keep a hung holder's lease alive."""
    world.set_power(1, 200)
    for _ in range(20):
        world.restart(1)
        world.advance(TTL_S / 10)
    assert world.limit_w() == 300
    assert len(world.events("lease_expired")) == 1


def test_a_living_holder_keeps_its_lease_over_restarts(world: World) -> None:
    process = world.connect(1)
    world.set_power(1, 200)
    for _ in range(20):
        world.restart(1)
        world.connect(1, process.pid)
        world.advance(TTL_S / 5)
        assert world.call(1, "heartbeat")["result"]["leases"] == 1
    world.restart(1)
    world.advance(TTL_S - 1)
    assert world.limit_w() == 200


def test_a_connection_alone_does_not_count_as_a_heartbeat(world: World) -> None:
    """ZeroMQ connects again by itself, in a process that hangs."""
    world.set_power(1, 200)
    for number in range(8):
        world.advance(TTL_S / 4)
        world.connect(10 + number, pid=1)
    assert world.limit_w() == 300


# -------------------------------------------------------------------------------- silent and busy


def test_a_silent_holder_that_computes_keeps_its_lease_up_to_a_bound(world: World) -> None:
    holder = world.connect(1)
    world.set_power(1, 200)
    world.cpu_share[holder] = 1.0
    world.advance(100)
    world.call(1, "heartbeat")
    world.advance(119)
    assert world.limit_w() == 200
    world.advance(1.1)
    assert world.limit_w() == 300
    assert "heartbeat stopped" in world.set_power(1, 200)["error"]["message"]


def test_it_keeps_it_only_while_it_computes(world: World) -> None:
    holder = world.connect(1)
    world.set_power(1, 200)
    world.cpu_share[holder] = 1.0
    world.advance(40)
    assert world.limit_w() == 200
    world.cpu_share[holder] = world.usage(holder).cpu_ns / (world.now_ns + 10**12)
    world.advance(2 * TTL_S / 5)
    assert world.limit_w() == 300


@pytest.mark.parametrize(("share", "keeps"), [(1.0, True), (0.0, False)])
def test_a_late_first_reading_decides_nothing(world: World, share: float, keeps: bool) -> None:
    holder = world.connect(1)
    answer = world.call(1, "acquire", gpus=[GPU0], controls=["power_limit"], ttl_ms=2000)
    assert "error" not in answer
    world.set_power(1, 200)
    world.cpu_share[holder] = share
    world.advance(1.55)
    world.stall(0.7)
    assert world.limit_w() == 200
    world.advance(10)
    assert (world.limit_w() == 200) is keeps


@pytest.mark.parametrize(
    ("share", "stopped", "busy_ttl_s"), [(0.0, False, 120), (1.0, True, 120), (1.0, False, 0)]
)
def test_a_silent_holder_that_sleeps_or_is_stopped_loses_it_at_its_ttl(
    share: float, stopped: bool, busy_ttl_s: int
) -> None:
    world = World(terms=LeaseTerms(busy_ttl_ns=busy_ttl_s * 10**9))
    holder = world.connect(1)
    world.set_power(1, 200)
    world.cpu_share[holder] = share
    if stopped:
        world.stopped.add(holder)
    world.advance(TTL_S - 0.1)
    assert world.limit_w() == 200
    world.advance(0.2)
    assert world.limit_w() == 300
    assert [note["ttl_s"] for note in world.events("lease_expired")] == [TTL_S]


# ---------------------------------------------------------------------------------------- owners


def test_an_acquired_lease_outlives_a_set_that_failed(world: World) -> None:
    world.call(1, "acquire", gpus=[GPU0], controls=["power_limit"])
    world.faults[POWER] = 4
    assert world.set_power(1, 200)["error"]["code"] == "permission_denied"
    world.faults.clear()
    assert world.set_power(2, 200)["error"]["code"] == "lease_held"
    assert world.set_power(1, 200) == {}


# ------------------------------------------------------------------------------- outside changes


def test_a_change_during_a_lease_is_seen_by_the_next_set_and_becomes_the_maximum(
    world: World,
) -> None:
    world.set_power(1, 200)
    world.values[POWER] = (240_000,)  # nvidia-smi -pl 240
    assert world.set_power(1, 220) == {}
    assert world.limit_w() == 220
    assert [note["result"] for note in world.events("outside_change")] == ["adopted"]
    assert world.set_power(1, 250)["error"]["code"] == "out_of_range"
    world.values[POWER] = (150_000,)
    assert world.set_power(1, 220)["error"]["code"] == "out_of_range"
    assert world.limit_w() == 150, "it is not touched"
    world.call(1, "release")
    assert world.limit_w() == 150


@pytest.mark.parametrize("sets_again", [False, True])
def test_an_outside_change_is_overwritten_where_the_site_says_so(sets_again: bool) -> None:
    world = World(SitePolicy(outside_change="override"))
    world.set_power(1, 200)
    world.values[POWER] = (240_000,)
    if sets_again:
        assert world.set_power(1, 280) == {}
    world.die(1)
    assert world.limit_w() == 300
    assert [note["result"] for note in world.events("outside_change")] == ["overridden"]


def test_a_restore_target_that_the_device_no_longer_takes_becomes_the_nearest(world: World) -> None:
    world.set_power(1, 150)
    world.range_mw = (100_000, 220_000)  # a driver update lowered the maximum
    world.die(1)
    assert world.limit_w() == 220
    (note,) = world.events("restore_clamped")
    assert (note["old"], note["new"]) == ("300 W", "220 W")
    assert not world.journaled("pending")


def test_configured_clocks_that_the_device_refuses_become_unlocked() -> None:
    world = World(site(clocks=(5, 6)))
    world.lock_clocks(1)
    world.refused_values.add((5, 6))
    world.die(1)
    assert world.values[CLOCKS] == ()


# --------------------------------------------------------------------------------- driver, reload


def test_another_load_of_the_driver_invalidates_the_journal(world: World) -> None:
    world.set_power(1, 200)
    world.lock_clocks(2)
    world.values[POWER] = (280_000,)  # the new driver's default
    world.driver = "driver-2"
    world.writes.clear()
    world.restart(1)
    assert world.writes == []
    assert {key.split("/")[0] for key in world.journal} == {*("driver", "initial", "gpu", "loss")}
    assert world.journal["initial/GPU-0000/power_limit"] == {"value": [280_000]}
    answer = world.set_power(1, 200)
    assert answer["error"]["code"] == "lease_expired"
    assert "driver was reloaded" in answer["error"]["message"]


def test_a_reload_moves_targets_and_keeps_leases(world: World) -> None:
    world.set_power(1, 150)
    world.reload(site(220))
    assert world.journal["pending/GPU-0000/power_limit"]["target"] == [220_000], "a crash's, too"
    assert world.limit_w() == 150
    assert world.set_power(1, 230)["error"]["code"] == "out_of_range"
    assert world.call(1, "hello")["result"]["gpus"][0]["power_limit_site_mw"] == 220_000
    world.die(1)
    assert world.limit_w() == 220
    world.reload(SitePolicy())
    assert world.call(2, "hello")["result"]["gpus"][0]["power_limit_site_mw"] == 300_000


def test_a_released_lease_stays_released_over_a_crash(world: World) -> None:
    """Its holder is alive and sends heartbeats; the value must still be restored."""
    world.set_power(1, 200)
    world.faults[POWER] = 15
    world.call(1, "release")
    world.restart(1)
    world.faults.clear()
    for _ in range(10):
        world.advance(10)
        world.call(1, "heartbeat")
    assert world.limit_w() == 300
    assert world.call(1, "leases")["result"]["leases"] == []


def test_a_queued_set_is_not_applied_after_a_release(world: World) -> None:
    world.set_power(1, 200)
    world.hold = True
    world.ask(1, "release")
    world.ask_power(2, 150, block=False)
    waiting = world.ask_power(2, 160)
    released = world.ask(2, "release")
    world.run_held()
    assert world.limit_w() == 300
    assert world.outcome(2, waiting)["error"]["code"] == "lease_expired"
    assert world.answer(2, released) is not None
    assert not world.watched


def test_requests_of_dead_processes_are_not_applied(world: World) -> None:
    world.set_power(1, 200)
    world.lock_clocks(2)
    world.hold = True
    world.ask(1, "release")
    world.ask_power(2, 150)
    world.die(2)
    world.writes.clear()
    world.run_held()
    assert (GPU0, Control.POWER_LIMIT, (150_000,)) not in world.writes
    assert world.limit_w() == 300
    assert not world.watched


# --------------------------------------------------------------------------------------- the stop


def test_a_restart_keeps_what_a_stop_restores(world: World) -> None:
    world.set_power(1, 200)
    world.apply(world.core.stop(world.now_ns, restore=False))
    asked = world.ask_power(1, 180)
    assert world.answer(1, asked) is None, "the client asks the next zeusd"
    assert world.limit_w() == 200
    world.restart(1)
    assert world.set_power(1, 190) == {}
    world.apply(world.core.stop(world.now_ns))
    assert world.limit_w() == 300
    assert world.set_power(1, 180)["error"]["code"] == "shutting_down"
    world.restart(1)
    assert world.set_power(1, 190)["error"]["code"] == "lease_expired"


def test_requests_queued_when_a_stop_begins_acquire_no_lease(world: World) -> None:
    """Otherwise the stop would restore one process's value, and leave the next one's."""
    world.set_power(1, 200)
    world.hold = True
    world.ask(1, "release")
    waiting = world.ask_power(2, 150)
    world.apply(world.core.stop(world.now_ns))
    assert not world.core.settled
    world.run_held()
    assert world.core.settled
    assert world.limit_w() == 300
    assert world.core.unrestored == []
    assert world.outcome(2, waiting)["error"]["code"] == "shutting_down"


def test_a_stop_tries_at_once_what_failed_before(world: World) -> None:
    world.set_power(1, 200)
    world.faults[POWER] = 15
    world.die(1)
    world.advance(40)  # it tried again, in vain; the next attempt is not due
    world.faults.clear()
    world.apply(world.core.stop(world.now_ns))
    assert world.limit_w() == 300
    assert world.core.unrestored == []


def test_a_late_list_of_computing_users_does_not_delay_a_stop() -> None:
    world = World(access=Access(rules=(AllowRule(everyone=True),), require_compute_process=True))
    world.compute_uids = frozenset({1000})
    world.hold = True
    world.ask_power(1, 150)
    world.apply(world.core.stop(world.now_ns))
    world.run_held()
    assert world.limit_w() == 300
    assert world.core.unrestored == []


def test_a_stop_that_was_killed_is_finished_by_the_next_start(world: World) -> None:
    world.set_power(1, 200)
    world.hold = True
    world.apply(world.core.stop(world.now_ns))
    world.hold = False
    world.restart(1)
    assert world.limit_w() == 300
    assert "stopping" not in world.journal


# -------------------------------------------------------------------------------------- profiles


def test_a_published_profile_lasts_as_long_as_the_lease(world: World) -> None:
    known = {"limits_mw": [100_000, 300_000], "progress": [0.5, 1.0]}

    def publish(conn: int, **more: object) -> str:
        return world.code(conn, "publish_profile", **{**known, **more})

    def published() -> list[tuple[object, object, object]]:
        leases = world.call(1, "leases")["result"]["leases"]
        return [(lease["profile"], lease["measuring"], lease["needs_mw"]) for lease in leases]

    assert publish(1) == "lease_expired"
    world.set_power(1, 200)
    assert published() == [(None, False, None)]
    assert publish(1, measuring=True, needs_mw=250_000) == "ok"
    assert published() == [(known, True, 250_000)]
    assert publish(2) == "lease_expired", "another process's lease"
    assert publish(1, limits_mw=[], progress=[]) == "ok"
    assert published() == [(None, False, None)]
    publish(1)
    world.call(1, "release", gpus=[GPU0])
    world.set_power(1, 210)
    assert published() == [(None, False, None)]

"""Leases, sets and restores, by their effects on devices, journal and clients."""

from __future__ import annotations

import pytest

from tests.zeusd.core.world import CLOCKS, GPU0, GPU1, POWER, World, site
from zeus_ipc.controls import Control
from zeus_ipc.replies import ErrorBody
from zeusd.core.access import OPEN
from zeusd.core.policy import CoreSettings, SitePolicy


def test_a_set_acquires_the_lease_and_a_release_restores_the_limit(world: World) -> None:
    process = world.connect(1)
    assert world.set_power(1, 200) == {}
    assert world.limit_w() == 200
    assert process in world.watched
    (lease,) = world.call(1, "leases")["result"]["leases"]
    assert (lease["gpu"], lease["control"], lease["pid"]) == (GPU0, "power_limit", process.pid)
    assert world.call(1, "release")["result"] == {"released": 1}
    assert world.limit_w() == 300
    assert not world.watched
    assert not world.journaled("pending")
    assert world.call(1, "leases")["result"]["leases"] == []


def test_a_gpu_that_is_split_while_zeusd_runs_is_seen_as_split(world: World) -> None:

    def is_split() -> bool:
        return bool(world.call(1, "hello")["result"]["gpus"][0]["mig_enabled"])

    for split in (True, False):
        world.split = {GPU0} if split else set()
        assert is_split() is not split
        world.look_around()
        assert is_split() is split


def test_the_death_of_the_holder_restores_all_its_controls_and_no_others(world: World) -> None:
    world.set_power(1, 150)
    world.call(1, "set", gpus=[GPU0, GPU1], control="gpu_clocks", value=[900, 1000])
    world.set_power(2, 200, GPU1)
    world.writes.clear()
    world.die(1)
    assert world.limit_w(GPU0) == 300
    assert world.limit_w(GPU1) == 200
    assert world.values[CLOCKS] == ()
    assert world.values[(GPU1, Control.GPU_CLOCKS)] == ()
    assert len(world.writes) == 3
    assert world.journaled("pending") == [f"pending/{GPU1}/power_limit"]


def test_a_second_process_learns_who_holds_the_lease(world: World) -> None:
    holder = world.connect(1, uid=1234)
    world.set_power(1, 200)
    world.advance(5)
    error = world.set_power(2, 250)["error"]
    assert error["code"] == "lease_held"
    assert str(holder.pid) in error["message"]
    assert "1234" in error["message"]
    assert "5 s" in error["message"]
    assert world.limit_w() == 200
    world.connect(3, pid=holder.pid)
    assert world.set_power(3, 250) == {}, "the same process"


def test_goodbye_releases_only_what_that_client_took(world: World) -> None:
    world.set_power(1, 200, client="a")
    world.lock_clocks(1, client="b")
    assert world.call(1, "goodbye", client="b")["result"] == {"released": 1}
    assert world.values[CLOCKS] == ()
    assert world.limit_w() == 200


def test_the_journal_holds_the_intent_before_the_device_is_written(world: World) -> None:
    world.hold = True
    world.ask_power(1, 200)
    world.run_next()  # the reading before the first write
    assert world.limit_w() == 300
    entry = world.journal[f"pending/{GPU0}/power_limit"]
    assert entry["target"] == [300_000]
    assert entry["values"] == [[300_000], [200_000]]


def test_nothing_is_written_when_the_journal_fails(world: World) -> None:
    world.journal_broken = True
    assert world.set_power(1, 200)["error"]["code"] == "journal_failed"
    assert world.writes == []
    world.journal_broken = False
    assert world.call(1, "leases")["result"]["leases"] == []


@pytest.mark.parametrize("watts", [99, 301])
def test_a_limit_outside_the_range_is_refused_without_a_device_call(
    world: World, watts: int
) -> None:
    error = world.set_power(1, watts)["error"]
    assert error["code"] == "out_of_range"
    assert "100 to 300 W" in error["message"]
    assert world.lock_clocks(1, 1000, 900) == "out_of_range"
    assert world.writes == []


def test_a_refused_set_leaves_no_lease_behind(world: World) -> None:
    world.faults[POWER] = 4
    error = world.set_power(1, 200)["error"]
    assert error["code"] == "permission_denied"
    assert error["details"]["device_code"] == 4
    assert not world.journaled("pending")
    assert not world.watched
    world.faults.clear()
    assert world.set_power(2, 250) == {}


def test_several_gpus_in_one_message_have_results_of_their_own(world: World) -> None:
    world.faults[(GPU1, None)] = 15
    asked = world.ask_power(1, 200, gpus=[GPU0, GPU1, "GPU-none"])
    assert world.outcome(1, asked) == {}
    assert world.outcome(1, asked, GPU1)["error"]["code"] == "gpu_lost"
    assert world.outcome(1, asked, "GPU-none")["error"]["code"] == "unknown_gpu"


def test_a_failed_restore_is_retried_with_growing_pauses_and_blocks_nothing_else(
    world: World,
) -> None:
    world.set_power(1, 200, GPU0)
    world.set_power(1, 200, GPU1)
    world.faults[POWER] = 15
    world.die(1)
    assert world.limit_w(GPU1) == 300
    assert world.limit_w(GPU0) == 200
    assert world.set_power(2, 250)["error"]["code"] == "restore_pending"
    world.advance(0.6)
    pauses = [fields["retry_in_s"] for fields in world.events("restore_failed")]
    assert pauses == [0.5, 1.0]
    assert f"pending/{GPU0}/power_limit" in world.journal
    world.faults.clear()
    world.advance(1.1)
    assert world.limit_w(GPU0) == 300
    assert not world.journaled("pending")
    assert world.set_power(2, 250) == {}


def test_a_set_that_arrives_during_a_restore_waits_for_it(world: World) -> None:
    world.set_power(1, 200)
    world.hold = True
    world.die(1)
    request = world.ask_power(2, 150)
    assert world.answer(2, request) is None
    world.run_held()
    assert [value for _, _, value in world.writes] == [(200_000,), (300_000,), (150_000,)]
    assert world.answer(2, request) is not None


def test_a_limit_lowered_outside_before_the_first_set_is_the_restore_target(
    world: World,
) -> None:
    world.values[POWER] = (250_000,)  # nvidia-smi -pl 250
    assert world.set_power(1, 300)["error"]["code"] == "out_of_range"
    assert (world.limit_w(), world.journaled("pending")) == (250, [])
    assert world.set_power(1, 200) == {}
    world.die(1)
    assert world.limit_w() == 250
    assert world.events("outside_change")[0]["result"] == "adopted"
    assert "100 to 250 W" in world.set_power(2, 300)["error"]["message"]
    gpu = world.call(2, "hello")["result"]["gpus"][0]
    assert gpu["power_limit_site_mw"] == 250_000


def test_a_limit_set_outside_during_a_lease_is_kept(world: World) -> None:
    world.set_power(1, 200)
    world.values[POWER] = (275_000,)
    world.writes.clear()
    world.die(1)
    assert world.limit_w() == 275
    assert world.writes == []
    assert world.events("outside_change")[0]["result"] == "kept"


def test_a_configured_maximum_is_the_target_and_the_ceiling() -> None:
    world = World(site(220, (0, 1200)))
    assert "100 to 220 W" in world.set_power(1, 300)["error"]["message"]
    world.set_power(1, 150)
    world.lock_clocks(1)
    world.die(1)
    assert world.limit_w() == 220
    assert world.values[CLOCKS] == (0, 1200)


@pytest.mark.parametrize(("restore", "watts"), [("device-max", 300), ("device-default", 280)])
def test_the_other_restore_policies(restore: str, watts: int) -> None:
    world = World(SitePolicy(restore_power=restore), limits_mw=(260_000,))
    world.set_power(1, 290)
    world.die(1)
    assert world.limit_w() == watts


def test_reset_restores_and_keeps_the_lease(world: World) -> None:
    world.set_power(1, 200)
    assert world.result(1, "reset", control="power_limit") == {"applied": [300_000]}
    assert world.limit_w() == 300
    assert world.set_power(2, 250)["error"]["code"] == "lease_held"


def test_acquire_takes_all_controls_of_a_gpu_or_none(world: World) -> None:
    world.lock_clocks(2)
    reply = world.call(1, "acquire", gpus=[GPU0, GPU1], controls=["power_limit", "gpu_clocks"])
    assert reply["result"]["gpus"][GPU0]["error"]["code"] == "lease_held"
    assert reply["result"]["gpus"][GPU1] == {
        "back": {
            "power_limit": {"value": [300_000], "source": "observed"},
            "gpu_clocks": {"value": [], "source": "unreadable"},
        }
    }
    held = {(one["gpu"], one["control"]) for one in world.call(1, "leases")["result"]["leases"]}
    assert (GPU0, "power_limit") not in held
    assert {(GPU1, "power_limit"), (GPU1, "gpu_clocks")} <= held
    assert world.writes == [(GPU0, Control.GPU_CLOCKS, (900, 1000))]
    world.lock_clocks(1)
    counted = [{"labels": {"code": "lease_held"}, "count": 2}]
    assert world.call(1, "metrics")["result"]["refusals"] == counted, "an acquire and a set"


def test_of_queued_sets_that_nobody_waits_for_only_the_newest_is_applied(world: World) -> None:
    world.set_power(1, 290)
    world.hold = True
    for watts in (280, 270, 260, 250):
        world.ask_power(1, watts, block=False)
    world.run_held()
    assert [value[0] for _, _, value in world.writes] == [290_000, 280_000, 250_000]
    assert len(world.replies[1]) == 1


def test_failures_nobody_waited_for_come_with_the_next_reply_once(world: World) -> None:
    for _ in range(3):
        world.ask_power(1, 1, block=False)
    reply = world.call(1, "heartbeat")
    assert reply["deferred"]["count"] == 3
    assert reply["deferred"]["last"]["code"] == "out_of_range"
    assert "deferred" not in world.call(1, "heartbeat")


def test_failures_nobody_waited_for_belong_to_a_client_object_not_to_a_connection(
    world: World,
) -> None:
    for conn in (1, 2, 3):
        world.connect(conn, pid=1)
    invalid = ErrorBody(code="bad_request", message="nobody waits for it")
    third = world.core.connection(3)
    assert third is not None
    third.deferrals.add(invalid)  # the first that comes
    world.ask_power(1, 1, client="a", block=False)
    assert world.call(3, "heartbeat", client="b")["deferred"]["count"] == 1
    assert world.call(2, "heartbeat", client="a")["deferred"]["count"] == 1
    for conn, client in ((1, "a"), (2, "a"), (3, "b")):
        assert "deferred" not in world.call(conn, "heartbeat", client=client)


def test_a_set_whose_deadline_passes_while_it_waits_is_not_applied(world: World) -> None:
    stale = world.set_power(1, 200, deadline_ns=world.now_ns - 1)
    assert stale["error"]["code"] == "deadline_exceeded"
    world.set_power(1, 290)
    world.hold = True
    world.ask_power(1, 280)
    second = world.ask_power(1, 200, deadline_ns=world.now_ns + 1_000_000)
    assert world.core.next_deadline_ns() == world.now_ns + 1_000_000
    world.advance(0.01)
    assert world.outcome(1, second)["error"]["code"] == "deadline_exceeded"
    world.run_held()
    assert [value[0] for _, _, value in world.writes] == [290_000, 280_000]


def test_a_gpu_that_does_not_answer_costs_the_others_nothing(world: World) -> None:
    world.hold = True
    request = world.ask_power(1, 200, gpus=[GPU0, GPU1], deadline_ns=world.now_ns + 10**9)
    world.run_held(GPU1)
    assert world.answer(1, request) is None
    world.advance(1.1)
    assert world.outcome(1, request)["error"]["code"] == "deadline_exceeded"
    assert "error" not in world.outcome(1, request, GPU1)


def test_requests_of_one_connection_are_bounded(world: World) -> None:
    world.hold = True
    ids = [world.ask_power(1, 200) for _ in range(40)]
    assert world.outcome(1, ids[-1])["error"]["code"] == "overloaded", "for one control"
    clocks = {"gpus": [GPU0], "value": [500, 900]}
    for control in ("gpu_clocks", "memory_clocks"):
        ids += [world.ask(1, "set", control=control, **clocks) for _ in range(30)]
    codes = [(world.answer(1, one) or {}).get("error", {}).get("code") for one in ids]
    assert "overloaded" in codes
    assert codes[0] is None


def test_a_restarted_daemon_keeps_live_leases_and_restores_dead_ones(world: World) -> None:
    world.set_power(1, 200, GPU0)
    world.set_power(2, 150, GPU1)
    world.restart(1)
    assert world.limit_w(GPU0) == 200
    assert world.limit_w(GPU1) == 300
    (restored,) = world.events("restore")
    assert (restored["gpu"], restored["reason"]) == (GPU1, "holder_gone")
    assert world.set_power(1, 210, GPU0) == {}
    world.die(1)
    assert world.limit_w(GPU0) == 300


def test_a_restarted_daemon_remembers_what_it_saw_first() -> None:
    world = World(limits_mw=(250_000,))
    world.set_power(1, 150)
    world.restart(1)  # the limit is 150 W at this moment
    world.die(1)
    assert world.limit_w() == 250


def test_a_maximum_configured_before_a_restart_counts_for_what_is_still_held(world: World) -> None:
    world.set_power(1, 150)
    world.settings = CoreSettings(site(220), OPEN)
    world.restart(1)
    world.die(1)
    assert world.limit_w() == 220


@pytest.mark.parametrize("written", [False, True])
def test_a_crash_between_journal_and_device_ends_at_the_target(world: World, written: bool) -> None:
    world.set_power(1, 200)
    world.hold = True
    world.ask_power(1, 150)
    if written:
        world.values[POWER] = (150_000,)
    world.hold = False
    world.restart()
    assert world.limit_w() == 300


def test_a_release_while_a_set_is_under_way_waits_and_then_restores(world: World) -> None:
    world.hold = True
    first = world.ask_power(1, 200)
    second = world.ask_power(1, 150)
    release = world.ask(1, "release")
    assert world.answer(1, release) is None
    world.run_held()
    for request in (first, second):
        assert world.outcome(1, request)["error"]["code"] == "lease_expired"
    assert world.answer(1, release)["result"] == {"released": 1}
    assert world.limit_w() == 300
    assert not world.journaled("pending")


def test_a_process_that_dies_before_its_first_write_leaves_nothing(world: World) -> None:
    world.hold = True
    world.ask_power(1, 200)
    world.die(1)
    world.run_held()
    assert world.writes == []
    assert not world.journaled("pending")
    assert not world.watched


def test_the_audit_log_names_old_and_new_value_and_who(world: World) -> None:
    process = world.connect(1, uid=4711, command="train", job="77")
    world.set_power(1, 200)
    (change,) = world.events("set")
    assert change == {
        "gpu": GPU0,
        "control": "power_limit",
        "old": "300 W",
        "new": "200 W",
        "pid": process.pid,
        "uid": 4711,
        "command": "train",
        "job": "77",
        "lease": f"{process.pid}-{world.now_ns}",
        "reason": "requested",
        "result": "ok",
    }
    world.die(1)
    (back,) = world.events("restore")
    assert (back["old"], back["new"], back["reason"]) == ("200 W", "300 W", "holder_gone")
    ended = world.core.audit_log.newest(0, 2**62, 1)[0]  # of a process that is gone
    assert (ended.event, ended.command, ended.job) == ("lease_ended", "train", "77")

"""What administrators may do to a node, and what everyone may know of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zeusd.core.world import (
    ADMIN,
    ALICE,
    BOB,
    CLOCKS,
    GPU0,
    GPU1,
    POWER,
    World,
    site,
    staffed,
)
from zeus_ipc.controls import Control
from zeus_ipc.replies import AuditRecords, Metrics, NodeInfo, Policy, Quiesced


@pytest.fixture
def world() -> World:
    return staffed()


def restored(world: World, **arguments: Any) -> dict[str, str]:
    """What became of each control of the first GPU, of all that are restored."""
    reply = world.call(ADMIN, "restore", **arguments)
    found: dict[str, str] = reply["result"]["gpus"][GPU0]["controls"]
    return found


def persist(world: World, watts: int) -> None:
    world.set_power(ADMIN, watts)
    assert world.result(ADMIN, "persist", controls=["power_limit"]) == {}


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("restore", {}),
        ("persist", {"gpus": [GPU0], "controls": ["power_limit"]}),
        ("quiesce", {}),
        ("resume", {}),
        ("release", {"whose": "all"}),
        ("set_ceiling", {"gpus": [GPU0], "name": "fleet", "value": [150_000]}),
    ],
)
def test_only_administrators_may(world: World, op: str, arguments: dict[str, Any]) -> None:
    world.set_power(ALICE, 200)
    reply = world.call(ALICE, op, **arguments)
    assert reply["error"]["code"] == "permission_denied"
    assert "administrator" in reply["error"]["message"]
    assert world.limit_w() == 200
    assert world.call(BOB, "policy")["result"]["admin"] is False


# ------------------------------------------------------------------------------------------ restore


def test_a_restore_revokes_leases_and_informs_their_holders(world: World) -> None:
    world.set_power(ALICE, 200)
    world.lock_clocks(ALICE)
    assert restored(world, controls=["gpu_clocks"]) == {"gpu_clocks": "ok"}
    assert (world.limit_w(), world.values[CLOCKS]) == (200, ())
    world.call(ALICE, "acquire", gpus=[GPU0], controls=["gpu_clocks"])
    world.lock_clocks(ALICE)
    outcomes = restored(world)
    assert outcomes == dict.fromkeys((one.value for one in Control), "ok")
    assert world.limit_w() == 300
    assert world.values[CLOCKS] == ()
    assert world.call(ADMIN, "leases")["result"]["leases"] == []
    refusal = world.set_power(ALICE, 200)["error"]
    assert refusal["code"] == "lease_expired"
    assert "administrator (user 1001) reset the GPU" in refusal["message"]


def test_a_control_that_a_gpu_does_not_offer_is_none_to_restore(world: World) -> None:
    """A library lists memory clocks for Hopper, and its driver refuses them."""
    world.faults[GPU0, Control.MEMORY_CLOCKS] = 3
    outcomes = restored(world)
    assert outcomes.pop("memory_clocks") == "not_offered"
    assert set(outcomes.values()) == {"ok"}
    records = world.call(ADMIN, "audit")["result"]["records"]
    assert [one for one in records if one.get("control") == "memory_clocks"] == []
    world.call(ADMIN, "set", gpus=[GPU0], control="memory_clocks", value=[900, 1000])
    world.faults.clear()
    assert restored(world)["memory_clocks"] == "ok"
    world.hidden[GPU0] = frozenset([Control.MEMORY_CLOCKS])
    world.restart()
    none = world.result(ADMIN, "restore", controls=["memory_clocks"])["error"]
    assert (none["code"], "offers none of these" in none["message"]) == ("not_supported", True)


def test_a_set_control_whose_driver_refuses_is_pending(world: World) -> None:
    world.lock_clocks(ALICE)
    world.faults[CLOCKS] = 3
    outcome = restored(world)["gpu_clocks"]
    assert "not supported" in outcome
    assert world.call(ADMIN, "leases")["result"]["leases"] != []


def test_a_restore_overwrites_an_outside_change(world: World) -> None:
    """Held, free, or adopted as the target by a lease since: the site limit is in force."""
    world.values[POWER] = (120_000,)
    world.values[CLOCKS] = (300, 300)
    restored(world)
    assert (world.limit_w(), world.values[CLOCKS]) == (300, ())
    world.values[POWER] = (160_000,)
    world.set_power(ALICE, 150)  # the value outside becomes its restore target
    world.call(ALICE, "release")
    assert world.limit_w() == 160
    restored(world)
    assert world.limit_w() == 300
    assert "error" not in world.set_power(ALICE, 290), "the site limit is the most again"
    world.values[POWER] = (120_000,)
    restored(world)
    assert world.limit_w() == 300
    assert world.call(ADMIN, "leases")["result"]["leases"] == []


def test_a_restore_writes_the_configured_site_limit() -> None:
    world = staffed(site(220, (300, 1200)))
    restored(world)
    assert (world.limit_w(), world.values[CLOCKS]) == (220, (300, 1200))


def test_a_restore_that_fails_is_reported_and_retried_if_one_was_pending(world: World) -> None:
    world.set_power(ALICE, 200)
    world.faults[POWER] = 15
    outcome = restored(world, controls=["power_limit"])
    assert "fallen off the bus" in outcome["power_limit"]
    (lease,) = world.call(ADMIN, "leases")["result"]["leases"]
    assert lease["restoring"] is True
    assert "fallen off the bus" in lease["trouble"]
    assert metrics(world).pending == [[GPU0, "power_limit"]]
    assert [one.count for one in metrics(world).restore_failures] == [1]
    world.faults.clear()
    assert restored(world)["power_limit"] == "ok"
    assert world.limit_w() == 300
    assert metrics(world).pending == []


@pytest.mark.parametrize(("code", "said"), [(3, "not_offered"), (4, "permission")])
def test_a_failed_request_leaves_nothing_pending(world: World, code: int, said: str) -> None:
    """Nobody had changed the clock: a GPU that refuses is not leased to nobody forever."""
    world.faults[CLOCKS] = code
    outcome = restored(world, controls=["gpu_clocks"])
    assert said in outcome["gpu_clocks"]
    world.faults.clear()
    assert world.call(ADMIN, "leases")["result"]["leases"] == []
    assert world.lock_clocks(ALICE) == "ok"


def test_a_restore_that_a_crash_cuts_short_is_finished(world: World) -> None:
    world.values[POWER] = (120_000,)
    world.hold = True
    world.ask(ADMIN, "restore", controls=["power_limit"])
    world.run_next()  # read; the write is under way, and in the journal
    world.values[POWER] = (120_000,)
    world.hold = False
    world.restart()
    assert world.limit_w() == 300


def test_a_restore_of_an_unknown_gpu_gets_an_error(world: World) -> None:
    reply = world.call(ADMIN, "restore", gpus=["GPU-no", GPU0])["result"]["gpus"]
    assert reply["GPU-no"]["error"]["code"] == "unknown_gpu"
    assert reply[GPU0]["controls"]["power_limit"] == "ok"


# ------------------------------------------------------------------------------------------ persist


def test_a_persisted_value_stays_and_is_the_highest_that_may_be_set(world: World) -> None:
    persist(world, 240)
    world.close(ADMIN)
    world.advance(60)
    assert world.limit_w() == 240
    assert world.set_power(ALICE, 250)["error"]["code"] == "out_of_range"
    world.set_power(ALICE, 200)
    world.call(ALICE, "release")
    assert world.limit_w() == 240
    assert world.call(ALICE, "hello")["result"]["gpus"][0]["persisted"] == ["power_limit"]


def test_a_persisted_value_survives_zeusd_and_a_reload_and_ends_with_a_reset(
    world: World,
) -> None:
    persist(world, 240)
    world.lock_clocks(ADMIN, 300, 1100)
    world.call(ADMIN, "persist", gpus=[GPU0], controls=["gpu_clocks"])
    world.restart()
    world.apply(world.core.reconfigure(world.now_ns, world.settings))
    known = world.call(ALICE, "hello")["result"]["gpus"][0]
    assert known["persisted"] == ["power_limit", "gpu_clocks"]
    assert world.set_power(ALICE, 250)["error"]["code"] == "out_of_range"
    world.set_power(ALICE, 200)
    world.call(ALICE, "release")
    assert (world.limit_w(), world.values[CLOCKS]) == (240, (300, 1100))
    restored(world)
    assert (world.limit_w(), world.values[CLOCKS]) == (300, ())
    assert not world.journaled("pin")
    assert world.call(ALICE, "hello")["result"]["gpus"][0]["persisted"] == []
    world.restart()
    assert "error" not in world.set_power(ALICE, 290)


def test_a_reset_of_a_persisted_value_is_pending_until_it_succeeds(world: World) -> None:
    """Neither a full disk nor a kill leaves a value without a record that covers it."""
    persist(world, 240)
    world.journal_broken = True
    assert "disk is full" in restored(world)["power_limit"]
    assert world.limit_w() == 240
    world.journal_broken = False
    world.advance(1)
    assert world.limit_w() == 300
    persist(world, 240)
    world.hold = True
    world.ask(ADMIN, "restore", controls=["power_limit"])
    world.hold = False
    world.restart()
    assert world.limit_w() == 300


def test_an_administrator_may_persist_a_higher_limit_than_before(world: World) -> None:
    persist(world, 200)
    ((_, most),) = world.call(ADMIN, "policy")["result"]["gpus"][GPU0]["power_limit"]["ranges"]
    assert most == 300_000
    assert world.set_power(ADMIN, 301)["error"]["code"] == "out_of_range"
    persist(world, 260)
    assert world.limit_w() == 260
    assert "error" not in world.set_power(ALICE, 250)


@pytest.mark.parametrize("revoked", [False, True])
def test_a_change_while_a_set_is_under_way_is_noticed(world: World, revoked: bool) -> None:
    persist(world, 240)
    world.call(ADMIN, "release")
    world.hold = True
    asked = world.ask_power(ALICE, 200)
    world.run_next()  # the value in force is read
    world.values[POWER] = (150_000,)
    if revoked:
        world.ask(ADMIN, "release", whose="all")
    world.run_held()
    assert [note["result"] for note in world.events("outside_change")] == ["noticed"]
    refusal = world.outcome(ALICE, asked).get("error")
    assert (refusal and refusal["code"]) == ("lease_expired" if revoked else None)
    assert world.limit_w() == (150 if revoked else 200)


def test_a_control_that_was_not_set_cannot_be_persisted(world: World) -> None:
    world.set_power(ALICE, 200)
    assert world.code(ADMIN, "persist", controls=["power_limit"]) == "bad_request"
    world.call(ALICE, "release")
    assert world.limit_w() == 300


# --------------------------------------------------------------------------------- the driver's end


def test_quiesce_restores_everything_and_nothing_calls_the_driver_until_resume(
    world: World,
) -> None:
    world.set_power(ALICE, 200)
    assert len(world.call(ADMIN, "resume")["result"]["gpus"]) == 1
    assert world.limit_w() == 200, "nothing is to be resumed"
    result = Quiesced.model_validate(world.call(ADMIN, "quiesce")["result"])
    assert (result.open, result.pending) == ([], [])
    assert world.limit_w() == 300
    assert world.driver_open is False  # from here on the world fails every call to a device
    assert world.set_power(ALICE, 200)["error"]["code"] == "quiesced"
    assert world.code(ADMIN, "restore") == "quiesced"
    assert world.code(ADMIN, "persist", controls=["power_limit"]) == "quiesced"
    world.ask_power(ALICE, 200, block=False)
    assert world.call(ALICE, "heartbeat")["deferred"]["last"]["code"] == "quiesced"
    assert world.call(BOB, "hello")["result"]["quiesced_ns"] is not None
    assert world.call(ADMIN, "quiesce")["result"]["since_ns"] == result.since_ns
    world.advance(100)
    node = NodeInfo.model_validate(world.call(ADMIN, "resume")["result"], strict=False)
    assert (len(node.gpus), node.quiesced_ns) == (1, None)
    for event in ("quiesced", "resumed"):
        assert [one["uid"] for one in world.events(event)] == [1001], event
    assert world.set_power(ALICE, 200)["error"]["code"] == "lease_expired"
    world.call(ALICE, "acquire", gpus=[GPU0], controls=["power_limit"])
    assert "error" not in world.set_power(ALICE, 200)


def test_a_quiesced_node_stays_so_over_a_restart(world: World) -> None:
    world.call(ADMIN, "quiesce")
    world.restart()
    assert world.driver_open is False
    assert world.call(BOB, "hello")["result"]["gpus"] == []
    assert world.set_power(ALICE, 200)["error"]["code"] == "quiesced"
    world.call(ADMIN, "resume")
    assert "error" not in world.set_power(ALICE, 200)


def test_a_gpu_that_cannot_be_restored_does_not_keep_the_driver_open() -> None:
    """A reset is for this: pending restores are retried after it."""
    world = staffed(gpus=2)
    world.set_power(ALICE, 200)
    world.set_power(ALICE, 200, GPU1)
    world.faults[POWER] = 15
    result = world.call(ADMIN, "quiesce")["result"]
    assert result["pending"] == [[GPU0, "power_limit"]]
    assert world.values[(GPU1, Control.POWER_LIMIT)] == (300_000,)
    world.advance(10)  # no attempt is made meanwhile: it would fail
    world.faults.clear()
    world.call(ADMIN, "resume")
    assert world.limit_w() == 300
    assert world.call(ADMIN, "leases")["result"]["leases"] == []


def test_after_a_reset_persisted_limits_are_in_force_again_and_others_are_what_is_found(
    world: World,
) -> None:
    persist(world, 240)
    world.call(ADMIN, "quiesce")
    world.values[POWER] = (280_000,)  # a reset GPU has the vendor's default
    world.call(ADMIN, "resume")
    assert world.limit_w() == 240
    restored(world)
    world.call(ADMIN, "quiesce")
    world.values[POWER] = (280_000,)
    world.call(ADMIN, "resume")
    assert world.limit_w() == 280
    assert world.call(ALICE, "hello")["result"]["gpus"][0]["power_limit_site_mw"] == 280_000
    restored(world)
    assert world.limit_w() == 300


@pytest.mark.parametrize("sets", [[], [210, 220]], ids=["a restore", "a set, and one that waits"])
def test_a_gpu_that_does_not_answer_does_not_keep_the_administrator(sets: list[int]) -> None:
    world = staffed(gpus=2)
    world.set_power(ALICE, 200)
    world.set_power(ALICE, 200, GPU1)
    world.hold = True
    waiting = [world.ask_power(ALICE, watts) for watts in sets][1:]
    asked = world.ask(ADMIN, "quiesce")
    stuck = [call for call in world.held if call.gpu == GPU0]
    world.run_held(GPU1)
    assert world.answer(ADMIN, asked) is None
    world.advance(6)
    answer = world.answer(ADMIN, asked)
    assert answer is not None
    assert answer["result"]["open"] == ["/dev/nvidia0"]
    assert answer["result"]["pending"] == [[GPU0, "power_limit"]]
    for one in waiting:
        assert world.outcome(ALICE, one)["error"]["code"] == "quiesced"
    world.hold = False
    assert stuck == world.held
    world.run_held()
    world.advance(60)  # the call in progress is over; nothing new is tried
    assert world.limit_w() == (sets or [200])[0]
    world.call(ADMIN, "resume")
    assert world.limit_w() == 300


def test_a_repeated_request_gets_the_answer_of_the_one_in_progress(world: World) -> None:
    """Like a client that lost its connection."""
    world.set_power(ALICE, 200)
    world.hold = True
    first = world.ask(ADMIN, "quiesce")
    second = world.ask(ADMIN, "quiesce")
    assert world.call(ADMIN, "resume")["error"]["code"] == "overloaded"
    world.run_held()
    world.hold = False
    answers = [world.answer(ADMIN, number) for number in (first, second)]
    assert answers[0] is not None
    assert answers[1] is not None
    assert answers[0]["result"] == answers[1]["result"]


def test_a_stop_while_quiesced_waits_for_nothing(world: World) -> None:
    world.set_power(ALICE, 200)
    world.faults[POWER] = 15
    world.call(ADMIN, "quiesce")
    world.apply(world.core.stop(world.now_ns))
    assert world.core.restoring is False


# ------------------------------------------------------------------------------------------ release


def test_a_user_may_release_what_another_of_his_processes_holds(world: World) -> None:
    world.set_power(ALICE, 200)
    world.connect(9, pid=902, uid=1002)
    assert world.call(9, "release")["result"] == {"released": 0}
    assert world.call(BOB, "release", whose="user")["result"] == {"released": 0}
    assert world.limit_w() == 200
    assert world.call(9, "release", whose="user")["result"] == {"released": 1}
    assert world.limit_w() == 300
    message = world.set_power(ALICE, 200)["error"]["message"]
    assert "process 902 of the same user ended it" in message


def test_leases_are_released_by_process_and_by_job() -> None:
    world = staffed(gpus=2)
    world.connect(7, pid=707, uid=1002, job="77", command="train")
    world.set_power(7, 200)
    world.set_power(BOB, 200, GPU1)
    (mine, bobs) = world.call(7, "leases")["result"]["leases"]
    assert (mine["job"], mine["command"], mine["pid"]) == ("77", "train", 707)
    assert (bobs["job"], bobs["command"], bobs["pid"]) == (None, None, None)
    world.restart(7, BOB)
    assert world.call(ADMIN, "release", whose="all", job="78")["result"] == {"released": 0}
    assert world.call(ADMIN, "release", whose="all", pids=[999])["result"] == {"released": 0}
    assert world.call(ADMIN, "release", whose="all", job="77")["result"] == {"released": 1}
    assert world.limit_w(GPU0) == 300
    assert world.limit_w(GPU1) == 200
    assert world.call(ADMIN, "release", whose="all", pids=[103])["result"] == {"released": 1}
    assert world.limit_w(GPU1) == 300


def test_a_job_that_starts_takes_nothing_from_other_jobs_on_its_gpu() -> None:
    """A shard's prolog: the GPU is reset, except for what a running job holds."""
    world = staffed()
    world.connect(7, pid=707, uid=1002, job="77")
    world.set_power(7, 200)
    world.lock_clocks(BOB, 600, 900)
    answer = world.result(ADMIN, "restore", jobs=["78", "s78"])
    assert (answer["controls"]["power_limit"], answer["controls"]["gpu_clocks"]) == ("held", "ok")
    assert world.limit_w() == 200
    assert world.set_power(7, 180) == {}  # it has not lost the lease
    only = restored(world, controls=["power_limit"], jobs=["78"])
    assert only == {"power_limit": "held"}
    world.call(ADMIN, "restore", gpus=[GPU0], jobs=["77"])  # an earlier run of the job itself
    assert world.limit_w() == 300


def test_a_restore_pending_on_a_missing_gpu_can_be_forgotten_by_administrators() -> None:
    world = staffed(gpus=2)
    process = world.connect(7, pid=707, uid=1002)
    world.set_power(7, 150, GPU1)
    world.limits_mw = ()
    world.restart(7)
    world.apply(world.core.process_gone(world.now_ns, process))
    gone_ns = world.now_ns
    world.advance(60)
    (lease,) = world.call(ADMIN, "leases")["result"]["leases"]
    assert (lease["restoring"], lease["pending_ns"]) == (True, gone_ns)
    denied = world.call(BOB, "restore", gpus=[GPU1], forget=True)
    assert denied["error"]["code"] == "permission_denied"

    def forget(gpu: str) -> str:
        result = world.call(ADMIN, "restore", gpus=[gpu], forget=True)["result"]["gpus"][gpu]
        return str(result["error"]["message"] if "error" in result else result["controls"])

    assert "zeusd has found no GPU at all" in forget(GPU1)
    assert "this node has no GPUs" in world.call(ADMIN, "restore")["error"]["message"]
    world.limits_mw = (300_000,)
    world.find_gpus()
    assert "is on this node; reset it" in forget(GPU0)
    assert "GPU-2 has none" in forget("GPU-2")
    assert forget(GPU1) == "{'power_limit': 'forgotten'}"
    assert world.call(ADMIN, "leases")["result"]["leases"] == []
    records = world.core.audit_log.newest(0, 1 << 40, 99)
    (record,) = [one for one in records if one.event == "restore_forgotten"]
    assert (record.gpu, record.control, record.uid) == (GPU1, "power_limit", 1001)
    world.limits_mw = (300_000, 150_000)
    world.restart()
    assert not world.core.unrestored, "it is not in the journal either"
    assert world.limit_w(GPU1) == 150


# -------------------------------------------------------------------------------- what may be known


def test_the_policy_says_what_this_user_may(world: World) -> None:
    policy = Policy.model_validate(world.call(ALICE, "policy")["result"])
    mine = policy.gpus[GPU0]
    assert (policy.uid, policy.admin) == (1002, False)
    assert mine["power_limit"].ranges == [[150_000, 290_000]]
    assert mine["gpu_clocks"].allowed
    assert mine["gpu_clocks"].ranges == []
    assert not mine["memory_clocks"].allowed
    assert "may not change memory_clocks" in mine["memory_clocks"].why
    admins = Policy.model_validate(world.call(ADMIN, "policy")["result"])
    assert admins.admin
    assert admins.gpus[GPU0]["power_limit"].ranges == [[100_000, 300_000]]
    assert all(one.allowed for one in admins.gpus[GPU0].values())


def test_the_policy_reply_equals_what_a_set_may_do(world: World) -> None:
    """Neither has more than the other."""
    for conn in (ADMIN, ALICE):
        ((low, high),) = world.call(conn, "policy")["result"]["gpus"][GPU0]["power_limit"]["ranges"]
        for milliwatts, fits in (
            (low, True),
            (high, True),
            (low - 1000, False),
            (high + 1000, False),
        ):
            result = world.set_power(conn, milliwatts // 1000)
            assert ("error" not in result) is fits, milliwatts
        world.call(conn, "release")


def audit(world: World, conn: int = ADMIN, **arguments: Any) -> AuditRecords:
    return AuditRecords.model_validate(world.call(conn, "audit", **arguments)["result"])


def test_the_audit_trail_has_every_change_and_many_sets_are_one_record(world: World) -> None:
    begin = audit(world).records[-1].number
    for watts in (200, 220, 210):
        world.set_power(ALICE, watts)
    world.call(ALICE, "release")
    records = audit(world, after=begin).records
    assert [one.event for one in records] == ["set", "restore", "lease_ended"]
    sets, back, end = records
    assert (sets.count, sets.old, sets.new, sets.uid) == (3, "300 W", "210 W", 1002)
    assert (back.old, back.new, back.reason, back.result) == ("210 W", "300 W", "released", "ok")
    assert (end.reason, end.result) == ("released", "restored")
    assert sets.number < back.number < end.number
    world.set_power(ALICE, 200)
    world.faults[POWER] = 999
    world.set_power(ALICE, 210)
    done, failed = audit(world, after=end.number).records[:2]
    assert (done.result, "internal driver error" in str(failed.result)) == ("ok", True)


def test_the_author_of_a_change_is_shown_to_that_user_and_administrators(world: World) -> None:
    world.set_power(ALICE, 200)
    assert audit(world).records[-1].pid == 102
    assert audit(world, ALICE).records[-1].pid == 102
    seen = audit(world, BOB).records[-1]
    assert (seen.pid, seen.lease, seen.uid) == (None, None, 1002)
    assert (seen.command, seen.job) == (None, None)


def test_a_dumped_audit_log_continues_after_a_restart(world: World) -> None:
    world.set_power(ALICE, 200)
    before = audit(world).records
    dumped = world.core.audit_log.dump()
    world.restart()
    world.core.audit_log.load(dumped)
    after = audit(world).records
    assert after[: len(before)] == before
    assert [one.event for one in after[len(before) :]] == ["restore", "lease_ended"]
    numbers = [one.number for one in after]
    assert numbers == list(range(1, len(after) + 1))
    for strange in ({"nonsense": 1}, {**dumped[0], "number": "1"}, {**dumped[0], "result": []}):
        with pytest.raises(ValueError, match="validation error"):
            world.core.audit_log.load([strange])


def metrics(world: World) -> Metrics:
    return Metrics.model_validate(world.call(BOB, "metrics")["result"])


def test_the_metrics_count_what_happened(world: World) -> None:
    world.set_power(ALICE, 200)
    world.set_power(ALICE, 210)
    world.set_power(BOB, 200)  # held
    world.call(BOB, "set", gpus=[GPU0], control="memory_clocks", value=[1, 2])  # not allowed
    world.values[POWER] = (120_000,)
    world.call(ALICE, "release")
    found = metrics(world)
    assert found.connections == 3
    counted = (found.changes, found.restores, found.outside_changes, found.refusals)
    assert [[(*one.labels.values(), one.count) for one in kind] for kind in counted] == [
        [("power_limit", "ok", 2)],
        [("released", "changed_outside", 1)],
        [("power_limit", "kept", 1)],
        [("lease_held", 1), ("permission_denied", 1)],
    ]

"""Who did it, and what else an administrator wants to find in the audit log."""

from __future__ import annotations

import pytest

from tests.zeusd.core.world import ADMIN, ALICE, BOB, GPU0, POWER, World, site, staffed
from zeus_ipc.replies import AuditRecords
from zeus_ipc.requests import MAX_RECORDS
from zeusd.core.access import Access, AllowRule
from zeusd.core.audit_log import KEPT, REPEATED_NS, AuditLog
from zeusd.core.effects import Note
from zeusd.core.outbox import Outbox

FAILED = "restore_failed"


@pytest.fixture
def world() -> World:
    return staffed()


def test_a_revoked_lease_names_who_revoked_it(world: World) -> None:
    world.set_power(ALICE, 200)
    world.call(ADMIN, "release", whose="all")
    (record,) = world.events("revoked")
    assert (record["uid"], record["pid"]) == (1001, 101)
    assert (record["reason"], record["lease"]) == ("the lease of user 1002", f"102-{world.now_ns}")


def test_no_record_tells_other_users_a_pid(world: World) -> None:
    """Neither in a field nor in a text."""
    world.set_power(ALICE, 200)
    world.call(ADMIN, "release", whose="all")
    world.call(BOB, "set", gpus=[GPU0], control="memory_clocks", value=[1, 2])  # not allowed
    world.call(ADMIN, "restore", gpus=[GPU0])
    records = world.call(BOB, "audit")["result"]["records"]
    others = [one for one in records if one.get("uid") != 1003]
    assert {"set", "revoked"} <= {one["event"] for one in others}
    assert len(others) < len(records)
    assert "101" not in str(others).replace("1001", "")
    assert "102" not in str(others).replace("1002", "")


def test_an_outside_change_on_an_idle_gpu_is_recorded_once(world: World) -> None:
    world.look_around()
    assert world.events("outside_change") == []
    world.values[POWER] = (150_000,)
    for _ in range(3):
        world.look_around()
    (record,) = world.events("outside_change")
    assert (record["old"], record["new"], record["result"]) == ("300 W", "150 W", "noticed")
    world.values[POWER] = (160_000,)
    world.look_around()
    assert len(world.events("outside_change")) == 2


def test_zeusds_own_write_is_not_an_outside_change(world: World) -> None:
    world.set_power(ALICE, 200)
    world.look_around()
    world.call(ALICE, "release")
    world.look_around()
    world.call(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=[250_000])
    world.look_around()
    assert world.events("outside_change") == []


def test_a_lost_gpu_is_one_record(world: World) -> None:
    world.faults[POWER] = 15
    for _ in range(3):
        world.set_power(ALICE, 200)
    (record,) = world.events("gpu_lost")
    assert record["gpu"] == GPU0
    assert world.events("gpu_returned") == []
    world.faults.clear()
    world.find_gpus()
    assert [record["gpu"] for record in world.events("gpu_returned")] == [GPU0]
    world.faults[POWER] = 15
    world.set_power(ALICE, 200)
    assert len(world.events("gpu_lost")) == 2


def test_a_gpu_that_answers_again_has_returned(world: World) -> None:
    """Without a scan for GPUs; and not while it answers only some calls."""
    world.reads_fail = True
    world.faults[POWER] = 15
    world.set_power(ALICE, 200)
    for _ in range(3):
        world.look_around()
    assert world.events("gpu_returned") == [], "its persistence mode can be read"
    world.faults.clear()
    for _ in range(3):
        world.look_around()
    assert len(world.events("gpu_returned")) == len(world.events("gpu_lost")) == 1


def test_a_restart_is_no_record_for_each_gpu() -> None:
    world = staffed(gpus=2)
    assert len(world.events("gpu_found")) == 2
    world.notes.clear()
    world.restart()
    assert world.events("gpu_found") == []
    world.driver = "driver-2"
    world.restart()
    assert len(world.events("gpu_found")) == 2


def test_a_warning_that_repeats_is_counted_in_one_record_and_logged_when_it_doubles() -> None:
    """Whatever repeats: neither the log nor the history fills with it."""
    log, outbox = AuditLog(), Outbox()
    outbox.audit_log = log
    said = {"gpu": GPU0, "control": "power_limit", "error": "NVML code 3"}
    for number in range(1000):
        outbox.now_ns = number * 4_000_000_000
        outbox.add(Note("restore_failed", {**said, "attempt": number}, warning=True))
        if number == 20:
            outbox.add(Note("lease_ended", {"gpu": GPU0, "reason": "released", "result": "ok"}))
    failed, ended = log.newest(0, 2**62, 10)
    assert (failed.event, failed.count, failed.t_ns) == ("restore_failed", 1000, 0)
    assert failed.last_ns == 999 * 4_000_000_000
    assert ended.event == "lease_ended"
    assert dict(log.total("restore_failed")) == {("power_limit",): 1000}
    logged = [note.fields.get("count", 1) for note in outbox.take() if note.warning]
    assert logged == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    outbox.add(Note("restore_failed", {**said, "error": "NVML code 10"}, warning=True))
    outbox.now_ns += 2 * REPEATED_NS
    outbox.add(Note("restore_failed", said, warning=True))
    assert [one.count for one in log.newest(0, 2**62, 10)] == [1000, 1, 1, 1]


def test_a_repeated_warning_whose_record_is_gone_is_recorded_again() -> None:
    log = AuditLog()
    log.note(0, Note("gpu_lost", {"gpu": GPU0}, warning=True))
    for number in range(KEPT):
        log.note(1, Note("set", {"gpu": GPU0, "lease": str(number), "result": "ok"}))
    log.note(2, Note("gpu_lost", {"gpu": GPU0}, warning=True))
    assert log.newest(0, 2**62, 1)[0].event == "gpu_lost"


def test_a_user_who_acquires_and_releases_for_ever_pushes_out_only_own_records(
    world: World,
) -> None:
    world.set_power(ALICE, 200)
    world.call(ALICE, "release")
    records = world.core.audit_log.newest(0, 2**62, KEPT)
    for _ in range(8 * KEPT // 5):
        world.now_ns += 10_000_000  # below the rate limit
        world.call(BOB, "acquire", gpus=[GPU0], controls=["power_limit"])
        world.call(BOB, "release")
    later = world.core.audit_log.newest(0, 2**62, 2 * KEPT)
    assert len(later) == KEPT
    page = AuditRecords.model_validate(world.call(ADMIN, "audit")["result"])
    assert (len(page.records), page.dropped) == (MAX_RECORDS, page.records[-1].number - KEPT)
    first = page.records[0].number
    assert first == page.records[-1].number - MAX_RECORDS + 1
    earlier = world.call(ADMIN, "audit", before=first, limit=20)["result"]["records"]
    assert [one["number"] for one in earlier] == list(range(first - 20, first))
    assert later[: len(records)] == records
    assert world.core.audit_log.dropped > KEPT / 2
    log, (kept, again) = world.core.audit_log, (AuditLog(), AuditLog())
    # Bob's oldest record that is kept began right after his newest one that is not.
    bobs = next(one for one in later if one not in records)
    assert 0 <= bobs.t_ns - log.complete_ns <= 10_000_000
    kept.load(log.dump(), log.complete_ns)
    again.load(kept.dump(), kept.complete_ns)
    assert again.newest(0, 2**62, 2 * KEPT) == later
    assert again.complete_ns == log.complete_ns
    assert AuditLog().complete_ns == 0


def test_a_restart_is_a_record_of_the_time_in_which_nothing_was_recorded() -> None:
    log = AuditLog()
    log.restarted(saved_ns=10, now_ns=20)
    (record,) = log.newest(0, 2**62, 10)
    assert (record.event, record.t_ns, record.last_ns, record.count) == ("restarted", 10, 20, 1)


def test_many_subordinate_uids_are_one_user() -> None:
    """Of all limits for one user: their records push out only that user's."""
    access = Access(rules=(AllowRule(uids=frozenset({1000})),), writes_per_second=5)
    world = World(access=access, owner_of=lambda uid: 2000 if uid >= 100_000 else uid)
    world.set_power(1, 200)
    records = world.core.audit_log.newest(0, 2**62, KEPT)
    codes = set()
    for number in range(2 * KEPT):
        world.now_ns += 2_000_000_000 if number % 20 else 0
        world.connect(2, pid=2 + number, uid=100_000 + number)
        codes.add(world.set_power(2, 200)["error"]["code"])
    assert codes == {"permission_denied"}
    world.now_ns += 10_000_000_000
    for number in range(20):
        world.connect(2, pid=10_000 + number, uid=200_000 + number)
        codes.add(world.set_power(2, 200)["error"]["code"])
    assert codes == {"permission_denied", "overloaded"}
    later = world.core.audit_log.newest(0, 2**62, 2 * KEPT)
    assert (len(later), later[: len(records)]) == (KEPT, records)
    world.call(2, "usage", edges=[0, 86_400])
    assert {call.uid for call in world.accounted} == {2000}


def test_each_failed_attempt_of_a_restore_counts_in_one_record() -> None:
    world = World()
    world.set_power(1, 200)
    world.faults[POWER] = 10
    world.die(1)
    for _ in range(300):
        world.advance(2)
        due_ns = world.core.next_deadline_ns()
        assert due_ns is not None
        assert due_ns - world.now_ns <= 4_000_000_000
    (failed,) = (one for one in world.core.audit_log.newest(0, 2**62, 1000) if one.event == FAILED)
    assert failed.count > 100
    assert dict(world.core.audit_log.total(FAILED)) == {("power_limit",): failed.count}
    assert len(world.events(FAILED)) < 10
    assert len(world.core.audit_log.newest(0, 2**62, 1000)) < 10


@pytest.mark.parametrize("code", [3, 10, 999])
def test_a_limit_that_cannot_be_enforced_delays_no_stop(code: int) -> None:
    world = World()
    world.faults[POWER] = code
    world.reload(site(200, enforce=True))
    world.advance(60)
    assert world.values[POWER] == (300_000,)
    world.apply(world.core.stop(world.now_ns))
    assert not world.core.restoring
    assert world.core.unrestored == []

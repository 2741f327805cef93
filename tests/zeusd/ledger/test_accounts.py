"""The ledger of a node: who is charged, over restarts, reboots, suspends and lost epilogs."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests import seeds
from tests.zeusd.ledger.world import ALL, START_S, Gpu, World, energy_uj
from zeus_common.units import SECOND_NS
from zeus_ipc.requests import MAX_SUMS, NOBODY
from zeusctl.entities import limited_texts
from zeusctl.usage import edges
from zeusd.ledger.usage import TooManySums
from zeusd.runtime.workloads import Workloads

HOUR_S = 3600
SLUID = "sEKNKTV3WPV500"


def test_a_job_is_charged_for_what_it_held_and_nobody_for_the_rest(world: World) -> None:
    world.tick(50, 10, idle=True)
    world.allocate("7")
    world.tick(300, 50)
    assert world.deallocate("7") == ["GPU-0"]
    world.tick(300, 10)
    assert world.usage() == {"idle": 50, "7": 1500, "no holder": 300}
    assert world.usage("user") == {"idle": 50, "uid 1000": 1500, "no holder": 300}
    assert world.usage("gpu") == {"GPU-0": 1850}
    assert world.usage("total") == {"idle": 50, "total": 1500, "unattributed": 300}


def test_a_job_that_holds_and_does_not_compute_is_charged_as_held_idle(world: World) -> None:
    world.allocate("7")
    world.tick(80, 50, idle=True)
    answer = world.answer()
    (one,) = answer.sums
    assert (one.active_uj, one.idle_uj, one.end_s) == (0, 400_000_000, 0)
    assert (one.methods, one.ns) == (["allocated"], 5 * SECOND_NS)
    assert (one.begin_s, one.first_ms) == (START_S, START_S * 1000)
    assert one.last_ms == answer.settled_ms == world.utc_ns() // 10**6
    assert answer.begins_s == START_S // 86_400 * 86_400
    world.deallocate("7")
    assert world.answer().sums[0].end_s == world.utc_ns() // SECOND_NS
    world.allocate("7")
    assert world.answer().sums[0].end_s == 0, "it goes on"
    world.gpus["GPU-0"].tick(80, 1, every_ns=2 * HOUR_S * SECOND_NS)
    assert world.usage(name="7") == world.usage() == {"7": 400 + 2 * 80 * HOUR_S}


def test_shards_share_by_weight_and_a_whole_allocation_ends_them(world: World) -> None:
    world.allocate("7", weight=3)
    world.allocate("8", uid=1001, weight=1)
    world.tick(100, 10)
    world.allocate("9", uid=1002)
    world.tick(100, 10)
    assert world.usage() == {"7": 75, "8": 25, "9": 100}
    assert world.deallocate("7") == []


def test_the_time_that_a_job_was_limited_is_in_the_ledger_by_cause(world: World) -> None:
    gpu = world.gpus["GPU-0"]
    gpu.limited = {"power:rack1": 0.37, "heat": 0.02}
    world.tick(300, 10)  # nobody's
    world.allocate("7")
    world.tick(300, 100)
    world.accounts.settle()
    gpu.limited = {"power:lease": 0.5}
    world.allocate("8", uid=1001, weight=1)  # half a GPU each
    world.allocate("9", uid=1001, weight=1)
    world.tick(300, 100)
    world.deallocate("8")
    world.accounts.settle()

    def seen(**fields: Any) -> dict[str, list[str]]:
        sums = world.answer(**fields).sums
        return {one.name: limited_texts(one) for one in sums if one.limited_ns}

    whole, part = ["37 % at the ceiling rack1", "2 % limited by heat"], ["50 % at a lease's limit"]
    assert seen() == {"7": whole, "8": part, "9": part}
    assert seen(name="8") == {"8": part}
    assert seen(reader=1000) == {"7": whole}
    expire(world, 401)
    assert seen() == {}
    (rows,) = world.connection.execute("SELECT count(*) FROM limited").fetchone()
    assert rows == 0


def test_a_requeued_job_is_two_runs_and_asking_twice_is_one_holding(world: World) -> None:
    world.allocate("7", run="0")
    world.allocate("7", run="0")
    world.tick(100, 10)
    assert world.deallocate("7", run="1") == []
    world.allocate("7", run="1")
    world.tick(100, 20)
    assert world.usage() == {"7/0": 100, "7/1": 200}
    assert world.usage(name="7") == {"7/0": 100, "7/1": 200}
    assert world.deallocate("7") == ["GPU-0"]


def test_a_lost_epilog_ends_with_the_jobs_control_group(world: World) -> None:
    group = world.group("sEKNKTV3WPV500")
    world.allocate("7", control_group="sEKNKTV3WPV500")
    world.run(30, 100, 10)  # a prolog comes before its job's group
    group.mkdir(parents=True)
    world.run(30, 100, 10)
    group.rmdir()
    world.restart()  # it was there once, which the next zeusd knows
    world.run(30, 100, 10)
    found = world.usage()
    assert 6000 <= found.pop("7") <= 6500
    assert [*found] == ["no holder"]
    assert world.deallocate("7") == []


def test_a_job_with_a_sluid_may_still_have_a_group_with_its_id(world: World) -> None:
    """Slurm 25.11, and 26.05 with `CgroupJobIdPaths=yes`."""
    world.allocate("7", run=SLUID, control_group=SLUID)
    group = world.group("job_7")
    group.mkdir(parents=True)
    world.run(2, 100, 21)
    group.rmdir()
    world.run(8, 100, 21)
    assert [one.gpu for one in world.accounts.held] == []


def test_a_run_that_begins_ends_an_earlier_one_on_other_gpus(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2).open()
    world.allocate("7", run="0", gpus=["GPU-0"])
    world.tick(100, 10)
    world.allocate("7", run="1", gpus=["GPU-1"])
    world.tick(100, 10)
    assert [one.gpu for one in world.accounts.held] == ["GPU-1"]
    found = world.usage()
    assert (found["7/0"], found["7/1"]) == (100, 100)


def test_a_run_is_found_by_its_sluid(world: World) -> None:
    for run in (SLUID, SLUID[:-1] + "1"):
        world.allocate("7", run=run)
        world.tick(100, 10)
        world.deallocate("7")
    assert world.usage(name=SLUID) == {f"7/{SLUID}": 100}
    assert sum(world.usage(name="7").values()) == 200
    assert world.usage(name="0") == {}


def test_a_suspended_job_keeps_its_gpu_and_is_charged_what_that_draws_idle(world: World) -> None:
    """Its processes are stopped, and still there."""
    world.allocate("7")
    group = world.group("job_7")
    group.mkdir(parents=True)
    events = group / "cgroup.events"
    events.write_text("populated 1\nfrozen 0\n")
    world.run(1, 300, 100)
    events.write_text("populated 1\nfrozen 1\n")
    world.run(30, 50, 20, idle=True)
    assert [one.gpu for one in world.accounts.held] == ["GPU-0"]
    assert world.usage() == {"7": 300 * 10 + 50 * 60}
    (one,) = world.accounts.totals()
    assert 0.95 <= one.idle_uj / (50 * 60 * 1_000_000) <= 1  # the driver reports it once a second
    events.write_text("populated 0\nfrozen 0\n")  # cancelled while it was suspended
    world.run(8, 50, 20, idle=True)
    assert [one.gpu for one in world.accounts.held] == []


def test_a_group_that_is_made_again_soon_is_the_same_job(world: World) -> None:
    group = world.group("job_7")
    world.allocate("7")
    for present in (True, False, True, False, True):
        if present:
            group.mkdir(parents=True, exist_ok=True)
        else:
            group.rmdir()
        world.run(6, 100, 10)
    assert world.usage() == {"7": 3000}


def test_a_restart_loses_nothing_that_someone_held(world: World) -> None:
    world.allocate("7")
    world.tick(100, 10)
    world.accounts.settle()
    world.tick(100, 10)
    world.accounts.close()  # killed: nothing more is settled
    world.gpus["GPU-0"].tick(100, 1, every_ns=60 * SECOND_NS)
    world.open()
    world.tick(100, 10)
    assert world.usage() == {"7": 100 + 100 + 6000 + 100}


def test_energy_without_a_holder_while_zeusd_was_down_is_unattributed(
    world: World,
) -> None:
    world.tick(100, 20, idle=True)
    world.accounts.settle()
    world.accounts.close()
    gpu = world.gpus["GPU-0"]
    gpu.tick(100, 1, idle=True, every_ns=60 * SECOND_NS)
    world.ahead_ns = -SECOND_NS  # zeusd starts before this reading
    world.open()
    world.ahead_ns = 0
    world.tick(100, 10, idle=True)
    assert world.usage() == {"idle": 300, "down": 6000}


def test_a_reboot_ends_what_was_held_and_never_charges_more_than_was_counted(
    world: World, tmp_path: Path
) -> None:
    world.allocate("7")
    world.tick(100, 10)
    world.accounts.settle()
    world.tick(100, 10)  # lost with the history
    world.accounts.close()
    after = World(tmp_path)
    after.step_ns = 100 * SECOND_NS
    after.open(boot="boot-2")
    after.tick(100, 10)
    assert after.usage() == {"7": 100, "no holder": 100}
    db = sqlite3.connect(after.directory / "energy.db")
    (begin_s, end_s) = db.execute("SELECT begin_s, end_s FROM account WHERE name = '7'").fetchone()
    assert begin_s <= end_s <= begin_s + 1800
    assert db.execute("SELECT count(*) FROM holding").fetchone() == (0,)


def test_a_driver_that_is_loaded_again_begins_a_new_history_without_a_step(tmp_path: Path) -> None:
    """Also if another driver, with its own GPU, stays."""
    world = World(tmp_path, gpus=2).open()
    world.allocate("7")
    world.allocate("8", gpus=["GPU-1"])
    world.tick(100, 100)
    world.accounts.settle()
    world.accounts.close()
    world.gpus["GPU-0"] = Gpu(world.now_ns + SECOND_NS)
    world.gpus["GPU-1"].tick(100, 10)
    world.open()
    world.tick(100, 10)
    assert world.usage() == {"7": 1000 + 100, "8": 1000 + 200}


def test_energy_drawn_during_a_suspend_is_unattributed(world: World) -> None:
    world.allocate("7")
    world.run(3, 100, 10)
    world.accounts.settle()
    world.slept_ns += HOUR_S * SECOND_NS
    world.run(1, 5000, 1)
    world.run(1, 100, 9)
    assert world.usage() == {"7": 390, "suspend": 500}


def test_steps_of_the_clock_move_later_rows_and_no_sum(world: World) -> None:
    world.allocate("7")
    for step_s in (0, HOUR_S, -HOUR_S, 0):
        world.step_ns = step_s * SECOND_NS
        world.tick(100, 10)
        world.accounts.settle()
    assert world.usage() == {"7": 400}
    db = sqlite3.connect(world.directory / "energy.db")
    rows = dict(db.execute("SELECT bucket, active_uj FROM energy").fetchall())
    now = START_S // 900
    # A step counts from the settlement on that notices it.
    assert rows == {now: 200_000_000, now + 4: 100_000_000, now - 4: 100_000_000}
    world.deallocate("7")
    assert world.usage(name="7") == {"7": 400}, "though it began after, and ended before, its rows"


def test_an_answer_is_of_its_interval(world: World) -> None:
    """Also that of one job, and the time that jobs were limited."""
    gpu = world.gpus["GPU-0"]
    world.allocate("7")
    for share in (0.5, 0.2):
        gpu.limited = {"heat": share}
        world.tick(100, 100)
        world.accounts.settle()
        world.step_ns += HOUR_S * SECOND_NS
        world.accounts.settle()
    first, whole = [START_S, START_S + HOUR_S], [START_S, START_S + 2 * HOUR_S]
    for span, joules, limited in ((first, 1000, "50 %"), (whole, 2000, "35 %")):
        assert world.usage("job", span) == {"7": joules}
        assert world.usage("job", span, name="7") == {"7": joules}
        (one,) = world.answer("job", span).sums
        assert limited_texts(one) == [f"{limited} limited by heat"]


def test_an_answer_that_would_be_too_long_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeusd.ledger.usage.MAX_ANSWER", 3)
    for number in range(4):
        world.allocate(f"job{number}")
        world.tick(100)
    world.accounts.settle()
    world.step_ns += HOUR_S * SECOND_NS
    world.accounts.settle()
    world.tick(100, 10)
    hours = [START_S, START_S + HOUR_S, START_S + 2 * HOUR_S]
    with pytest.raises(TooManySums, match=r"over 3 sums.* ask for a shorter time, or by user"):
        world.usage("job", hours)
    assert world.usage("user", hours) == {"uid 1000": 140}


def test_days_add_up_in_every_zone(world: World) -> None:
    """A day of 23 hours, of 25, and zones that are not whole hours from UTC."""
    world.allocate("7")
    for _ in range(1500):  # six weeks, in which clocks change on three continents
        world.gpus["GPU-0"].tick(100, 1, every_ns=2400 * SECOND_NS)
    world.accounts.settle()
    zones = "Europe/Paris", "Asia/Kathmandu", "Australia/Lord_Howe"
    for zone in map(ZoneInfo, zones):
        begin = datetime.fromtimestamp(ALL[0] + 39 * 86_400, zone)
        found = edges(begin, begin + timedelta(days=44), zone, daily=True)
        assert len(found) >= 44
        for by in ("user", "job"):
            answer = world.answer(by, found)
            by_day: dict[int, int] = defaultdict(int)
            for one in answer.sums:
                by_day[one.interval] += energy_uj(one)
            assert [by_day[day] for day in range(len(found) - 1)] == answer.metered_uj
            assert sum(by_day.values()) == world.gpus["GPU-0"].energy_uj


@pytest.mark.parametrize(("month", "day", "hours"), [(3, 29, 23), (10, 25, 25)])
def test_a_day_on_which_clocks_change_has_its_hours(month: int, day: int, hours: int) -> None:
    zone = ZoneInfo("Europe/Paris")
    begin = datetime(2026, month, day - 1, 23, tzinfo=zone)
    found = edges(begin, datetime(2026, month, day + 1, 1, tzinfo=zone), zone, daily=True)
    assert found[2] - found[1] == hours * HOUR_S


def test_a_user_sees_the_users_own_rows_and_the_others_as_one_sum(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=4).open()
    for number, uid in enumerate((1000, 1001, 1002)):
        world.allocate(f"job{number}", uid=uid, gpus=[f"GPU-{number}"])
    world.allocate("ml/train", uid=-1, kind="pod", gpus=["GPU-3"])
    world.tick(100, 10)
    assert world.usage("job", reader=1001) == {"job1": 100, "others": 300}
    assert world.usage("user", reader=1001) == {"uid 1001": 100, "others": 300}
    assert world.usage("pod", reader=1001) == {"uid 1001": 100, "others": 300}
    assert world.usage("namespace", reader=1001) == {"uid 1001": 100, "others": 300}
    assert world.usage("namespace") == {
        **{f"uid {uid}": 100 for uid in (1000, 1001, 1002)},
        "ml": 100,
    }
    # No answer to any query is about a single other user.
    assert world.usage("user", reader=1001, uid=1000) == {}
    assert world.usage("job", reader=1001, uid=1000) == {}
    assert world.usage("job", reader=1001, name="job0") == {}
    assert world.usage("total", reader=1001, uid=1000) == {}
    assert world.usage("gpu", reader=1001, uid=1000) == {}
    assert world.usage("job", reader=1001, name="job1") == {"job1": 100}


def test_a_forgotten_user_leaves_every_sum_as_it_was(world: World) -> None:
    world.allocate("7")
    world.tick(100, 10)
    before = world.usage("total")
    assert world.accounts.forget(1000) == 2
    assert world.usage("total") == before
    for by in ("job", "user"):
        assert "7" not in world.usage(by)
        assert "uid 1000" not in world.usage(by)
    stored = world.accounts.stored  # what it counts says that the ledger works again
    assert world.accounts.forget(1000) == 0
    assert world.accounts.stored == stored
    world.tick(100, 10)
    assert world.usage("user")["uid 1000"] == 100
    stored = world.accounts.stored
    world.accounts.close()
    with pytest.raises(sqlite3.Error):
        world.accounts.forget(1000)
    assert world.accounts.stored == stored
    for path in world.directory.iterdir():
        path.unlink()


def expire(world: World, days: int, used: bool = True) -> None:
    """Expires what is old some days after the start, the day after the node was used last."""
    if used:
        day = START_S // 86_400 + days - 1
        world.connection.execute(
            f"INSERT INTO day SELECT {day}, account, method, 0, 0, 0, 0, 0 FROM day LIMIT 1"
        )
    world.store.expire(START_S + days * 86_400, 400, 760)


def test_a_clock_that_is_years_ahead_for_a_while_deletes_no_rows(world: World) -> None:
    world.allocate("7")
    world.tick(100, 10)
    world.accounts.settle()
    expire(world, 3650, used=False)
    world.step_ns += 3650 * 86_400 * SECOND_NS
    world.accounts.settle()
    world.tick(100, 10)
    world.accounts.settle()
    expire(world, 3650, used=False)
    world.step_ns -= 3650 * 86_400 * SECOND_NS
    assert world.usage("job", [START_S - HOUR_S, START_S + HOUR_S])["7"] == 100


def test_old_rows_are_deleted_and_days_stay_longer(world: World) -> None:
    world.allocate("7")
    world.tick(100, 10)
    world.deallocate("7")
    assert world.usage("user") == {"uid 1000": 100}
    expire(world, 401)
    # Its job is gone, its user's day is not, and all still adds up to the meters.
    for by in ("job", "user", "namespace"):
        assert world.usage(by) == {"uid 1000": 100}
    assert world.usage("gpu") == {"GPU-0": 100}
    for some in ([START_S - 2 * HOUR_S, START_S + 100 * HOUR_S], [*range(ALL[0], ALL[1], 86_400)]):
        assert world.usage("user", some) == {"uid 1000": 100}
    world.step_ns += 402 * 86_400 * SECOND_NS
    world.accounts.settle()
    world.allocate("7")  # another one, of a cluster that counts from 1 again
    world.tick(100, 20)
    recent = [ALL[0], ALL[1] + 410 * 86_400]
    assert [*world.usage("job", recent).items()] == [("7", 200), ("uid 1000", 100)]
    expire(world, 761)
    assert world.usage("user", ALL) == {}
    assert world.answer().begins_s == (START_S // 86_400 + 400) * 86_400, "the oldest day of use"


def test_an_account_that_was_never_charged_yet_is_not_deleted_as_old(world: World) -> None:
    world.allocate("ml/train", uid=NOBODY, kind="pod")
    world.store.expire(START_S, 400, 760)
    world.tick(100, 10)
    assert world.usage("namespace", [START_S, START_S + HOUR_S]) == {"ml": 100}
    assert world.usage("pod") == {"ml/train": 100}


def test_a_disk_that_is_full_for_a_while_loses_nothing(world: World) -> None:
    world.allocate("7")
    world.tick(100, 10)
    db = world.connection
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError):
        for number in range(1000):
            world.allocate(f"8{number}" + "x" * 200, uid=number)
    world.tick(100, 10)
    db.execute("PRAGMA max_page_count = 1000000")
    found = world.usage()
    assert sum(found.values()) == 200
    assert found["7"] == 100


def test_a_settlement_that_fails_between_rows_and_position_leaves_neither(world: World) -> None:
    world.tick(100, 10)
    with no_position(world.connection):
        world.accounts.settle()
    for table in ("energy", "gpu", "account"):
        assert world.connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    world.tick(100, 10)
    assert world.usage() == {"no holder": 200}
    assert world.usage("gpu") == {"GPU-0": 200}


@contextlib.contextmanager
def no_position(db: sqlite3.Connection) -> Iterator[None]:
    """A disk on which a settlement fails at its end."""
    db.execute(
        "CREATE TEMP TRIGGER broken BEFORE INSERT ON position "
        "BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END"
    )
    with pytest.raises(sqlite3.DatabaseError, match="disk I/O error"):
        yield
    db.execute("DROP TRIGGER broken")


def fails(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_a_settlement_that_could_not_be_written_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("7")
    world.tick(100, 10)
    world.deallocate("7")
    world.tick(100, 10)

    with monkeypatch.context() as broken:
        broken.setattr(world.store, "settle", fails)
        with pytest.raises(sqlite3.OperationalError):
            world.accounts.settle()
    assert world.usage() == {"7": 100, "no holder": 100}


def test_long_answers_come_in_pages(world: World) -> None:
    for number in range(MAX_SUMS + 20):
        world.allocate(f"job{number}")
        world.tick(100)
    first = world.answer()
    rest = world.answer(offset=len(first.sums))
    assert (first.more, rest.more) == (True, False)
    found = {one.name for one in (*first.sums, *rest.sums)}
    assert found == {f"job{number}" for number in range(MAX_SUMS + 20)}


def test_any_schedule_adds_up_by_every_view(tmp_path: Path) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    world = World(tmp_path, gpus=3).open()
    before_uj = 0
    for _ in range(120):
        kind, name = rng.choice(
            (("job", f"job{rng.randrange(6)}"), ("pod", f"ml{rng.randrange(3)}/a"))
        )
        gpu = f"GPU-{rng.randrange(3)}"
        choice = rng.random()
        if choice < 0.4:
            uid, weight = rng.randrange(-1, 4), rng.randrange(3)
            world.allocate(name, uid=uid, kind=kind, gpus=[gpu], weight=weight)
            if rng.random() < 0.2:
                world.store.expire(START_S, 400, 760)
        elif choice < 0.6:
            world.deallocate(name, kind=kind)
        elif choice < 0.65:
            world.restart()
        elif choice < 0.7:  # a driver is loaded again
            world.accounts.settle()
            world.accounts.close()
            before_uj += world.gpus[gpu].energy_uj
            world.gpus[gpu] = Gpu(world.now_ns + 1)
            world.open()
        elif choice < 0.8:
            world.step_ns += rng.randrange(-HOUR_S, HOUR_S) * SECOND_NS
        elif choice < 0.9:
            world.accounts.settle()
        for one in world.gpus.values():
            one.tick(rng.randrange(700), rng.randrange(30), idle=rng.random() < 0.3)
        world.accounts.work()
    world.accounts.settle()
    truth = before_uj + sum(gpu.energy_uj for gpu in world.gpus.values())
    for by in ("user", "job", "gpu", "total", "namespace", "pod"):
        answer = world.answer(by)
        assert sum(map(energy_uj, answer.sums)) == truth
        assert sum(answer.metered_uj) == truth
    # With any clock, quarters of an hour add up to the whole, and none is negative.
    begin_s = START_S - START_S % 900 - 2 * 86_400
    quarters = [*range(begin_s, begin_s + 4 * 86_400, 900)]
    answer = world.answer("user", quarters)
    assert sum(map(energy_uj, answer.sums)) == sum(answer.metered_uj) == truth
    assert min(min(one.active_uj, one.idle_uj, one.ns) for one in answer.sums) >= 0
    assert min(answer.metered_uj) >= 0
    assert sum(map(energy_uj, world.accounts.totals())) == truth
    assert sum(world.accounts.counted_uj().values()) == truth
    totals, unused = world.accounts.totals(), world.accounts.by_gpu().values()
    nobodys = [one for one in totals if one.kind in ("idle", "unattributed")]
    held = [one for one in totals if one not in nobodys]
    unheld_uj = sum(one.idle_uj + sum(one.unattributed_uj.values()) for one in unused)
    assert sum(map(energy_uj, nobodys)) == unheld_uj
    assert sum(one.idle_uj for one in held) == sum(one.held_idle_uj for one in unused)


def test_jobs_of_half_a_minute_are_all_in_counters_scraped_once_a_minute(world: World) -> None:
    """Prometheus's increase of a user's counter equals the ledger."""
    scraped: list[int] = []

    def scrape() -> None:
        scraped.extend(one.active_uj for one in world.accounts.totals() if one.uid == 1000)

    for number in range(20):
        world.allocate(f"job{number}")
        if not number:
            scrape()
        world.tick(100 + number, 300)
        world.deallocate(f"job{number}")
        world.accounts.settle()
        if number % 2 == 0:
            scrape()
        world.tick(50, 3, idle=True)
    scrape()
    assert scraped == sorted(scraped)
    assert len(scraped) == 12, "the counter is there before there is anything to count"
    stored = world.usage("user")["uid 1000"]
    assert stored == pytest.approx((scraped[-1] - scraped[0]) / 1e6, abs=2)
    assert stored == sum(30 * (100 + number) for number in range(20))


def test_a_jobs_counter_continues_over_restarts_and_ends_some_minutes_after_it(
    world: World,
) -> None:
    world.allocate("7")
    (begun,) = world.accounts.workloads()
    assert (begun.kind, begun.name, begun.uid, begun.active_uj) == ("job", "7", 1000, 0)
    counted = []
    for _ in range(3):
        world.tick(100, 10)
        world.accounts.settle()
        (one,) = world.accounts.workloads()
        counted.append(one.active_uj)
        world.restart()
    assert counted == [100_000_000, 200_000_000, 300_000_000]
    (one,) = world.accounts.workloads()
    assert one.active_uj == 300_000_000
    world.deallocate("7")
    world.tick(100, 10)
    world.accounts.settle()
    assert [one.active_uj for one in world.accounts.workloads()] == [300_000_000]
    world.tick(100, 3100)
    world.accounts.settle()
    assert world.accounts.workloads() == []


def test_a_failure_after_a_stored_settlement_charges_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("7")
    world.tick(100, 10)

    with monkeypatch.context() as patch:
        patch.setattr(Workloads, "settled", fails)
        with pytest.raises(sqlite3.OperationalError):
            world.accounts.settle()
    world.tick(100, 10)
    assert world.usage() == {"7": 200}

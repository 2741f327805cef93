"""The ledger of a node: who is charged, over restarts, reboots, suspends and lost epilogs."""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import seeds
from tests.zeusd.ledger.world import START_S, Gpu, World
from zeus_common.units import SECOND_NS
from zeus_ipc.replies import Usage
from zeus_ipc.requests import MAX_SUMS, NOBODY, Allocate, Deallocate, GetUsage
from zeusctl.entities import limited_texts
from zeusd.core.model import Failure
from zeusd.runtime.accounts import Accounts
from zeusd.runtime.workloads import Workloads

HOUR_S = 3600
SLUID = "sEKNKTV3WPV500"
ALL = [START_S - 40 * 86_400 - START_S % 900, START_S - START_S % 900 + 40 * 86_400]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def allocate(accounts: Accounts, world: World, name: str, uid: int = 1000, **fields: Any) -> None:
    gpus = fields.pop("gpus", ["GPU-0"])
    request = Allocate(id=1, gpus=gpus, name=name, uid=uid, **fields)
    accounts.allocate(request, world.now_ns)


def deallocate(accounts: Accounts, world: World, name: str, **fields: Any) -> list[str]:
    return accounts.deallocate(Deallocate(id=1, name=name, **fields), world.now_ns)


def usage(
    accounts: Accounts,
    by: str = "job",
    edges: list[int] = ALL,
    reader: int | None = None,
    **fields: Any,
) -> dict[str, int]:
    """Joules by name, or else by kind or uid; checks that they add up to the meters."""
    accounts.settle()
    answer = accounts.usage(GetUsage(id=1, edges=edges, by=by, **fields), reader)
    assert isinstance(answer, Usage)
    found: dict[str, int] = defaultdict(int)
    total_uj = 0
    for one in answer.sums:
        energy_uj = one.active_uj + one.idle_uj
        total_uj += energy_uj
        label = one.name or (f"uid {one.uid}" if one.kind == "user" else one.kind)
        found[label + (f"/{one.run}" if one.run else "")] += energy_uj // 1_000_000
    if not fields:
        assert total_uj == sum(answer.metered_uj)
    return dict(found)


def test_a_job_is_charged_for_what_it_held_and_nobody_for_the_rest(world: World) -> None:
    accounts = world.accounts()
    world.tick(50, 10, idle=True)
    allocate(accounts, world, "7")
    world.tick(300, 50)
    assert deallocate(accounts, world, "7") == ["GPU-0"]
    world.tick(300, 10)
    assert usage(accounts) == {"idle": 50, "7": 1500, "no holder": 300}
    assert usage(accounts, "user") == {"idle": 50, "uid 1000": 1500, "no holder": 300}
    assert usage(accounts, "gpu") == {"GPU-0": 1850}
    assert usage(accounts, "total") == {"idle": 50, "total": 1500, "unattributed": 300}


def test_a_job_that_holds_and_does_not_compute_is_charged_as_held_idle(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(80, 50, idle=True)
    accounts.settle()
    answer = accounts.usage(GetUsage(id=1, edges=ALL, by="job"), None)
    assert isinstance(answer, Usage)
    (one,) = answer.sums
    assert (one.active_uj, one.idle_uj) == (0, 400_000_000)
    assert one.methods == ["allocated"]


def test_shards_share_by_weight_and_a_whole_allocation_ends_them(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7", weight=3)
    allocate(accounts, world, "8", uid=1001, weight=1)
    world.tick(100, 10)
    allocate(accounts, world, "9", uid=1002)
    world.tick(100, 10)
    assert usage(accounts) == {"7": 75, "8": 25, "9": 100}
    assert deallocate(accounts, world, "7") == []


def test_the_time_that_a_job_was_limited_is_in_the_ledger_by_cause(world: World) -> None:
    accounts, gpu = world.accounts(), world.gpus["GPU-0"]
    gpu.limited = {"power:rack1": 0.37, "heat": 0.02}
    world.tick(300, 10)  # nobody's
    allocate(accounts, world, "7")
    world.tick(300, 100)
    accounts.settle()
    gpu.limited = {"power:lease": 0.5}
    allocate(accounts, world, "8", uid=1001, weight=1)  # half a GPU each
    allocate(accounts, world, "9", uid=1001, weight=1)
    world.tick(300, 100)
    deallocate(accounts, world, "8")
    accounts.settle()

    def seen(reader: int | None = None, **fields: Any) -> dict[str, list[str]]:
        answer = accounts.usage(GetUsage(id=1, edges=ALL, by="job", **fields), reader)
        return {one.name: limited_texts(one) for one in answer.sums if one.limited_ns}

    whole, part = ["37 % at the ceiling rack1", "2 % limited by heat"], ["50 % at a lease's limit"]
    assert seen() == {"7": whole, "8": part, "9": part}
    assert seen(name="8") == {"8": part}
    assert seen(reader=1000) == {"7": whole}
    expire(world, 401)
    assert seen() == {}
    (rows,) = world.connection.execute("SELECT count(*) FROM limited").fetchone()
    assert rows == 0


def test_a_requeued_job_is_two_runs_and_asking_twice_is_one_holding(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7", run="0")
    allocate(accounts, world, "7", run="0")
    world.tick(100, 10)
    assert deallocate(accounts, world, "7", run="1") == []
    allocate(accounts, world, "7", run="1")
    world.tick(100, 20)
    assert usage(accounts) == {"7/0": 100, "7/1": 200}
    assert usage(accounts, name="7") == {"7/0": 100, "7/1": 200}
    assert deallocate(accounts, world, "7") == ["GPU-0"]


def test_a_lost_epilog_ends_with_the_jobs_control_group(world: World) -> None:
    accounts = world.accounts()
    group = world.groups / "system.slice/slurmstepd.scope/sEKNKTV3WPV500"
    allocate(accounts, world, "7", control_group="sEKNKTV3WPV500")
    for _ in range(30):  # a prolog comes before its job's group
        world.tick(100, 10)
        accounts.work()
    group.mkdir(parents=True)
    for _ in range(30):
        world.tick(100, 10)
        accounts.work()
    group.rmdir()
    accounts.close()
    accounts = world.accounts()  # it was there once, which the next zeusd knows
    for _ in range(30):
        world.tick(100, 10)
        accounts.work()
    found = usage(accounts)
    assert 6000 <= found.pop("7") <= 6500
    assert [*found] == ["no holder"]
    assert deallocate(accounts, world, "7") == []


def test_a_job_with_a_sluid_may_still_have_a_group_with_its_id(world: World) -> None:
    """Slurm 25.11, and 26.05 with `CgroupJobIdPaths=yes`."""
    accounts = world.accounts()
    allocate(accounts, world, "7", run=SLUID, control_group=SLUID)
    group = world.groups / "system.slice/slurmstepd.scope/job_7"
    group.mkdir(parents=True)
    for _ in range(2):
        world.tick(100, 21)
        accounts.work()
    group.rmdir()
    for _ in range(8):
        world.tick(100, 21)
        accounts.work()
    assert [one.gpu for one in accounts.held] == []


def test_a_run_that_begins_ends_an_earlier_one_on_other_gpus(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    accounts = world.accounts()
    allocate(accounts, world, "7", run="0", gpus=["GPU-0"])
    world.tick(100, 10)
    allocate(accounts, world, "7", run="1", gpus=["GPU-1"])
    world.tick(100, 10)
    assert [one.gpu for one in accounts.held] == ["GPU-1"]
    found = usage(accounts)
    assert (found["7/0"], found["7/1"]) == (100, 100)


def test_a_run_is_found_by_its_sluid(world: World) -> None:
    accounts = world.accounts()
    for run in (SLUID, SLUID[:-1] + "1"):
        allocate(accounts, world, "7", run=run)
        world.tick(100, 10)
        deallocate(accounts, world, "7")
    assert usage(accounts, name=SLUID) == {f"7/{SLUID}": 100}
    assert sum(usage(accounts, name="7").values()) == 200
    assert usage(accounts, name="0") == {}


def test_a_suspended_job_keeps_its_gpu_and_is_charged_what_that_draws_idle(world: World) -> None:
    """Its processes are stopped, and still there."""
    accounts = world.accounts()
    allocate(accounts, world, "7")
    group = world.groups / "system.slice/slurmstepd.scope/job_7"
    group.mkdir(parents=True)
    events = group / "cgroup.events"
    events.write_text("populated 1\nfrozen 0\n")
    world.tick(300, 100)
    accounts.work()
    events.write_text("populated 1\nfrozen 1\n")
    for _ in range(30):
        world.tick(50, 20, idle=True)
        accounts.work()
    assert [one.gpu for one in accounts.held] == ["GPU-0"]
    assert usage(accounts) == {"7": 300 * 10 + 50 * 60}
    (one,) = accounts.totals()
    assert 0.95 <= one.idle_uj / (50 * 60 * 1_000_000) <= 1  # the driver reports it once a second
    events.write_text("populated 0\nfrozen 0\n")  # cancelled while it was suspended
    for _ in range(8):
        world.tick(50, 20, idle=True)
        accounts.work()
    assert [one.gpu for one in accounts.held] == []


def test_a_group_that_is_made_again_soon_is_the_same_job(world: World) -> None:
    accounts = world.accounts()
    group = world.groups / "system.slice/slurmstepd.scope/job_7"
    allocate(accounts, world, "7")
    for present in (True, False, True, False, True):
        if present:
            group.mkdir(parents=True, exist_ok=True)
        else:
            group.rmdir()
        for _ in range(6):
            world.tick(100, 10)
            accounts.work()
    assert usage(accounts) == {"7": 3000}


def test_a_restart_loses_nothing_that_someone_held(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    accounts.settle()
    world.tick(100, 10)
    accounts.close()  # killed: nothing more is settled
    world.gpus["GPU-0"].tick(100, 1, every_ns=60 * SECOND_NS)
    accounts = world.accounts()
    world.tick(100, 10)
    assert usage(accounts) == {"7": 100 + 100 + 6000 + 100}


def test_energy_without_a_holder_while_zeusd_was_down_is_unattributed(
    world: World,
) -> None:
    accounts = world.accounts()
    world.tick(100, 20, idle=True)
    accounts.settle()
    accounts.close()
    gpu = world.gpus["GPU-0"]
    gpu.tick(100, 1, idle=True, every_ns=60 * SECOND_NS)
    world.ahead_ns = -SECOND_NS  # zeusd starts before this reading
    accounts = world.accounts()
    world.ahead_ns = 0
    world.tick(100, 10, idle=True)
    assert usage(accounts) == {"idle": 300, "down": 6000}


def test_a_reboot_ends_what_was_held_and_never_charges_more_than_was_counted(
    world: World, tmp_path: Path
) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    accounts.settle()
    world.tick(100, 10)  # lost with the history
    accounts.close()
    after = World(tmp_path)
    after.step_ns = 100 * SECOND_NS
    accounts = after.accounts(boot="boot-2")
    after.tick(100, 10)
    assert usage(accounts) == {"7": 100, "no holder": 100}
    db = sqlite3.connect(after.directory / "energy.db")
    (begin_s, end_s) = db.execute("SELECT begin_s, end_s FROM account WHERE name = '7'").fetchone()
    assert begin_s <= end_s <= begin_s + 1800
    assert db.execute("SELECT count(*) FROM holding").fetchone() == (0,)


def test_a_driver_that_is_loaded_again_begins_a_new_history_without_a_step(tmp_path: Path) -> None:
    """Also if another driver, with its own GPU, stays."""
    world = World(tmp_path, gpus=2)
    accounts = world.accounts()
    allocate(accounts, world, "7")
    allocate(accounts, world, "8", gpus=["GPU-1"])
    world.tick(100, 100)
    accounts.settle()
    accounts.close()
    world.gpus["GPU-0"] = Gpu(world.now_ns + SECOND_NS)
    world.gpus["GPU-1"].tick(100, 10)
    accounts = world.accounts()
    world.tick(100, 10)
    assert usage(accounts) == {"7": 1000 + 100, "8": 1000 + 200}


def test_energy_drawn_during_a_suspend_is_unattributed(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    for _ in range(3):
        world.tick(100, 10)
        accounts.work()
    accounts.settle()
    world.slept_ns += HOUR_S * SECOND_NS
    world.tick(5000, 1)
    accounts.work()
    world.tick(100, 9)
    accounts.work()
    assert usage(accounts) == {"7": 390, "suspend": 500}


def test_steps_of_the_clock_move_later_rows_and_no_sum(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    for step_s in (0, HOUR_S, -HOUR_S, 0):
        world.step_ns = step_s * SECOND_NS
        world.tick(100, 10)
        accounts.settle()
    assert usage(accounts) == {"7": 400}
    db = sqlite3.connect(world.directory / "energy.db")
    rows = dict(db.execute("SELECT bucket, active_uj FROM energy").fetchall())
    now = START_S // 900
    # A step counts from the settlement on that notices it.
    assert rows == {now: 200_000_000, now + 4: 100_000_000, now - 4: 100_000_000}


def test_days_add_up_in_every_zone(tmp_path: Path) -> None:
    """A day of 23 hours, of 25, and zones that are not whole hours from UTC."""
    from datetime import datetime
    from zoneinfo import ZoneInfo

    from zeusctl.usage import edges

    world = World(tmp_path)
    accounts = world.accounts()
    allocate(accounts, world, "7")
    for _ in range(1500):  # six weeks, in which clocks change on three continents
        world.gpus["GPU-0"].tick(100, 1, every_ns=2400 * SECOND_NS)
    accounts.settle()
    for name in (
        "UTC",
        "Europe/Paris",
        "America/New_York",
        "Asia/Kathmandu",
        "Australia/Lord_Howe",
    ):
        zone = ZoneInfo(name)
        begin = datetime.fromtimestamp(ALL[0] + 39 * 86_400, zone)
        end = datetime.fromtimestamp(ALL[0] + 83 * 86_400, zone)
        found = edges(begin, end, zone, daily=True)
        assert len(found) >= 44
        for by in ("user", "job"):
            answer = accounts.usage(GetUsage(id=1, edges=found, by=by), None)
            assert isinstance(answer, Usage)
            by_day: dict[int, int] = defaultdict(int)
            for one in answer.sums:
                by_day[one.interval] += one.active_uj + one.idle_uj
            assert [by_day[day] for day in range(len(found) - 1)] == answer.metered_uj
            assert sum(by_day.values()) == world.gpus["GPU-0"].energy_uj
    spring = [
        int(datetime(2026, 3, day, tzinfo=ZoneInfo("Europe/Paris")).timestamp()) for day in (29, 30)
    ]
    autumn = [
        int(datetime(2026, 10, day, tzinfo=ZoneInfo("Europe/Paris")).timestamp())
        for day in (25, 26)
    ]
    for (first, last), hours in ((spring, 23), (autumn, 25)):
        begin = datetime.fromtimestamp(first - HOUR_S, ZoneInfo("Europe/Paris"))
        end = datetime.fromtimestamp(last + HOUR_S, ZoneInfo("Europe/Paris"))
        found = edges(begin, end, ZoneInfo("Europe/Paris"), daily=True)
        assert found[2] - found[1] == hours * HOUR_S


def test_a_user_sees_the_users_own_rows_and_the_others_as_one_sum(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=4)
    accounts = world.accounts()
    for number, uid in enumerate((1000, 1001, 1002)):
        allocate(accounts, world, f"job{number}", uid=uid, gpus=[f"GPU-{number}"])
    allocate(accounts, world, "ml/train", uid=-1, kind="pod", gpus=["GPU-3"])
    world.tick(100, 10)
    assert usage(accounts, "job", reader=1001) == {"job1": 100, "others": 300}
    assert usage(accounts, "user", reader=1001) == {"uid 1001": 100, "others": 300}
    assert usage(accounts, "pod", reader=1001) == {"uid 1001": 100, "others": 300}
    assert usage(accounts, "namespace", reader=1001) == {"uid 1001": 100, "others": 300}
    assert usage(accounts, "namespace") == {
        **{f"uid {uid}": 100 for uid in (1000, 1001, 1002)},
        "ml": 100,
    }
    # No answer to any query is about a single other user.
    assert usage(accounts, "user", reader=1001, uid=1000) == {}
    assert usage(accounts, "job", reader=1001, uid=1000) == {}
    assert usage(accounts, "job", reader=1001, name="job0") == {}
    assert usage(accounts, "total", reader=1001, uid=1000) == {}
    assert usage(accounts, "gpu", reader=1001, uid=1000) == {}
    assert usage(accounts, "job", reader=1001, name="job1") == {"job1": 100}


def test_a_forgotten_user_leaves_every_sum_as_it_was(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    before = usage(accounts, "total")
    assert accounts.forget(1000) == 2
    assert usage(accounts, "total") == before
    for by in ("job", "user"):
        assert "7" not in usage(accounts, by)
        assert "uid 1000" not in usage(accounts, by)
    stored = accounts.stored  # what it counts says that the ledger works again
    assert accounts.forget(1000) == 0
    assert accounts.stored == stored
    world.tick(100, 10)
    assert usage(accounts, "user")["uid 1000"] == 100
    stored = accounts.stored
    accounts.close()
    with pytest.raises(sqlite3.Error):
        accounts.forget(1000)
    assert accounts.stored == stored
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
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    accounts.settle()
    expire(world, 3650, used=False)
    world.step_ns += 3650 * 86_400 * SECOND_NS
    accounts.settle()
    world.tick(100, 10)
    accounts.settle()
    expire(world, 3650, used=False)
    world.step_ns -= 3650 * 86_400 * SECOND_NS
    assert usage(accounts, "job", [START_S - HOUR_S, START_S + HOUR_S])["7"] == 100


def test_old_rows_are_deleted_and_days_stay_longer(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    deallocate(accounts, world, "7")
    assert usage(accounts, "user") == {"uid 1000": 100}
    expire(world, 401)
    # Its job is gone, its user's day is not, and all still adds up to the meters.
    for by in ("job", "user", "namespace"):
        assert usage(accounts, by) == {"uid 1000": 100}
    assert usage(accounts, "gpu") == {"GPU-0": 100}
    for edges in ([START_S - 2 * HOUR_S, START_S + 100 * HOUR_S], [*range(ALL[0], ALL[1], 86_400)]):
        assert usage(accounts, "user", edges) == {"uid 1000": 100}
    world.step_ns += 402 * 86_400 * SECOND_NS
    accounts.settle()
    allocate(accounts, world, "8")
    world.tick(100, 10)
    recent = [ALL[0], ALL[1] + 410 * 86_400]
    assert usage(accounts, "job", recent) == {"uid 1000": 100, "8": 100}
    expire(world, 761)
    assert usage(accounts, "user", ALL) == {}


def test_an_account_that_was_never_charged_yet_is_not_deleted_as_old(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "ml/train", uid=NOBODY, kind="pod")
    world.store.expire(START_S, 400, 760)
    world.tick(100, 10)
    assert usage(accounts, "namespace", [START_S, START_S + HOUR_S]) == {"ml": 100}
    assert usage(accounts, "pod") == {"ml/train": 100}


def test_a_disk_that_is_full_for_a_while_loses_nothing(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    db = world.connection
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError):
        for number in range(1000):
            allocate(accounts, world, f"8{number}" + "x" * 200, uid=number)
    world.tick(100, 10)
    db.execute("PRAGMA max_page_count = 1000000")
    found = usage(accounts)
    assert sum(found.values()) == 200
    assert found["7"] == 100


def test_a_settlement_that_fails_between_rows_and_position_leaves_neither(world: World) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    db = world.connection
    db.execute(
        "CREATE TEMP TRIGGER broken BEFORE INSERT ON position "
        "BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END"
    )
    with pytest.raises(sqlite3.DatabaseError, match="disk I/O error"):
        accounts.settle()
    assert db.execute("SELECT count(*) FROM energy").fetchone() == (0,)
    db.execute("DROP TRIGGER broken")
    world.tick(100, 10)
    assert usage(accounts) == {"7": 200}


def test_a_settlement_that_could_not_be_written_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)
    deallocate(accounts, world, "7")
    world.tick(100, 10)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(world.store, "settle", fail)
        with pytest.raises(sqlite3.OperationalError):
            accounts.settle()
    assert usage(accounts) == {"7": 100, "no holder": 100}


def test_long_answers_come_in_pages(tmp_path: Path) -> None:
    world = World(tmp_path)
    accounts = world.accounts()
    for number in range(MAX_SUMS + 20):
        allocate(accounts, world, f"job{number}")
        world.tick(100)
    found: set[str] = set()
    more, offset = True, 0
    while more:
        answer = accounts.usage(GetUsage(id=1, edges=ALL, by="job", offset=offset), None)
        assert isinstance(answer, Usage)
        found |= {one.name for one in answer.sums}
        more, offset = answer.more, offset + len(answer.sums)
    assert found == {f"job{number}" for number in range(MAX_SUMS + 20)}
    assert not isinstance(answer, Failure)


def test_any_schedule_adds_up_by_every_view(tmp_path: Path) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    world = World(tmp_path, gpus=3)
    accounts = world.accounts()
    before_uj = 0
    for _ in range(120):
        kind, name = rng.choice(
            (("job", f"job{rng.randrange(6)}"), ("pod", f"ml{rng.randrange(3)}/a"))
        )
        gpu = f"GPU-{rng.randrange(3)}"
        choice = rng.random()
        if choice < 0.4:
            uid, weight = rng.randrange(-1, 4), rng.randrange(3)
            allocate(accounts, world, name, uid=uid, kind=kind, gpus=[gpu], weight=weight)
            if rng.random() < 0.2:
                world.store.expire(START_S, 400, 760)
        elif choice < 0.6:
            deallocate(accounts, world, name, kind=kind)
        elif choice < 0.65:
            accounts.close()
            accounts = world.accounts()
        elif choice < 0.7:  # a driver is loaded again
            accounts.settle()
            accounts.close()
            before_uj += world.gpus[gpu].energy_uj
            world.gpus[gpu] = Gpu(world.now_ns + 1)
            accounts = world.accounts()
        elif choice < 0.8:
            world.step_ns += rng.randrange(-HOUR_S, HOUR_S) * SECOND_NS
        elif choice < 0.9:
            accounts.settle()
        for one in world.gpus.values():
            one.tick(rng.randrange(700), rng.randrange(30), idle=rng.random() < 0.3)
        accounts.work()
    accounts.settle()
    truth = before_uj + sum(gpu.energy_uj for gpu in world.gpus.values())
    for by in ("user", "job", "gpu", "total", "namespace", "pod"):
        answer = accounts.usage(GetUsage(id=1, edges=ALL, by=by), None)
        assert isinstance(answer, Usage)
        assert sum(one.active_uj + one.idle_uj for one in answer.sums) == truth
        assert sum(answer.metered_uj) == truth
    # With any clock, quarters of an hour add up to the whole, and none is negative.
    begin_s = START_S - START_S % 900 - 2 * 86_400
    quarters = [*range(begin_s, begin_s + 4 * 86_400, 900)]
    answer = accounts.usage(GetUsage(id=1, edges=quarters, by="user"), None)
    assert isinstance(answer, Usage)
    assert (
        sum(one.active_uj + one.idle_uj for one in answer.sums) == sum(answer.metered_uj) == truth
    )
    assert min(min(one.active_uj, one.idle_uj, one.ns) for one in answer.sums) >= 0
    assert min(answer.metered_uj) >= 0
    assert sum(one.active_uj + one.idle_uj for one in accounts.totals()) == truth
    assert sum(accounts.counted_uj().values()) == truth
    unused = accounts.by_gpu()
    nobodys = sum(
        one.active_uj + one.idle_uj
        for one in accounts.totals()
        if one.kind in ("idle", "unattributed")
    )
    assert nobodys == sum(
        one.idle_uj + sum(one.unattributed_uj.values()) for one in unused.values()
    )
    held = sum(one.idle_uj for one in accounts.totals() if one.kind not in ("idle", "unattributed"))
    assert sum(one.held_idle_uj for one in unused.values()) == held


def test_jobs_of_half_a_minute_are_all_in_counters_scraped_once_a_minute(world: World) -> None:
    """Prometheus's increase of a user's counter equals the ledger."""
    accounts = world.accounts()
    scraped: list[int] = []
    for number in range(20):
        allocate(accounts, world, f"job{number}", uid=1000)
        if not number:
            scraped += [one.active_uj for one in accounts.totals() if one.uid == 1000]
        world.tick(100 + number, 300)
        deallocate(accounts, world, f"job{number}")
        accounts.settle()
        if number % 2 == 0:
            scraped.append(sum(one.active_uj for one in accounts.totals() if one.uid == 1000))
        world.tick(50, 3, idle=True)
    scraped.append(sum(one.active_uj for one in accounts.totals() if one.uid == 1000))
    assert scraped == sorted(scraped)
    assert len(scraped) == 12, "the counter is there before there is anything to count"
    stored = usage(accounts, "user")["uid 1000"]
    assert stored == pytest.approx((scraped[-1] - scraped[0]) / 1e6, abs=2)
    assert stored == sum(30 * (100 + number) for number in range(20))


def test_a_jobs_counter_continues_over_restarts_and_ends_some_minutes_after_it(
    world: World,
) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    (begun,) = accounts.workloads()
    assert (begun.kind, begun.name, begun.uid, begun.active_uj) == ("job", "7", 1000, 0)
    counted = []
    for _ in range(3):
        world.tick(100, 10)
        accounts.settle()
        (one,) = accounts.workloads()
        counted.append(one.active_uj)
        accounts.close()
        accounts = world.accounts()
    assert counted == [100_000_000, 200_000_000, 300_000_000]
    (one,) = accounts.workloads()
    assert one.active_uj == 300_000_000
    deallocate(accounts, world, "7")
    world.tick(100, 10)
    accounts.settle()
    assert [one.active_uj for one in accounts.workloads()] == [300_000_000]
    world.tick(100, 3100)
    accounts.settle()
    assert accounts.workloads() == []


def test_a_failure_after_a_stored_settlement_charges_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = world.accounts()
    allocate(accounts, world, "7")
    world.tick(100, 10)

    def fails(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Workloads, "settled", fails)
        with pytest.raises(sqlite3.OperationalError):
            accounts.settle()
    world.tick(100, 10)
    assert usage(accounts) == {"7": 200}

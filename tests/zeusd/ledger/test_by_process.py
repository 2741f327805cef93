"""Energy by process, of a GPU that nobody holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.zeusd.ledger.test_accounts import no_position
from tests.zeusd.ledger.test_shared import BOB, Shared
from tests.zeusd.ledger.world import GPU, START_S, energy_uj
from zeus_common.units import SECOND_NS
from zeus_ipc.replies import UsageSum
from zeusd.energy.split import Account, Kind
from zeusd.runtime.accounts import Retention
from zeusd.runtime.activity import Listed

JOB = Account(Kind.JOB, "77", uid=1000)


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    """Processes 1 and 3 are of job 77, process 2 is bob's."""
    found = Shared(tmp_path)
    now_ns = found.gpu.now_ns
    found.accounts.listed(Listed(GPU, now_ns, ()))
    for pid, account in ((1, JOB), (2, BOB), (3, JOB)):
        found.processes.start(pid, now_ns, account)
    return found


def second(shared: Shared, watts: int, *pids: int) -> None:
    shared.gpu.tick(watts, 10)
    shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, pids))


def asked(shared: Shared, **fields: Any) -> list[UsageSum]:
    answer = shared.world.answer("process", **fields)
    if not {*fields} - {"reader"}:
        charged_uj = sum(map(energy_uj, answer.sums))
        assert charged_uj == sum(answer.metered_uj) == shared.gpu.energy_uj
    for one in answer.sums:
        assert 0 <= one.lower_uj <= energy_uj(one) <= one.upper_uj
    return answer.sums


def by_name(sums: Iterable[UsageSum]) -> dict[str, int]:
    return {one.name or one.kind: energy_uj(one) // 10**6 for one in sums}


def test_each_process_has_its_part_and_an_allocation_is_its_holders(shared: Shared) -> None:
    second(shared, 300, 1)
    second(shared, 400, 1, 3)
    second(shared, 300, 1, 2, 3)
    shared.world.allocate("8")
    shared.gpu.tick(500, 10)
    sums = asked(shared)
    processes = {one.name: one for one in sums if one.kind == "process"}
    assert by_name(processes.values()) == {"1": 300 + 200 + 100, "3": 200 + 100, "2": 100}
    of_what = {name: one.workload for name, one in processes.items()}
    assert of_what == {"1": "job 77", "3": "job 77", "2": ""}
    assert {*processes["1"].methods} == {"exclusive", "equal"}
    assert processes["1"].lower_uj == 300_000_000
    (rest,) = [one for one in sums if one.kind == "user"]
    assert (rest.uid, rest.methods, rest.active_uj) == (1000, ["allocated"], 500_000_000)
    assert rest.lower_uj == rest.upper_uj == rest.active_uj


def test_a_pid_that_another_process_has_got_is_another_process(shared: Shared) -> None:
    """On a machine that has slept, which the clock of processes' starts has counted."""
    shared.accounts.close()
    shared.world.slept_ns = 3_600 * SECOND_NS
    shared.open()
    shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, ()))
    shared.processes.start(1, shared.gpu.now_ns + shared.world.slept_ns, JOB)
    second(shared, 300, 1)
    shared.processes.living.pop(1)
    second(shared, 100)  # it went at some time in this second
    shared.processes.start(1, shared.gpu.now_ns + shared.world.slept_ns, JOB)
    second(shared, 200, 1)
    found = [one for one in asked(shared) if one.kind == "process"]
    assert sorted(one.active_uj for one in found) == [200_000_000, 400_000_000]
    assert len({one.run for one in found}) == 2
    assert {one.name for one in found} == {"1"}
    first, later = sorted(found, key=lambda one: one.begin_s)
    assert 1 <= later.begin_s - first.begin_s <= 3
    assert abs(first.begin_s - START_S) <= 1


def test_users_see_their_own_processes_and_the_others_as_one(shared: Shared) -> None:
    second(shared, 300, 1, 2, 3)
    found = by_name(asked(shared, reader=1001))
    assert found == {"2": 100, "others": 200}
    assert by_name(asked(shared, uid=1001)) == {"2": 100}
    assert asked(shared, reader=1001, uid=1000) == []


def test_after_a_week_it_is_the_users(shared: Shared) -> None:
    second(shared, 300, 1, 2)
    assert by_name(asked(shared)) == {"1": 150, "2": 150}
    users = {one.uid: one for one in shared.charged().values()}
    shared.world.store.expire(shared.world.utc_ns() // 10**9 + 9 * 86_400, 400, 760, 7)
    later = {one.uid: one for one in asked(shared)}
    assert {uid: one.kind for uid, one in later.items()} == {1000: "user", 1001: "user"}
    for uid, one in users.items():
        assert later[uid].active_uj == one.active_uj
    assert shared.world.connection.execute("SELECT count(*) FROM process").fetchone() == (0,)
    second(shared, 300, 1, 2)
    assert by_name(one for one in asked(shared) if one.kind == "process") == {"1": 150, "2": 150}


def test_what_a_process_used_in_a_part_of_a_day_and_in_whole_days_adds_up(shared: Shared) -> None:
    for _ in range(2):
        second(shared, 300, 1, 2)
        shared.accounts.settle()
        shared.world.step_ns += 2 * 86_400 * SECOND_NS
        shared.accounts.settle()
    found = asked(shared, edges=[START_S, START_S + 4 * 86_400])
    assert by_name(found) == {"1": 300, "2": 300}


def test_nothing_is_kept_by_process_where_none_is_wanted(shared: Shared, tmp_path: Path) -> None:
    shared.accounts.close()
    shared.open(retention=Retention(processes=0))
    shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, ()))
    second(shared, 300, 1, 2)
    assert {one.kind for one in asked(shared)} == {"user"}


def test_a_restart_keeps_what_is_known_by_process(shared: Shared) -> None:
    """Also after a settlement that failed, and once a user is forgotten."""
    second(shared, 300, 1)
    with no_position(shared.world.connection):
        shared.accounts.settle()
    before = asked(shared)
    assert by_name(before) == {"1": 300}
    shared.accounts.close()
    shared.open()
    assert asked(shared) == before
    shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, (1,)))
    second(shared, 300, 1)
    asked(shared)
    assert shared.accounts.forget(1000) > 0
    second(shared, 100, 1)
    assert {energy_uj(one) for one in asked(shared) if one.uid == 1000} == {100_000_000}


def test_it_is_known_when_who_used_which_gpu(shared: Shared) -> None:
    """To the list of each second: what ended before an interval was not in it."""
    begin_ns = shared.gpu.now_ns
    second(shared, 300, 1)
    second(shared, 400, 1, 2)
    second(shared, 300, 2)
    spans = {
        one.name: [
            (ms - shared.world.utc_ns_at(begin_ns) // 10**6) / 1000
            for ms in (one.first_ms, one.last_ms)
        ]
        for one in asked(shared)
        if one.kind == "process"
    }
    assert spans["1"][0] == 0
    assert 2 <= spans["1"][1] <= 3
    assert 1 <= spans["2"][0] <= 2
    assert spans["2"][1] >= 3
    assert asked(shared, gpus=["GPU-elsewhere"]) == []
    assert sum(map(energy_uj, asked(shared, gpus=[GPU]))) == shared.gpu.energy_uj

"""Charges for a GPU that several users share, compared with the truth."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests import seeds
from tests.zeusd.ledger.world import GPU, World, energy_uj
from tests.zeusd.runtime.test_presence import Processes
from zeus_common.units import SECOND_NS
from zeusd.energy.split import Account, Kind
from zeusd.ledger.usage import Sum
from zeusd.runtime.activity import Activity, Listed, PidUse

IDLE_W = 75
ALICE, BOB = Account(Kind.USER, uid=1000), Account(Kind.USER, uid=1001)
WATTS = {1: 400, 2: 150}
METHODS = ("equal", "utilization")


class Shared:
    """A GPU that two processes use, and the true energy of each."""

    def __init__(self, directory: Path) -> None:
        self.world = World(directory)
        self.gpu = self.world.gpus[GPU]
        self.processes = Processes()
        self.truth_uj = {1: 0, 2: 0}
        self.open()

    def open(self, **options: Any) -> None:
        """A zeusd starts, which knows the processes of this world."""
        self.accounts = self.world.open(ignored_units=["dcgm*"], **options).accounts
        assert self.accounts._presence is not None
        self.accounts._presence._identities = self.processes

    def idle(self, seconds: int) -> None:
        self.gpu.tick(IDLE_W, 10 * seconds, idle=True)

    def second(self, active: list[set[int]], begin: int | None = None) -> None:
        """Ten ticks, in each of which some of the processes compute, in fair turns."""
        begin_ns = self.gpu.now_ns
        ticks = dict.fromkeys(WATTS, 0.0)
        for pids in active:
            watts = sum(WATTS[pid] for pid in pids) // max(1, len(pids))
            for pid in pids:
                ticks[pid] += 1 / len(pids)
                self.truth_uj[pid] += WATTS[pid] * SECOND_NS // 10_000 // len(pids)
            self.gpu.tick(IDLE_W + watts)
        for pid in WATTS:
            self.truth_uj[pid] += IDLE_W * SECOND_NS // 2000  # idle power, by rule
        end_ns = self.gpu.now_ns
        uses = tuple(
            PidUse(pid, end_ns, round(1000 * 10 * part)) for pid, part in ticks.items() if part
        )
        activity = Activity(begin_ns, uses)
        self.accounts.listed(Listed(GPU, end_ns, (1, 2), activity))

    def charged(self) -> dict[int, Sum]:
        answer = self.world.answer("user")
        assert sum(map(energy_uj, answer.sums)) == sum(answer.metered_uj)
        return {one.uid: one for one in answer.sums if one.kind == "user"}


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    found = Shared(tmp_path)
    found.idle(20)
    found.accounts.listed(Listed(GPU, found.gpu.now_ns, ()))
    now_ns = found.gpu.now_ns
    found.processes.start(1, now_ns, ALICE)
    found.processes.start(2, now_ns, BOB)
    return found


def test_notebooks_are_charged_within_bounds_that_hold_the_truth(shared: Shared) -> None:
    """Each computes for a while and pauses for longer, as notebooks do."""
    rng = random.Random(seeds.fresh())
    on, until = {1: False, 2: False}, {1: 0, 2: 0}
    for second in range(240):
        active = []
        for tick in range(10):
            for pid in WATTS:
                if second * 10 + tick >= until[pid]:
                    on[pid] = not on[pid]
                    mean = 100 if on[pid] else 250
                    until[pid] = second * 10 + tick + 1 + round(rng.expovariate(1 / mean))
            active.append({pid for pid in WATTS if on[pid]})
        shared.second(active)
    found = shared.charged()
    for uid, pid in ((1000, 1), (1001, 2)):
        one, truth = found[uid], shared.truth_uj[pid]
        assert one.lower_uj <= one.active_uj + one.idle_uj <= one.upper_uj
        # Rounding of a second's idle power to ticks: below a millionth.
        assert one.lower_uj - 1000 <= truth <= one.upper_uj + 1000
    methods = {method for one in found.values() for method in one.methods}
    assert "utilization" in methods


def test_turns_that_do_not_overlap_are_charged_exactly(shared: Shared) -> None:
    for _ in range(30):
        shared.second([{1}] * 10)
        shared.second([{2}] * 10)
    for uid, pid in ((1000, 1), (1001, 2)):
        one = shared.charged()[uid]
        assert one.active_uj + one.idle_uj == pytest.approx(shared.truth_uj[pid], rel=0.001)
        assert one.methods == ["utilization"]
        assert one.lower_uj == one.upper_uj


def test_two_that_hold_parts_share_by_use_and_idle_power_by_their_parts(shared: Shared) -> None:
    """Slurm's shards: a job's processes are found by its control group."""
    now_ns = shared.gpu.now_ns
    shared.processes.start(1, now_ns, Account(Kind.JOB, "7", uid=1000))
    shared.processes.start(2, now_ns, Account(Kind.JOB, "sEKNKTV3WPV500", uid=1001))
    jobs = (("7", 1000, "7", 3), ("8", 1001, "sEKNKTV3WPV500", 1))
    for name, uid, group, weight in jobs:
        shared.world.allocate(name, uid=uid, run="0", weight=weight, control_group=group)
    for _ in range(20):
        shared.second([{2}] * 10)
    found = shared.charged()
    assert found[1000].active_uj == pytest.approx(20e6 * IDLE_W * 3 / 4, rel=0.01)
    assert found[1001].active_uj == pytest.approx(20e6 * (IDLE_W / 4 + 150), rel=0.01)
    assert found[1001].methods == ["utilization"]


def test_a_part_beside_one_that_nobody_holds_is_not_charged_the_whole_gpu(shared: Shared) -> None:
    shared.gpu.tick(IDLE_W, 10)
    shared.charged()
    shared.world.allocate("7", weight=3, parts=7)
    shared.gpu.tick(700, 10)
    shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, ()))
    one = shared.charged()[1000]
    # 75 W idle are shared by size, and so is the rest, which nobody measured.
    assert one.active_uj + one.idle_uj == 300_000_000
    assert one.lower_uj < 300_000_000 < one.upper_uj < 700_000_000
    assert one.methods == ["weights"]


def test_processes_that_only_hold_memory_have_used_nothing(shared: Shared) -> None:
    """Each second, on any GPU where two of them wait; no list is lost for it."""
    for _ in range(3):
        begin_ns = shared.gpu.now_ns
        shared.gpu.tick(IDLE_W, 10, idle=True)
        activity = Activity(begin_ns, ())
        shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, (1, 2), activity))
    shared.charged()  # adds up
    answer = shared.world.answer("user")
    assert sum(answer.metered_uj) == shared.gpu.energy_uj  # all is known until now


def test_use_of_nobody_that_is_known_is_unattributed(shared: Shared) -> None:
    shared.second([{1}] * 10)
    begin_ns = shared.gpu.now_ns
    shared.gpu.tick(300, 10)
    uses = (PidUse(1, shared.gpu.now_ns, 50), PidUse(99, shared.gpu.now_ns, 50))
    shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, (1, 2), Activity(begin_ns, uses)))
    sums = shared.world.answer("account").sums
    (unknown,) = [one for one in sums if one.name == "unknown process"]
    assert unknown.active_uj == pytest.approx(25e6 + 112.5e6, rel=0.01)


def test_each_method_has_bounds_of_its_own_kind(shared: Shared) -> None:
    """Measured for a while, then not measured: two sums, and a counter of each."""
    accounts, gpu = shared.accounts, shared.gpu
    for _ in range(10):
        shared.second([{1, 2}] * 10)
    for _ in range(10):
        gpu.tick(IDLE_W + 300, 10)
        accounts.listed(Listed(GPU, gpu.now_ns, (1, 2)))
    whole = shared.charged()
    answer = shared.world.answer("user", by_method=True)
    found = {(one.uid, *one.methods): one for one in answer.sums if one.kind == "user"}
    assert {*found} == {(uid, method) for uid in (1000, 1001) for method in METHODS}
    for uid in (1000, 1001):
        parts = [found[uid, method] for method in METHODS]
        for amount in ("active_uj", "idle_uj", "lower_uj", "upper_uj", "ns"):
            total = sum(getattr(part, amount) for part in parts)
            assert total == getattr(whole[uid], amount)
    counters = {one.uid: one.estimates for one in accounts.totals() if one.kind == "user"}
    for (uid, method), one in found.items():
        (part,) = [part for part in counters[uid] if part.method == method]
        bounds_uj = one.lower_uj, one.upper_uj
        assert (part.energy_uj, part.lower_uj, part.upper_uj) == (energy_uj(one), *bounds_uj)
    (gpus,) = shared.world.answer("gpu").sums  # the total is certain, only the shares are not
    assert gpus.lower_uj == gpus.upper_uj == gpu.energy_uj


def test_settling_often_changes_no_bound(tmp_path: Path) -> None:
    found = []
    for often in (False, True):
        shared = Shared(tmp_path / str(often))
        shared.idle(10)
        shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, ()))
        shared.processes.start(1, shared.gpu.now_ns, ALICE)
        shared.processes.start(2, shared.gpu.now_ns, BOB)
        for second in range(12):
            shared.second([{1 + second % 2}] * 5 + [{1, 2}] * 5)
            shared.gpu.tick(IDLE_W, 3)
            if often:
                shared.accounts.settle()
            shared.accounts.listed(Listed(GPU, shared.gpu.now_ns, (1, 2)))
        charged = shared.charged().items()
        found.append({uid: (one.active_uj, one.lower_uj, one.upper_uj) for uid, one in charged})
    assert found[0] == found[1]


def test_any_schedule_of_parts_processes_and_failures_adds_up(tmp_path: Path) -> None:
    rng = random.Random(seeds.fresh())
    shared = Shared(tmp_path)
    accounts, processes, gpu = shared.accounts, shared.processes, shared.gpu
    owners = [
        ALICE,
        BOB,
        Account(Kind.JOB, "job1", uid=1002),
        Account(Kind.SERVICE, "dcgm.service"),
        Account(Kind.POD, "unknown/uid-2"),
    ]
    for _ in range(150):
        begin_ns = gpu.now_ns
        gpu.tick(rng.randrange(700), rng.randrange(1, 25), idle=rng.random() < 0.3)
        now_ns, choice = gpu.now_ns, rng.random()
        if choice < 0.25:
            number, parts = rng.randrange(3), rng.choice((0, 7))
            weight = rng.randrange(4) if not parts else rng.randrange(1, 4)
            kind, name = ("pod", "ml/pod2") if number == 2 else ("job", f"job{number}")
            size = {"weight": weight, "parts": parts, "control_group": f"uid-{number}"}
            shared.world.allocate(name, uid=1000 + number, kind=kind, **size)
        elif choice < 0.4:
            shared.world.deallocate(f"job{rng.randrange(2)}")
        elif choice < 0.9:
            for pid in {*processes.living} - {1, 2}:
                if rng.random() < 0.3:
                    processes.living.pop(pid)
            pid = rng.randrange(3, 12)
            if pid not in processes.living:
                processes.start(pid, now_ns - rng.randrange(2 * SECOND_NS), rng.choice(owners))
            pids = tuple(rng.sample(range(3, 14), rng.randrange(6)))
            uses = tuple(
                PidUse(pid, rng.randrange(begin_ns, now_ns + 1), rng.randrange(1, 9999))
                for pid in (*pids, 0)
                if rng.random() < 0.6
            )
            activity = Activity(begin_ns, uses, rng.random() < 0.7)
            accounts.listed(Listed(GPU, now_ns, pids, activity))
        elif choice < 0.95:
            accounts.listed(Listed(GPU, now_ns, None))
        else:
            accounts.settle()
        accounts.work()
    gpu.tick(100, 10 * 20)  # longer than a list may be late
    accounts.settle()
    for by in ("account", "user", "job", "pod", "process", "gpu", "total"):
        answer = shared.world.answer(by)
        assert sum(map(energy_uj, answer.sums)) == gpu.energy_uj
        for one in answer.sums:
            assert 0 <= one.lower_uj <= energy_uj(one) <= one.upper_uj
    assert {one.kind for one in answer.sums} <= {"total", "idle", "unattributed"}

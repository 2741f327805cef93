"""Processes that search together, all in this one: real optimizers, links and leader over a store
that is a dictionary, devices of arithmetic, and a clock that passes only by training.
"""

from __future__ import annotations

import heapq
import json
import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeus.exceptions import ZeusGPUInvalidArgError, ZeusGPUNoPermissionError
from zeus.optimizer import GlobalPowerLimitOptimizer
from zeus.optimizer.power_limit import Done, Energy, Time, ZeusCost, link, shell
from zeus.optimizer.power_limit import optimizer as product
from zeus.optimizer.power_limit.leader import SILENCE_S, Leader
from zeus.optimizer.power_limit.link import LinkError, Together, connect
from zeus.optimizer.power_limit.messages import Choose, Hello, Piece, Trouble, Try
from zeus.optimizer.power_limit.profile import load
from zeus.optimizer.power_limit.search import Exhaustive, Search
from zeus.utils import framework

HIGH, LOW = 300_000, 150_000
MAX_Q = 1
SMALL: dict[str, Any] = {"warmup_steps": 2, "profile_steps": 16, "pl_step": 50}


def seconds_at(limit: int) -> float:
    """Of a step, for a process that is neither fast nor slow."""
    return 1 + 0.5 * max(0, 250_000 - limit) / 250_000


def joules_at(limit: int) -> float:
    """Of a step on one GPU, of a weight of 1."""
    return seconds_at(limit) * min(limit, 250_000) / 1000


class Party:
    """All processes of a job.

    Args:
        world: How many.
        step_s: Of a step at the highest limit, of a process that is not slow.
        ripe_s: A window's energy is there this long after its end.
        delay_s: What one process writes is seen by others so much later; called for each note.
        randomness: In which order processes begin a step.
        options: Of every optimizer.
    """

    def __init__(
        self,
        world: int,
        *,
        step_s: float = 1.0,
        ripe_s: float = 0.15,
        delay_s: Callable[[], float] = lambda: 0.0,
        randomness: random.Random | None = None,
        **options: Any,
    ) -> None:
        self.step_s = step_s
        self.ripe_s = ripe_s
        self.delay_s = delay_s
        self.randomness = randomness or random.Random(1)
        self.options = {**SMALL, **options}
        self.now_s = 1000.0
        self.steps = 0
        self.notes: dict[str, tuple[bytes, float, int]] = {}
        self.counts: dict[str, list[tuple[int, float, int]]] = {}
        self.processes = [Process(self, rank) for rank in range(world)]
        self.current = self.processes[0]
        self.met = True

    @property
    def world(self) -> int:
        """As torch.distributed says, which may not be initialised yet."""
        return len(self.processes) if self.met else 1

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def begin(self) -> Party:
        """Every process makes its optimizer."""
        for process in self.processes:
            process.begin()
        return self

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if not process.dead]

    def done(self) -> bool:
        return all(process.done for process in self.living)

    def run(self, steps: int, *, until_done: bool = True) -> Party:
        """In lockstep: the next step begins where the slowest process has ended the last."""
        for _ in range(steps):
            if until_done and self.done():
                break
            order = list(self.living)
            self.randomness.shuffle(order)
            for process in order:
                process.step()
            self.now_s += max((process.lasts for process in order), default=self.step_s)
            self.steps += 1
        return self

    def run_free(self, steps: int, *, until_done: bool = True) -> Party:
        """Each process on its own. `steps` are of the one that has made the most."""
        due = [(self.now_s + self.randomness.random(), process.rank) for process in self.living]
        heapq.heapify(due)
        while due and not (until_done and self.done()):
            self.now_s, rank = heapq.heappop(due)
            process = self[rank]
            if process.dead:
                continue
            if process.steps >= steps:
                break
            process.step()
            heapq.heappush(due, (self.now_s + process.lasts, rank))
        self.steps = max(process.steps for process in self.processes)
        return self

    def search(self) -> Search:
        """That of the leader."""
        lead = self[0].leader
        assert lead.search is not None
        return lead.search

    def assert_chosen(self, limit_w: int | None = None) -> int:
        """All hold one limit that the search has measured, by choice. Returns it, mW."""
        assert self.done()
        limits = {process.limit for process in self.living}
        assert len(limits) == 1, limits
        for process in self.living:
            assert not process.optimizer.disabled
            assert process.optimizer.current_power_limit == process.limit
        (limit,) = limits
        assert limit_w is None or limit == limit_w * 1000
        assert limit in [one.power_limit_mw for one in self[0].optimizer.estimates]
        return limit

    def assert_given_up(self) -> None:
        """All are at their highest limit, and search no more."""
        assert self.done()
        for process in self.living:
            assert process.optimizer.disabled
            assert process.limit == process.high

    def assert_whole(self) -> None:
        """Each sample holds every process exactly once, and counts the slowest."""
        lead = self[0].leader
        assert lead.search is not None
        everyone = sum(process.weight * process.gpu_count for process in self.processes)
        slowest = max(process.slow for process in self.processes)
        for sample in lead.search.samples:
            limit = sample.power_limit_mw
            assert sample.energy_j / sample.steps == pytest.approx(
                joules_at(limit) * everyone * self.step_s, rel=1e-9
            )
            expected = seconds_at(limit) * slowest * self.step_s
            assert sample.time_s / sample.steps == pytest.approx(expected, rel=1e-9)


@dataclass
class Taken:
    """As `Measurement`."""

    process: Process
    time: float
    joules: float
    ended_s: float

    def look_up(self) -> None:
        if self.process.blind:
            raise ZeusGPUNoPermissionError("no sensor") from PermissionError()

    @property
    def total_energy(self) -> float:
        return self.joules

    @property
    def uncertainty(self) -> float:
        return 0.001 * self.joules


class Monitor:
    """As `ZeusMonitor`, of what a process computes itself: waiting for others takes no time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.gpu_indices = list(range(process.gpu_count))
        self.gpus = Gpus(process)
        self.measurement_states: dict[str, tuple[float, float]] = {}

    def begin_window(self, name: str, restart: bool = False) -> None:
        assert restart or name not in self.measurement_states
        self.measurement_states[name] = self._process.busy_s, self._process.joules

    def end_window(self, name: str, cancel: bool = False) -> Taken:
        busy_s, joules = self.measurement_states.pop(name)
        process = self._process
        return Taken(process, process.busy_s - busy_s, process.joules - joules, process.party.now_s)

    def ripe(self, taken: Taken) -> bool:
        return self._process.party.now_s - taken.ended_s >= self._process.party.ripe_s


class Gpus:
    """As `GPUs`, and each of them."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __getitem__(self, index: int) -> Gpus:
        return self

    @property
    def uuid(self) -> str:
        return f"GPU-{id(self._process)}"

    def with_power_limit(self, gpu_indices: list[int], alone: bool = True) -> list[int]:
        return [] if self._process.second else gpu_indices

    def owners_of_limits(self, gpu_indices: list[int]) -> list[Gpus]:
        return [self]

    def bounded_by(self, indices: list[int], ceiling: str) -> bool | None:
        return None  # no power budget over many nodes

    def publish_profile(self, indices: list[int], progress: dict[int, float]) -> None:
        assert all(0 < speed <= 1 for speed in progress.values())

    def get_name(self) -> str:
        return "GPU"

    def get_supported_power_profiles(self) -> list[str]:
        return ["max-p", "max-q"]

    def set_power_profiles_of(self, indices: list[int], profiles: list[int]) -> None:
        if self._process.refuses_profiles and profiles:
            raise ZeusGPUInvalidArgError("max-q is not in force")
        self._process.profiles = list(profiles)

    def get_power_management_limit(self) -> int:
        return self._process.limit

    def get_power_management_limit_constraints(self) -> tuple[int, int]:
        return self._process.low, self._process.high

    def get_persistence_mode(self) -> bool:
        return True

    def set_power_management_limits(self, indices: list[int], limit: int) -> None:
        process = self._process
        if not indices:
            return
        if process.denied:
            raise ZeusGPUNoPermissionError("not allowed here")
        if limit in process.refuses:
            raise ZeusGPUInvalidArgError(f"{limit / 1000:g} W is not taken")
        assert process.low <= limit <= process.high
        process.limit = limit
        process.limits.append((process.steps, limit))

    def release_all(self, indices: list[int]) -> None:
        self._process.limit, self._process.profiles = self._process.high, []


@dataclass
class Process:
    """One process: a training loop of steps and what goes wrong in it."""

    party: Party
    rank: int
    low: int = LOW
    high: int = HIGH
    gpu_count: int = 1
    slow: float = 1.0
    refuses: set[int] = field(default_factory=set)
    denied: bool = False
    blind: bool = False
    cut_off: bool = False
    dead: bool = False
    refuses_profiles: bool = False
    second: bool = False
    """Its GPU is the second die of a card, whose limit and energy are the first one's."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = 1 + 2**self.rank / 1000  # no other sum of them is that of all
        self.limit = self.high
        self.limits: list[tuple[int, int]] = []
        self.plan: dict[int, list[Callable[[], None]]] = {}
        self.parties = 0
        self.steps = 0
        self.busy_s = self.joules = 0.0
        self.profiles: list[int] = []
        self.calls = 0
        self.seen_s = 0.0

    def __next__(self) -> int:
        self.parties += 1
        return self.parties

    def begin(self) -> None:
        self.party.current = self
        self.limit = self.high
        options = {**self.party.options, **self.options}
        self.optimizer = GlobalPowerLimitOptimizer(Monitor(self), **options)  # type: ignore[arg-type]

    @property
    def leader(self) -> Leader:
        assert self.led is not None
        return self.led

    @property
    def led(self) -> Leader | None:
        found = self.optimizer._shell.link
        if found is not None:
            self._led = found.leader
        return getattr(self, "_led", None)

    @property
    def done(self) -> bool:
        return isinstance(self.optimizer.state, Done)

    @property
    def lasts(self) -> float:
        return self.party.step_s * self.slow * seconds_at(self.limit)

    def step(self) -> None:
        for event in self.plan.pop(self.steps, []):
            event()
        if self.dead:
            return
        self.call("on_step_begin")
        _ = self.led
        self.busy_s += self.lasts
        joules = joules_at(self.limit) * (0.8 if MAX_Q in self.profiles else 1.0)
        self.joules += self.party.step_s * self.weight * self.gpu_count * joules
        self.steps += 1

    def call(self, what: str, *arguments: Any) -> None:
        """What a training loop calls."""
        self.party.current = self
        getattr(self.optimizer, what)(*arguments)

    def at(self, step: int, event: Callable[[], None]) -> None:
        """Has something happen before a step."""
        self.plan.setdefault(step, []).append(event)

    def end(self) -> None:
        """Its training ends in order."""
        self.call("on_train_end")
        assert self.limit == self.high
        self.dead = True

    def die(self) -> None:
        """kill -9: zeusd puts its limits back."""
        self.dead = True
        self.limit = self.high


class Store:
    """As a store of torch.distributed, seen by whichever process runs."""

    def __init__(self, party: Party, prefix: str = "") -> None:
        self._party = party
        self._prefix = prefix

    def within(self, prefix: str) -> Store:
        return Store(self._party, f"{self._prefix}{prefix}/")

    def set(self, key: str, note: bytes) -> None:
        seen_s, rank = self._call()
        assert self._prefix + key not in self._party.notes, "a note is written once"
        self._party.notes[self._prefix + key] = note, seen_s, rank

    def check(self, keys: list[str]) -> bool:
        _, rank = self._call()
        return all(self._seen(*self._party.notes[one][1:], rank) for one in self._named(keys))

    def get(self, key: str) -> bytes:
        _, rank = self._call()
        note, seen_s, by = self._party.notes[self._prefix + key]
        assert self._seen(seen_s, by, rank), "a real store would wait here"
        return note

    def add(self, key: str, more: int) -> int:
        seen_s, rank = self._call()
        counts = self._party.counts.setdefault(self._prefix + key, [])
        if more:
            counts.append((more, seen_s, rank))
        return sum(one for one, when_s, by in counts if self._seen(when_s, by, rank))

    def _named(self, keys: list[str]) -> list[str]:
        found = [self._prefix + key for key in keys]
        return found if all(one in self._party.notes for one in found) else [NOWHERE]

    def _seen(self, seen_s: float, by: int, rank: int) -> bool:
        return by == rank or seen_s <= self._party.now_s

    def _call(self) -> tuple[float, int]:
        party, process = self._party, self._party.current
        process.calls += 1
        if process.cut_off:
            raise RuntimeError("Broken pipe")
        party.notes.setdefault(NOWHERE, (b"", float("inf"), -1))
        # In the order of writing.
        process.seen_s = max(process.seen_s, party.now_s + party.delay_s())
        return process.seen_s, process.rank


NOWHERE = "nowhere"
MakeParty = Callable[..., Party]


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> MakeParty:
    """Makes a party, and has this process take itself for whichever of its processes runs."""
    now: list[Party] = []
    monkeypatch.setattr(framework, "world_size", lambda: now[-1].world)
    monkeypatch.setattr(framework, "rank", lambda: now[-1].current.rank * now[-1].met)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(framework, "store", lambda timeout: Store(now[-1]))
    monkeypatch.setattr(framework, "prefixed", lambda prefix, store: store.within(prefix))
    for module in (product, shell):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[-1].now_s))

    class Counting:
        def __next__(self) -> int:
            return next(now[-1].current)

    monkeypatch.setattr(link, "_parties", Counting())

    def make(world: int, **options: Any) -> Party:
        now.append(Party(world, **options))
        return now[-1]

    return make


def most_steps(party: Party, silent: bool = False) -> int:
    """A search's steps at most, those until silence is noticed, and what waiting for energies and
    for each other takes."""
    limits = (HIGH - LOW) // (party.options["pl_step"] * 1000) + 1
    every = limits * (party.options["warmup_steps"] + party.options["profile_steps"])
    fastest = party.step_s * min(process.slow for process in party.processes)
    waits = int(SILENCE_S / fastest) if silent else 0
    return 2 * every + limits * (10 + int(2 * party.ripe_s / party.step_s)) + waits + 200


# ------------------------------------------------------------------------------------ in agreement


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_choose_the_same_of_the_energy_of_all_and_the_time_of_the_slowest(
    party: MakeParty, world: int, search: str
) -> None:
    job = party(world, search=search)
    job[world - 1].slow = 1.7
    job[0].gpu_count = 3
    job.begin().run(500)
    chosen = job.assert_chosen()
    job.assert_whole()
    assert job.search().samples
    cost = ZeusCost(0.5, world_size=world + 2)
    assert cost.select(job[0].optimizer.measurements) * 1000 == chosen
    assert all(one.optimizer.measurements == job[0].optimizer.measurements for one in job.processes)


@pytest.mark.parametrize(("selector", "limit_w"), [(Time(), 300), (Energy(), 150)])
def test_the_selector_of_rank_0_decides(party: MakeParty, selector: Any, limit_w: int) -> None:
    job = party(4)
    for process in job.processes:
        process.options["optimum_selector"] = selector if process.rank == 0 else ZeusCost(0.5)
    job.begin().run(500)
    chosen = job.assert_chosen()
    assert chosen == limit_w * 1000 or (limit_w == 300 and chosen == 250_000)


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("seed", range(4))
def test_in_lockstep_all_change_limits_at_the_same_steps(
    party: MakeParty, search: str, seed: int
) -> None:
    # Within a step processes come in any order: who begins it before rank 0 sees no command of it.
    job = party(4, search=search, randomness=random.Random(seed)).begin().run(500)
    assert len(job[0].limits) > 2
    for process in job.processes[1:]:
        assert process.limits == job[0].limits


def test_one_that_begins_a_step_early_changes_limits_with_the_others(party: MakeParty) -> None:
    job = party(2, search="exhaustive").begin()
    ahead = job[1]
    while not job.done():
        ahead.step()  # it is one step ahead when rank 0 decides
        if job.steps:
            job[0].step()
        job.now_s += 1
        job.steps += 1
        assert job.steps < 200
    assert ahead.limits == job[0].limits


@pytest.mark.parametrize("step_s", [0.003, 0.02, 0.1])
@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
def test_steps_shorter_than_the_sensors_ticks(party: MakeParty, step_s: float, search: str) -> None:
    job = party(4, step_s=step_s, search=search).begin()
    job.run(most_steps(job))
    job.assert_chosen()
    job.assert_whole()


def test_when_nothing_is_new_a_step_costs_one_question_to_the_store(party: MakeParty) -> None:
    job = party(4, warmup_steps=100).begin().run(10, until_done=False)
    before = [process.calls for process in job.processes]
    job.run(20, until_done=False)
    leads, *follow = [
        process.calls - calls for process, calls in zip(job.processes, before, strict=True)
    ]
    assert leads <= 22
    assert max(follow) <= 22


# ---------------------------------------------------------------------------- unequal processes


def test_the_limits_are_those_that_all_take(party: MakeParty) -> None:
    job = party(3, optimum_selector=Energy())
    job[1].low, job[1].high = 200_000, 350_000
    job[2].low, job[2].high = 100_000, 250_000
    job.begin()
    for process in job.processes:
        assert process.limit == process.high
    job.run(500)
    job.assert_chosen(200)
    job.assert_whole()
    assert {one.power_limit_mw for one in job.search().samples} <= {250_000, 200_000}


def test_where_no_limit_is_taken_by_all_nothing_is_tried(party: MakeParty) -> None:
    job = party(2)
    job[1].low, job[1].high = 310_000, 400_000
    with pytest.warns(UserWarning, match="no power limit that all GPUs of this job take"):
        job.begin().run(50)
    job.assert_given_up()
    assert job[1].limits == [(0, 400_000)]


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("refused", [250_000, 200_000, 150_000])
@pytest.mark.parametrize("who", [(0,), (2,), (1, 2)])
@pytest.mark.parametrize("step_s", [1.0, 0.03])
def test_a_limit_that_one_refuses_is_left_out_by_all(
    party: MakeParty, search: str, refused: int, who: tuple[int, ...], step_s: float
) -> None:
    job = party(3, search=search, optimum_selector=Energy(), step_s=step_s)
    for rank in who:
        job[rank].refuses.add(refused)
    job.begin().run(most_steps(job))
    chosen = job.assert_chosen()
    assert chosen != refused
    job.assert_whole()
    if search == "exhaustive":
        assert chosen == (200_000 if refused == 150_000 else 150_000)
        estimates = {one.power_limit_mw for one in job[0].optimizer.estimates}
        assert estimates == {300_000, 250_000, 200_000, 150_000} - {refused}


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
def test_pieces_that_only_rank_0_cuts_are_measured_all_the_same(
    party: MakeParty, search: str
) -> None:
    job = party(3, search=search).begin()
    while not job.done():
        job.run(7)
        assert job.steps < 700
        job[0].call("on_pause" if job.steps % 2 else "on_evaluate", *([] if job.steps % 2 else [0]))
    job.assert_chosen()
    job.assert_whole()


def test_a_pause_of_rank_0_in_a_long_piece_is_not_taken_for_silence_of_others(
    party: MakeParty,
) -> None:
    # Rank 0 cuts its piece in two, and all go on before the others' second is whole. Their next
    # word comes a hundred seconds later, which is all in order.
    job = party(3, search="exhaustive", profile_steps=60, warmup_steps=10).begin()
    job.run(40)
    job[0].call("on_pause")
    job.run(1000)
    job.assert_chosen()
    job.assert_whole()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("early", [-5, -2, 2, 5])
def test_steps_counted_differently(party: MakeParty, search: str, early: int) -> None:
    job = party(2, search=search).begin()
    for _ in range(abs(early)):
        job[1 if early > 0 else 0].step()
    job.run(500)
    job.assert_chosen()
    job.assert_whole()
    assert [limit for _, limit in job[1].limits] == [limit for _, limit in job[0].limits]


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("slow", [0.6, 1.02, 1.4, 2.0])
def test_processes_that_do_not_wait_for_each_other(
    party: MakeParty, search: str, slow: float
) -> None:
    job = party(3, search=search)
    job[1].slow = slow
    job.begin().run_free(800)
    job.assert_chosen()
    job.assert_whole()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("refusing", [None, 0, 1])
def test_all_hold_one_profile_or_none(party: MakeParty, search: str, refusing: int | None) -> None:
    names = ["max-q", "max-p"]
    job = party(3, search=search, optimum_selector=Energy(), search_profiles=names)
    if refusing is not None:
        job[refusing].refuses_profiles = True
    job.begin().run(1500)
    job.assert_chosen()
    wanted = [] if refusing is not None else [MAX_Q]
    assert [process.profiles for process in job.processes] == [wanted] * 3
    estimates = job[2].optimizer.estimates
    assert {one.profile for one in estimates} == ({None} if refusing is not None else {None, 0, 1})
    job[0].end()
    assert job[0].profiles == []


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("second", [0, 1])
def test_of_two_dies_with_a_process_each_the_first_sets_and_counts(
    party: MakeParty, search: str, second: int
) -> None:
    job = party(2, search=search, optimum_selector=Energy())
    job[second].second, job[second].weight = True, 0.0
    job.begin().run(500)
    first = job[1 - second]
    assert job.done()
    assert job[second].limits == []
    for process in (first, job[second]):
        assert process.optimizer.state.chosen  # type: ignore[union-attr]
        assert process.optimizer.current_power_limit == first.limit
    assert first.limit < HIGH
    job.assert_whole()


def test_second_dies_alone_are_not_searched(party: MakeParty) -> None:
    job = party(2)
    for process in job.processes:
        process.second = True
    with pytest.warns(UserWarning, match="no process of this job sees the die of each card"):
        job.begin().run(5)
    job.assert_given_up()


def test_a_piece_that_is_lost_after_a_limit_was_refused_keeps_nobody_waiting() -> None:
    lead = Leader(
        2, lambda _: Exhaustive([HIGH, LOW], 1, 4), lambda found, _: found[0], lambda *_: None
    )

    def tell(rank: int, trial: Try, index: int) -> None:
        lead.take(
            rank,
            Piece(trial=trial.trial, index=index, steps=2, energy_j=1, energy_error_j=0, time_s=1),
        )

    def command() -> Any:
        lead.look()
        (found,) = lead.commands()
        return found

    for rank in (0, 1):
        lead.take(rank, Hello(gpus=["GPU"], min_mw=LOW, max_mw=HIGH))
    high = command()
    for index in (0, 1):  # rank 0 cuts the piece in two
        lead.ran(high, index, 2)
        tell(0, high, index)
    tell(1, high, 0)
    low = command()
    assert low.power_limit_mw == LOW
    lead.take(0, Trouble(reason="not taken", power_limit_mw=LOW))
    lead.look()
    assert not lead.commands()  # rank 1 may still tell its second part
    tell(1, low, 0)  # no: it has left that limit
    again = command()
    assert (again.power_limit_mw, again.steps) == (HIGH, 2)
    lead.ran(again, 0, 2)
    tell(0, again, 0)
    assert not lead.commands()
    tell(1, again, 0)
    assert isinstance(command(), Choose)


def test_epochs_that_end_before_a_limit_is_measured(party: MakeParty) -> None:
    job = party(2, search="exhaustive").begin()
    while not job.done():
        for process in job.processes:
            process.call("on_epoch_begin")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A stretch of")
            job.run(9)
            for process in job.processes:
                process.call("on_epoch_end")
        assert job.steps < 500
    job.assert_chosen()
    job.assert_whole()


# ------------------------------------------------------------------------------------- in trouble


def test_one_that_never_begins_is_named(party: MakeParty) -> None:
    job = party(3).begin()
    job[2].dead = True
    with pytest.warns(UserWarning, match="highest limit: rank 2 did not begin"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()
    assert SILENCE_S < job.steps * job.step_s < SILENCE_S + 5


def test_silence_is_a_matter_of_steps_too(party: MakeParty) -> None:
    # A minute passes within a few steps, as with a long evaluation before the others begin.
    job = party(2, step_s=30.0).begin()
    job[1].dead = True
    job.run(10)
    job[1].dead = False
    job.run(500)
    job.assert_chosen()


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("after", [5, 12, 40])
def test_one_that_dies_is_named(
    party: MakeParty, search: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = party(3, search=search, profile_steps=60).begin().run(after)
    job[1].die()
    with pytest.warns(UserWarning, match="highest limit: rank 1 did not report steps"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()
    assert "the power limit optimizer stopped: rank 1 did not report steps" in caplog.text


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
@pytest.mark.parametrize("after", [0, 1, 5, 12, 40])
def test_without_rank_0_the_others_give_up(party: MakeParty, search: str, after: int) -> None:
    job = party(3, search=search, profile_steps=60).begin().run(after)
    job[0].die()
    with pytest.warns(UserWarning, match="highest limit: rank 0 has not been heard of"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_may_not_set_limits_says_so_to_all(
    party: MakeParty, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = party(3)
    job[rank].denied = True
    with pytest.warns(UserWarning, match="the power limit cannot be set") as told:
        job.begin().run(20)
    job.assert_given_up()
    assert job.steps < 6
    reasons = [str(one.message).partition("highest limit: ")[2] for one in told]
    why = "the power limit cannot be set: not allowed here"
    assert sorted(reasons) == sorted({why, f"rank 1: {why}" if rank else why})
    caplog.set_level(logging.WARNING)
    assert caplog.text.count(f"rank {rank}: {why}") == 2 - rank


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_loses_its_permission(party: MakeParty, rank: int) -> None:
    job = party(3, search="exhaustive").begin().run(25)
    assert not job.done()
    job[rank].denied = True
    with pytest.warns(UserWarning, match="not allowed here"):
        job.run(30)
    job.assert_given_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_cannot_measure(party: MakeParty, rank: int) -> None:
    job = party(3).begin().run(5)
    job[rank].blind = True
    with pytest.warns(UserWarning, match="energy cannot be measured: no sensor"):
        job.run(20)
    job.assert_given_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_whose_training_ends_first(party: MakeParty, rank: int) -> None:
    job = party(3).begin().run(12)
    job[rank].call("on_train_end")
    assert job[rank].limit == HIGH
    job[rank].dead = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job.run(20)
    job.assert_given_up()
    expected = ["rank 1: its training has ended"] if rank else []
    assert [str(one.message).partition("highest limit: ")[2] for one in told] == expected


@pytest.mark.parametrize("after", [0, 5, 13, 30])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_cut_off_goes_to_the_highest_limit_and_so_do_the_others(
    party: MakeParty, rank: int, after: int
) -> None:
    job = party(3, search="exhaustive").begin().run(after)
    job[rank].cut_off = True
    with pytest.warns(UserWarning, match="does not answer .Broken pipe."):
        job.run(3, until_done=False)
    assert job[rank].optimizer.disabled
    assert job[rank].limit == HIGH
    with pytest.warns(UserWarning, match=rf"rank {rank} (did not|has not)"):
        job.run(most_steps(job, silent=True))
    job.assert_given_up()


def test_one_that_is_cut_off_after_the_choice_keeps_it(party: MakeParty) -> None:
    job = party(3, optimum_selector=Energy()).begin().run(500)
    for process in job.processes:
        process.cut_off = True
    job.run(300, until_done=False)
    job.assert_chosen(150)


def test_without_a_store_each_stays_at_the_highest_limit(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = party(2)
    monkeypatch.setattr(framework, "store", lambda timeout: None)
    with pytest.warns(UserWarning, match=r"torch.distributed has no store"):
        job.begin().run(5)
    job.assert_given_up()
    with pytest.raises(LinkError):
        connect(Leader(2, *[lambda *_: None] * 3), 2)  # type: ignore[arg-type, list-item]


def test_a_selector_that_fails_stops_all(party: MakeParty) -> None:
    class Fails(Energy):
        def select(self, measurements: Any) -> float:
            raise RuntimeError("no idea")

    job = party(2, optimum_selector=Fails())
    with pytest.warns(UserWarning, match="Fails could not choose"):
        job.begin().run(500)
    job.assert_given_up()


# ------------------------------------------------------------------------------ profiles, again


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_profile_of_rank_0_counts(party: MakeParty, tmp_path: Path, rank: int) -> None:
    paths = [tmp_path / f"{one}.json" for one in range(3)]
    rows = [{"power_limit": w, "energy": w * 10, "time": 10} for w in (300, 250, 200, 150)]
    paths[rank].write_text(f'{{"measurements": {rows}}}'.replace("'", '"'))
    job = party(3, optimum_selector=Energy())
    for process in job.processes:
        process.options["profile_path"] = paths[process.rank]
    paths[2].write_text("no profile, and nobody looks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.begin().run(500)
    job.assert_chosen(150)
    assert (job.steps < 6) == (rank == 0)
    assert paths[2].read_text() == "no profile, and nobody looks"
    if rank == 1:
        job.assert_whole()
        assert load(paths[0]).gpus == ["GPU"] * 3
        assert load(paths[1]).gpus is None


@pytest.mark.parametrize("launched", [True, False])
def test_a_profile_is_believed_by_optimizers_made_before_the_processes_meet(
    party: MakeParty, tmp_path: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    job = party(2, optimum_selector=Energy(), profile_path=path).begin().run(500)
    job.assert_chosen(150)
    kept = path.read_text()

    if launched:  # by torchrun, as its environment says
        monkeypatch.setenv("WORLD_SIZE", "2")
    again = party(2, optimum_selector=Energy(), profile_path=path)
    again.met = False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.begin()
    assert [process.limit for process in again.processes] == [HIGH] * 2
    again.met = True
    again.run(6)
    again.assert_chosen(150)
    assert json.loads(path.read_text())["samples"] == json.loads(kept)["samples"]
    assert len(told) == (0 if launched else 2)


def test_training_that_changes_is_measured_anew_by_all(party: MakeParty) -> None:
    job = party(3, optimum_selector=Energy()).begin().run(500)
    job.assert_chosen(150)
    first = [len(process.limits) for process in job.processes]
    job.step_s = 2.0
    job.run(700, until_done=False)
    job.assert_chosen(150)
    job.assert_whole()
    assert all(len(p.limits) > n + 1 for p, n in zip(job.processes, first, strict=True))
    assert job[1].limits == job[2].limits == job[0].limits


def test_a_second_optimizer_does_not_read_the_first_ones_notes(party: MakeParty) -> None:
    job = party(3, optimum_selector=Energy())
    job[1].denied = True
    with pytest.warns(UserWarning, match="not allowed here"):
        job.begin().run(20)
    job[1].denied = False
    job.begin().run(500)
    job.assert_chosen(150)
    job.assert_whole()


def test_training_twice(party: MakeParty) -> None:
    job = party(2, optimum_selector=Energy()).begin().run(15)
    for process in job.processes:
        process.call("on_train_end")
    assert [process.limit for process in job.processes] == [HIGH] * 2
    for _ in range(2):
        for process in job.processes:
            process.call("on_train_begin")
        job.run(500, until_done=False)
        job.assert_chosen(150)
        for process in job.processes:
            process.call("on_train_end")
        assert [process.limit for process in job.processes] == [HIGH] * 2


# -------------------------------------------------------------------------------------- at random


@dataclass
class Fate:
    """What is in store for a job, from a seed."""

    seed: int

    def make(self, party: MakeParty) -> Party:
        chance = random.Random(self.seed)
        step_s = chance.choice([0.05, 0.3, 1.0, 4.0])
        late_s = chance.choice([0, 0, 0.01, step_s, 3 * step_s])
        job = party(
            chance.randint(1, 8),
            step_s=step_s,
            ripe_s=chance.choice([0.0, 0.15, 1.0]),
            delay_s=lambda: chance.random() * late_s,
            randomness=chance,
            search=chance.choice(["adaptive", "exhaustive"]),
            optimum_selector=chance.choice([None, Energy(), Time()]),
            profile_steps=chance.choice([4, 16, 40]),
            warmup_steps=chance.choice([0, 2, 10]),
        )
        self.free = chance.random() < 0.5
        # Who is alone with its interruptions may have no word to say for long.
        self.faults = self.starved = False
        for process in job.processes:
            process.slow = chance.uniform(0.7, 1.4)
            process.gpu_count = chance.choice([1, 1, 2])
            self._interrupt(process, chance)
        if chance.random() < 0.2:
            chance.choice(job.processes).low = 180_000
        if chance.random() < 0.2:
            chance.choice(job.processes).high = 270_000
        if chance.random() < 0.3:
            one = chance.choice(job.processes)
            one.refuses |= set(chance.sample([250_000, 220_000, 200_000, 180_000, 150_000], 2))
        while chance.random() < 0.35:
            self.faults = True
            self._strike(chance.choice(job.processes), chance)
        return job

    def _interrupt(self, process: Process, chance: random.Random) -> None:
        for count in range(chance.choice([0, 0, 0, 0, 0, 1, 8])):
            self.starved = self.starved or self.free or count > 0
            what = chance.choice([("on_pause",), ("on_epoch_end",), ("on_evaluate", 0.0)])
            process.at(chance.randrange(100), lambda what=what: process.call(*what))

    def _strike(self, process: Process, chance: random.Random) -> None:
        fault = chance.choice(["dead", "end", "cut_off", "blind", "denied", "never"])
        step = chance.choice([0, 1, 2, 3, chance.randrange(150)])
        if fault == "never":
            process.dead = True
        elif fault == "denied" and step == 0:
            process.denied = True
        elif fault == "dead":
            process.at(step, process.die)
        elif fault == "end":
            process.at(step, process.end)
        else:
            process.at(step, lambda: setattr(process, fault, True))


@pytest.mark.parametrize("block", range(10))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whatever_happens_all_end_at_one_limit_or_at_the_highest(
    party: MakeParty, block: int
) -> None:
    for seed in range(40 * block, 40 * (block + 1)):
        fate = Fate(seed)
        job = fate.make(party).begin()
        try:
            check_fate(job, fate)
        except BaseException:
            print(f"seed {seed}: {fate}, {job.options}, {job.steps} steps")
            raise


def check_fate(job: Party, fate: Fate) -> None:
    most = most_steps(job, silent=fate.faults)
    if fate.free:
        job.run_free(4 * most)
    else:
        job.run(most)
    assert job.done()
    held = {process.limit for process in job.living if not process.optimizer.disabled}
    assert len(held) <= 1
    for process in job.living:
        if process.optimizer.disabled:
            assert process.limit == process.high
    low = max(process.low for process in job.processes)
    high = min(process.high for process in job.processes)
    for process in job.processes:
        tried = {limit for _, limit in process.limits} - {process.high}
        assert all(low <= limit <= high for limit in tried)
    lead = job[0].led
    if lead is not None and lead.search is not None:
        job.assert_whole()
    refused = set().union(*(process.refuses for process in job.processes))
    assert not held & refused
    if not fate.faults and not fate.starved and high not in refused:
        job.assert_chosen()


def test_a_note_of_another_version_is_told_as_that() -> None:
    class Notes:
        def check(self, keys: list[str]) -> bool:
            return keys == ["command/0"]

        def get(self, key: str) -> bytes:
            return b'{"kind": "dance"}'

    with pytest.raises(LinkError, match="another version of zeus; install the same"):
        Together(Notes(), 1, 2, None).hear(0.0, 1)

"""Processes that search together, all in this one: real optimizers, links and leader over a store
that is a dictionary, devices of arithmetic, and a clock that passes only by training.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from zeus.exceptions import ZeusGPUInvalidArgError, ZeusGPUNoPermissionError
from zeus.optimizer import GlobalPowerLimitOptimizer
from zeus.optimizer.power_limit import Done
from zeus.optimizer.power_limit.leader import SILENCE_S, Leader
from zeus.optimizer.power_limit.search import SettingsSearch

HIGH, LOW = 300_000, 150_000
MAX_Q = 1
SMALL: dict[str, Any] = {"warmup_steps": 2, "profile_steps": 16, "pl_step": 50}


def seconds_at(limit: int) -> float:
    """Of a step, for a process that is neither fast nor slow."""
    return 1 + 0.5 * max(0, 250_000 - limit) / 250_000


def joules_at(limit: int) -> float:
    """Of a step on one GPU, of a weight of 1."""
    return seconds_at(limit) * min(limit, 250_000) / 1000


class SimulatedJob:
    """All processes of a job.

    Args:
        world: How many.
        step_s: Of a step at the highest limit, of a process that is not slow.
        settled_s: A window's energy is there this long after its end.
        delay_s: What one process writes is seen by others so much later; called for each note.
        randomness: In which order processes begin a step.
        options: Of every optimizer.
    """

    def __init__(
        self,
        world: int,
        *,
        step_s: float = 1.0,
        settled_s: float = 0.15,
        delay_s: Callable[[], float] = lambda: 0.0,
        randomness: random.Random | None = None,
        **options: Any,
    ) -> None:
        self.step_s = step_s
        self.settled_s = settled_s
        self.delay_s = delay_s
        self.randomness = randomness or random.Random(1)
        self.options = {**SMALL, **options}
        self.now_s = 1000.0
        self.steps = 0
        self.notes: dict[str, tuple[bytes, float, int]] = {}
        self.counts: dict[str, Count] = {}
        self.processes = [Process(self, rank) for rank in range(world)]
        self.current = self.processes[0]
        self.met = True

    @property
    def world(self) -> int:
        """As torch.distributed reports it, which may not be initialized yet."""
        return len(self.processes) if self.met else 1

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def begin(self) -> SimulatedJob:
        """Every process makes its optimizer."""
        for process in self.processes:
            process.begin()
        return self

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if not process.dead]

    def done(self) -> bool:
        return all(process.done for process in self.living)

    def run(self, steps: int, *, until_done: bool = True) -> SimulatedJob:
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

    def run_free(self, steps: int, *, until_done: bool = True) -> SimulatedJob:
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

    def search(self) -> SettingsSearch:
        """That of the leader."""
        return self[0].led.search

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
        everyone = sum(process.weight * process.gpu_count for process in self.processes)
        slowest = max(process.slow for process in self.processes)
        for sample in self.search().samples:
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

    @property
    def error(self) -> ZeusGPUNoPermissionError | None:
        if not self.process.blind:
            return None
        error = ZeusGPUNoPermissionError("no sensor")
        error.__cause__ = PermissionError()
        return error

    @property
    def total_energy(self) -> float:
        return self.joules

    @property
    def uncertainty(self) -> float:
        return 0.001 * self.joules

    limited_so_far = None  # its driver does not count it


class Monitor:
    """Like `ZeusMonitor`, for the process's own computation: waiting for others takes no time."""

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
        return Taken(process, process.busy_s - busy_s, process.joules - joules, process.job.now_s)

    def between_reads(self, taken: Taken) -> list[Taken]:
        return [taken]

    def available(self, taken: Taken, *, limited: bool = False) -> bool:
        return self._process.job.now_s - taken.ended_s >= self._process.job.settled_s


class Gpus:
    """As `GPUs`, and each of them."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __len__(self) -> int:
        return self._process.gpu_count

    def __getitem__(self, index: int) -> Gpus:
        return self

    @property
    def uuid(self) -> str:
        return f"GPU-{self._process.number}"

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


_numbers = itertools.count()


@dataclass
class Process:
    """One process: a training loop of steps with failures."""

    job: SimulatedJob
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
        self.number = next(_numbers)
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
        self.job.current = self
        self.limit = self.high
        options = {**self.job.options, **self.options}
        self.optimizer = GlobalPowerLimitOptimizer(Monitor(self), **options)

    @property
    def led(self) -> Leader | None:
        found = self.optimizer._core.ranks
        if found is not None:
            self._led = found.leader
        return getattr(self, "_led", None)

    @property
    def done(self) -> bool:
        return isinstance(self.optimizer.state, Done)

    @property
    def lasts(self) -> float:
        return self.job.step_s * self.slow * seconds_at(self.limit)

    def step(self) -> None:
        for event in self.plan.pop(self.steps, []):
            event()
        if self.dead:
            return
        self.call("on_step_begin")
        _ = self.led
        self.busy_s += self.lasts
        joules = joules_at(self.limit) * (0.8 if MAX_Q in self.profiles else 1.0)
        self.joules += self.job.step_s * self.weight * self.gpu_count * joules
        self.steps += 1

    def call(self, what: str, *arguments: Any) -> None:
        """The calls of a training loop."""
        self.job.current = self
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


@dataclass
class Count:
    """A counter: what all processes see, and what only its process sees until then."""

    seen: int = 0
    unseen: list[tuple[int, float, int]] = field(default_factory=list)


class Store:
    """As a store of torch.distributed, seen by whichever process runs."""

    def __init__(self, job: SimulatedJob, prefix: str = "") -> None:
        self._job = job
        self._prefix = prefix

    def within(self, prefix: str) -> Store:
        return Store(self._job, f"{self._prefix}{prefix}/")

    def set(self, key: str, note: bytes) -> None:
        seen_s, rank = self._call()
        assert self._prefix + key not in self._job.notes, "a note is written once"
        self._job.notes[self._prefix + key] = note, seen_s, rank

    def check(self, keys: list[str]) -> bool:
        _, rank = self._call()
        return all(self._seen(*self._job.notes[one][1:], rank) for one in self._named(keys))

    def get(self, key: str) -> bytes:
        _, rank = self._call()
        note, seen_s, by = self._job.notes[self._prefix + key]
        assert self._seen(seen_s, by, rank), "a real store would wait here"
        return note

    def add(self, key: str, more: int) -> int:
        seen_s, rank = self._call()
        count = self._job.counts.setdefault(self._prefix + key, Count())
        if more:
            count.unseen.append((more, seen_s, rank))
        unseen = [one for one in count.unseen if one[1] > self._job.now_s]
        count.seen += sum(one for one, _, _ in count.unseen) - sum(one for one, _, _ in unseen)
        count.unseen = unseen
        return count.seen + sum(one for one, _, by in unseen if by == rank)

    def _named(self, keys: list[str]) -> list[str]:
        found = [self._prefix + key for key in keys]
        return found if all(one in self._job.notes for one in found) else [NOWHERE]

    def _seen(self, seen_s: float, by: int, rank: int) -> bool:
        return by == rank or seen_s <= self._job.now_s

    def _call(self) -> tuple[float, int]:
        job, process = self._job, self._job.current
        process.calls += 1
        if process.cut_off:
            raise RuntimeError("Broken pipe")
        job.notes.setdefault(NOWHERE, (b"", float("inf"), -1))
        # In the order of writing.
        process.seen_s = max(process.seen_s, job.now_s + job.delay_s())
        return process.seen_s, process.rank


NOWHERE = "nowhere"
MakeJob = Callable[..., SimulatedJob]
"""Makes a job of so many processes."""


def most_steps(job: SimulatedJob, silent: bool = False) -> int:
    """A search's steps at most, those until silence is noticed, and what waiting for energies and
    for each other takes."""
    limits = (HIGH - LOW) // (job.options["pl_step"] * 1000) + 1
    every = limits * (job.options["warmup_steps"] + job.options["profile_steps"])
    fastest = job.step_s * min(process.slow for process in job.processes)
    waits = int(SILENCE_S / fastest) if silent else 0
    return 2 * every + limits * (10 + int(2 * job.settled_s / job.step_s)) + waits + 200

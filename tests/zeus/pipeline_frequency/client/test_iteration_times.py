"""Iteration times, on the CPU and with events of a GPU that is behind."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from zeus.optimizer.pipeline_frequency.iteration_times import (
    EVERY,
    MOST_OPEN,
    IterationTimes,
    Least,
)


class Gpu:
    """A GPU that runs its queue on request, 10 ms per item; nothing may wait for it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.queued: list[Event] = []
        self.made = 0

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)

    def go_on(self, events: int) -> None:
        for event in self.queued[:events]:
            self.now_ms += 10
            event.at_ms = self.now_ms
        del self.queued[:events]


class Event:
    """An event in a stream."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = None
        self.gpu.queued = [one for one in self.gpu.queued if one is not self] + [self]

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for the GPU")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    cuda = SimpleNamespace(is_initialized=lambda: True, Event=made.event)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return made


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def iterate(times: IterationTimes, iteration: int, ends: int = 1) -> None:
    times.begin(iteration)
    for _ in range(ends):
        times.end()
    times.close()


def test_times_come_when_the_gpu_has_come_so_far(gpu: Gpu) -> None:
    times = IterationTimes()
    for iteration in range(3):
        iterate(times, iteration)
    assert times.collect()[0] == []
    gpu.go_on(3)  # the second iteration has begun
    assert times.collect()[0] == [(0, 0.01)]
    assert times.collect()[0] == []
    gpu.go_on(9)
    assert times.collect()[0] == [(1, 0.01), (2, 0.01)]


def test_the_last_end_counts_and_events_are_used_again(gpu: Gpu) -> None:
    times = IterationTimes()
    for iteration in range(50):
        iterate(times, iteration, ends=3)
        gpu.go_on(9)
        assert times.collect()[0] == [(iteration, 0.01)]
    assert gpu.made <= 4


def test_a_gpu_that_hangs_costs_bounded_memory(gpu: Gpu) -> None:
    times = IterationTimes()
    for iteration in range(10 * MOST_OPEN):
        iterate(times, iteration)
    assert gpu.made <= 2 * MOST_OPEN + 4
    gpu.go_on(10**6)
    assert len(times.collect()[0]) == MOST_OPEN


def test_an_iteration_without_an_end_does_not_count(no_gpu: None) -> None:
    times = IterationTimes()
    iterate(times, 0, ends=0)
    times.end()
    times.close()
    times.begin(1)
    time.sleep(0.01)
    times.end()
    times.close()
    times.close()
    found, _ = times.collect()
    assert [iteration for iteration, _ in found][-1] == 1
    assert found[-1][1] >= 0.01


def test_a_gpu_that_comes_into_use_in_between_falsifies_no_time(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = IterationTimes()
    cuda = sys.modules["torch"].cuda
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    times.begin(0)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    times.end()
    times.close()
    iterate(times, 1)
    gpu.go_on(9)
    assert times.collect()[0] == [(1, 0.01)]


# ------------------------------------------------------------------------------------ instructions


def run(times: IterationTimes, iteration: int, *steps: tuple[str, int]) -> None:
    times.begin(iteration)
    for name, mhz in steps:
        times.begin_instruction(name, mhz)
        times.end_instruction()
    times.end()
    times.close()


def test_the_least_time_of_each_kind_counts_in_one_of_every_few_iterations(gpu: Gpu) -> None:
    times = IterationTimes()
    for iteration in range(EVERY - 1):
        run(times, iteration, ("forward", 1410))
        assert not times.timed
    gpu.go_on(99)
    assert times.collect()[1] == []
    times.begin(EVERY - 1)
    assert times.timed
    for mhz in (1410, 1410, 1200):
        times.begin_instruction("forward", mhz)
        gpu.go_on(9)
        gpu.now_ms += 7 if mhz == 1200 else 0  # it waited
        times.end_instruction()
    times.end_instruction()  # of none
    times.end()
    times.close()
    assert times.collect() == ([], [])
    gpu.go_on(9)
    assert times.collect()[1] == [
        Least(EVERY - 1, "forward", 1410, 0.01),
        Least(EVERY - 1, "forward", 1200, pytest.approx(0.017)),
    ]
    assert times.collect() == ([], [])


def test_events_of_instructions_are_used_again_and_are_few(gpu: Gpu) -> None:
    times = IterationTimes()
    steps = [("forward", 1410), ("backward", 1200)]
    for number in range(20):
        run(times, EVERY * number + EVERY - 1, *steps)
        gpu.go_on(99)
        assert len(times.collect()[1]) == 2
    assert gpu.made == 6
    for number in range(20 * MOST_OPEN):  # the GPU hangs
        run(times, number, *steps)
    assert gpu.made <= 2 * MOST_OPEN + 4 * (MOST_OPEN // EVERY + 1) + 6


def test_instructions_without_a_gpu(no_gpu: None) -> None:
    times = IterationTimes()
    times.begin(EVERY - 1)
    times.begin_instruction("forward", 0)
    time.sleep(0.01)
    times.end_instruction()
    times.end()
    times.close()
    _, (found,) = times.collect()
    assert (found.name, found.setting) == ("forward", 0)
    assert found.seconds >= 0.01

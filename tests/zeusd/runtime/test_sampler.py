"""The sampler on a simulated node, in virtual time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias, cast
from unittest.mock import Mock

import pytest

from tests.support import wait_for
from zeusd.devices.metered import MeteredBackend
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import Backend, SensorValues
from zeusd.devices.simulated import SimulatedBackend, VirtualClock
from zeusd.energy.history import SIZE, History
from zeusd.runtime import sampler
from zeusd.runtime.devices import inspect_gpu
from zeusd.runtime.sampler import Sampler, Source
from zeusd.runtime.sources import GpuSource, TickReading


class Sampled:
    """A node whose GPUs are sampled as its time passes."""

    def __init__(self, spec: str) -> None:
        self.clock = VirtualClock()
        self.nvml = SimulatedBackend(spec, clock_ns=self.clock, sleep=self.clock.sleep)
        self.nvml.init()
        self.looks = 0
        self.samples: list[tuple[str, TickReading]] = []
        self.reads = 0
        self.reported: list[tuple[int, int]] = []
        self.sampler = Sampler(
            lambda name: self.reported.append((self.reads, self.clock())),
            lambda name, sample: self.samples.append((name, sample)),
            self.clock,
        )
        self.sources: list[GpuSource] = []
        for index in range(len(self.nvml.specs)):
            facts, handle = inspect_gpu(self.nvml, index)
            history = History(memoryview(bytearray(SIZE)))
            metered = cast("Backend", MeteredBackend(self.nvml))
            source = GpuSource(metered, handle, facts.info, history, self.clock)
            self.sources.append(source)
            self.sampler.add(facts.info.uuid, source)
        self.clock.attach(self.sampler)

    def energy_j(self, gpu: int, begin_ns: int, end_ns: int) -> float:
        return self.sources[gpu].curve.window(begin_ns, end_ns, False).energy_uj / 1e6

    def count_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = self.nvml.sensors

        def sensors(gpu: Any, *which: bool) -> SensorValues:
            self.looks += 1
            return real(gpu, *which)

        monkeypatch.setattr(self.nvml, "sensors", sensors)


@pytest.mark.parametrize(("kind", "tick_ms"), [("v100", 20), ("a100-sxm-80", 100), ("p100", 20)])
def test_each_update_takes_about_one_reading(
    kind: str, tick_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Sampled(f"4x{kind}:setter_ms=0")
    node.clock.sleep(5)
    node.count_looks(monkeypatch)
    before = [source.history.ticks.end for source in node.sources]
    node.clock.sleep(20)
    ticks = [
        source.history.ticks.end - first for source, first in zip(node.sources, before, strict=True)
    ]
    assert ticks == [pytest.approx(20_000 / tick_ms, abs=1)] * 4
    assert node.looks < 1.5 * sum(ticks)
    for source in node.sources:
        assert source.period_ns == pytest.approx(tick_ms * 1e6, rel=1e-3)


def test_readings_of_several_gpus_share_the_threads_wake_ups() -> None:
    node = Sampled("8xv100:setter_ms=0")
    node.clock.sleep(5)
    wakes: list[int] = []
    real = node.sampler.run_due

    def run_due(now_ns: int) -> None:
        wakes.append(now_ns)
        real(now_ns)

    node.sampler.run_due = run_due
    node.clock.sleep(10)
    assert len(wakes) < 10 * 50 * 4  # half of one for each tick of each GPU


def test_a_tick_that_nobody_awaits_is_recorded_later_as_it_would_have_been_at_once() -> None:
    def rows(awaited: bool) -> tuple[list[tuple[int, ...]], int]:
        node = Sampled("v100:setter_ms=0")
        (source,) = node.sources
        read, history = source.read, source.history
        source.read = lambda streamed, _=True: read(streamed, awaited)  # type: ignore[method-assign]  # of one object
        node.clock.sleep(9.5)
        recorded = history.ticks.end
        columns = [source.history.ticks.column(one) for one in range(4)]
        assert node.clock() - source.history.ends_ns < 40_000_000
        tiers = [ring.end for ring in source.history.tiers]
        numbers = range(source.history.ticks.end)
        return [
            *(tuple(column[number] for column in columns) for number in numbers),
            tuple(tiers),
        ], recorded

    (at_once, all_of_them), (later, some) = rows(True), rows(False)
    assert later == at_once
    assert all_of_them == len(at_once) - 1
    assert some < all_of_them - 15


@pytest.mark.parametrize("kind", ["v100", "a100-sxm-80", "h100"])
def test_the_energy_of_a_call_that_hung_is_spread_over_its_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its value is of the end of the call, and its time would be the middle."""
    node = Sampled(f"{kind}:setter_ms=0")
    node.clock.sleep(25)
    (source,), real, hung = node.sources, node.nvml.sensors, []

    def sensors(gpu: Any, *which: bool) -> SensorValues:
        if hung:
            return real(gpu, *which)
        hung.append(node.clock())
        node.clock.detach(node.sampler)
        node.clock.sleep(38)
        node.clock.attach(node.sampler)
        found = real(gpu, *which)
        return found._replace(t_ns=(hung[0] + node.clock()) // 2, took_ns=node.clock() - hung[0])

    monkeypatch.setattr(node.nvml, "sensors", sensors)
    node.clock.sleep(70)
    begin_ns, middle_ns = hung[0], hung[0] + 19_000_000_000
    halves = [
        node.energy_j(0, begin_ns, middle_ns),
        node.energy_j(0, middle_ns, middle_ns + 19_000_000_000),
    ]
    assert halves[0] == pytest.approx(halves[1], rel=0.05)
    assert source.failure is None


def test_a_tick_that_is_asked_for_during_its_reading_is_reported_after_it() -> None:
    node = Sampled("v100:setter_ms=0")
    node.clock.sleep(9.5)
    sampler, (source,), (name,) = node.sampler, node.sources, node.sampler.names()
    read = source.read
    node.reported.clear()

    def asked(streamed: bool, awaited: bool = True) -> Any:
        node.reads += 1
        if node.reads == 1:
            sampler.hurry(name)
        return read(streamed, awaited)

    source.read = asked  # type: ignore[method-assign]  # of one object
    node.clock.sleep(0.1)
    ((after, t_ns),) = node.reported
    assert after == 1
    assert t_ns - source.history.ends_ns < 20_000_000  # an update


def test_the_last_ticks_are_in_the_history_after_a_stop() -> None:
    node = Sampled("v100:setter_ms=0")
    node.clock.sleep(9.5)
    history = node.sources[0]._channel._history
    assert node.clock() - history.ends_ns > 100_000_000
    node.sampler.stop()
    assert node.clock() - history.ends_ns < 40_000_000


def test_one_senseless_reading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Sampled("v100:setter_ms=0")
    node.clock.sleep(2)
    real, numbers = node.nvml.sensors, itertools.count()

    def sensors(gpu: Any, *which: bool) -> SensorValues:
        reading = real(gpu, *which)
        number = next(numbers)
        if number % 7 == 3:
            return reading._replace(energy_mj=0, power_instant_mw=0)
        if number % 7 == 5:
            raise nvml_error(3, "nvmlDeviceGetFieldValues")
        return reading

    monkeypatch.setattr(node.nvml, "sensors", sensors)
    begin_ns, begin_j = node.clock(), node.nvml.true_energy_j(0)
    node.clock.sleep(20)
    truth_j = node.nvml.true_energy_j(0) - begin_j
    assert node.energy_j(0, begin_ns, node.clock()) == pytest.approx(truth_j, rel=0.005)


def test_a_gpu_that_is_lost_and_returns_is_measured_over_the_gap() -> None:
    node = Sampled("v100:setter_ms=0")
    node.clock.sleep(2)
    begin_ns, begin_j = node.clock(), node.nvml.true_energy_j(0)
    node.nvml.lose(0)
    node.clock.sleep(60)
    assert node.sources[0].failure is not None
    node.nvml.clear_faults()
    node.clock.sleep(5)
    assert node.sources[0].failure is None
    truth_j = node.nvml.true_energy_j(0) - begin_j
    assert node.energy_j(0, begin_ns, node.clock()) == pytest.approx(truth_j, rel=0.005)


@pytest.mark.parametrize("kind", ["mi300x", "v100", "a100-sxm-80", "h100-sxm"])
def test_power_is_right_after_a_pause_of_zeusd(kind: str) -> None:
    node = Sampled(f"{kind}:setter_ms=0")
    node.clock.sleep(10)
    (source,) = node.sources
    before, history = source.history.ticks.end, source.history
    node.clock.detach(node.sampler)
    node.clock.sleep(90)
    node.clock.attach(node.sampler)
    node.clock.sleep(2)
    levels = [history.level_mw[number] for number in range(before, history.ticks.end)]
    assert len(levels) > 10
    assert max(levels) == pytest.approx(history.power_mw[before - 1], rel=0.05)


def test_a_reload_of_the_driver_begins_a_new_epoch_of_the_same_energy() -> None:
    node = Sampled("a100-sxm-80:setter_ms=0")
    node.clock.sleep(3)
    begin_ns = node.clock()
    node.clock.sleep(3)
    node.nvml.reload_driver()
    node.clock.sleep(10)
    idle_w = node.nvml.specs[0].model.idle_w[0]
    assert node.energy_j(0, begin_ns, node.clock()) == pytest.approx(13 * idle_w, rel=0.01)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("temperature_c", 0xFFFF),
        ("gpu_clock_mhz", 2**32 - 1),
        ("memory_clock_mhz", 2**32 - 1),
        ("enforced_power_limit_mw", 2**32 - 1),
        ("throttle_reasons", 1 << 40 | 1),
    ],
)
def test_an_impossible_value_ends_no_sampling(
    monkeypatch: pytest.MonkeyPatch, call: str, value: int
) -> None:
    node = Sampled("v100:setter_ms=0")

    def odd(gpu: Any) -> int:
        return value

    odd.__name__ = call
    monkeypatch.setattr(node.nvml, call, odd)
    node.clock.sleep(5)
    assert node.clock() - node.sources[0].history.ends_ns < 1e9


def test_who_waits_for_the_time_limited_learns_that_it_is_no_longer_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Sampled("v100:setter_ms=0")
    node.clock.sleep(5)
    (source,), real = node.sources, node.nvml.sensors
    stopped_ns = source.history.limited.ends_ns
    assert stopped_ns > 0
    averages = 0

    def stopped(gpu: Any, counter: bool = True, slow: bool = True) -> SensorValues:
        nonlocal averages
        averages += slow
        return real(gpu, counter, slow)._replace(limited_ns=())

    monkeypatch.setattr(node.nvml, "sensors", stopped)
    for _ in range(3):
        source.limited_until_ns = node.clock()
        node.clock.sleep(0.25)  # a streamed GPU's are read each 0.2 s
        assert source.history.limited.read_ns >= source.limited_until_ns
    assert source.history.limited.ends_ns == stopped_ns
    before = averages
    node.clock.sleep(10)
    assert averages - before == pytest.approx(10, abs=1)


def test_the_drivers_samples_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Sampled("2xh100-sxm:setter_ms=0")
    node.clock.sleep(1)
    begin_ns, begin_j = node.clock(), node.nvml.true_energy_j(0)
    reads, counters = 0, 0
    samples, sensors = node.nvml.power_samples, node.nvml.sensors

    def power_samples(gpu: Any, since_ns: int) -> list[tuple[int, int]]:
        nonlocal reads
        reads += 1
        return samples(gpu, since_ns)

    def counted(gpu: Any, counter: bool = True, averages: bool = True) -> SensorValues:
        nonlocal counters
        counters += counter
        return sensors(gpu, counter, averages)

    monkeypatch.setattr(node.nvml, "power_samples", power_samples)
    monkeypatch.setattr(node.nvml, "sensors", counted)
    before = node.sources[0].history.ticks.end
    node.clock.sleep(60)
    assert node.sources[0].history.ticks.end - before == pytest.approx(3000, abs=90)
    assert reads < 2 * 60 * 6
    assert counters <= 2 * 7
    assert node.sources[0].period_ns == 20_000_000
    truth_j = node.nvml.true_energy_j(0) - begin_j
    assert node.energy_j(0, begin_ns, node.clock()) == pytest.approx(truth_j, rel=0.005)
    assert node.sources[0].slow.average_mw is not None
    node.reported.clear()
    asked_ns = node.clock()
    node.sampler.hurry(next(node.sampler.names()))
    node.clock.sleep(0.1)
    assert node.reported[0][1] - asked_ns < 60_000_000


def test_each_of_the_drivers_samples_is_published() -> None:
    node = Sampled("h100-sxm:setter_ms=0")
    (name,) = node.sampler.names()
    node.clock.sleep(1)
    node.sampler.stream(frozenset({name}))
    node.clock.sleep(5)
    numbers = [sample.number for _, sample in node.samples]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) == pytest.approx(250, abs=10)
    times = [sample.t_ns for _, sample in node.samples]
    assert times == sorted(times)
    grown_uj = node.samples[-1][1].energy_uj - node.samples[0][1].energy_uj
    shown_uj = sum(
        one.power_mw * (one.t_ns - last.t_ns) // 1_000_000
        for (_, last), (_, one) in itertools.pairwise(node.samples)
    )
    assert grown_uj == pytest.approx(shown_uj, rel=0.002)


@pytest.mark.parametrize("spec", ["h100-sxm", "gh200", "b200"])
def test_a_gpu_whose_samples_cannot_be_used_is_measured_by_its_counter(spec: str) -> None:
    node = Sampled(f"{spec}:setter_ms=0")
    if spec == "h100-sxm":
        node.nvml.inject(0, "power_samples", Return.NOT_SUPPORTED)
    node.clock.sleep(20)
    assert node.sources[0].period_ns == pytest.approx(100_000_000, rel=0.01)


def test_samples_go_on_after_readings_that_failed() -> None:
    node = Sampled("h100-sxm:setter_ms=0")
    node.clock.sleep(5)
    begin_ns, begin_j = node.clock(), node.nvml.true_energy_j(0)
    for call in ("power_samples", "sensors"):
        node.nvml.inject(0, call, Return.UNKNOWN)
        node.clock.sleep(20)
        assert node.sources[0].failure is not None
        node.nvml.clear_faults()
        node.clock.sleep(10)
        assert node.sources[0].failure is None
        assert node.sources[0].period_ns == 20_000_000
    truth_j = node.nvml.true_energy_j(0) - begin_j
    assert node.energy_j(0, begin_ns, node.clock()) == pytest.approx(truth_j, rel=0.005)


def test_only_streamed_gpus_are_published_with_what_is_read_now_and_then() -> None:
    node = Sampled("2xa40:setter_ms=0")
    names = list(node.sampler.names())
    node.sampler.stream(frozenset({names[1]}))
    node.clock.sleep(5)
    assert {name for name, _ in node.samples} == {names[1]}
    sample = node.samples[-1][1]
    assert sample.slow.temperature_c is not None
    assert sample.slow.gpu_mhz == node.nvml.gpu_clock_mhz(1)
    assert sample.slow.average_mw == pytest.approx(sample.power_mw, rel=0.01)
    numbers = [one.number for _, one in node.samples]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_source_that_breaks_the_sampler_is_left_out() -> None:
    node = Sampled("2xv100:setter_ms=0")
    node.clock.sleep(2)

    def broken(*_: bool) -> None:
        raise ZeroDivisionError

    node.sources[0].read = broken
    before = node.sources[1].history.ticks.end
    node.clock.sleep(2)
    assert node.sources[1].history.ticks.end - before == pytest.approx(100, abs=2)


def test_a_reading_refused_now_and_then_is_retried_and_one_always_refused_is_not() -> None:
    node = Sampled("v100:setter_ms=0")
    node.clock.sleep(2)
    node.nvml.inject(0, "temperature_c", 3, count=5)
    node.clock.sleep(3)
    node.sampler.stream(frozenset(node.sampler.names()))
    node.clock.sleep(5)
    assert node.samples[-1][1].slow.temperature_c is not None
    other = Sampled("v100:setter_ms=0")
    other.nvml.inject(0, "temperature_c", 3)
    other.clock.sleep(8)
    other.nvml.clear_faults()
    other.sampler.stream(frozenset(other.sampler.names()))
    other.clock.sleep(3)
    assert other.samples[-1][1].slow.temperature_c is None


class _Blocked:
    """A source whose driver does not answer until it is let go."""

    next_tick_ns = next_read_ns = latest_read_ns = 0
    history = None

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.reads = 0

    def read(self, *_: bool) -> None:
        self.reads += 1
        self.answers.wait()
        self.next_read_ns = time.monotonic_ns() + 1_000_000


class _Patient:
    """A source whose readings may wait for an hour if nobody awaits its next change."""

    history = History(memoryview(bytearray(SIZE)))

    def __init__(self) -> None:
        self.next_tick_ns = time.monotonic_ns()
        self.next_read_ns = self.next_tick_ns + 3600 * 10**9
        self.reads = self.looks = 0

    @property
    def latest_read_ns(self) -> int:
        self.looks += 1
        return self.next_read_ns

    def read(self, *_: bool) -> None:
        self.reads += 1
        self.next_tick_ns = self.next_read_ns


def test_the_thread_sleeps_until_something_is_due_or_somebody_waits() -> None:
    reads = Sampler(lambda name: None, lambda name, sample: None)
    reads.start()
    asks = (lambda: None), (lambda: reads.hurry("1")), (lambda: reads.stream(frozenset({"2"})))
    found = [_Patient() for _ in asks]
    for name, source in enumerate(found):
        reads.add(str(name), cast("Source", source))
    wait_for(lambda: found[2].looks, "the thread to know all")
    looks = found[0].looks
    time.sleep(0.3)
    assert found[0].looks <= looks + 1  # for the last of them
    for source, ask in zip(found, asks, strict=True):
        ask()
        wait_for(lambda: source.reads or ask is asks[0], "what is awaited to be read")
    looks = found[0].looks
    for _ in range(100):  # it wakes for this one in time: no later than for the first
        reads.hurry("1")
        time.sleep(0.001)
    assert found[0].looks < looks + 10
    assert [source.reads for source in found] == [0, 1, 1]
    reads.stop()


Blocked: TypeAlias = "tuple[Sampler, _Blocked, _Blocked]"


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    """A sampler whose only source does not answer, and a source that does."""
    monkeypatch.setattr(sampler, "STUCK_NS", 0)
    reads = Sampler(lambda name: None, lambda name, sample: None)
    stuck, other = _Blocked(), _Blocked()
    other.answers.set()
    reads.add("stuck", cast("Source", stuck))
    reads.start()
    wait_for(lambda: stuck.reads, "the driver to block")
    yield reads, stuck, other
    reads.stop()


def test_a_driver_that_answers_while_its_thread_is_given_up_is_read_again(
    monkeypatch: pytest.MonkeyPatch, blocked: Blocked
) -> None:
    reads, stuck, other = blocked
    reads.add("other", cast("Source", other))

    def error(*_: object, **__: object) -> None:
        stuck.answers.set()
        wait_for(lambda: other.reads > 2, "a thread to go on")

    monkeypatch.setattr(sampler.log, "error", error)
    reads.replace_stuck()
    wait_for(lambda: stuck.reads > 2, "the GPU to be read again")


def test_a_thread_that_cannot_be_replaced_now_is_replaced_later(
    monkeypatch: pytest.MonkeyPatch, blocked: Blocked
) -> None:
    reads, stuck, other = blocked
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no more threads")))
        with pytest.raises(RuntimeError):
            reads.replace_stuck()
    reads.add("other", cast("Source", other))
    reads.replace_stuck()
    wait_for(lambda: other.reads > 2, "another thread to read")
    stuck.answers.set()
    wait_for(lambda: stuck.reads > 2, "the GPU to be read again")

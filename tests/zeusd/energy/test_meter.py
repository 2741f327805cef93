from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tests import seeds
from tests.zeusd.energy.support import channel_of, reading
from zeus_common.units import MS
from zeusd.devices.port import SensorValues
from zeusd.energy.meter import (
    COUNTER_AGE_NS,
    EXACT,
    FAR_MJ,
    STUCK_TICKS,
    Edge,
    GpuMeter,
    SensorTiming,
    sensor_timing,
)

TICK = 100 * MS


class Ticking:
    """A GPU at constant power whose counter ticks, and the meter that adds it up."""

    def __init__(self, window_ns: int | None = None, counter_mj: int | None = 5_000_000) -> None:
        self.meter = GpuMeter(SensorTiming(window_ns, window_ns))
        self.t_ns = 10 * TICK
        self.counter_mj = counter_mj
        self.energy_uj = 0
        self.tick(60_000)

    def tick(self, power_mw: int, count: int = 1, counts: bool = True) -> int:
        """A tick at this power. Returns how much the meter has gained."""
        self.t_ns += count * TICK
        if self.counter_mj is not None and counts:
            self.counter_mj += power_mw * count // 10
        sensors = reading(self.t_ns, self.counter_mj, power_mw)
        assert self.meter.plausible(sensors)
        edge = self.meter.advance(self.t_ns, TICK, count * TICK, sensors)
        gained, self.energy_uj = edge.energy_uj - self.energy_uj, edge.energy_uj
        return gained


def test_the_timing_of_each_architectures_sensors() -> None:
    assert sensor_timing(4, "Tesla P100-PCIE-16GB").window_ns == 10 * MS
    assert sensor_timing(5, "Tesla V100-SXM2-16GB").window_ns == 10 * MS
    assert sensor_timing(6, "Tesla T4") == EXACT
    assert sensor_timing(7, "NVIDIA A100-SXM4-80GB").window_ns == 25 * MS
    assert sensor_timing(7, "NVIDIA A40") == EXACT
    assert sensor_timing(7, "NVIDIA A30").window_ns == 25 * MS
    assert sensor_timing(8, "NVIDIA L40S") == EXACT
    hopper = sensor_timing(9, "NVIDIA H100 80GB HBM3")
    assert hopper.window_ns is None
    assert hopper.power_window_ns == 25 * MS
    assert 4 * MS <= hopper.lag_ns <= 12 * MS
    assert hopper == sensor_timing(10, "NVIDIA B200")


def test_the_counter_is_followed_and_power_where_there_is_none() -> None:
    counted, integrated = Ticking(), Ticking(counter_mj=None)
    for power_mw in (100_000, 300_000, 50_000):
        assert counted.tick(power_mw) == power_mw * 100
        assert integrated.tick(power_mw) == power_mw * 100
    assert counted.tick(200_000, count=5) == 200_000 * 500


@pytest.mark.parametrize("window_ns", [None, 25 * MS])
def test_the_power_shown_is_the_counters_mean_where_that_covers_more(
    window_ns: int | None,
) -> None:
    gpu = Ticking(window_ns)
    edge = gpu.meter.advance(gpu.t_ns + TICK, TICK, TICK, reading(0, 5_016_000, 250_000))
    shown_mw = 100_000 if window_ns is None else 250_000
    assert (edge.level_mw, edge.power_mw) == (shown_mw, shown_mw)


@pytest.mark.parametrize(("more_mj", "far"), [(0, False), (FAR_MJ, False), (FAR_MJ + 1, True)])
def test_a_counter_is_as_far_ahead_of_samples_as_it_shows_beyond_its_age(
    more_mj: int, far: bool
) -> None:
    gpu = Ticking()
    edge = gpu.meter.integrate(gpu.t_ns + TICK, 100_000)
    assert gpu.meter.raw_mj == 5_016_000
    shown_mj = gpu.meter.raw_mj + 20_000 + more_mj
    assert gpu.meter.follow(edge.t_ns + 200 * MS + COUNTER_AGE_NS, shown_mj) is far
    assert gpu.meter.ahead_mj == (0 if far else more_mj)
    assert gpu.meter.raw_mj == (shown_mj if far else 5_016_000)


@pytest.mark.parametrize("window_ns", [None, 25 * MS, 10 * MS])
def test_long_windows_equal_the_counter_under_any_load(window_ns: int | None) -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    gpu = Ticking(window_ns)
    gpu.tick(60_000)
    first_mj, first_uj = gpu.counter_mj, gpu.energy_uj
    assert first_mj is not None
    last_uj = 0
    for _ in range(2000):
        power_mw = chance.choice([60_000, chance.randrange(60_000, 400_000)])
        gpu.tick(power_mw, count=chance.choice([1, 1, 1, 3]))
        assert gpu.energy_uj >= last_uj
        last_uj = gpu.energy_uj
    for _ in range(2):
        gpu.tick(60_000)
    assert gpu.counter_mj is not None
    counted_uj = (gpu.counter_mj - first_mj) * 1000
    assert abs(gpu.energy_uj - first_uj - counted_uj) <= 2000


@pytest.mark.parametrize(("window_ms", "period_ms"), [(10, 20), (25, 100)])
@pytest.mark.parametrize("phase", [0.05, 0.5, 0.95])
def test_a_steady_load_is_steady_from_the_first_tick_on(
    window_ms: int, period_ms: int, phase: float
) -> None:
    """Also while the sensor's period is not known yet: no window has too much or too little."""
    name, architecture = ("Tesla V100", 5) if window_ms == 10 else ("NVIDIA H100", 9)
    channel = channel_of(architecture, name)
    first_ns = None
    while channel.period_ns is None or channel.next_read_ns < 40 * period_ms * MS:
        t_ns = channel.next_read_ns
        ticks = int(t_ns / (period_ms * MS) + phase)
        edge = channel.observe(reading(t_ns, 1_000 + ticks * period_ms * 200, 200_000))
        if edge is not None and first_ns is None:
            first_ns = edge.t_ns
    assert first_ns is not None
    for begin_ns in range(first_ns, 30 * period_ms * MS, 7 * MS):
        energy_uj = channel.curve.window(begin_ns, begin_ns + 8 * MS, False).energy_uj
        assert energy_uj == pytest.approx(200_000 * 8, rel=0.3)


@pytest.mark.parametrize("after_ticks", range(1, 12))
@pytest.mark.parametrize("counts", [True, False])
def test_nothing_is_counted_twice_after_a_pause_of_readings(after_ticks: int, counts: bool) -> None:
    """The reader was stopped for ten ticks, at any moment of its search and after it."""
    tick_ns = 20 * MS
    channel = channel_of(5, "Tesla V100", 300_000)

    def shown(t_ns: int) -> SensorValues:
        return reading(t_ns, 1_000 + t_ns // tick_ns * 520 if counts else None, 26_000)

    edges = []
    stopped = False
    t_ns = 0
    while t_ns < 2_000 * MS:
        t_ns = max(channel.next_read_ns, t_ns + MS // 10)
        if t_ns > after_ticks * tick_ns and not stopped:
            stopped, t_ns = True, t_ns + 10 * tick_ns
        edge = channel.observe(shown(t_ns))
        if edge is not None:
            edges.append(edge)
    first, last = edges[0], edges[-1]
    drawn_uj = 26_000 * (last.t_ns - first.t_ns) / MS
    assert last.energy_uj - first.energy_uj == pytest.approx(drawn_uj, abs=2.5 * 520_000)
    for edge, following in itertools.pairwise(edges):
        assert following.energy_uj > edge.energy_uj


def read_with_pauses(
    pauses: Callable[[int], int], counts: bool, tick_ns: int, until_ns: int
) -> list[Edge]:
    """The edges of a GPU at 400 W whose reader is late, by so much at a time, ns."""
    channel = channel_of(7, "NVIDIA A40", 500_000)
    edges, t_ns = [], 0
    while t_ns < until_ns:
        t_ns = max(channel.next_read_ns, t_ns + MS // 10)
        t_ns += pauses(t_ns)
        ticks = t_ns // tick_ns
        counter_mj = 1_000 + ticks * tick_ns * 400_000 // 10**9 if counts else None
        edge = channel.observe(reading(t_ns, counter_mj, 400_000 + ticks % 2))
        if edge is not None:
            edges.append(edge)
    return edges


@pytest.mark.parametrize("tick_ms", [20, 100])
@pytest.mark.parametrize("counts", [True, False])
def test_power_is_the_truth_although_the_reader_stands_still_now_and_then(
    tick_ms: int, counts: bool
) -> None:
    """Else what was drawn over a second would seem to be drawn within some milliseconds."""
    chance = random.Random(seeds.fresh())
    shown: list[float] = []
    for _ in range(seeds.tries(90)):

        def pause(t_ns: int) -> int:
            return chance.randrange(2_000 * MS) if chance.random() < 0.03 else 0

        edges = read_with_pauses(pause, counts, tick_ms * MS, 10_000 * MS)
        for edge, following in itertools.pairwise(edges[1:]):
            grown_mw = (following.energy_uj - edge.energy_uj) * MS / (following.t_ns - edge.t_ns)
            shown += [grown_mw, following.level_mw]
    assert sum(not 250_000 < mw < 800_000 for mw in shown) / len(shown) < 0.01
    assert max(shown) < 1_000_000


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("pause_ms", [300, 1_000, 5_000])
def test_a_reader_that_stands_still_once_has_ticks_soon_after(counts: bool, pause_ms: int) -> None:
    for after_ms in (10, 90, 250, 450, 1_500):
        stopped: list[int] = []

        def pause(t_ns: int, after_ms: int = after_ms, stopped: list[int] = stopped) -> int:
            if stopped or t_ns < after_ms * MS:
                return 0
            stopped.append(t_ns + pause_ms * MS)
            return pause_ms * MS

        edges = read_with_pauses(pause, counts, TICK, 10_000 * MS)
        first = next(edge.t_ns for edge in edges if edge.t_ns > stopped[0])
        assert first - stopped[0] < 900 * MS


def test_power_is_that_of_whole_ticks_and_otherwise_of_the_time_that_passed() -> None:
    edges = read_with_pauses(lambda _: 0, True, TICK, 10_000 * MS)
    levels = [edge.level_mw for edge in edges if edge.t_ns > 2_000 * MS]
    assert levels == pytest.approx([400_000] * len(levels), rel=1e-3)
    chance = random.Random(seeds.fresh())
    edges = read_with_pauses(lambda _: chance.randrange(8 * MS), True, MS, 10_000 * MS)
    levels = [edge.level_mw for edge in edges if edge.t_ns > 2_000 * MS]
    assert min(levels) > 360_000
    assert max(levels) < 440_000


def test_power_that_was_the_same_for_seconds_says_nothing_of_the_next_tick() -> None:
    """Without a counter, ticks at which it stays the same are only assumed."""
    channel = channel_of(7, "NVIDIA A40", 500_000)
    levels, t_ns = [], 0
    while t_ns < 10_000 * MS:
        t_ns = max(channel.next_read_ns, t_ns + MS // 10)
        ticks = t_ns // TICK
        edge = channel.observe(reading(t_ns, None, 200_000 + (ticks % 2 if ticks % 40 > 20 else 0)))
        levels += [] if edge is None else [edge.level_mw]
    assert len(levels) > 80
    assert min(levels) > 180_000
    assert max(levels) < 220_000


def test_no_power_is_left_out_where_it_alone_is_known() -> None:
    """Although it is read late each time, so that the sensor's period is not found."""
    chance = random.Random(seeds.fresh())
    channel = channel_of(7, "NVIDIA A40", 500_000)
    rows, readings, t_ns = 0, 0, 0
    while t_ns < 40_000 * MS:
        t_ns = max(channel.next_read_ns, t_ns) + chance.randrange(40 * MS, 100 * MS)
        readings += 1
        rows += channel.observe(reading(t_ns, None, 60_000 + t_ns // MS)) is not None
    assert rows > 0.95 * readings


@pytest.mark.parametrize("phase", [0.1, 0.4, 0.7, 0.95])
def test_a_counter_that_appears_between_two_ticks_is_continued(phase: float) -> None:
    """As a superchip's, once it is known to count the GPU: the tick that follows is one tick."""
    channel = channel_of(10, "NVIDIA GB200", 1_000_000)
    appears_ns = round((30 + phase) * TICK)
    edges = []
    t_ns = 0
    while t_ns < 60 * TICK:
        t_ns = max(channel.next_read_ns, t_ns + 5 * MS)
        ticks = t_ns // TICK
        counter_mj = 1_000 + ticks * 16_600 if t_ns >= appears_ns else None
        # Power readings vary a little at each update, or updates could not be distinguished.
        edge = channel.observe(reading(t_ns, counter_mj, 166_000 + ticks % 2))
        if edge is not None:
            edges.append(edge)
    first, last = edges[0], edges[-1]
    drawn_uj = 166_000 * (last.t_ns - first.t_ns) / MS
    assert last.counted_uj - first.counted_uj == pytest.approx(drawn_uj, abs=0.2 * 16_600_000)


def test_energy_that_nobody_waits_for_is_the_same_when_it_is_computed_later() -> None:
    chance = random.Random(seeds.fresh())
    awaited, deferred = channel_of(5, "Tesla V100"), channel_of(5, "Tesla V100")
    t_ns, tick, counter_mj, power_mw, ticks = 0, 0, 1_000, 60_000, 0
    while t_ns < 20_000 * MS:
        t_ns = max(awaited.next_read_ns, t_ns + MS // 10)
        while tick < t_ns // (20 * MS):
            tick, counter_mj = tick + 1, counter_mj + power_mw // 50
            power_mw = chance.choice([power_mw, chance.randrange(60_000, 300_000)])
        sensors = reading(t_ns, counter_mj, power_mw)
        ticks += awaited.observe(sensors) is not None
        deferred.observe(sensors, awaited=chance.random() < 0.01)
        assert deferred.next_read_ns == awaited.next_read_ns
    assert ticks > 800
    for _ in range(50):
        begin_ns = chance.randrange(1_000 * MS, 19_000 * MS)
        window = begin_ns, begin_ns + chance.randrange(900 * MS), False
        assert deferred.curve.window(*window) == awaited.curve.window(*window)
    assert deferred.history.last() == awaited.history.last()


def test_energy_from_power_is_less_certain_by_the_resolution_of_power() -> None:
    stated_uj = []
    for counts in (True, False):
        channel = channel_of(7, "NVIDIA A40")
        t_ns = 0
        while t_ns < 60 * TICK:
            t_ns = max(channel.next_read_ns, t_ns + MS // 10)
            ticks = t_ns // TICK
            counter_mj = 1_000 + ticks * 20_000 if counts else None
            channel.observe(reading(t_ns, counter_mj, 200_000 + ticks % 2))
        stated_uj.append(channel.curve.window(20 * TICK, 50 * TICK, False).uncertainty_uj)
    assert stated_uj[1] > 1.5 * stated_uj[0]


def test_a_counter_that_restarts_loses_nothing() -> None:
    gpu = Ticking()
    gpu.tick(100_000)
    gpu.counter_mj = 0
    gpu.t_ns += TICK
    sensors = reading(gpu.t_ns, 70, 120_000)
    assert not gpu.meter.plausible(sensors)  # it may be a slip: asked once more
    assert gpu.meter.plausible(sensors)
    edge = gpu.meter.advance(gpu.t_ns, TICK, TICK, sensors)
    assert edge.energy_uj - gpu.energy_uj == 120_000 * 100
    assert gpu.meter.epochs == 1
    gpu.energy_uj, gpu.counter_mj = edge.energy_uj, 70
    assert gpu.tick(120_000) == 120_000 * 100


@pytest.mark.parametrize("slip_mj", [0, 3, 10**15])
def test_one_senseless_reading_is_passed_over(slip_mj: int) -> None:
    gpu = Ticking()
    gpu.tick(100_000)
    assert not gpu.meter.plausible(reading(gpu.t_ns + MS, slip_mj, 100_000))
    assert gpu.tick(100_000) == 100_000 * 100
    assert gpu.meter.epochs == 0


def test_a_counter_that_is_missing_for_once_is_not_integrated_twice() -> None:
    gpu = Ticking()
    gpu.tick(100_000)
    assert not gpu.meter.plausible(reading(gpu.t_ns + MS, None, 100_000))
    assert not gpu.meter.plausible(reading(gpu.t_ns + 2 * MS, None, 100_000))
    assert gpu.tick(100_000, count=3) == 100_000 * 300


def test_a_counter_that_does_not_update_is_replaced_by_power_until_it_moves() -> None:
    gpu = Ticking()
    gpu.tick(100_000)
    still = reading(gpu.t_ns, gpu.counter_mj, 200_000)
    for _ in range(5):  # slow, and not stuck
        assert not any(gpu.meter.stands_still(still) for _ in range(STUCK_TICKS - 1))
        gpu.tick(100_000)
    still = reading(gpu.t_ns, gpu.counter_mj, 200_000)
    stands = [gpu.meter.stands_still(still) for _ in range(10)]
    assert stands[0] is False
    assert stands[-1] is True
    assert gpu.meter.stuck
    gained = gpu.tick(200_000, count=10, counts=False)
    assert gained == 200_000 * 1000
    assert gpu.tick(200_000) == 200_000 * 100  # it moves again: counted once
    assert not gpu.meter.stuck
    assert gpu.tick(300_000) == 300_000 * 100


def test_a_counter_that_covers_the_whole_period_is_recognized_by_its_steps() -> None:
    chance = random.Random(1)
    gpu = Ticking(25 * MS)
    for _ in range(200):
        # The last reading says little about the whole period.
        gpu.counter_mj = (gpu.counter_mj or 0) + chance.randrange(6_000, 30_000)
        gpu.tick(chance.randrange(60_000, 300_000), counts=False)
    assert gpu.meter.window_ns is None
    other = Ticking(25 * MS)
    for _ in range(200):
        other.tick(chance.randrange(60_000, 300_000))
    assert other.meter.window_ns == 25 * MS


def test_a_counter_that_disappears_permanently_is_replaced_by_power() -> None:
    gpu = Ticking()
    gpu.tick(100_000)
    believed = [gpu.meter.plausible(reading(gpu.t_ns, None, 100_000)) for _ in range(25)]
    assert not any(believed[:10])
    assert believed[-1]
    gpu.counter_mj = None
    assert gpu.tick(150_000, count=10) == 150_000 * 1000

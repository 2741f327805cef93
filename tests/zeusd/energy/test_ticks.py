from __future__ import annotations

import bisect
import random

import pytest

from tests import seeds
from zeus_common.units import MS
from zeusd.energy.ticks import Tick, TickTracker

SECOND = 1_000 * MS


class Sensor:
    """A sensor that changes at given times; read when a tracker asks, a little late."""

    def __init__(self, changes_ns: list[int], seed: int) -> None:
        self.changes_ns = changes_ns
        self.chance = random.Random(seed)
        self.tracker = TickTracker(0)
        self.ticks: list[Tick] = []
        self.looks: list[int] = []
        self._shown = -1

    def run(self, until_ns: int) -> None:
        while True:
            first, last = self.tracker.next_read_ns, self.tracker.latest_read_ns
            late_ns = round(self.chance.expovariate(1 / 60_000))
            if self.chance.random() < 0.01:
                late_ns += self.chance.randrange(8 * MS)
            t_ns = self.chance.randint(first, last) + late_ns
            if self.looks:
                t_ns = max(t_ns, self.looks[-1] + 1)
            if t_ns > until_ns:
                return
            self.look(t_ns)

    def look(self, t_ns: int) -> Tick | None:
        shown = bisect.bisect_right(self.changes_ns, t_ns)
        tick = self.tracker.observe(t_ns, shown != self._shown)
        self._shown = shown
        self.looks.append(t_ns)
        if tick is not None:
            self.ticks.append(tick)
        return tick

    def errors_ms(self, since_ns: int) -> list[float]:
        """How far each tick's stamp is from the change that it is of."""
        errors = []
        for tick in self.ticks:
            if tick.t_ns >= since_ns and not tick.silent:
                place = bisect.bisect_left(self.changes_ns, tick.t_ns)
                near = self.changes_ns[max(0, place - 1) : place + 1]
                errors.append(min(abs(tick.t_ns - at_ns) for at_ns in near) / MS)
        return errors

    def error_ms(self, since_ns: int) -> float:
        """How far 95 % of them are at most."""
        errors = sorted(self.errors_ms(since_ns))
        return errors[int(0.95 * len(errors))]


def every(period_ms: float, seconds: float, jitter_ms: float = 0.0, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    phase = chance.uniform(0, period_ms)
    count = int(seconds * 1000 / period_ms)
    return [
        round((phase + n * period_ms + chance.uniform(-jitter_ms, jitter_ms)) * MS)
        for n in range(count)
    ]


@pytest.mark.parametrize("period_ms", [20, 37.3, 100, 101.2, 250, 1000])
def test_an_update_is_found_and_dated_within_a_millisecond_by_few_readings(
    period_ms: float,
) -> None:
    seed = seeds.fresh()
    seconds = max(30.0, 160 * period_ms / 1000)
    sensor = Sensor(every(period_ms, seconds, seed=seed), seed)
    settled_ns = round(max(3.0, 25 * period_ms / 1000) * SECOND)
    sensor.run(settled_ns)
    assert sensor.tracker.period_ns == pytest.approx(period_ms * MS, rel=2e-3)
    looked = len(sensor.looks)
    sensor.run(round(seconds * SECOND))
    assert sensor.tracker.period_ns == pytest.approx(period_ms * MS, rel=5e-4)
    errors = sorted(sensor.errors_ms(settled_ns))
    ticks = (seconds * SECOND - settled_ns) / (period_ms * MS)
    assert len(errors) == pytest.approx(ticks, rel=0.1)
    assert errors[int(0.95 * len(errors))] < 1.0
    assert (len(sensor.looks) - looked) / ticks < 3.0


@pytest.mark.parametrize("late", [0, 0.3])
def test_no_change_is_taken_for_another_while_the_period_is_not_known_well(late: float) -> None:
    """A reading beyond the next change shows both as one; before the next, one as two."""
    chance = random.Random(seeds.fresh())
    wrong = []
    for _ in range(seeds.tries(90)):
        sensor = Sensor(
            every(20 * chance.uniform(0.998, 1.002), 4, seed=chance.randrange(10**6)), 1
        )
        t_ns = 0
        while t_ns < 3.9 * SECOND:
            t_ns = max(t_ns + 1, sensor.tracker.latest_read_ns)
            t_ns += round(chance.expovariate(1 / 150_000))
            t_ns += chance.randrange(15 * MS) if chance.random() < late else 0
            tick = sensor.look(t_ns)
            if tick is not None and t_ns > (SECOND if late else SECOND // 2):
                read = sensor.changes_ns[bisect.bisect_right(sensor.changes_ns, t_ns) - 1]
                wrong.append(abs(tick.t_ns - read) > 2 * MS)
    assert sum(wrong) / len(wrong) < 0.001


@pytest.mark.parametrize("slower_ms", [-3, -1, 1, 2, 3])
def test_a_period_that_was_misjudged_at_first_is_corrected(slower_ms: int) -> None:
    seed = seeds.fresh()
    first = every(100 + slower_ms, 1, seed=seed)
    later = [round(first[-1] + n * 100 * MS) for n in range(1, 300)]
    sensor = Sensor(first + later, seed)
    sensor.run(29 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(100 * MS, rel=5e-4)
    assert sensor.error_ms(10 * SECOND) < 2.0


def test_a_thread_that_always_wakes_late_does_not_look_more_often() -> None:
    class Late(random.Random):
        def expovariate(self, lambd: float = 1.0) -> float:
            return 140_000 + super().expovariate(1 / 60_000)

    for seed in range(1, 9):
        sensor = Sensor(every(100, 120, seed=seed), seed)
        sensor.chance = Late(seed)
        sensor.run(10 * SECOND)
        looked = len(sensor.looks)
        sensor.run(119 * SECOND)
        assert (len(sensor.looks) - looked) / 1090 < 1.1
        assert sensor.error_ms(10 * SECOND) < 0.3


def test_early_and_late_updates_are_still_dated() -> None:
    sensor = Sensor(every(100, 60, jitter_ms=0.4), 7)
    sensor.run(60 * SECOND)
    assert sensor.error_ms(5 * SECOND) < 1.2
    assert len(sensor.looks) < 6 * 600


def test_another_period_is_found_again() -> None:
    first = every(100, 10)
    second = [first[-1] + change for change in every(20, 10)]
    sensor = Sensor(first + second, 3)
    sensor.run(9 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(100 * MS, rel=1e-3)
    sensor.run(19 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(20 * MS, rel=2e-3)
    assert sensor.error_ms(15 * SECOND) < 1.0


def test_a_sensor_that_does_not_update_is_reported_and_not_hammered() -> None:
    changes = every(100, 5)
    sensor = Sensor(changes + [change + 60 * SECOND for change in changes], 5)
    sensor.run(8 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(100 * MS, rel=1e-3)  # as it may only pause
    sensor.run(60 * SECOND)
    silent = [tick.t_ns for tick in sensor.ticks if tick.silent]
    assert silent[0] - changes[-1] == pytest.approx(100 * MS, abs=2 * MS)
    assert 300 < len(silent) < 11 * 55  # about ten a second
    assert sum(t_ns > 20 * SECOND for t_ns in sensor.looks) < 21 * 40
    sensor.run(65 * SECOND)
    errors = sensor.errors_ms(64 * SECOND)
    assert errors
    assert max(errors) < 1.5


def test_the_last_of_several_updates_that_were_missed_is_dated() -> None:
    sensor = Sensor(every(100, 30), 1)
    sensor.run(10 * SECOND)
    before = sensor.ticks[-1]
    tick = sensor.look(sensor.looks[-1] + 1_050 * MS)
    assert tick is not None
    assert round((tick.t_ns - before.t_ns) / (100 * MS)) >= 10
    assert min(sensor.errors_ms(tick.t_ns)) < 1.0


def test_a_search_that_is_held_up_at_each_second_change_takes_no_pause_for_a_period() -> None:
    sensor = Sensor(every(20, 10), 1)
    changed = 0
    while (t_ns := sensor.tracker.next_read_ns) < 2 * SECOND:
        held_up = changed == 1
        changed = -1 if held_up else changed
        changed += sensor.look(t_ns + 45 * MS * held_up) is not None
    assert sensor.tracker.period_ns is None
    sensor.run(5 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(20 * MS, rel=2e-3)


def test_a_sensor_that_changes_at_every_reading_is_read_at_a_limited_rate() -> None:
    sensor = Sensor(every(0.5, 10), 1)
    sensor.run(10 * SECOND)
    looks = [t_ns for t_ns in sensor.looks if t_ns > 5 * SECOND]
    assert 200 < len(looks) < 260


def test_a_sensor_without_a_period_is_not_searched_forever() -> None:
    chance = random.Random(4)
    changes = [0]
    while changes[-1] < 60 * SECOND:
        changes.append(changes[-1] + chance.randrange(30 * MS, 400 * MS))
    sensor = Sensor(changes, 4)
    sensor.run(60 * SECOND)
    late = [t_ns for t_ns in sensor.looks if t_ns > 50 * SECOND]
    assert len(late) < 10 * 60
    seen = [tick for tick in sensor.ticks if tick.t_ns > 50 * SECOND and not tick.silent]
    there = [t_ns for t_ns in changes if 50 * SECOND < t_ns < 60 * SECOND]
    assert len(seen) == pytest.approx(len(there), abs=2)


def test_a_sensor_that_was_only_read_late_is_searched_again() -> None:
    chance = random.Random(2)
    sensor = Sensor(every(20, 700), 2)
    while (t_ns := sensor.tracker.latest_read_ns) < 35 * SECOND:
        sensor.look(t_ns + chance.randrange(10 * MS, 40 * MS))
    sensor.run(590 * SECOND)
    assert len(sensor.looks) > 500 * 45, "read as if it changed all the time"
    looked = len(sensor.looks)
    sensor.run(660 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(20 * MS, rel=1e-4)
    assert max(sensor.errors_ms(650 * SECOND)) < 1.5
    assert len(sensor.looks) - looked < 70 * 60


def test_failed_readings_are_retried_with_growing_pauses_and_then_everything_restarts() -> None:
    sensor = Sensor(every(100, 100), 1)
    sensor.run(10 * SECOND)
    pauses = []
    t_ns = sensor.looks[-1]
    for _ in range(20):
        sensor.tracker.failed(t_ns)
        pauses.append(sensor.tracker.next_read_ns - t_ns)
        t_ns = sensor.tracker.next_read_ns
    assert pauses[0] <= 5 * MS
    assert pauses == sorted(pauses)
    assert pauses[-1] == SECOND
    sensor.run(t_ns + 10 * SECOND)
    assert sensor.errors_ms(t_ns + 5 * SECOND)
    assert max(sensor.errors_ms(t_ns + 5 * SECOND)) < 1.5


def test_one_failed_reading_loses_no_update() -> None:
    sensor = Sensor(every(100, 30), 1)
    sensor.run(10 * SECOND)
    sensor.tracker.failed(sensor.looks[-1])
    sensor.run(12 * SECOND)
    assert sensor.tracker.period_ns == pytest.approx(100 * MS, rel=1e-3)
    assert sum(tick.t_ns > 9 * SECOND for tick in sensor.ticks) in (30, 31)


@pytest.mark.parametrize("held_up_ms", [0, 4])
def test_readings_of_several_sensors_fall_together(held_up_ms: int) -> None:
    """Also if a thread is held up now and then, as on a busy machine."""
    seed = seeds.fresh()
    chance = random.Random(seed)
    sensors = [Sensor(every(20, 40, seed=seed + number), seed) for number in range(8)]
    wakes = now_ns = 0
    while now_ns < 38 * SECOND:
        # As the sampler does: it wakes when one can wait no longer, and reads all that it may.
        now_ns = max(now_ns, min(one.tracker.latest_read_ns for one in sensors)) + 80_000
        now_ns += round(held_up_ms * MS * chance.random()) if chance.random() < 0.05 else 0
        wakes += now_ns >= 10 * SECOND
        for sensor in sensors:
            if sensor.tracker.next_read_ns <= now_ns:
                sensor.look(now_ns)
    assert wakes < 28 * 75, "of 400 changes a second"
    for sensor in sensors:
        errors = sorted(sensor.errors_ms(10 * SECOND))
        assert errors[-1 if not held_up_ms else -len(errors) // 100] < 1.0


def test_readings_wait_for_each_other_only_as_long_as_they_are_punctual() -> None:
    sensor = Sensor(every(20, 40), 1)
    tracker = sensor.tracker

    def longest_wait_ms(readings: int, late_ns: int) -> float:
        waits = []
        for _ in range(readings):
            waits.append((tracker.latest_read_ns - tracker.next_read_ns) / MS)
            sensor.look(tracker.latest_read_ns + late_ns)
        return max(waits[1:])

    longest_wait_ms(1000, 80_000)
    assert longest_wait_ms(80, 80_000) > 14
    assert longest_wait_ms(80, 3 * MS) == pytest.approx(12, abs=0.1)
    sensor.look(tracker.latest_read_ns + 2 * SECOND)  # once, the machine or the driver stood still
    longest_wait_ms(400, 80_000)
    assert longest_wait_ms(80, 80_000) > 14

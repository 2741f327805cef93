"""The driver's own samples of power, which Hopper's keeps. `h100_samples.json` has those of an H100
under bursts of a known load.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests import seeds
from tests.zeusd.energy.support import channel_of, empty_history, joules, reading
from zeus_common.units import MS
from zeusd.energy.channel import PATIENT_NS, SAMPLE_NS, Channel, tiles
from zeusd.energy.meter import SAMPLED, sensor_timing

MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("h100_samples.json").read_text())
BURST_W = 432.0
"""Power of that load: the mean of its bursts of 150 ms and more."""

SECOND = 1_000 * MS
PRODUCT = 9, "NVIDIA H100 80GB HBM3"

Samples = list[tuple[int, int]]


def measured() -> Samples:
    ends_us = itertools.accumulate(after_us for after_us, _ in MEASURED["samples"])
    return [(t_us * 1000, mw) for t_us, (_, mw) in zip(ends_us, MEASURED["samples"], strict=True)]


def feed(
    channel: Channel,
    samples: Samples,
    counter_mj: int | None = None,
    few: int = 7,
) -> None:
    """Reads samples as they appear, a few at a time, and the counter where it is needed."""
    for first in range(0, len(samples), few):
        part = samples[first : first + few]
        now_ns = part[-1][0] + 2 * MS
        sensors = reading(now_ns, counter_mj, part[-1][1])
        channel.extend(now_ns, part, sensors if channel.lacks(part) else None)


def steady(since_s: float, until_s: float, watts: float) -> Samples:
    first, last = round(since_s * 50), int(until_s * 50 + 1e-6)
    return [(number * SAMPLE_NS, round(watts * 1000)) for number in range(first + 1, last + 1)]


def test_an_h100s_samples_add_up_to_its_counter() -> None:
    """Over half a minute; the counter shows the energy until its last tick, some ms late."""
    channel = channel_of(*PRODUCT)
    feed(channel, measured())
    readings = [one for one in MEASURED["counter"] if one[0] > 1_000_000]
    (begin_us, _, begin_mj), (end_us, _, end_mj) = readings[0], readings[-1]
    energy = channel.curve.window(begin_us * 1000, end_us * 1000, False)
    assert energy.energy_uj / 1000 == pytest.approx(end_mj - begin_mj, rel=0.005)


def test_bursts_on_an_h100_have_the_power_of_the_load() -> None:
    """Any length and distance: a sample may be of several of them."""
    channel = channel_of(*PRODUCT)
    feed(channel, measured())
    found: dict[int, list[float]] = {}
    within = []
    for begin_us, end_us in MEASURED["bursts"]:
        energy = channel.curve.window(begin_us * 1000, end_us * 1000, True)
        watts = energy.energy_uj / (end_us - begin_us)
        found.setdefault(min(150, (end_us - begin_us) // 25_000 * 25), []).append(watts)
        stated_w = energy.uncertainty_uj / (end_us - begin_us)
        within.append(abs(watts - BURST_W) <= stated_w + 0.02 * BURST_W)
    assert statistics.fmean(within) > 0.93
    spread = {length_ms: statistics.pstdev(watts) for length_ms, watts in found.items()}
    assert spread[25] < 0.12 * BURST_W  # 25 to 50 ms
    assert spread[150] < 0.03 * BURST_W
    for length_ms in (25, 50, 100, 150):
        assert statistics.fmean(found[length_ms]) == pytest.approx(BURST_W, rel=0.04)


@pytest.mark.parametrize("counter", [True, False])
def test_time_without_samples_has_the_counters_growth(counter: bool) -> None:
    """zeusd was stopped for a minute: the driver keeps only the last seconds."""
    history = empty_history()
    start_mj = 5_000_000 if counter else None
    before = steady(1, 11, 300)
    feed(Channel(0, history, *PRODUCT, 700_000), before, start_mj)
    away_mj, later = 60 * 450_000, steady(70, 75, 300)
    end_mj = None if start_mj is None else start_mj + 10 * 300_000 + away_mj + 119 * 6_000
    again = Channel(0, history, *PRODUCT, 700_000)
    now_ns = later[118][0]
    sensors = reading(now_ns, end_mj, 300_000)
    assert again.lacks(later[:119])
    again.extend(now_ns, later[:119], sensors)
    feed(again, later[119:], None)
    watts_away = 460 if counter else 300  # a minute's energy in 59 s, or power at its end
    expected_j = 9 * 300 + watts_away * 59 + 4 * 300
    assert joules(again, 2_000, 74_000) == pytest.approx(expected_j, rel=0.01)


def test_power_that_nobody_has_sampled_may_have_been_as_low_as_any_before() -> None:
    stated_uj = []
    for least_w in (300, 50):
        channel = channel_of(*PRODUCT)
        feed(channel, steady(1, 3, least_w) + steady(3, 10, 300), 1_000_000)
        feed(channel, steady(30, 35, 300), 1_000_000 + 2_000 * least_w + 27 * 300_000)
        stated_uj.append(channel.curve.window(11 * SECOND, 20 * SECOND, False).uncertainty_uj)
    assert stated_uj[1] > 100 * stated_uj[0] > 0


def test_samples_add_up_to_the_counter_over_minutes() -> None:
    """They may differ by a little. The counter is read once a second, between two of its ticks."""
    chance = random.Random(seeds.fresh())
    channel = channel_of(*PRODUCT)

    def second(number: int, counter_mj: int) -> None:
        samples = steady(number, number + 1, 300)
        now_ns = samples[-1][0] + 3 * MS
        shown_mj = counter_mj - chance.randint(8, 108) * 303
        channel.extend(now_ns, samples, reading(now_ns, shown_mj, 0))

    for number in range(1, 400):
        second(number, 1_000_000 + number * 303_000)  # 1 % more than the samples
    assert joules(channel, 200_000, 390_000) == pytest.approx(190 * 303, rel=0.002)
    assert joules(channel, 330_000, 390_000) == pytest.approx(60 * 303, rel=0.003)
    second(410, 1_000_000 + 410 * 303_000)  # ten seconds without samples
    assert joules(channel, 400_000, 410_000) == pytest.approx(10 * 303, rel=0.02)


def test_a_counter_that_starts_again_changes_nothing() -> None:
    channel = channel_of(*PRODUCT)
    for number in range(1, 100):
        samples = steady(number, number + 1, 300)
        counter_mj = (5_000_000 if number < 50 else 0) + number * 300_000
        now_ns = samples[-1][0]
        channel.extend(now_ns, samples, reading(now_ns, counter_mj, 0))
    assert joules(channel, 2_000, 99_000) == pytest.approx(97 * 300, rel=0.003)


def test_a_driver_that_makes_no_more_samples_is_read_as_if_it_had_none() -> None:
    channel = channel_of(*PRODUCT)
    feed(channel, steady(1, 5, 300), 1_000_000)
    assert channel.sampled_ns == 5 * SECOND
    assert channel.period_ns == SAMPLE_NS
    for now_ns in (20 * SECOND, 22 * SECOND + 900 * MS):  # zeusd did not run for 15 s
        channel.extend(now_ns, [], None)
        assert channel.sampled_ns is not None
    now_ns = 23 * SECOND + 100 * MS
    assert channel.extend(now_ns, [], None) is None
    assert channel.sampled_ns is None
    counter_mj, tick_ns = 1_000_000 + 4 * 300_000, 100 * MS
    while now_ns < 40 * SECOND:
        now_ns = max(now_ns + MS // 10, channel.latest_read_ns)
        counted_mj = counter_mj + (now_ns - 5 * SECOND) // tick_ns * 30_000
        channel.observe(reading(now_ns, counted_mj, 300_000))
    assert channel.period_ns == pytest.approx(tick_ns, rel=0.01)
    # The counter shows the energy of some milliseconds before its tick.
    late_ns = (-channel.history.ends_ns) % tick_ns
    assert late_ns == pytest.approx(sensor_timing(*PRODUCT).lag_ns, abs=MS)
    assert joules(channel, 3_000, 39_000) == pytest.approx(36 * 300, rel=0.01)


@pytest.mark.parametrize(("share", "used"), [(1.0, True), (1.03, True), (0.8, False), (1.1, False)])
def test_samples_are_not_used_where_the_counter_contradicts_them(share: float, used: bool) -> None:
    """As on a board whose samples are of another part of it."""
    channel = channel_of(*PRODUCT)
    for number in range(1, 301):
        samples = steady(number, number + 1, 700)
        counted = round(1_000_000 + number * 700_000 * share)
        now_ns = samples[-1][0]
        if channel.sampled_ns is None:
            break
        sensors = reading(now_ns, counted, 0)
        channel.extend(now_ns, samples, sensors if number % 10 == 1 else None)
    assert (channel.sampled_ns is not None) is used


@pytest.mark.parametrize("off_ms", [-400, 400])
def test_samples_that_get_another_time_are_not_used_for_long(off_ms: int) -> None:
    """As if the driver's clock were not the time of day, and drifted away from it."""
    channel = channel_of(*PRODUCT)
    feed(channel, steady(1, 5, 300), 1_000_000)
    now_ns, known_ns = 5 * SECOND, 5 * SECOND
    while channel.sampled_ns is not None and now_ns < 20 * SECOND:
        now_ns += 200 * MS
        made = steady(4, now_ns / SECOND, 300)
        shifted = [(t_ns + off_ms * MS, mw) for t_ns, mw in made]
        new = [one for one in shifted if one[0] > known_ns]
        channel.extend(now_ns, new, reading(now_ns, None, 0))
        known_ns = channel.sampled_ns or known_ns
        assert channel.history.ends_ns <= now_ns
    assert now_ns < 10 * SECOND
    assert channel.sampled_ns is None


def test_setting_the_time_of_day_back_ends_no_use_of_samples() -> None:
    channel = channel_of(*PRODUCT)
    feed(channel, steady(1, 5, 300), 1_000_000)
    ring = steady(2.6, 5, 300)
    for now_ns in range(5 * SECOND, 9 * SECOND, 200 * MS):
        future = [(t_ns + 3600 * SECOND, mw) for t_ns, mw in ring if t_ns > now_ns - 2_400 * MS]
        newest = steady(max(5, now_ns / SECOND - 0.2), now_ns / SECOND, 300)
        channel.extend(now_ns, newest + future, reading(now_ns, None, 0))
    assert channel.sampled_ns == pytest.approx(9 * SECOND, abs=250 * MS)
    assert channel.history.ends_ns < 9 * SECOND


def test_a_reading_that_fails_is_tried_again_and_nothing_is_lost() -> None:
    channel = channel_of(*PRODUCT)
    feed(channel, steady(1, 3, 300), 1_000_000)
    pauses = []
    now_ns = 3 * SECOND
    for _ in range(8):
        channel.failed(now_ns)
        pauses.append(channel.next_read_ns - now_ns)
        now_ns = channel.next_read_ns
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1]
    feed(channel, steady(3, 5, 600), 1_000_000)
    assert joules(channel, 2_000, 4_000) == pytest.approx(300 + 600, rel=0.005)


def test_samples_are_read_when_somebody_waits_or_before_the_driver_forgets_them() -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    channel, now_ns = channel_of(*PRODUCT), SECOND
    for awaited, most, least in ((False, 6, 2), (True, 26, 15)):
        looks, until_ns = 0, now_ns + 20 * SECOND
        while now_ns < until_ns:
            known_ns = channel.sampled_ns or 0
            samples = steady(known_ns / SECOND, (now_ns - 2 * MS) / SECOND, 100)[-119:]
            channel.extend(now_ns, samples, reading(now_ns, None, 0))
            looks += 1
            low_ns, high_ns = channel.next_read_ns, channel.latest_read_ns
            assert now_ns < channel.next_tick_ns <= low_ns <= high_ns <= now_ns + PATIENT_NS
            now_ns = channel.next_tick_ns if awaited else chance.randint(low_ns, high_ns)
            now_ns += round(chance.expovariate(1 / 60_000))
        assert least < looks / 20 < most


@pytest.mark.parametrize(("apart_ms", "whole"), [(20, True), (45, True), (100, False)])
def test_samples_far_from_each_other_do_not_cover_all_time(apart_ms: int, whole: bool) -> None:
    assert tiles([(number * apart_ms * MS, 300_000) for number in range(24)]) is whole


def test_few_samples_show_nothing() -> None:
    assert not tiles([])
    assert not tiles(steady(0, 0.18, 300))
    assert tiles(steady(0, 0.2, 300))
    assert not channel_of(*PRODUCT).lacks([])


def test_a_burst_between_two_samples_is_uncertain_by_what_they_may_leave_out() -> None:
    channel = channel_of(*PRODUCT)
    samples = steady(1, 3, 100) + steady(3, 3.1, 600) + steady(3.1, 5, 100)
    feed(channel, samples, 1_000_000)
    begin_ns = 3 * SECOND - SAMPLED.lag_ns
    energy = channel.curve.window(begin_ns, begin_ns + 100 * MS, True)
    assert energy.energy_uj / 1e6 == pytest.approx(60, rel=0.001)
    assert 0.5 < energy.uncertainty_uj / 1e6 < 4

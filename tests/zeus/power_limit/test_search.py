"""Searches alone: what they measure, when they end, and how they treat noise."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.zeus.power_limit.searched_job import LIMITS, STEPS, WARMUP, Job, adaptive, search
from zeus.optimizer.power_limit.estimates import (
    Estimates,
    LimitEstimate,
    SettingSample,
    step_noise,
)
from zeus.optimizer.power_limit.planner import costs_of
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement
from zeus.optimizer.power_limit.search import Exhaustive, Search, expected_steps
from zeus.optimizer.power_limit.selectors import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    ZeusCost,
    best,
)
from zeus.optimizer.power_limit.watch import Watch


def chosen(searching: Search, selector: OptimumSelector) -> int:
    """The limit that a selector names of the estimates, mW."""
    rows = [
        PowerLimitMeasurement(
            power_limit=one.power_limit_mw / 1000, energy=one.energy_j, time=one.time_s
        )
        for one in searching.estimates()
    ]
    return round(selector.select(rows) * 1000)


def regret(searching: Search, job: Job, selector: OptimumSelector) -> float:
    curve = [job.time_s(one) for one in LIMITS], [job.energy_j(one) for one in LIMITS]
    true = costs_of(selector, LIMITS, curve)
    return true[LIMITS.index(chosen(searching, selector))] / min(true) - 1


# -------------------------------------------------------------------------------------- estimates


def estimated(samples: list[SettingSample]) -> list[LimitEstimate]:
    return Estimates(LIMITS, samples, 1).limits()


@pytest.mark.parametrize("seed", range(5))
def test_estimates_are_right_within_what_they_say(seed: int) -> None:
    """Of 9 limits in 5 runs, one may be off by more than three standard deviations."""
    job = Job(seed)
    samples = [job.run(limit, 5) for limit in LIMITS[:8:2] for _ in range(3)]
    off = [
        abs(math.log(one.time_s / job.time_s(one.power_limit_mw))) / one.time_error
        for one in estimated(samples)
    ]
    assert sum(one > 3 for one in off) <= 1, off


def test_measured_limits_are_known_best_and_interpolated_ones_better_than_others() -> None:
    job = Job(0)
    samples = [job.run(limit, 10) for limit in (300_000, 200_000, 150_000)]
    errors = {one.power_limit_mw: one.time_error for one in estimated(samples)}
    assert errors[200_000] < errors[175_000] < errors[100_000]
    samples.append(job.run(200_000, 30))
    again = {one.power_limit_mw: one.time_error for one in estimated(samples)}
    assert again[200_000] < errors[200_000]


def test_the_spread_of_steps_is_learned_from_pieces() -> None:
    quiet, noisy = [
        step_noise([job.run(300_000, 5) for _ in range(20)]) for job in (Job(3, 0.005), Job(3, 0.1))
    ]
    assert quiet < 0.02
    assert noisy == pytest.approx(0.1, rel=0.35)


@pytest.mark.parametrize(
    ("power", "energy_j", "seconds", "words"),
    [
        (True, 4000.0, 20.0, None),
        (True, 4360.0, 21.8, None),
        (True, 4600.0, 23.0, "a step takes +15 % against what was measured"),
        (True, 3400.0, 17.0, "a step takes -15 % against what was measured"),
        (True, 4360.0, 20.0, None),
        (True, 4600.0, 20.0, "power is +15 % against what was measured"),
        (False, 4600.0, 20.0, None),
        (True, 0.0, 40.0, None),
    ],
)
def test_training_has_changed_if_two_checks_in_a_row_show_it(
    power: bool, energy_j: float, seconds: float, words: str | None
) -> None:
    first = Watch(LimitEstimate(200_000, 1.0, 200.0, 0.0, 0.0, 40), power, None)
    for watch, every in ((first, 200), (Watch(first.chosen, power, first), 400)):
        assert watch.changed(4000.0, 20.0, 100) is None
        assert watch.next == 100 + every
        assert watch.changed(energy_j, seconds, 500) is None
        if energy_j:
            assert watch.next == 500 + (every if words is None else 0), "it is repeated at once"
        assert watch.changed(energy_j, seconds, 520) == words
        assert watch.changed(4000.0, 20.0, 540) is None
        assert watch.changed(energy_j, seconds, 560) is None, "once is chance"


# ------------------------------------------------------------------------------------- exhaustive


def test_the_exhaustive_search_measures_every_limit_from_the_highest_down() -> None:
    job = Job(0)
    searching = Exhaustive(LIMITS, WARMUP, STEPS)
    assert search(searching, job, late=1) == LIMITS
    assert job.position == expected_steps("exhaustive", 9, 10, 40) == 450
    assert ([one.steps for one in searching.estimates()], searching.reason) == ([40] * 9, "")


def test_what_was_measured_briefly_is_known_less() -> None:
    """Its errors are of the steps' spread and the sensor, in time and energy alike."""
    job = Job(1, noise=0.02)
    searching = Exhaustive(LIMITS, WARMUP, STEPS)
    for _ in range(8):
        searching.add(job.run(300_000, 5))
    searching.add(job.run(200_000, 4))
    long, brief = searching.estimates()
    assert 0.001 < long.time_error < 0.01 < brief.time_error < 0.03
    for one in (long, brief):
        assert one.energy_error >= one.time_error


def test_after_an_interruption_only_the_missing_steps_are_measured() -> None:
    job, searching = Job(0), Exhaustive(LIMITS, WARMUP, STEPS)
    searching.add(job.run(300_000, 15))
    trial = searching.next(0, 0, {})
    assert (trial.power_limit_mw, trial.steps) == (300_000, 25)
    further = searching.next(300_000, 0, {300_000: 25})
    assert further.power_limit_mw == 275_000
    again = searching.next(300_000, 0, {})  # they were lost
    assert (again.power_limit_mw, again.steps) == (300_000, 25)


# --------------------------------------------------------------------------------------- adaptive


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_the_adaptive_search_takes_a_third_of_the_steps_and_chooses_as_well(noise: float) -> None:
    found = []
    for seed in range(20):
        job = Job(seed, noise)
        searching = adaptive(ZeusCost(0.5))
        search(searching, job, late=1)
        assert job.position <= 450 / 3 + 15, f"seed {seed}"
        found.append(regret(searching, job, ZeusCost(0.5)))
    assert sum(found) / len(found) < 0.01, found
    assert max(found) < 0.03, found


def test_a_constraint_is_kept_within_what_can_be_known() -> None:
    for seed in range(10):
        job = Job(seed)
        searching = adaptive(MaxSlowdownConstraint(1.1))
        search(searching, job)
        limit = chosen(searching, MaxSlowdownConstraint(1.1))
        slowdown = job.time_s(limit) / job.time_s(LIMITS[0])
        assert slowdown < 1.1 * 1.02, f"seed {seed}"
        lower = [one for one in LIMITS if one < limit]
        assert job.time_s(lower[0]) / job.time_s(LIMITS[0]) > 1.1 * 0.96, f"seed {seed}"


def test_limits_that_cannot_win_are_not_measured() -> None:
    held = search(adaptive(ZeusCost(0.5)), Job(1, noise=0.01))
    assert held[0] == 300_000
    assert len(set(held)) < len(LIMITS)


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_draws_far_less_than_any_limit_is_left_at_the_highest(seed: int) -> None:
    job = Job(seed, noise=0.05, draws_w=60.0)
    searching = adaptive(Energy())
    assert search(searching, job) == [LIMITS[0]]
    assert job.position <= 40
    assert searching.reason == "no limit lowers the power that this job draws"


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_the_lowest_limit_does_not_slow_tries_only_that_limit(
    seed: int,
) -> None:
    job = Job(seed, draws_w=85.0)
    assert set(search(adaptive(Energy()), job)) == {LIMITS[0], LIMITS[-1]}
    assert job.position <= 100


@pytest.mark.parametrize("seed", range(3))
def test_short_steps_have_no_peaks_for_a_limit_above_the_mean_to_lower(seed: int) -> None:
    """The same draw is below every limit: whether one is tried depends on how long steps are."""
    for unit_s, tried in ((0.015, {LIMITS[0]}), (0.06, {LIMITS[0], LIMITS[-1]})):
        searching = adaptive(Energy())
        assert set(search(searching, Job(seed, unit_s=unit_s, draws_w=90.0))) == tried, unit_s
        assert searching.reason == "no limit lowers the power that this job draws"


@pytest.mark.parametrize("seed", range(3))
def test_short_steps_of_a_job_that_a_limit_reaches_are_searched(seed: int) -> None:
    job = Job(seed, unit_s=0.015, draws_w=200.0)
    searching = adaptive(Energy())
    assert len(set(search(searching, job))) > 2
    assert regret(searching, job, Energy()) < 0.03


def test_waiting_for_the_first_energy_is_no_part_of_the_search() -> None:
    """As of a zeusd that gets no CPU for seconds: the highest limit costs nothing meanwhile."""
    searching = adaptive(Energy())
    held = search(searching, Job(0), late=60)
    assert len(set(held)) > 1
    assert searching.reason == ""


def test_a_search_that_measured_only_the_highest_limit_says_so() -> None:
    searching = adaptive(Energy())
    searching.add(Job(0).run(LIMITS[0], 5))
    assert searching.reason == "no other was measured in time"


class _Flat(Job):
    """Draws 88 W, which no limit lowers, and saves one uncertain percent at the lowest."""

    def time_s(self, limit_mw: int) -> float:
        return self.unit_s * (0.99 if limit_mw == LIMITS[-1] else 1.0)


def test_the_search_ends_once_it_knows_that_no_limit_lowers_the_power() -> None:
    """It measures the highest limit beside the lowest, and stops before they are distinguished."""
    for seed in range(12):
        job = _Flat(seed, draws_w=88.0)
        assert set(search(adaptive(Energy()), job)) == {LIMITS[0], LIMITS[-1]}
        assert job.position < 40, f"seed {seed}"


class _Bursts(Job):
    """Draws 90 W on average, and more for moments: limits above the average lower its power."""

    def power_w(self, limit_mw: int) -> float:
        return 90.0 * min(1.0, (limit_mw / 200_000) ** 0.3)


def test_a_job_that_the_lowest_limit_slows_is_searched_even_if_it_draws_less() -> None:
    job = _Bursts(0, noise=0.01, draws_w=90.0)
    searching = adaptive(Energy())
    search(searching, job)
    limit = best(Energy(), searching.estimates(), STEPS, cautious=True).power_limit_mw
    assert limit == LIMITS[-1]
    assert not searching.reason


class _Counted(Job):
    """Its driver counts the time in which power limited the clocks."""

    def run(self, limit_mw: int, steps: int) -> SettingSample:
        sample = super().run(limit_mw, steps)
        return replace(sample, limited_s=sample.time_s * (limit_mw < 1000 * self.draws_w))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("selector", [Energy(), ZeusCost(0.5), MaxSlowdownConstraint(1.1)])
def test_limits_that_do_not_bind_are_skipped_where_drivers_count_it(
    seed: int, selector: OptimumSelector
) -> None:
    plain, counted = Job(seed, draws_w=160.0), _Counted(seed, draws_w=160.0)
    assert 160_000 < search(adaptive(selector), plain)[1] < LIMITS[0]
    held = search(adaptive(selector), counted)
    assert held[1] == 150_000
    assert counted.position <= plain.position
    searching = adaptive(selector)
    for limit in (300_000, 200_000, 150_000):
        searching.add(counted.run(limit, 10))
    assert not {225_000, 250_000, 275_000} & {*search(searching, counted)}


def test_a_lowest_limit_that_does_not_bind_ends_the_search() -> None:
    plain, counted = Job(0, draws_w=95.0), _Counted(0, draws_w=95.0)
    plain.power_w = lambda limit_mw: 95.0 * (limit_mw / 300_000) ** 0.03  # type: ignore[method-assign]  # its own
    counted.power_w = plain.power_w  # type: ignore[method-assign]  # the same
    assert set(search(adaptive(Energy()), counted)) == {LIMITS[0], LIMITS[-1]}
    search(adaptive(Energy()), plain)
    assert counted.position < plain.position


class WithoutCosts(ZeusCost):
    """As a user's that has none."""

    def costs(self, measurements: object) -> None:
        return None


def test_a_selector_without_costs_has_every_limit_measured_until_it_is_known() -> None:
    job = Job(0, noise=0.002)
    held = search(adaptive(WithoutCosts(0.5)), job)
    assert set(held) == set(LIMITS)
    assert job.position < 450


def test_a_limit_that_is_left_out_is_never_tried_nor_estimated() -> None:
    job = Job(0)
    searching = adaptive(ZeusCost(0.5))
    searching.without(200_000)
    assert 200_000 not in search(searching, job)
    assert 200_000 not in [one.power_limit_mw for one in searching.estimates()]


def test_measurements_of_an_earlier_run_are_not_repeated() -> None:
    job = Job(0)
    first = adaptive(ZeusCost(0.5))
    search(first, job)
    second = adaptive(ZeusCost(0.5))
    for sample in first.samples:
        second.add(sample)
    assert second.next(0, job.position, {}) is None
    half = adaptive(ZeusCost(0.5))
    for sample in first.samples[: len(first.samples) // 2]:
        half.add(sample)
    rest = Job(1)
    rest.position = job.position // 2
    search(half, rest)
    assert rest.position <= 450 / 3 + 15


@pytest.mark.parametrize("seed", range(30))
def test_any_job_ends_in_time_and_is_measured_at_its_highest_limit(seed: int) -> None:
    randomness = random.Random(seed)
    print(f"seed {seed}")
    count = randomness.randint(1, 12)
    limits = sorted(randomness.sample(range(60_000, 700_000, 5_000), count), reverse=True)
    warmup, profile = randomness.randint(0, 12), randomness.randint(1, 60)
    noise = randomness.choice([0.0, 0.02, 0.3])
    job = Job(seed, noise, unit_s=10 ** randomness.uniform(-4, 1))
    selector = randomness.choice([ZeusCost(0.0), ZeusCost(1.0), MaxSlowdownConstraint(1.2)])
    searching = adaptive(selector, limits, warmup, profile)
    held = search(searching, job, late=randomness.randint(0, 3))
    assert held[0] == limits[0]
    most = 2 * expected_steps("adaptive", count, warmup, profile)
    assert job.position <= most + 5 * (warmup + profile)

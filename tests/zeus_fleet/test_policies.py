"""The promises of each policy, on random jobs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest

from tests.seeds import fresh
from tests.support import known
from zeus_fleet.policies import (
    POLICIES,
    JobGroup,
    busy,
    level,
    level_by_want,
    max_min,
    uniform,
    water_filling,
)
from zeus_fleet.profiles import MEAN_POINTS, ProgressProfile, mean, monotone

LOW, HIGH = 100_000, 300_000
LIMITS = tuple(range(LOW, HIGH + 1, 25_000))


def random_profile(generator: random.Random) -> ProgressProfile:
    rates = sorted(generator.uniform(0.2, 1) for _ in LIMITS)
    flat_from = generator.choice((3, 6, 9))
    rates[flat_from:] = [rates[-1]] * len(rates[flat_from:])
    return ProgressProfile(LIMITS, tuple(rate / rates[-1] for rate in rates))


def random_jobs(generator: random.Random, known: float = 1.0) -> list[JobGroup]:
    jobs = [
        JobGroup(
            generator.choice((1, 2, 8, 16)),
            LOW,
            HIGH,
            profile=random_profile(generator) if generator.random() < known else None,
        )
        for _ in range(generator.randint(1, 12))
    ]
    return [*jobs, JobGroup(generator.randint(1, 20), LOW, HIGH, busy=False)]


def cases(count: int = 40) -> list[tuple[list[JobGroup], int]]:
    """Jobs, and a budget between their minimum and their maximum limits."""
    generator = random.Random(fresh())
    found = []
    for _ in range(count):
        jobs = random_jobs(generator, generator.choice((0.0, 0.5, 1.0)))
        gpus = sum(job.gpus for job in jobs)
        found.append((jobs, generator.randint(gpus * LOW, gpus * HIGH)))
    return found


def held(jobs: Sequence[JobGroup], limits: Sequence[int]) -> int:
    return sum(job.gpus * limit for job, limit in zip(jobs, limits, strict=True))


def progress(jobs: Sequence[JobGroup], limits: Sequence[int]) -> list[float]:
    return [
        job.profile.at(limit)
        for job, limit in zip(jobs, limits, strict=True)
        if job.busy and job.profile
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_limits_are_in_range_and_their_sum_in_the_budget(name: str) -> None:
    for jobs, total in cases():
        limits = POLICIES[name](jobs, total)
        assert all(LOW <= limit <= HIGH for limit in limits)
        assert held(jobs, limits) <= total
        if name != "uniform":
            assert limits[-1] == LOW, "idle GPUs are at their minimum"
        room = [limit < HIGH for job, limit in zip(jobs, limits, strict=True) if job.busy]
        if any(room):
            gpus = sum(job.gpus for job in jobs)
            assert total - held(jobs, limits) <= gpus, "nothing is left but a rounding"


@pytest.mark.parametrize("name", POLICIES)
def test_below_the_minimum_limits_all_are_at_their_minimum(name: str) -> None:
    jobs = random_jobs(random.Random(fresh()))
    assert set(POLICIES[name](jobs, sum(job.gpus for job in jobs) * LOW - 1)) == {LOW}


@pytest.mark.parametrize("policy", [uniform, busy])
def test_a_larger_budget_slows_no_job(
    policy: Callable[[Sequence[JobGroup], int], list[int]],
) -> None:
    for jobs, total in cases():
        less, more = policy(jobs, total), policy(jobs, total + 1_000_000)
        pairs = zip(progress(jobs, less), progress(jobs, more), strict=True)
        assert all(after >= before - 1e-6 for before, after in pairs)


def test_a_larger_budget_does_not_slow_the_slowest_job_under_max_min() -> None:
    for jobs, total in cases():
        less, more = max_min(jobs, total), max_min(jobs, total + 1_000_000)
        assert min(progress(jobs, more), default=1) >= min(progress(jobs, less), default=1) - 1e-6


@pytest.mark.parametrize("floor", [0.0, 0.9, 1.0])
def test_water_filling_leaves_each_job_its_floor(floor: float) -> None:
    for jobs, total in cases():
        fair = progress(jobs, busy(jobs, total))
        filled = progress(jobs, water_filling(jobs, total, floor))
        assert all(now >= floor * then - 1e-9 for now, then in zip(filled, fair, strict=True))


def test_water_filling_gives_the_most_where_profiles_are_concave() -> None:
    generator = random.Random(fresh())
    for _ in range(30):
        jobs = []
        for _ in range(6):
            steps = sorted((generator.uniform(0, 1) for _ in LIMITS[1:]), reverse=True)
            rates = [sum(steps[:index]) + 1 for index in range(len(LIMITS))]
            profile = ProgressProfile(LIMITS, tuple(rate / rates[-1] for rate in rates))
            jobs.append(JobGroup(generator.choice((1, 4)), LOW, HIGH, profile=profile))
        gpus = sum(job.gpus for job in jobs)
        total = generator.randint(gpus * LOW, gpus * HIGH)

        def gain(limits: Sequence[int], jobs: Sequence[JobGroup] = jobs) -> float:
            rates = progress(jobs, limits)
            return sum(job.gpus * rate for job, rate in zip(jobs, rates, strict=True))

        best = gain(water_filling(jobs, total, floor=0.0))
        for other in (uniform, busy, max_min, water_filling):
            assert gain(other(jobs, total)) <= best + 1e-4


def test_max_min_has_the_fastest_slowest_job() -> None:
    for jobs, total in cases():
        if all(job.profile is None for job in jobs):
            continue
        jobs = [job for job in jobs if job.profile or not job.busy]
        worst = min(progress(jobs, max_min(jobs, total)))
        for other in (uniform, busy, water_filling):
            assert min(progress(jobs, other(jobs, total))) <= worst + 1e-4


@pytest.mark.parametrize("policy", [max_min, water_filling])
def test_without_profiles_busy_gpus_share(
    policy: Callable[[Sequence[JobGroup], int], list[int]],
) -> None:
    jobs = [JobGroup(4, LOW, HIGH), JobGroup(2, LOW, HIGH), JobGroup(2, LOW, HIGH, busy=False)]
    assert policy(jobs, 1_400_000) == busy(jobs, 1_400_000) == [200_000, 200_000, LOW]


def test_unknown_jobs_count_by_the_mean() -> None:
    steep = ProgressProfile((LOW, HIGH), (0.4, 1.0))
    flat = ProgressProfile((LOW, HIGH), (0.9, 1.0))
    jobs = [JobGroup(1, LOW, HIGH, profile=one) for one in (steep, None, flat)]
    assert water_filling(jobs, 500_000, floor=0.0) == [HIGH, LOW, LOW]
    assert water_filling(jobs, 700_000, floor=0.0) == [HIGH, HIGH, LOW]


def test_an_unknown_job_counts_by_the_mean_of_its_kind_of_gpu() -> None:
    flat = ProgressProfile(LIMITS, (0.99,) * 8 + (1.0,))
    steep = ProgressProfile(LIMITS, tuple(limit / HIGH for limit in LIMITS))
    for kind, gains in (("steep", True), ("flat", False)):
        jobs = [
            JobGroup(1, LOW, HIGH, profile=flat, kind="flat"),
            JobGroup(1, LOW, HIGH, profile=steep, kind="steep"),
            JobGroup(1, LOW, HIGH, kind=kind),
        ]
        limits = water_filling(jobs, 3 * LOW + 300_000, floor=0.0)
        assert (limits[2] > 200_000) == gains


# ------------------------------------------------------------------------------ levels, profiles


def test_a_common_level_distributes_everything_but_rounding() -> None:
    generator = random.Random(fresh())
    for _ in range(100):
        count = generator.randint(1, 8)
        lows = [generator.randint(0, 50) for _ in range(count)]
        highs = [low + generator.randint(0, 50) for low in lows]
        counts = [generator.randint(1, 5) for _ in range(count)]
        least = sum(low * k for low, k in zip(lows, counts, strict=True))
        most = sum(high * k for high, k in zip(highs, counts, strict=True))
        total = generator.randint(least, most + 10)
        shares = level(total, lows, highs, counts)
        given = sum(share * k for share, k in zip(shares, counts, strict=True))
        assert min(total, most) - sum(counts) < given <= total
        inner = {
            share
            for low, share, high in zip(lows, shares, highs, strict=True)
            if low < share < high
        }
        assert len(inner) <= 1, "one level for all that are not at a bound"


def test_wants_come_first() -> None:
    assert level_by_want(100, [0, 0], [20, 90], [90, 90]) == [20, 80]
    assert level_by_want(100, [0, 0], [20, 20], [90, 90]) == [50, 50]
    assert level_by_want(0, [], [], []) == []


def test_noise_in_a_profile_is_pooled() -> None:
    profile = ProgressProfile.measured({100: 2.0, 150: 1.0, 200: 1.25, 250: 1.0})
    assert profile.progress == pytest.approx((0.5, 0.9, 0.9, 1.0))
    assert monotone([3, 2, 1]) == [2, 2, 2]


def test_a_profile_is_read_both_ways() -> None:
    profile = ProgressProfile((100, 200, 300), (0.5, 0.9, 1.0))
    assert [profile.at(limit) for limit in (50, 150, 300, 400)] == pytest.approx([0.5, 0.7, 1, 1])
    assert [profile.limit_for(value) for value in (0.1, 0.7, 0.9, 2.0)] == [100, 150, 200, 300]
    assert profile.segments(150, 300) == [pytest.approx((0.004, 50)), pytest.approx((0.001, 100))]
    convex = ProgressProfile((100, 200, 300), (0.5, 0.6, 1.0))
    assert convex.segments(100, 300) == [pytest.approx((0.0025, 200))]
    both = known(mean([profile, convex]))
    assert both.progress == pytest.approx((0.5, 0.75, 1.0))
    assert mean([]) is None
    many = [ProgressProfile((100 + n, 5000 + n, 9000 + n), (0.5, 0.9, 1.0)) for n in range(3000)]
    found = known(mean(many))
    assert len(found.limits_mw) <= MEAN_POINTS + 1, "what one node reports costs not its square"
    assert (found.limits_mw[0], found.limits_mw[-1], found.progress[-1]) == (100, 11_999, 1.0)
    exact = sum(one.at(6_500) for one in many) / len(many)
    assert found.at(6_500) == pytest.approx(exact, abs=0.001)


@pytest.mark.parametrize(
    ("limits", "values"),
    [((100,), (1.0,)), ((100, 100), (0.5, 1.0)), ((100, 200), (1.0, 0.9)), ((1, 2), (0.0, 1.0))],
)
def test_an_invalid_profile_is_refused(limits: tuple[int, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="profile"):
        ProgressProfile(limits, values)


# ---------------------------------------------------------------------------- latency objectives


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_goes_below_what_a_latency_objective_needs(name: str) -> None:
    generator = random.Random(fresh())
    for jobs, _ in cases(20):
        serving = [
            dataclasses.replace(job, needs_mw=generator.randint(LOW, HIGH))
            if job.busy and generator.random() < 0.4
            else job
            for job in jobs
        ]
        needed = held(serving, [job.needs_mw or job.low_mw for job in serving])
        total = generator.randint(needed, sum(job.gpus for job in jobs) * HIGH)
        limits = POLICIES[name](serving, total)
        assert held(serving, limits) <= total
        for job, limit in zip(serving, limits, strict=True):
            assert limit >= (job.needs_mw or LOW)


@pytest.mark.parametrize("name", POLICIES)
def test_where_objectives_need_more_than_there_is_they_share_it(name: str) -> None:
    jobs = [
        JobGroup(1, LOW, HIGH, needs_mw=HIGH),
        JobGroup(1, LOW, HIGH, needs_mw=HIGH),
        JobGroup(1, LOW, HIGH),
    ]
    assert POLICIES[name](jobs, 500_000) == [200_000, 200_000, LOW]

"""Searches in disturbed training: a contradiction leads to more measurement, not to a choice."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from zeus.optimizer.power_limit.adaptive import Adaptive
from zeus.optimizer.power_limit.estimates import Curve, LimitEstimate, SettingSample
from zeus.optimizer.power_limit.planner import costs_of
from zeus.optimizer.power_limit.review import Review
from zeus.optimizer.power_limit.selectors import (
    ALLOWANCE,
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    ZeusCost,
    best,
)

LIMITS = [300_000, 275_000, 250_000, 225_000, 200_000, 175_000, 150_000, 125_000, 100_000]
FACTOR = 1.1
STEPS = 40


@dataclass
class Job:
    """Steps of a job that draws its own power unless it is capped.

    Attributes:
        seed: For the noise.
        natural_w: What it draws by itself.
        steep: How much a limit below that costs in time.
        noise: How much steps vary.
        start: How much slower the first 25 steps are.
        drift: How much slower it gets as it warms up.
        interruption_s: How long one of the first 100 steps stands still.
        base_w: Power that no limit saves.
    """

    seed: int
    natural_w: float = 260.0
    steep: float = 0.8
    noise: float = 0.02
    start: float = 0.0
    drift: float = 0.0
    interruption_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.interrupted = self.random.randrange(100)
        self.position = 0

    def time_s(self, limit_mw: int) -> float:
        below = max(0.0, math.log(1000 * self.natural_w / limit_mw))
        return 0.3 * math.exp(0.25 * below + self.steep * below**2)

    def energy_j(self, limit_mw: int) -> float:
        return self.time_s(limit_mw) * min(self.natural_w, 0.97 * limit_mw / 1000)

    def run(self, limit_mw: int, steps: int) -> SettingSample:
        seconds = joules = 0.0
        begin = self.position
        for _ in range(steps):
            warmer = 1 + self.drift * (1 - math.exp(-self.position / 150))
            slower = 1 + self.start if self.position < 25 else 1.0
            off = warmer * slower * math.exp(self.random.gauss(0, self.noise))
            seconds += self.time_s(limit_mw) * off
            joules += self.energy_j(limit_mw) * off * warmer
            if self.position == self.interrupted:
                seconds += self.interruption_s
                joules += 50 * self.interruption_s
            self.position += 1
        return SettingSample(limit_mw, steps, joules, seconds, 0.5, begin + steps / 2)


DISTURBED = {
    "start": {"start": 0.15},
    "drift": {"drift": 0.03},
    "noise": {"noise": 0.05},
    "interruption": {"interruption_s": 2.0},
    "together": {"start": 0.15, "drift": 0.03, "noise": 0.05, "interruption_s": 2.0},
}


def searching(selector: OptimumSelector) -> Adaptive:
    def choice(estimates: Sequence[LimitEstimate], cautious: bool) -> LimitEstimate:
        return best(selector, estimates, STEPS, cautious=cautious)

    def costs(curve: Curve) -> list[float] | None:
        return costs_of(selector, LIMITS, curve)

    return Adaptive(LIMITS, 10, STEPS, costs, choice, gpus=1)


def chosen(search: Adaptive, job: Job, selector: OptimumSelector, current: int = 0) -> int:
    """Runs a search to its end. Returns its choice, mW."""
    late: list[SettingSample] = []
    trial = search.next(current, job.position, {})
    while trial is not None or late:
        assert job.position < 2000, "the search does not end"
        if trial is not None:
            if trial.power_limit_mw != current:
                job.run(trial.power_limit_mw, max(1, trial.warmup_steps))
            current = trial.power_limit_mw
            late.append(job.run(current, trial.steps))
        if len(late) > 1 or trial is None:
            search.add(late.pop(0))
        outstanding: Counter[int] = Counter()
        for one in late:
            outstanding[one.power_limit_mw] += one.steps
        trial = search.next(current, job.position, outstanding)
    estimates = search.estimates()
    return best(selector, estimates, STEPS, cautious=True).power_limit_mw


@pytest.mark.parametrize("what", DISTURBED)
def test_a_constraint_is_kept_under_every_disturbance(what: str) -> None:
    """In all but at most one of 15 jobs; the benchmark shows all tables."""
    selector = MaxSlowdownConstraint(FACTOR)
    off = []
    for seed in range(15):
        print(f"seed {seed}")
        job = Job(seed, natural_w=200 + 4 * seed, steep=0.4 + 0.05 * (seed % 7), **DISTURBED[what])
        search = searching(selector)
        limit = chosen(search, job, selector)
        slowdown = job.time_s(limit) / job.time_s(LIMITS[0])
        assert job.energy_j(limit) <= job.energy_j(LIMITS[0])
        assert limit < LIMITS[0] or job.natural_w > 290, "there is something to win"
        if slowdown > FACTOR + ALLOWANCE:
            off.append((seed, slowdown))
    assert len(off) <= 1, off


@pytest.mark.parametrize("selector", [ZeusCost(0.5), Energy(), MaxSlowdownConstraint(3.0)])
def test_a_limit_that_costs_more_energy_is_not_chosen(selector: OptimumSelector) -> None:
    """Of a job whose time grows faster than its power falls: no limit saves anything."""
    for seed in range(5):
        job = Job(seed, natural_w=310, steep=6.0)
        job.time_s = lambda limit: 0.3 * (320_000 / limit) ** 1.5
        assert chosen(searching(selector), job, selector) == LIMITS[0], f"seed {seed}"


def test_a_flat_optimum_does_not_keep_the_search_going() -> None:
    for seed in range(5):
        job = Job(seed, natural_w=80, noise=0.05)  # no limit makes a difference
        search = searching(Energy())
        chosen(search, job, Energy())
        assert job.position <= search.budget + 30, f"seed {seed}"


@pytest.mark.parametrize("selector", [ZeusCost(0.5), Energy(), MaxSlowdownConstraint(FACTOR)])
def test_a_limit_far_above_what_a_job_draws_is_not_tried(selector: OptimumSelector) -> None:
    for seed in range(5):
        job = Job(seed, natural_w=114)
        search = searching(selector)
        limit = chosen(search, job, selector)
        tried = {one.power_limit_mw for one in search.samples}
        assert min(tried) < LIMITS[0], f"seed {seed}: nothing was tried"
        assert tried <= {LIMITS[0], *LIMITS[-4:]}, f"seed {seed}"
        assert job.energy_j(limit) <= job.energy_j(LIMITS[0]), f"seed {seed}"


# ----------------------------------------------------------------------------------------- review


def stay(limit_mw: int, position: int, *step_s: float) -> list[SettingSample]:
    """Pieces of five steps each."""
    return [
        SettingSample(limit_mw, 5, 100.0, 5 * one, 0.0, position + 5 * at + 2.5)
        for at, one in enumerate(step_s)
    ]


HIGH, LOW = LIMITS[0], LIMITS[4]


def test_measurements_that_agree_are_accepted() -> None:
    samples = [*stay(HIGH, 0, 1.0, 1.01), *stay(LOW, 20, 1.1, 1.09), *stay(HIGH, 40, 1.02)]
    review = Review(samples)
    assert (review.trusted, review.doubt, review.changed) == (samples, None, False)


def test_a_lower_limit_that_is_faster_has_the_higher_one_measured_again() -> None:
    samples = [*stay(HIGH, 0, 1.15, 1.16), *stay(LOW, 20, 1.05, 1.06)]
    assert Review(samples).doubt == HIGH
    again = Review([*samples, *stay(HIGH, 40, 1.0)])
    assert again.doubt == HIGH  # one piece may be an interruption
    review = Review([*samples, *stay(HIGH, 40, 1.0, 1.01)])
    assert review.changed
    assert review.trusted == stay(HIGH, 40, 1.0, 1.01)  # the start was slow, so it is ignored
    kept = Review([*samples, *stay(HIGH, 40, 1.15, 1.16)])  # so it is, in this job
    assert (kept.doubt, kept.changed) == (None, False)


def test_an_interruption_is_left_out() -> None:
    first = stay(LOW, 0, 1.0, 1.4)
    assert Review(first).doubt == LOW
    third = stay(LOW, 0, 1.0, 1.4, 1.01)
    assert Review(third).trusted == [third[0], third[2]]
    newest = stay(LOW, 0, 1.0, 1.01, 1.4)
    assert Review(newest).trusted == newest[:2]


def test_a_start_that_ends_while_it_is_measured_is_left_out() -> None:
    pieces = stay(HIGH, 0, 1.15, 1.16, 1.0, 1.01)
    assert Review(pieces).trusted == pieces[2:]


def test_pieces_that_never_agree_are_taken_as_they_are() -> None:
    pieces = stay(HIGH, 0, 1.0, 1.3, 1.7, 2.2, 2.9)
    assert Review(pieces[:4]).doubt == HIGH
    assert (Review(pieces).doubt, Review(pieces).trusted) == (None, pieces)

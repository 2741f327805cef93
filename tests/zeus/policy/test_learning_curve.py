"""Runs that are given up by their learning curves."""

from __future__ import annotations

import math
import random

import pytest

from tests import seeds
from zeus.job import Job
from zeus.policy import make_policy
from zeus.policy.interface import Run
from zeus.policy.learning_curve import LEAST_EPOCHS, hopeless, reach_probability
from zeus.policy.recurrence import Recurrences
from zeus.policy.stopping import LearningCurve, Verdict, judge

EPOCHS = range(1, 31)
FLAT = [0.5 - 0.4 * math.exp(-epoch / 2) for epoch in EPOCHS]
RISING = [0.7 - 0.6 * epoch**-0.5 for epoch in EPOCHS]


def test_a_flat_curve_is_stopped_and_a_rising_one_is_not() -> None:
    assert hopeless(FLAT[:15], 0.8, True, 50)
    assert not hopeless(FLAT[:15], 0.49, True, 50)
    assert not hopeless(RISING[:8], 0.6, True, 50)
    # It reaches 0.6 in its 36th epoch.
    assert hopeless(RISING[:20], 0.6, True, 1)
    assert reach_probability(RISING, 0.6, True, 30) > 0.5


def test_a_loss_falls() -> None:
    falling = [1 - metric for metric in FLAT]
    more = reach_probability(falling[:12], 0.45, False, 20)
    assert more == pytest.approx(reach_probability(FLAT[:12], 0.55, True, 20))
    assert hopeless(falling[:15], 0.2, False, 50)


def test_an_unknown_metric_does_not_stop_a_run() -> None:
    few = FLAT[: LEAST_EPOCHS - 1]
    assert reach_probability(few, 0.9, True, 1) == 1
    assert reach_probability([*few, None, math.nan, math.inf], 0.9, True, 1) == 1
    assert reach_probability([0.5] * 10, 0.5, True, 5) == 1  # it is there
    assert hopeless([*FLAT[:15], None], 0.8, True, 50)
    assert reach_probability(FLAT[:15], 0.6, True, 0.5) == 0  # no epoch is left
    assert reach_probability([0.1] * 10, 0.6, True, 100_000) < 0.9


def test_more_epochs_make_it_likelier() -> None:
    found = [reach_probability(RISING[:10], 0.6, True, more) for more in (1, 5, 20, 100)]
    assert found == sorted(found)
    assert found[0] < 0.1
    assert found[-1] > 0.6


def test_few_runs_that_would_reach_their_target_are_stopped() -> None:
    draw = random.Random(seeds.fresh())
    wrong = 0
    for _ in range(300):
        needed, power = draw.randint(10, 60), draw.uniform(0.2, 1.5)
        metrics = [
            1 - 0.9 * epoch**-power - abs(draw.gauss(0, 0.005)) for epoch in range(1, needed)
        ]
        target = 1 - 0.9 * needed**-power
        now = draw.randint(LEAST_EPOCHS, needed - 1)
        wrong += hopeless(metrics[:now], target, True, 1.2 * needed - now)
    assert wrong <= 15


def test_no_metrics_are_too_strange() -> None:
    draw = random.Random(seeds.fresh())
    for _ in range(200):
        size = 10 ** draw.uniform(-300, 308)
        kinds = [draw.uniform(-1, 1) * size, draw.gauss(0, 1), 0.0, None, math.nan, -math.inf]
        metrics = [draw.choice(kinds) for _ in range(draw.randint(0, 40))]
        metrics = [None] * draw.choice([0, 0, 3000]) + metrics
        target = draw.choice([size, -size, 0.5, math.inf])
        more = draw.choice([0.0, 0.5, 1.0, 7.3, 1e6])
        assert 0 <= reach_probability(metrics, target, draw.random() < 0.5, more) <= 1


def judged(metrics: list[float], target: float = 0.8, **more: object) -> Verdict:
    """Of a run whose epochs cost 10 J."""
    epochs = len(metrics)
    given: dict[str, object] = {"max_epochs": 100, "cost_bound": 600.0, **more}
    rerun = given.pop("rerun_cost", 300.0)
    curve = LearningCurve(metrics, target, True, rerun)
    return judge(
        reached=False,
        epochs=epochs,
        next_cost=10.0 * (epochs + 1),
        cost=10.0 * epochs,
        curve=curve,
        **given,
    )


def test_a_verdict_says_what_reaching_the_target_would_have_cost() -> None:
    assert judged(FLAT[:15]) == Verdict(True, next_cost=150 + 300, by_curve=True)
    assert judged(FLAT[:15], cost_bound=400.0) == Verdict(True, next_cost=400.0, by_curve=True)
    # The epochs end before: no cost would have been enough.
    assert judged(FLAT[:15], max_epochs=30) == Verdict(True, by_curve=True)
    assert judged(RISING[:10], 0.6, rerun_cost=1000.0, cost_bound=None) == Verdict(False)
    # It would reach the target, at more than a rerun costs.
    assert judged(RISING[:20], 0.6, rerun_cost=10.0, cost_bound=None).by_curve


def test_no_curve_interrupts_what_no_cost_does() -> None:
    curve = LearningCurve(FLAT, 0.8, True, 1.0)
    verdict = judge(
        reached=False, epochs=30, max_epochs=100, next_cost=None, cost_bound=None, curve=curve
    )
    assert verdict == Verdict(False)


def test_only_sizes_that_never_reached_the_target_are_given_up_by_their_curve() -> None:
    job = Job("a", "b", "sgd", 0.5, 100, 64, 0.1)
    policy = make_policy("gp")
    policy.register_job(job, [32, 64, 128])
    recurrences = Recurrences(policy, job, 2.0)
    first = recurrences.begin()
    assert (first.batch_size, first.rerun_cost) == (64, None)
    recurrences.end(Run(64, 100.0, True, 10))
    seen = set()
    for _ in range(6):
        now = recurrences.begin()
        if now.batch_size in seen | {64}:
            assert now.rerun_cost is None
        else:
            assert now.rerun_cost == pytest.approx(100.0, rel=0.3)
        seen.add(now.batch_size)
        recurrences.end(Run(now.batch_size, 100.0, True, 10))
    assert len(seen) > 1


def test_the_published_policy_stops_by_cost_only() -> None:
    assert make_policy("gp").stops_by_curve
    assert not make_policy("pruning-gts").stops_by_curve
    assert not make_policy("gts").stops_by_curve

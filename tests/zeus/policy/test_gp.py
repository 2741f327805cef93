"""The default policy: what it learns of neighbors, what it avoids, and what it forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests import seeds
from zeus.job import Job
from zeus.policy import GPBatchSizeOptimizer as Gp
from zeus.policy import Run, make_policy
from zeus.policy.curves import CurveModel, Prior, Tally, critical, saturating

JOB = Job("d", "n", "sgd", 0.5, 100, default_bs=256)
SIZES = [2**n for n in range(3, 13)]


def run_of(size: int, epochs: int, epoch_cost: float, **more: object) -> Run:
    return Run(size, epochs * epoch_cost, True, epochs, **more)


def policy_of(seed: int = 1, sizes: list[int] = SIZES, window: int = 0) -> Gp:
    policy = Gp(window_size=window, seed=seed, verbose=False)
    policy.register_job(JOB, sizes)
    return policy


def chosen(
    policy: Gp, cost: Callable[[int], tuple[float, float]], runs: int, seed: int = 0
) -> list[int]:
    """Sizes of so many runs; `cost` gives the epochs and an epoch's cost of a size."""
    rng = random.Random(seed)
    sizes = []
    for _ in range(runs):
        size = policy.predict(JOB)
        sizes.append(size)
        epochs, epoch_cost = cost(size)
        took = max(1, round(epochs * math.exp(rng.gauss(0, 0.05))))
        policy.observe_run(JOB, run_of(size, took, epoch_cost))
    return sizes


def u_shaped(best: int) -> Callable[[int], tuple[float, float]]:
    """Epochs and an epoch's cost, where the product is least at a size."""
    return lambda size: (20 * (1 + size / best), 10 * (1 + best / size))


def test_the_first_run_has_the_default() -> None:
    assert policy_of().predict(JOB) == 256
    assert policy_of().best(JOB) is None
    with pytest.raises(ValueError, match="default batch size 256 is not among"):
        policy_of(sizes=[8, 16])


@pytest.mark.parametrize("best", [32, 256, 2048])
def test_it_finds_the_best_size_and_leaves_most_others_alone(best: int) -> None:
    wrong = 0
    for seed in range(3):
        sizes = chosen(policy_of(seed), u_shaped(best), 40, seed)
        near = [size for size in sizes[20:] if best / 2 <= size <= best * 2]
        assert len(near) >= 18, (seed, sizes)
        assert len(set(sizes)) <= 7, (seed, sizes)
        wrong += sizes[20:].count(best) < 10
    assert wrong <= 1


def test_an_idle_gpu_makes_it_go_up_first_and_a_busy_one_not() -> None:
    def second(utilization: float) -> list[int]:
        found = []
        for seed in range(10):
            policy = policy_of(seed)
            policy.observe_run(JOB, run_of(256, 20, 10.0, utilization=utilization))
            found.append(policy.predict(JOB))
        return found

    assert sum(size > 256 for size in second(0.15)) >= 8
    assert sum(size > 256 for size in second(0.75)) <= 3


def test_profiling_is_not_held_against_a_size() -> None:
    policy = policy_of()
    policy.observe_run(JOB, Run(256, 300.0, True, 20, overhead=100.0))
    (estimate,) = (e for e in policy.estimates(JOB) if e.batch_size == 256)
    assert estimate.mean == pytest.approx(200, rel=0.1)


def test_a_run_that_was_given_up_makes_its_size_more_expensive_or_one_that_misses() -> None:
    policy = policy_of()
    policy.observe_run(JOB, run_of(256, 20, 10.0))
    before = {e.batch_size: e for e in policy.estimates(JOB)}[16]
    policy.observe_run(JOB, Run(16, 390.0, False, 13, cost_bound=400.0, stopped_by_cost=True))
    after = {e.batch_size: e for e in policy.estimates(JOB)}[16]
    assert after.low > before.low
    assert after.reach < 0.3 < 0.9 < before.reach
    assert after.probability_best < 0.02 < before.probability_best


def test_after_a_failure_the_job_is_done_with_what_is_known_to_reach_the_target() -> None:
    policy = policy_of()
    policy.observe_run(JOB, run_of(256, 20, 10.0))
    policy.observe_run(JOB, run_of(128, 18, 10.0))
    policy.observe_run(JOB, Run(512, 1000.0, False, 100))
    assert policy.predict(JOB) == 128


def test_the_bound_follows_what_is_expected_and_gives_way() -> None:
    policy = policy_of()
    assert policy.cost_bound(JOB, 2.0, 0) == math.inf
    for epochs in (10, 20, 20, 20):  # the first was lucky
        policy.observe_run(JOB, run_of(256, epochs, 10.0))
    bound = policy.cost_bound(JOB, 2.0, 0)
    assert 300 < bound < 400
    assert policy.cost_bound(JOB, 2.0, 1) == bound
    assert policy.cost_bound(JOB, 2.0, 3) == pytest.approx(bound * 1.5**2)
    assert policy.cost_bound(JOB, math.inf, 0) == math.inf


def test_where_the_default_misses_the_target_others_are_tried() -> None:
    policy = policy_of()
    tried = []
    for _ in range(5):
        tried.append(policy.predict(JOB))
        policy.observe_run(JOB, Run(tried[-1], 1000.0, False, 100))
    assert tried == [256, 128, 512, 64, 1024]


def test_with_costs_alone_it_finds_the_best_too() -> None:
    policy = policy_of()
    rng = random.Random(4)
    sizes = []
    for _ in range(40):
        sizes.append(policy.predict(JOB))
        cost = 100 * (1 + 0.3 * math.log2(sizes[-1] / 64) ** 2) * math.exp(rng.gauss(0, 0.03))
        policy.observe(JOB, sizes[-1], cost, True)
    assert sum(32 <= size <= 128 for size in sizes[15:]) >= 22, sizes


def test_an_untried_size_is_not_begun_twice_before_its_first_run_has_ended() -> None:
    for seed in range(10):
        policy = policy_of(seed)
        policy.observe_run(JOB, run_of(256, 20, 10.0, utilization=0.7))
        flying: list[int] = []
        for _ in range(12):
            flying.append(policy.predict_beside(JOB, flying))
        untried = [size for size in flying if size != 256]
        assert untried
        assert len(set(untried)) == len(untried)


def test_a_window_lets_a_size_forget() -> None:
    def mean(window: int) -> float | None:
        policy = policy_of(window=window)
        for epoch_cost in [10.0] * 10 + [30.0] * 3:
            policy.observe_run(JOB, run_of(256, 20, epoch_cost))
        return {e.batch_size: e.mean for e in policy.estimates(JOB)}[256]

    assert mean(3) == pytest.approx(600, rel=0.05)
    assert mean(0) == pytest.approx(300, abs=100)


def test_reading_estimates_changes_no_choice() -> None:
    def sizes(ask: bool) -> list[int]:
        policy = policy_of(2)
        found = []
        for _ in range(8):
            found.append(policy.predict(JOB))
            policy.observe_run(JOB, run_of(found[-1], 20 + found[-1] // 100, 10.0))
            if ask:
                policy.estimates(JOB)
        return found

    assert sizes(ask=True) == sizes(ask=False)


def test_estimates_bracket_the_truth_and_add_up() -> None:
    policy = policy_of()
    chosen(policy, u_shaped(64), 25)
    believed = policy.estimates(JOB)
    assert [e.batch_size for e in believed] == SIZES
    assert sum(e.probability_best for e in believed) == pytest.approx(1)
    within = 0
    for e in believed:
        epochs, epoch_cost = u_shaped(64)(e.batch_size)
        within += e.low * 0.97 <= epochs * epoch_cost <= e.high * 1.03
    assert within >= 8


def test_random_histories_keep_the_invariants() -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    for _ in range(25):
        sizes = sorted(rng.sample(range(1, 5000), rng.randint(1, 12)))
        job = Job("d", "n", "sgd", 0.5, 50, default_bs=rng.choice(sizes))
        policy = Gp(window_size=rng.choice([0, 0, 3]), seed=rng.randrange(1000), verbose=False)
        policy.register_job(job, sizes)
        failures = 0
        for _ in range(25):
            flying = rng.choices(sizes, k=rng.randint(0, 3))
            size = policy.predict_beside(job, flying)
            assert size in sizes
            bound = policy.cost_bound(job, rng.choice([1.0, 2.0, math.inf]), failures)
            assert bound > 0
            size = rng.choice([size, size, rng.choice(sizes)])
            converged = rng.random() < 0.7
            stopped = not converged and math.isfinite(bound) and rng.random() < 0.5
            run = Run(
                size,
                rng.choice([0.0, 1e-3, 1.0, 1e9]) * rng.random(),
                converged,
                rng.choice([None, 0, 1, 7, 50]),
                rng.choice([0.0, 0.5]),
                bound if stopped else None,
                stopped,
                rng.choice([None, 0.0, 0.4, 1.2]),
            )
            policy.observe_run(job, run)
            failures = 0 if converged else failures + 1
            if rng.random() < 0.2:
                assert len(policy.estimates(job)) == len(sizes)


def test_runs_without_epochs_may_be_all_that_a_window_has() -> None:
    """As of a job that a bound of cost stops ever since its data has changed."""
    policy = Gp(window_size=3, seed=0, verbose=False)
    policy.register_job(JOB, SIZES)
    policy.observe_run(JOB, run_of(JOB.default_bs, 20, 10.0))
    for _ in range(3):
        stopped = Run(JOB.default_bs, 250.0, False, None, 0.0, 250.0, True, None)
        policy.observe_run(JOB, stopped)
    assert policy.predict(JOB) == JOB.default_bs
    bound = policy.cost_bound(JOB, 2.0, 0)
    assert bound >= 2 * 250.0


def test_runs_that_tell_nothing_of_costs_may_be_all_that_a_window_has() -> None:
    policy = Gp(window_size=3, seed=0, verbose=False)
    policy.register_job(JOB, SIZES)
    policy.observe_run(JOB, run_of(JOB.default_bs, 20, 10.0))
    for _ in range(3):
        policy.observe_run(JOB, Run(JOB.default_bs, 30.0, False, None, 0.0, None, False, None))
    assert policy.predict(JOB) in SIZES
    bound = policy.cost_bound(JOB, 2.0, 0)
    assert 20.0 < bound < 1000.0
    assert len(policy.estimates(JOB)) == len(SIZES)


def test_a_size_that_is_not_the_job_s_is_reported() -> None:
    with pytest.raises(ValueError, match="7 is none of the batch sizes"):
        policy_of().observe(JOB, 7, 1.0, True)


@pytest.mark.parametrize("name", ["gp", "pruning-gts", "gts"])
def test_policies_by_name(name: str) -> None:
    policy = make_policy(name, seed=1)
    policy.register_job(JOB, SIZES)
    assert policy.predict(JOB) in SIZES
    with pytest.raises(ValueError, match="there is no policy 'x'; there are gp, "):
        make_policy("x")


# --- curves -----------------------------------------------------------------------------------


def test_shapes_bend_where_they_say() -> None:
    x = np.arange(-3.0, 4.0)
    epoch = saturating(x, np.array([-9.0, 9.0]))
    assert epoch[0] == pytest.approx(0, abs=0.02)  # saturated throughout
    assert np.diff(epoch[1]) == pytest.approx(-math.log(2), abs=0.02)
    epochs = critical(x, np.array([-9.0, 9.0]))
    assert np.diff(epochs[0]) == pytest.approx(math.log(2), abs=0.02)
    assert epochs[1] == pytest.approx(0, abs=0.02)
    assert epoch[:, 3] == pytest.approx(0)


def test_a_curve_is_what_exact_regression_says() -> None:
    """One hypothesis only, against the textbook's formulas."""
    x = np.array([-1.0, 0.0, 2.0])
    prior = Prior(np.zeros((1, 3)), np.zeros(1), ((0.4, 0.1, 0.0),), (0.2,))
    tallies = {0: Tally().and_also(1.0).and_also(1.4), 2: Tally().and_also(2.0)}
    belief = CurveModel(x, prior).learn(tallies)
    apart = (x[:, None] - x[None]) / 1.5
    k = 9 + 0.16 * np.exp(-0.5 * apart**2) + 0.01 * np.eye(3)
    at = [0, 0, 2]
    noisy = k[np.ix_(at, at)] - 0.0 + 0.04 * np.eye(3)
    mean = k[:, at] @ np.linalg.solve(noisy, np.array([1.0, 1.4, 2.0]))
    covariance = k - k[:, at] @ np.linalg.solve(noisy, k[at])
    assert belief.mean == pytest.approx(mean)
    draws = belief.draw(np.random.default_rng(0), 40_000)
    assert np.cov(draws.T) == pytest.approx(covariance, abs=0.01)


def test_scatter_within_a_size_determines_the_noise() -> None:
    x = np.array([0.0, 1.0])
    prior = Prior(np.zeros((1, 2)), np.zeros(1), ((0.1, 0.0, 0.0),), (0.05, 0.3))

    def spread(apart: float) -> float:
        tally = Tally()
        for value in 8 * [2 - apart, 2 + apart]:
            tally = tally.and_also(value)
        draws = CurveModel(x, prior).learn({0: tally}).draw(np.random.default_rng(0), 4000)
        return float(draws[:, 0].std())

    assert spread(0.05) == pytest.approx(0.05 / 4, rel=0.1)
    assert spread(0.3) == pytest.approx(0.3 / 4, rel=0.1)


def test_tallies_are_mean_and_scatter() -> None:
    tally = Tally()
    for value in (1.0, 4.0, 10.0):
        tally = tally.and_also(value)
    assert (tally.count, tally.mean, tally.scatter) == (3, pytest.approx(5.0), pytest.approx(42.0))

"""The published policy: the walk that prunes, and the bandit after it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from zeus.job import Job
from zeus.policy import (
    GaussianTS,
    GPBatchSizeOptimizer,
    GTSBatchSizeOptimizer,
    JITPowerLimitOptimizer,
    PruningExploreManager,
    make_policy,
)
from zeus.policy import PruningGTSBatchSizeOptimizer as Pruning

JOB = Job("d", "n", "sgd", 0.5, 10, default_bs=64)
SIZES = [8, 16, 32, 64, 128, 256]


def walk(manager: PruningExploreManager, misses: set[int], costs: dict[int, float]) -> list[int]:
    """Walks to the end; the sizes it explored."""
    explored = []
    while True:
        try:
            size = manager.next_batch_size()
        except StopIteration:
            return explored
        explored.append(size)
        manager.report_batch_size_result(size, costs.get(size, 100.0), size not in misses)


def test_a_round_goes_down_then_up_and_the_next_begins_at_the_cheapest() -> None:
    manager = PruningExploreManager(SIZES, 64)
    explored = walk(manager, {8, 256}, {32: 50.0})
    assert explored == [64, 32, 16, 8, 128, 256, 32, 16, 64, 128]
    assert manager.batch_sizes == [16, 32, 64, 128]
    with pytest.raises(StopIteration) as end:
        manager.next_batch_size()
    assert end.value.value == [16, 32, 64, 128]


def test_a_miss_prunes_all_beyond_it() -> None:
    manager = PruningExploreManager(SIZES, 64, num_pruning_rounds=1)
    assert walk(manager, {32, 128}, {}) == [64, 32, 128]
    assert manager.batch_sizes == [64]


def test_a_size_is_asked_for_until_its_result_is_there_and_others_are_refused() -> None:
    manager = PruningExploreManager(SIZES, 64)
    assert [manager.next_batch_size() for _ in range(3)] == [64, 64, 64]
    with pytest.raises(RuntimeError, match="batch size 32 came while 64 was explored"):
        manager.report_batch_size_result(32, 1.0, True)


def test_misses_in_every_direction_leave_the_default() -> None:
    manager = PruningExploreManager([32, 64], 64)
    assert walk(manager, {32, 64}, {}) == [64, 64]  # a second round, over the remaining sizes
    assert manager.batch_sizes == [64]


def test_a_default_that_is_no_size_is_reported() -> None:
    with pytest.raises(ValueError, match="default batch size 7 is not among"):
        PruningExploreManager(SIZES, 7)
    with pytest.raises(ValueError, match="no default batch size"):
        Pruning(verbose=False).register_job(Job("d", "n", "sgd", 0.5, 10), SIZES)


def test_after_pruning_the_cheaper_arm_is_chosen_nearly_always() -> None:
    policy = Pruning(verbose=False, seed=1)
    policy.register_job(JOB, [32, 64])
    rng = random.Random(1)
    chosen = []
    for _ in range(60):
        size = policy.predict(JOB)
        chosen.append(size)
        policy.observe(JOB, size, rng.gauss(100 if size == 32 else 120, 2), True)
    assert chosen[:4] == [64, 32, 32, 64]
    assert chosen[20:].count(32) >= 38


def test_a_window_lets_an_arm_forget() -> None:
    def arm(window: int) -> float:
        policy = Pruning(verbose=False, window_size=window, num_pruning_rounds=1)
        policy.register_job(JOB, [64])
        for cost in (100.0, 101.0):
            policy.predict(JOB)
            policy.observe(JOB, 64, cost, True)
        for cost in (200.0, 201.0, 202.0):
            policy.predict(JOB)
            policy.observe(JOB, 64, cost, True)
        return -policy.mabs[JOB].arm_param_mean[64]

    assert arm(3) == pytest.approx(201)
    assert arm(0) == pytest.approx(160.8)


def test_without_overlap_a_result_out_of_turn_is_an_error() -> None:
    policy = Pruning(verbose=False)
    policy.register_job(JOB, SIZES)
    assert policy.predict(JOB) == 64
    with pytest.raises(RuntimeError, match="64 was explored"):
        policy.observe(JOB, 32, 1.0, True)


def test_with_overlap_a_result_out_of_turn_counts_for_its_arm_only() -> None:
    policy = Pruning(verbose=False, concurrency=True, num_pruning_rounds=1)
    policy.register_job(JOB, [32, 64])
    assert policy.predict(JOB) == 64
    policy.observe(JOB, 32, 1.0, True)
    assert policy.predict(JOB) == 64
    assert policy.predict_beside(JOB, [64]) == 32  # the only one that is known to reach it
    policy.observe(JOB, 64, 2.0, True)
    assert policy.predict(JOB) == 32
    policy.observe(JOB, 32, 3.0, True)
    policy.predict(JOB)
    assert policy.mabs[JOB].arm_param_mean[32] == pytest.approx(-2)


def test_beside_others_the_cheapest_that_reached_the_target_is_used() -> None:
    policy = Pruning(verbose=False, concurrency=True)
    policy.register_job(JOB, SIZES)
    policy.predict(JOB)
    assert policy.predict_beside(JOB, [64]) == 64
    for size, cost, reached in [
        (128, 9.0, True),
        (64, 5.0, True),
        (32, 7.0, True),
        (16, 1.0, False),
    ]:
        policy.observe(JOB, size, cost, reached)
    assert policy.predict_beside(JOB, [8]) == 64


def test_a_replayed_log_advances_the_walk_and_predicts_beside_other_runs() -> None:
    policy = Pruning(verbose=False, replay=True)
    policy.register_job(JOB, SIZES)
    for size in (64, 32, 16):
        policy.observe(JOB, size, 10.0, True)
    assert policy.predict_beside(JOB, [64]) == 8
    assert policy.predict_beside(JOB, [8]) == 64
    assert policy.predict(JOB) == 8


# --- the bandit -------------------------------------------------------------------------------


def test_a_posterior_is_the_conjugate_one() -> None:
    bandit = GaussianTS([1], 0.25, prior_mean=10.0, prior_precision=0.5, verbose=False)
    bandit.fit([1, 1, 1], [4.0, 5.0, 6.0], reset=False)
    assert bandit.arm_param_prec[1] == pytest.approx(0.5 + 3 * 0.25)
    assert bandit.arm_param_mean[1] == pytest.approx((0.5 * 10 + 0.25 * 15) / 1.25)
    bandit.fit([1], [5.0], reset=True)
    assert bandit.arm_num_observations[1] == 1


def test_rewards_without_noise_are_known_for_sure() -> None:
    bandit = GaussianTS([1, 2], [math.inf, math.inf], verbose=False)
    bandit.fit([1, 1, 2], [-5.0, -5.0, -6.0], reset=False)
    assert {bandit.predict() for _ in range(20)} == {1}


def test_every_arm_is_explored_first() -> None:
    bandit = GaussianTS([1, 2, 3], 1.0, num_exploration=2, verbose=False)
    seen: list[int] = []
    for _ in range(6):
        arm = bandit.predict()
        seen.append(arm)
        bandit.fit_arm(arm, np.array([0.0]), reset=False)
    assert sorted(seen) == [1, 1, 2, 2, 3, 3]


def test_an_arm_without_an_observation_is_drawn_from_the_prior_with_a_warning() -> None:
    bandit = GaussianTS([1], 1.0, 5.0, 1e12, num_exploration=0, verbose=False)
    with pytest.warns(UserWarning, match="arm 1 is drawn without an observation"):
        assert bandit.predict_expectations() == {1: pytest.approx(5)}


def test_what_is_chosen_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    job = "Job(d,n,sgd,0.5,bs64~10)"
    for policy, words in (
        (Pruning(), f"[Pruning GaussianTS BSO] {job}, pruning: batch size 64\n"),
        (
            GTSBatchSizeOptimizer(True),
            f"[GaussianTS] exploring 64\n[GaussianTS BSO] {job}, sampling: batch size 64\n",
        ),
        (GPBatchSizeOptimizer(), f"[GP BSO] {job}: batch size 64\n"),
        *((make_policy(name), "") for name in ("gp", "gts", "pruning-gts")),
    ):
        policy.register_job(JOB, [64])
        assert policy.predict(JOB) == 64
        assert capsys.readouterr().out == words
    bandit = GaussianTS([64], math.inf)
    bandit.fit([64], [-5.0], reset=False)
    assert bandit.predict() == 64
    assert capsys.readouterr().out == "[GaussianTS] drawn mean rewards: {64: -5.0}\n"
    limits = JITPowerLimitOptimizer()
    limits.predict(JOB, 64)
    limits.observe(JOB, 64, 250, 1.0)
    limits.predict(JOB, 64)
    assert capsys.readouterr().out == (
        f"[JITPSO] {job} @ 64: power limit has to be profiled\n"
        f"[JITPSO] {job} @ 64: power limit 250 W\n"
    )


def test_without_pruning_all_sizes_stay() -> None:
    policy = GTSBatchSizeOptimizer(learn_reward_precision=True, num_exploration=2, verbose=False)
    policy.register_job(JOB, [32, 64])
    rng = random.Random(3)
    chosen = []
    for _ in range(40):
        size = policy.predict(JOB)
        chosen.append(size)
        policy.observe(JOB, size, rng.gauss(50 if size == 64 else 80, 2), size == 64)
    assert sorted(chosen[:4]) == [32, 32, 64, 64]
    assert chosen[10:].count(64) >= 28
    assert {policy.predict_beside(JOB, [32]) for _ in range(5)} == {64}
    policy.exclude(JOB, [64])
    assert {policy.predict(JOB) for _ in range(5)} == {32}
    replayed = GTSBatchSizeOptimizer(True, num_exploration=2, verbose=False, replay=True)
    replayed.register_job(JOB, [32, 64])
    replayed.observe(JOB, 64, 50.0, True)
    replayed.observe(JOB, 64, 51.0, True)
    assert {replayed.predict_beside(JOB, [64]) for _ in range(5)} == {32}  # not explored yet
    with pytest.raises(ValueError, match="7 is none of the batch sizes"):
        policy.observe(JOB, 7, 1.0)

"""Runs that miss their target: what they prove, and what they do not; many sizes; other GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import seeds
from zeus.job import Job
from zeus.policy import GPBatchSizeOptimizer as Gp
from zeus.policy import Run
from zeus.policy.gp import MOST_SIZES, considered
from zeus.policy.gp_model import Reach
from zeus.policy.knowledge import Knowledge, Place, load, save

JOB = Job("d", "n", "sgd", 0.5, 100, default_bs=128)
SIZES = [8, 16, 32, 64, 128, 256, 512, 1024]


def policy_of(seed: int = 1, job: Job = JOB, sizes: list[int] = SIZES) -> Gp:
    policy = Gp(seed=seed, verbose=False)
    policy.register_job(job, sizes)
    return policy


def reached(size: int, epochs: int = 20, epoch_cost: float = 10.0) -> Run:
    return Run(size, epochs * epoch_cost, True, epochs)


def missed(size: int, epoch_cost: float = 10.0) -> Run:
    """All epochs, and no target."""
    return Run(size, 100 * epoch_cost, False, 100)


def train(
    policy: Gp,
    costs: dict[int, float],
    reach: Callable[[int], float],
    times: int,
    rng: random.Random,
    job: Job = JOB,
) -> list[int]:
    """Sizes of so many recurrences, retries included; given up at twice the best."""
    sizes: list[int] = []
    failures = done = 0
    while done < times:
        size = policy.predict(job)
        sizes.append(size)
        bound = policy.cost_bound(job, 2.0, failures)
        most = min(100, bound // costs[size])
        needs = round(20 * math.exp(rng.gauss(0, 0.03)))
        if rng.random() < reach(size) and needs <= most:
            policy.observe_run(job, reached(size, needs, costs[size]))
            failures, done = 0, done + 1
            continue
        run = Run(size, most * costs[size], False, int(most), 0.0, bound, most < 100)
        policy.observe_run(job, run)
        failures += 1
    return sizes


def test_a_better_neighbor_beside_a_cliff_is_found() -> None:
    """Sizes up to 32 never reach the target, and 64 costs a quarter less than the default."""
    costs = {size: 10 * (1 + 0.15 * abs(math.log2(size / 128))) for size in SIZES}
    costs[64] = 7.5
    found = 0
    for seed in range(6):
        sizes = train(
            policy_of(seed), costs, lambda size: float(size > 32), 30, random.Random(seed)
        )
        found += sizes[-10:].count(64) >= 8
        assert sum(size <= 32 for size in sizes) <= 6, sizes
    assert found >= 5


def test_a_cheap_size_that_misses_often_is_not_the_best() -> None:
    """64 costs a tenth less than 128 where it reaches the target, in six runs of ten."""
    costs = {size: 10 * (1 + 0.3 * abs(math.log2(size / 128))) for size in SIZES}
    costs[64] = 9.0
    for seed in range(3):
        reach = {64: 0.6}
        rng = random.Random(seed)
        sizes = train(policy_of(seed), costs, lambda size: reach.get(size, 1.0), 50, rng)
        assert sizes[-20:].count(128) >= 15, sizes


def test_a_miss_hardly_affects_its_neighbor() -> None:
    policy = policy_of()
    policy.observe_run(JOB, reached(128))
    before = {e.batch_size: e for e in policy.estimates(JOB)}
    policy.observe_run(JOB, missed(32))
    policy.observe_run(JOB, reached(128))
    after = {e.batch_size: e for e in policy.estimates(JOB)}
    assert after[64].mean < 1.05 * before[64].mean
    assert after[32].reach < 0.3 < 0.7 < after[64].reach
    assert after[64].explored


def test_a_job_that_became_more_expensive_is_not_treated_as_missing_its_target() -> None:
    """A size that has always reached its target is given up for its cost again and again."""
    policy = policy_of()
    for _ in range(10):
        policy.observe_run(JOB, reached(128))
    before = policy.cost_bound(JOB, 2.0, 0)
    for _ in range(4):
        policy.observe_run(JOB, Run(128, 395.0, False, 39, 0.0, 400.0, stopped_by_cost=True))
    after = policy.cost_bound(JOB, 2.0, 0)
    assert after > 1.2 * before


def test_coins_are_of_each_size() -> None:
    runs, none = np.array([0.0, 0.0, 9.0, 6.0]), np.zeros(4)
    untouched = Reach(runs, none)
    assert (untouched.draw(np.random.default_rng(0), 50) == 1).all()
    some = Reach(runs, np.array([1.0, 0.0, 0.0, 4.0]))
    assert some.mean[0] < 0.3
    assert some.mean[1] > 0.6  # not tried
    assert some.mean[2] > 0.98
    assert some.mean[3] == pytest.approx(0.6, abs=0.05)
    draws = some.draw(np.random.default_rng(0), 20_000)
    assert draws.mean(axis=0) == pytest.approx(some.mean, abs=0.02)


# --- many sizes ---------------------------------------------------------------------------------


def test_of_many_sizes_some_are_considered() -> None:
    rng = random.Random(seeds.fresh())
    for _ in range(50):
        sizes = sorted(rng.sample(range(1, 20_000), rng.randint(MOST_SIZES + 1, 1000)))
        default = rng.choice(sizes)
        few = considered(sizes, default)
        assert len(few) <= MOST_SIZES
        assert set(few) <= set(sizes)
        assert default in few
        assert few == sorted(few)
    every_eighth = considered(list(range(8, 8001, 8)), 1000)
    assert {512, 2048} <= set(every_eighth)
    assert considered(SIZES, 128) == SIZES


def test_a_run_of_a_size_that_is_not_considered_counts_for_its_neighbor() -> None:
    sizes = list(range(8, 8001, 8))
    job = dataclasses.replace(JOB, default_bs=1000)
    policy = policy_of(job=job, sizes=sizes)
    for size in (1000, 1008, 1016):
        policy.observe_run(job, reached(size))
    found = {e.batch_size: e for e in policy.estimates(job)}
    assert len(found) == 1000
    assert found[1008].runs == 1
    assert not found[1008].explored
    assert found[1008].mean == pytest.approx(200, rel=0.1)
    assert policy.predict(job) in considered(sizes, 1000)
    with pytest.raises(ValueError, match="1001 is none of the batch sizes"):
        policy.observe_run(job, reached(1001))


def test_sizes_that_are_left_out_are_never_chosen() -> None:
    policy = policy_of()
    policy.observe_run(JOB, reached(128))
    policy.observe_run(JOB, reached(512, epoch_cost=5.0))
    policy.exclude(JOB, [512, 1024])
    chosen = set()
    for _ in range(15):
        chosen.add(policy.predict(JOB))
        policy.observe_run(JOB, reached(policy.predict(JOB)))
    assert not chosen & {512, 1024}
    assert policy.best(JOB) in chosen


# --- other GPUs -----------------------------------------------------------------------------------


def learnt() -> Knowledge:
    """Of a job whose best size is 32, and whose smaller sizes never reach the target."""
    policy = policy_of()
    costs = {size: 10 * (1 + 0.4 * abs(math.log2(size / 32))) for size in SIZES}
    train(policy, costs, lambda size: float(size >= 32), 30, random.Random(3))
    found = policy.knowledge(JOB)
    assert found.best == 32
    return found


def test_another_gpu_begins_with_the_best_size_and_knows_the_cliff() -> None:
    there = learnt()
    job = dataclasses.replace(JOB, network="on another GPU")
    policy = policy_of(job=job)
    policy.transfer(job, there)
    assert policy.predict(job) == 32
    # Where that misses, the default is next, as without.
    fails = policy_of(job=job)
    fails.transfer(job, there)
    fails.observe_run(job, missed(32))
    assert fails.predict(job) == 128
    costs = {size: 3 * (1 + 0.4 * abs(math.log2(size / 32))) for size in SIZES}
    rng = random.Random(1)
    sizes = train(policy, costs, lambda size: float(size >= 32), 15, rng, job)
    assert sizes.count(32) >= 12, sizes


def test_knowledge_from_elsewhere_yields_to_local_runs() -> None:
    """Here the best size is 512."""
    job = dataclasses.replace(JOB, network="on another GPU")
    policy = policy_of(job=job)
    policy.transfer(job, learnt())
    costs = {size: 10 * (1 + 0.5 * abs(math.log2(size / 512))) for size in SIZES}
    sizes = train(policy, costs, lambda size: 1.0, 30, random.Random(1), job)
    assert sizes[-10:].count(512) >= 8, sizes


def test_knowledge_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "knowledge.json"
    assert load(path) is None
    save(path, learnt())
    assert load(path) == learnt()
    given = json.loads(path.read_text())
    for wrong in (
        {"best": 7},
        {"log_epochs": [1.0]},
        {"reached": [math.nan] * len(SIZES)},
        {"batch_sizes": "many"},
    ):
        path.write_text(json.dumps({**given, **wrong}))
        with pytest.raises(ValueError, match=r"knowledge\.json has no knowledge of a job"):
            load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="name another file"):
        load(path)


def test_a_file_keeps_what_was_learned_in_each_place(tmp_path: Path) -> None:
    path = tmp_path / "knowledge.json"
    whole, capped, other = (
        Place("V100", (100.0, 250.0)),
        Place("V100", (100.0, 150.0)),
        Place("A40", (100.0, 300.0)),
    )
    of_other = dataclasses.replace(learnt(), place=other, reached=(9.0,) * len(SIZES))
    save(path, of_other)
    assert load(path, whole) == of_other  # all there is
    for best in (16, 64):  # the second one replaces the first
        save(path, dataclasses.replace(learnt(), place=whole, best=best))
    assert len(json.loads(path.read_text())["elsewhere"]) == 1
    # Of the same GPU model rather than of many runs; and then of the same range.
    found = load(path, capped)
    assert (found.place, found.best, found.same_gpu) == (whole, 64, True)
    save(path, dataclasses.replace(learnt(), place=capped))
    assert load(path, capped) == dataclasses.replace(learnt(), place=capped, same_gpu=True)
    found = load(path, Place("H100", (200.0, 700.0)))
    assert found == of_other
    assert Knowledge.from_json(found.to_json()) == found


def test_an_epoch_costs_alike_under_other_power_limits_of_the_same_gpu() -> None:
    job = dataclasses.replace(JOB, network="under other power limits")
    expected = []
    for same_gpu in (True, False):
        policy = policy_of(job=job)
        policy.transfer(job, dataclasses.replace(learnt(), same_gpu=same_gpu))
        policy.observe_run(job, reached(128))
        expected.append(policy.estimates(job))
    widths = [math.log((one[-1].high or 0.0) / (one[-1].low or 1.0)) for one in expected]
    assert widths[0] < 0.9 * widths[1]


def test_nothing_is_known_before_a_run_has_reached_its_target() -> None:
    policy = policy_of()
    assert policy.knowledge(JOB) is None
    policy.observe(JOB, 128, 5.0, True)
    assert policy.knowledge(JOB) is None  # its epochs were not reported


def test_a_size_that_never_reached_the_target_is_not_chosen_once_exploring_has_ended() -> None:
    policy = Gp(seed=1, verbose=False, explored_runs=30)
    policy.register_job(JOB, SIZES)
    for n in range(29):
        policy.observe_run(JOB, reached(128 if n % 2 else 64))
    beyond = {policy.predict_beside(JOB, (), seed) for seed in range(20)} - {64, 128}
    assert beyond, "while it explores, other sizes are chosen"
    policy.observe_run(JOB, missed(32))
    policy.observe_run(JOB, reached(128))
    assert {policy.predict_beside(JOB, (), seed) for seed in range(20)} <= {64, 128}
    explored = {one.batch_size for one in policy.estimates(JOB) if one.explored}
    assert explored == {64, 128}

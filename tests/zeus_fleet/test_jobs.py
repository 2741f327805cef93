"""Targets of nodes, and of the GPUs in them, by the jobs that run there."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from zeus_fleet import wire
from zeus_fleet.allocator import NodeDemand
from zeus_fleet.jobs import TURN_S, ByJobs
from zeus_fleet.messages import NodeWork
from zeus_fleet.policies import busy, max_min, uniform, water_filling
from zeus_fleet.profiles import ProgressProfile

LOW, HIGH = 100_000, 300_000
STEEP = ProgressProfile((LOW, 200_000, HIGH), (0.4, 0.7, 1.0))
FLAT = ProgressProfile((LOW, 200_000, HIGH), (0.9, 1.0, 1.0))


def work(job: str, gpus: tuple[int, ...], profile: ProgressProfile | None = None) -> NodeWork:
    return NodeWork(job, "V100", gpus, LOW, HIGH, profile)


def claim(*works: NodeWork) -> NodeDemand:
    return NodeDemand(2 * LOW, 2 * HIGH, 2 * HIGH, works)


def test_a_job_gets_one_limit_on_all_its_nodes() -> None:
    policy = ByJobs(functools.partial(water_filling, floor=0.0))
    claims = {
        "a": claim(work("steep", (0, 1), STEEP)),
        "b": claim(work("steep", (1,), STEEP), work("flat", (0,), FLAT)),
        "c": claim(),
    }
    targets = policy(claims, 1_300_000)
    assert policy.limits_mw == {"a": {0: HIGH, 1: HIGH}, "b": {1: HIGH, 0: 200_000}, "c": {}}
    assert targets == {"a": 2 * HIGH, "b": HIGH + 200_000, "c": 2 * LOW}


def test_a_job_that_measures_gets_its_highest_limit_one_at_a_time() -> None:
    policy = ByJobs(busy)
    one, two = (
        replace(work("1", (0, 1)), measuring=True),
        replace(work("2", (0, 1)), measuring=True),
    )
    claims = {"a": claim(one), "b": claim(two), "c": claim(work("3", (0, 1)))}
    targets = policy(claims, 1_100_000)
    assert targets == {"a": 2 * HIGH, "b": 250_000, "c": 250_000}
    assert (policy.lent_to, policy.waiting) == ("1", ("2",))
    claims["0"] = claim(replace(work("0", (0, 1)), measuring=True))
    assert policy(claims, 1_400_000)["a"] == 2 * HIGH, (
        "its turn does not end before it has measured"
    )
    del claims["0"]
    claims["a"] = claim(work("1", (0, 1)))
    assert policy(claims, 1_100_000) == {"a": 250_000, "b": 2 * HIGH, "c": 250_000}
    assert policy(claims, 600_000) == dict.fromkeys("abc", 200_000), "nothing is above the floors"


def test_a_turn_ends_and_does_not_begin_again_while_the_job_asks() -> None:
    now_s = 0.0
    policy = ByJobs(busy, clock=lambda: now_s)
    asks = {name: claim(replace(work(name, (0, 1)), measuring=True)) for name in ("1", "2")}
    policy(asks, 1_000_000)
    now_s = TURN_S - 1
    policy(asks, 1_000_000)
    assert policy.lent_to == "1"
    now_s = TURN_S
    assert policy(asks, 1_000_000) == {"1": 2 * 200_000, "2": 2 * HIGH}
    now_s = 2 * TURN_S
    policy(asks, 1_000_000)
    assert (policy.lent_to, policy.waiting) == (None, ())
    policy({"1": claim(work("1", (0, 1))), "2": asks["2"]}, 1_000_000)
    policy(asks, 1_000_000)
    assert policy.lent_to == "1"


@pytest.mark.parametrize(
    "wrong",
    [
        replace(work("x", (0, 1)), min_mw=10**12, max_mw=10**12),
        replace(work("x", (0, 1)), max_mw=10**12),
        replace(work("x", (0, 1)), min_mw=-1),
        work("x", (0, 1, 2)),
        work("x", (0, 0)),
    ],
)
def test_a_node_that_says_what_cannot_be_has_no_jobs(wrong: NodeWork) -> None:
    policy = ByJobs(busy)
    targets = policy({"a": claim(wrong), "b": claim(work("1", (0, 1)))}, 800_000)
    assert targets == {"a": 2 * LOW, "b": 2 * HIGH}


def test_an_unusable_profile_counts_as_unknown() -> None:
    assert wire.profile_of([1, 2], [0.5, 1]) == ProgressProfile((1, 2), (0.5, 1.0))
    assert wire.profile_of([1, 2], [0.4, 0.2]) == ProgressProfile((1, 2), (1.0, 1.0))
    for limits, progress in (
        ([], []),
        ([1], [1]),
        ([2, 1], [0.5, 1]),
        ([1, 2], [float("nan"), 1]),
        ([1, 2], [0, 0]),
    ):
        assert wire.profile_of(limits, progress) is None


def test_a_latency_objective_gets_what_its_job_published() -> None:
    """Before others get more than their minimum, and as much as the operator lets it claim."""
    serving = [replace(work("serving", (0,)), needs_mw=watts * 1000) for watts in (150, 220)]
    claims = {
        "a": claim(serving[0], work("training", (1,), STEEP)),
        "b": claim(serving[1], work("training", (1,), STEEP)),
    }
    for policy in (uniform, busy, max_min, water_filling):
        by_jobs = ByJobs(policy)
        assert sum(by_jobs(claims, 660_000).values()) <= 660_000
        assert by_jobs.limits_mw["a"][0] == by_jobs.limits_mw["b"][0] >= 220_000, "one job"
    half = ByJobs(functools.partial(busy, latency_share=0.5))
    half(claims, 660_000)
    assert half.limits_mw["a"][0] < 220_000
    assert wire.works_from(wire.works_bytes(serving)) == tuple(serving)

"""One run after the other: bounds, tries, and when it ends. And jobs, and power limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.late import late
from zeus.job import Job, LinearScaler, SquareRootScaler
from zeus.policy import BatchSizeOptimizer, JITPowerLimitOptimizer, Run
from zeus.policy.recurrence import (
    Recurrences,
    Used,
    Verdict,
    after_another_epoch,
    judge,
    reaches,
)
from zeus.utils.metric import zeus_cost

pd = late("pandas")
JOB = Job("d", "n", "Adam", 0.5, 10, 64, 0.1, command=["run", "{bs}", "--x={bs}", "{epochs}"])


class Always(BatchSizeOptimizer):
    """The same size, without its own bound."""

    name = "always"

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, bool | None]] = []

    def register_job(self, job: Job, batch_sizes: list[int]) -> None: ...

    def predict(self, job: Job) -> int:
        return 64

    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        self.seen.append((batch_size, cost, converged))


class Observes(Always):
    """Learns more of a run than its cost."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []

    def observe_run(self, job: Job, run: Run) -> None:
        self.runs.append(run)


def test_the_bound_is_of_the_cheapest_recurrence_with_all_its_tries() -> None:
    policy = Always()
    loop = Recurrences(policy, JOB, 2.0)
    bounds = []
    for cost, reached in [
        (100, True),
        (150, False),
        (60, True),
        (80, True),
        (10, False),
        (65, True),
    ]:
        now = loop.begin()
        bounds.append((now.recurrence, now.number, now.cost_bound))
        loop.observe(Run(64, cost, reached))
    assert bounds == [
        (1, 1, math.inf),
        (2, 1, 200),
        (2, 2, 200),
        (3, 1, 200),
        (4, 1, 160),
        (4, 2, 160),
    ]
    assert loop.min_cost == 75
    assert policy.seen[1] == (64, 150, False)


def test_before_a_run_has_reached_the_target_no_cost_is_too_much() -> None:
    for beta_knob in (1e-9, 2.0, math.inf, None):
        assert Recurrences(Always(), JOB, beta_knob).begin().cost_bound == math.inf
    with pytest.raises(ValueError, match="beta_knob must be positive, not 0"):
        Recurrences(Always(), JOB, 0.0)


def test_a_run_that_never_began_counts_as_a_miss_and_costs_nothing() -> None:
    policy = Always()
    loop = Recurrences(policy, JOB, 2.0)
    loop.begin()
    loop.observe(Run(64, 10, True))
    loop.skip(loop.begin())
    assert loop.begin().number == 2
    loop.observe(Run(64, 5.0, True))
    assert policy.seen[1] == (64, 2000, False)
    assert loop.min_cost == 5
    assert loop.recurrence == 3
    observer = Observes()
    loop = Recurrences(observer, JOB, 2.0)
    loop.observe(Run(64, 10, True))
    loop.skip(loop.begin())
    assert observer.runs[1] == Run(64, 2000, False, 0, cost_bound=20, stopped_by_cost=True)


def test_the_first_must_converge_and_twenty_misses_end_it() -> None:
    loop = Recurrences(Always(), JOB, 2.0)
    loop.begin()
    with pytest.raises(RuntimeError, match="The default batch size 64 did not converge"):
        loop.observe(Run(64, 10, False))
    loop = Recurrences(Always(), JOB, 2.0)
    loop.observe(Run(64, 10, True))
    for _ in range(20):
        loop.begin()
        loop.observe(Run(64, 10, False))
    with pytest.raises(RuntimeError, match=r"Unreachable target metric\. 20 runs"):
        loop.begin()


def test_of_equal_power_limits_the_first_counts() -> None:
    policy = JITPowerLimitOptimizer(verbose=False)
    assert policy.predict(JOB, 64) is None
    for limit, cost in [(300, 5.0), (250, 4.0), (200, 4.0), (150, 6.0)]:
        policy.observe(JOB, 64, limit, cost)
    assert policy.predict(JOB, 64) == 250
    assert policy.predict(JOB, 32) is None


def test_whole_words_of_a_command_are_replaced() -> None:
    assert JOB.gen_command(32, 0.2, 7, 3) == ["run", "32", "--x={bs}", "10"]
    words = ["{batch_size}", "{lr}", "{learning_rate}", "{seed}", "{epoch}", "{slice_number}"]
    job = Job("d", "n", "sgd", 0.5, 10, command=[*words, "{target_metric}"])
    assert job.gen_command(32, 0.2, 7, 3) == ["32", "0.2", "0.2", "7", "10", "3", "0.5"]
    with pytest.raises(ValueError, match="has no command to run"):
        Job("d", "n", "sgd", 0.5, 10).gen_command(1, 0.1, 1, 1)


def test_a_command_does_not_tell_jobs_apart() -> None:
    other = Job("d", "n", "Adam", 0.5, 10, 64, 0.1, command=["other"])
    assert other == JOB
    assert hash(other) == hash(JOB)


def test_learning_rates_scale_as_the_optimizer_asks() -> None:
    assert JOB.scale_lr(256) == pytest.approx(0.2) == SquareRootScaler(64, 0.1).compute_lr(256)
    linear = Job("d", "n", "SGD", 0.5, 10, 64, 0.1)
    assert linear.scale_lr(256) == pytest.approx(0.4) == LinearScaler(64, 0.1).compute_lr(256)
    with pytest.raises(NotImplementedError, match="adagrad's learning rate"):
        Job("d", "n", "adagrad", 0.5, 10, 64, 0.1).scale_lr(32)
    with pytest.raises(ValueError, match="default_bs and default_lr"):
        Job("d", "n", "sgd", 0.5, 10).scale_lr(32)


def test_names_of_jobs() -> None:
    assert str(JOB) == "Job(d,n,Adam,0.5,bs64~10)"
    assert str(Job("d", "n", "sgd", 1.0, 3)) == "Job(d,n,sgd,1.0~3)"
    assert JOB.to_logdir() == "d+n+bs64+Adam+lr0.1+tm0.5+me10"


def test_rows_of_a_job() -> None:
    frame = pd.DataFrame(
        {
            "dataset": ["d", "d", "e"],
            "network": ["n", "n", "n"],
            "optimizer": ["Adam", "Adam", "Adam"],
            "target_metric": [0.5, 0.6, 0.5],
        }
    )
    assert list(JOB.filter_df(frame).index) == [0]


def test_cost_is_energy_or_time_at_full_power() -> None:
    assert zeus_cost(100.0, 2.0, 1.0, 300.0) == 100
    assert zeus_cost(100.0, 2.0, 0.0, 300.0) == 600
    assert zeus_cost(100.0, 2.0, 0.25, 300.0) == pytest.approx(475)


def test_another_epoch_is_as_those_before() -> None:
    assert after_another_epoch(Used(time=3.0, energy=300.0), 3) == (400.0, 4.0)
    assert after_another_epoch(Used(time=3.0, energy=300.0), 0) == (600.0, 6.0)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({}, Verdict(stop=False)),
        ({"reached": True, "epochs": 10, "next_cost": 300.0}, Verdict(stop=True, reached=True)),
        ({"epochs": 10, "next_cost": 300.0}, Verdict(stop=True)),
        ({"next_cost": 200.0}, Verdict(stop=True, next_cost=200.0)),
        ({"next_cost": 199.0}, Verdict(stop=False)),
        ({"next_cost": 300.0, "cost_bound": None}, Verdict(stop=False)),
    ],
)
def test_a_run_ends_at_its_target_its_last_epoch_or_its_bound(
    given: dict[str, Any], verdict: Verdict
) -> None:
    run = {"reached": False, "epochs": 9, "max_epochs": 10, "next_cost": None, "cost_bound": 200.0}
    found = judge(**{**run, **given})
    assert found == verdict
    assert found.by_cost == (verdict.next_cost is not None)


def test_a_target_is_reached_from_its_own_side() -> None:
    assert [reaches(one, 0.5, True) for one in (0.4, 0.5, 0.6, None)] == [False, True, True, False]
    assert [reaches(one, 0.5, False) for one in (0.4, 0.5, 0.6, None)] == [True, True, False, False]


def test_the_cost_of_finding_the_limit_is_not_expected_again() -> None:
    used = Used(time=3.2, energy=330.0, overhead_time=0.2, overhead_energy=30.0)
    assert after_another_epoch(used, 3) == pytest.approx((430.0, 4.2))

"""The simulator gives the same runs as the published one, also for groups and odd tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.late import late
from zeus.job import Job
from zeus.policy import (
    BatchSizeOptimizer,
    JITPowerLimitOptimizer,
    PruningGTSBatchSizeOptimizer,
    Run,
    make_policy,
)
from zeus.simulate import Simulator
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import WORKLOADS, power_trace, train_trace
from zeus.utils.metric import zeus_cost

pd = late("pandas")

PUBLISHED = json.loads((Path(__file__).parent / "published_runs.json").read_text())
"""Runs of zeus 0.16's simulator with PruningGTSBatchSizeOptimizer and the same seed for both."""

LIBRISPEECH = Job("librispeech", "deepspeech2", "adamw", 40.0, 16, default_bs=192)


def simulator(
    policy: BatchSizeOptimizer, seed: int = 1, gpu: str = "v100", train: Any = None
) -> Simulator:
    return Simulator(
        train_trace() if train is None else train,
        power_trace(gpu),
        policy,
        JITPowerLimitOptimizer(verbose=False),
        seed,
        verbose=False,
    )


def pruning(seed: int = 1, **options: Any) -> PruningGTSBatchSizeOptimizer:
    return PruningGTSBatchSizeOptimizer(seed=seed, verbose=False, **options)


def job_of(dataset: str, default_bs: int) -> Job:
    (w,) = (w for w in WORKLOADS if w.dataset == dataset)
    return Job(w.dataset, w.network, w.optimizer, w.target_metric, w.max_epochs, default_bs)


@pytest.mark.parametrize("case", PUBLISHED, ids=[f"{c['gpu']}-{c['dataset']}" for c in PUBLISHED])
def test_the_published_policy_gives_the_published_runs(case: dict[str, Any]) -> None:
    beta = math.inf if case["beta"] is None else case["beta"]
    policy = pruning(case["seed"], window_size=case["window"])
    job = job_of(case["dataset"], case["default_bs"])
    runs = simulator(policy, case["seed"], case["gpu"]).simulate_one_job(
        job, case["recurrences"], beta, case["eta"]
    )
    assert [run.bs for run in runs] == case["batch_sizes"]
    assert [run.pl for run in runs] == case["power_limits"]
    assert "".join("1" if run.reached else "0" for run in runs) == case["reached"]
    assert sum(run.energy for run in runs) == pytest.approx(case["energy"], rel=1e-9)
    assert sum(run.time for run in runs) == pytest.approx(case["time"], rel=1e-9)


@pytest.mark.parametrize("name", ["gp", "pruning-gts"])
def test_every_call_simulates_the_same_runs(name: str) -> None:
    playing = simulator(make_policy(name, seed=3), seed=3)
    once = playing.simulate_one_job(LIBRISPEECH, 40, 2.0, 0.5)
    assert playing.simulate_one_job(LIBRISPEECH, 40, 2.0, 0.5) == once


def test_knowledge_from_other_power_limits_is_used(tmp_path: Path) -> None:
    path = tmp_path / "knowledge.json"
    policy = make_policy("gp", seed=3)
    known: dict[str, Any] = {"knowledge": path, "gpu_model": "V100"}
    runs = simulator(policy, 3).simulate_one_job(LIBRISPEECH, 40, 2.0, 0.5, **known)
    sizes = [run.bs for run in runs[20:]]
    capped = pd.read_csv(power_trace("v100"), header=None, index_col=0).T
    capped = capped[capped.power_limit.astype(int) <= 150]
    playing = Simulator(
        train_trace(), capped, policy, JITPowerLimitOptimizer(verbose=False), 3, verbose=False
    )
    runs = playing.simulate_one_job(LIBRISPEECH, 2, 2.0, 0.5, **known)
    assert runs[0].bs == max(set(sizes), key=sizes.count) != LIBRISPEECH.default_bs
    found = json.loads(path.read_text())
    assert [one["place"] for one in (found, *found["elsewhere"])] == [
        {"gpu_model": "V100", "power_limits": limits} for limits in ([100, 150], [100, 250])
    ]


def test_tables_may_be_data_frames() -> None:
    frame = pd.read_csv(train_trace(), header=None, index_col=0, low_memory=False).T
    with_frame = simulator(pruning(), train=frame).simulate_one_job(LIBRISPEECH, 30, 2.0, 0.5)
    assert with_frame == simulator(pruning()).simulate_one_job(LIBRISPEECH, 30, 2.0, 0.5)


def test_the_default_policy_loses_less_than_the_published() -> None:
    def cost(policy: BatchSizeOptimizer, seed: int) -> float:
        runs = simulator(policy, seed).simulate_one_job(LIBRISPEECH, 60, 2.0, 0.5)
        return sum(zeus_cost(run.energy, run.time, 0.5, 250) for run in runs)

    ours = sum(cost(make_policy("gp", seed=seed), seed) for seed in range(3))
    published = sum(cost(pruning(seed), seed) for seed in range(3))
    assert ours < 0.95 * published


class Fixed(BatchSizeOptimizer):
    """Sizes that a test gives, one after the other; records its observations."""

    def __init__(self, sizes: list[int], bound: float | None = None) -> None:
        self.sizes = sizes
        self.bound = bound
        self.seen: list[Run] = []
        self.beside: list[list[int]] = []

    @property
    def name(self) -> str:
        return "fixed"

    def __deepcopy__(self, memo: object) -> Fixed:
        return self  # a simulation works with copies; the test inspects this one

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        self.registered = batch_sizes

    def predict(self, job: Job) -> int:
        return self.sizes.pop(0)

    def predict_beside(self, job: Job, in_flight: Any, seed: Any = None) -> int:
        self.beside.append(sorted(in_flight))
        return self.sizes.pop(0)

    def observe(self, *args: Any) -> None:
        raise AssertionError("observe_run tells more")

    def observe_run(self, job: Job, run: Run) -> None:
        self.seen.append(run)

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float | None:
        return self.bound


def test_a_policy_gets_epochs_overhead_and_utilization() -> None:
    policy = Fixed([192, 192])
    simulator(policy).simulate_one_job(LIBRISPEECH, 2, math.inf, 0.5)
    first, second = policy.seen
    assert policy.registered[-1] == 192
    assert first.epochs in (9, 10)
    assert first.overhead > 0
    assert second.overhead == 0
    # Without what profiling took, both runs cost the same for an epoch.
    assert (first.cost - first.overhead) / first.epochs == pytest.approx(
        second.cost / second.epochs
    )
    assert second.utilization == pytest.approx(0.61, abs=0.01)


def test_a_policy_s_own_bound_stops_a_run_and_is_reported_with_it() -> None:
    policy = Fixed([192, 8, 192], 1.4e7)
    playing = simulator(policy)
    runs = playing.simulate_one_job(LIBRISPEECH, 2, 2.0, 0.5)
    assert [(run.bs, run.reached) for run in runs] == [(192, True), (8, False), (192, True)]
    stopped = policy.seen[1]
    assert stopped.stopped_by_cost
    assert stopped.cost_bound == 1.4e7
    assert stopped.cost <= 1.4e7 * 1.05  # profiling is not foreseen


def test_a_run_without_one_epoch_within_the_bound_never_begins() -> None:
    policy = Fixed([192, 8, 192])
    playing = simulator(policy)

    def bound(job: Job, beta_knob: float, failures: int) -> float:
        return 1e6 if len(policy.seen) == 1 else math.inf

    policy.cost_bound = bound
    runs = playing.simulate_one_job(LIBRISPEECH, 2, 2.0, 0.5)
    assert [run.bs for run in runs] == [192, 192]
    assert policy.seen[1].cost == 1e8
    assert not policy.seen[1].converged


def test_a_default_that_misses_the_target_is_reported_at_once() -> None:
    job = Job("movielens-1m", "ncf", "adam", 0.41, 100, default_bs=8)
    with pytest.raises(RuntimeError, match="The default batch size 8 did not converge"):
        simulator(pruning()).simulate_one_job(job, 5, 2.0, 0.5)


def test_twenty_misses_in_a_row_end_it() -> None:
    policy = Fixed([192] + 30 * [8], 1.4e7)
    playing = simulator(policy)
    with pytest.raises(RuntimeError, match=r"20 runs .* in a row"):
        playing.simulate_one_job(LIBRISPEECH, 2, 2.0, 0.5)
    assert len(policy.seen) == 21


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job("mnist", "cnn", "sgd", 1.0, 3, 8), "nothing was measured of mnist, cnn, sgd"),
        (Job("squad", "bert_base_uncased", "adamw", 99.5, 6, 32), "not measured with target 99.5"),
        (Job("squad", "bert_base_uncased", "adamw", 84.0, 6, 33), "33 is not among"),
    ],
)
def test_sizes_that_were_not_measured_are_reported(job: Job, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulator(pruning()).simulate_one_job(job, 3, 2.0, 0.5)


@pytest.mark.parametrize(
    ("beta_knob", "eta_knob", "message"),
    [
        (0.0, 0.5, "beta_knob must be positive, not 0"),
        (math.nan, 0.5, "beta_knob must be positive, not nan"),
        (2.0, 2.0, "eta_knob must be between 0 and 1, not 2"),
    ],
)
def test_knobs_out_of_range_are_named(beta_knob: float, eta_knob: float, message: str) -> None:
    playing = simulator(pruning())
    with pytest.raises(ValueError, match=message):
        playing.simulate_one_job(LIBRISPEECH, 3, beta_knob, eta_knob)
    with pytest.raises(ValueError, match=message):
        playing.play_group(LIBRISPEECH, [(0.0, 1.0, 1.0)], beta_knob, eta_knob)


TRAIN = "dataset,network,batch_size,optimizer,target_metric,target_epoch\n"
POWER = "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset,network\na,b\n", "line 1: the columns .*batch_size.* are missing"),
        ("", "columns .* are missing"),
        (TRAIN, "has no rows"),
        (TRAIN + "a,b,8,sgd,x,3\n", "line 2: target_metric is 'x'"),
        (TRAIN + "a,b,8,sgd,1,2.5\n", "line 2: target_epoch is '2.5'; .* a whole number above 0"),
        (TRAIN + "a,b,8,sgd,1,3\na,b,8,sgd,1,-3\n", "line 3: target_epoch is '-3'"),
        (TRAIN + "a,b,0,sgd,1,3\n", "line 2: batch_size is '0'"),
        (TRAIN + "a,b,nan,sgd,1,3\n", "line 2: batch_size is 'nan'"),
        (TRAIN + "a,b,8,sgd,1,3\n", "no batch size of any workload is in both tables"),
        (POWER + "a,b,8,sgd,150,10,-100\n", "line 2: average_power is '-100'; .* from 1 to 20000"),
        (POWER + "a,b,8,sgd,150,10,0\n", "line 2: average_power is '0'"),
        (POWER + "a,b,8,sgd,150,0,100\n", "line 2: time_per_epoch is '0'; .* a time in s, above 0"),
        (POWER + "a,b,8,sgd,-150,10,100\n", "line 2: power_limit is '-150'"),
        (POWER + "a,b,8,sgd,150000,10,100\n", "line 2: power_limit is '150000'; .* to 20000"),
        (
            POWER + "a,b,8,sgd,150,10,100\na,b,8,sgd,150,11,100\n",
            "line 3: another row has other figures for batch size 8 at 150 W",
        ),
        (
            "run," + TRAIN + "1,a,b,8,sgd,1,3\n2,a,b,8,sgd,1,4\n1,a,b,8,sgd,1,5\n",
            "line 4: another row has another target_epoch for run 1 of batch size 8",
        ),
    ],
)
def test_a_bad_table_is_reported_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        if text.startswith(POWER):
            Measurements(train_trace(), path)
        else:
            simulator(pruning(), train=path)


def test_whole_numbers_may_have_decimals_and_equal_rows_count_once(tmp_path: Path) -> None:
    train, power = tmp_path / "train.csv", tmp_path / "power.csv"
    train.write_text("run," + TRAIN + "1,a,b,16.0,sgd,1,3.0\n2,a,b,16,sgd,1,\n1,a,b,16,sgd,1,3\n")
    power.write_text(POWER + "a,b,16,sgd,150.0,10,100\n" * 2)
    (table,) = Measurements(train, power).of(Job("a", "b", "sgd", 1.0, 5, 16)).values()
    assert table.power.limits == (150,)
    epochs = table.target_epochs[1.0]
    assert len(epochs) == 2
    assert epochs[0] == 3
    assert math.isnan(epochs[1])


# --- groups -----------------------------------------------------------------------------------


def group(*rows: tuple[float, float, float]) -> list[dict[str, float]]:
    return [{"start_time": a, "end_time": b, "runtime_ratio": ratio} for a, b, ratio in rows]


def test_overlapping_jobs_know_it_and_end_in_their_order() -> None:
    policy = Fixed([192, 96, 48, 156])
    runs = simulator(policy).simulate_one_alibaba_group(
        LIBRISPEECH,
        group((0, 100, 1.0), (50, 80, 2.0), (90, 95, 1.0), (200, 300, 1.0)),
        math.inf,
        0.5,
    )
    assert [run.bs for run in runs] == [96, 48, 192, 156]
    assert policy.beside == [[192], [192]]  # the second of them had ended when the third began


def test_energy_and_time_follow_the_runtime_ratio_and_costs_do_not() -> None:
    rows = group((0, 1, 1.0), (2, 3, 1.0), (4, 5, 3.0))
    policy = Fixed([192, 192, 192])
    runs = simulator(policy).simulate_one_alibaba_group(LIBRISPEECH, rows, math.inf, 0.5)
    plain, tripled = policy.seen[1], policy.seen[2]
    per_epoch = [run.energy / seen.epochs for run, seen in zip(runs, policy.seen, strict=True)]
    assert per_epoch[2] == pytest.approx(3 * per_epoch[1])
    assert tripled.cost / tripled.epochs == pytest.approx(plain.cost / plain.epochs)


def test_a_failed_job_starts_over_when_it_ended_and_takes_as_long() -> None:
    policy = Fixed([192, 8, 96, 48])
    playing = simulator(policy)
    bounds = iter([math.inf, 1.4e7, math.inf, math.inf])
    policy.cost_bound = lambda job, beta, failures: next(bounds) if beta == 2.0 else math.inf
    rows = group((0, 10, 1.0), (20, 30, 1.0), (35, 50, 1.0))
    runs = playing.simulate_one_alibaba_group(LIBRISPEECH, rows, 2.0, 0.5)
    # The second fails at 30 and is tried again until 40, beside the third.
    found = [(run.bs, run.reached) for run in runs]
    assert found == [(192, True), (8, False), (96, True), (48, True)]
    assert policy.beside == [[96]]


def test_in_a_group_the_bound_is_of_the_cheapest_run() -> None:
    policy = Fixed([48, 192, 8, 48])
    runs = simulator(policy).simulate_one_alibaba_group(
        LIBRISPEECH, group((0, 1, 1.0), (2, 3, 1.0), (4, 5, 1.0)), 1.7, 0.5
    )
    assert [(run.bs, run.reached) for run in runs] == [
        (48, True),
        (192, True),  # 1.4 times as expensive
        (8, False),  # twice
        (48, True),
    ]
    assert policy.seen[2].cost_bound == pytest.approx(1.7 * policy.seen[0].cost)


def test_a_job_that_never_succeeds_is_given_up() -> None:
    policy = Fixed(2000 * [8], 1.4e7)
    playing = simulator(policy)
    with pytest.raises(RuntimeError, match="1000 runs of one job"):
        playing.simulate_one_alibaba_group(LIBRISPEECH, group((0, 1, 1.0)), 2.0, 0.5)

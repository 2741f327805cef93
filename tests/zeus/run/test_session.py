"""A run on simulated GPUs: what it measures, chooses and writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.in_trainers import WORKLOAD
from tests.zeus.run.sessions import ITERATIONS, Job, OpenNode
from zeus.policy.recurrence import Verdict
from zeus.run import files
from zeus.run.session import fitted
from zeus.utils.metric import zeus_cost

LIMITS = [250, 225, 200, 175, 150, 125, 100]


def truth(job: Job) -> dict[int, tuple[float, float]]:
    """The true time and power of an iteration at each limit."""
    points, node = {}, job.node
    for limit in LIMITS:
        node.client.set_power_limit(node.nvml.uuid(0), limit * 1000)
        job.work.run(20)
        before = node.clock(), node.nvml.true_energy_j(0)
        job.work.run(50)
        seconds = (node.clock() - before[0]) / 1e9
        points[limit] = seconds / 50, (node.nvml.true_energy_j(0) - before[1]) / seconds
    node.client.release()
    return points


def best(points: dict[int, tuple[float, float]], eta: float) -> int:
    def cost(limit: int) -> float:
        seconds, watts = points[limit]
        return zeus_cost(watts * seconds, seconds, eta, 250)

    return min(points, key=cost)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_the_limit_that_is_chosen_is_the_best_there_is(job: Job, eta: float) -> None:
    points = truth(job)
    run = job.run(eta_knob=eta)
    verdict = job.train(run, epochs=4)
    assert verdict == Verdict(True, True)
    assert list(dict.fromkeys(job.limits))[: len(LIMITS)] == LIMITS
    chosen = best(points, eta)
    # With time a thousand times too heavy, the fastest limit would be chosen: the highest.
    assert best(points, 0.5) < best(points, 0.0)
    assert job.limits[-1] == chosen
    assert job.node.limit_w() == 250
    assert job.node.client.leases() == []

    profile = job.power()
    assert profile["optimal_pl"] == chosen * 1000
    assert list(profile["train_power"]) == [str(limit * 1000) for limit in LIMITS]
    for limit in LIMITS:
        seconds, watts = points[limit]
        assert profile["train_power"][str(limit * 1000)] == pytest.approx(watts, rel=0.05)
        assert profile["train_throughput"][str(limit * 1000)] == pytest.approx(
            1 / seconds, rel=0.02
        )
    # 60 iterations hold five limits: two epochs. The evaluation of the second is at the choice.
    assert list(profile["eval_power"]) == list(profile["eval_throughput"]) == [str(chosen * 1000)]
    assert profile["eval_power"][str(chosen * 1000)] == pytest.approx(points[chosen][1], rel=0.05)
    assert profile["eval_throughput"][str(chosen * 1000)] == pytest.approx(
        1 / points[chosen][0], rel=0.02
    )
    assert not (job.folder / "bs64.power.json.partial").exists()


def test_limits_are_never_below_the_lowest_which_is_one_of_them(
    virtual_node: OpenNode, tmp_path: Path
) -> None:
    node = virtual_node("rtx6000:setter_ms=0")
    job = Job(node, node.nvml.open_work([0], "model/compute"), tmp_path)
    run = job.run()
    tried = [260, 235, 210, 185, 160, 135, 110, 100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.train(run, epochs=3)
    assert run.optimizer is not None
    assert run.optimizer.power_limits == [limit * 1000 for limit in tried]
    assert [int(limit) // 1000 for limit in job.power()["train_power"]] == tried


def test_the_result_is_what_the_run_took(job: Job) -> None:
    run = job.run(eta_knob=0.25)
    before = job.node.clock(), job.node.nvml.true_energy_j(0)
    costs = job.train_and_cost(run, epochs=5)
    found = job.result()
    seconds = (job.node.clock() - before[0]) / 1e9
    joules = job.node.nvml.true_energy_j(0) - before[1]
    assert found["time"] == pytest.approx(seconds, rel=0.01)
    assert found["energy"] == pytest.approx(joules, rel=0.02)
    assert found["cost"] == pytest.approx(zeus_cost(found["energy"], found["time"], 0.25, 250))
    assert (found["num_epochs"], found["reached"], found["stopped_by_cost"]) == (5, True, False)
    # Five limits in the first epoch, two in the second, and the rest at the choice.
    extra = sum(cost - costs[-1] for cost in costs[:2])
    assert costs[2:] == pytest.approx([costs[-1]] * 3, rel=0.02)
    assert found["overhead"] == pytest.approx(max(0.0, extra), abs=0.02 * found["cost"])


def test_a_run_that_knows_its_limit_has_it_from_the_first_iteration(job: Job) -> None:
    job.train(job.run(), epochs=3)
    chosen = job.power()["optimal_pl"] / 1000
    kept = job.profile.read_bytes()
    job.limits.clear()
    run = job.run()
    job.train(run, epochs=2)
    assert set(job.limits) == {chosen}
    assert job.result()["overhead"] == 0
    assert job.profile.read_bytes() == kept


def test_a_run_that_ended_early_is_continued(job: Job) -> None:

    first = job.run()
    job.train_epoch(first)  # and is killed
    first.close()
    assert not job.profile.exists()
    known = job.power(".partial")
    assert known["optimal_pl"] is None
    assert [int(limit) // 1000 for limit in known["train_power"]] == LIMITS[:5]

    job.limits.clear()
    second = job.run()
    job.train_epoch(second)
    assert list(dict.fromkeys(job.limits))[:3] == [125, 100, job.power()["optimal_pl"] / 1000]
    assert job.power()["train_power"].items() >= known["train_power"].items()
    assert not (job.folder / "bs64.power.json.partial").exists()


def test_a_profile_of_the_reference_is_chosen_from_again(job: Job) -> None:
    # It contains 250 W, in the wrong unit, and no lowest limit, so the run measures again.
    old = {
        "job_id": "rec01+try01",
        "train_power": {"250000": 240.0, "150000": 140.0},
        "train_throughput": {"250000": 10.0, "150000": 9.5},
        "eval_power": {"250000": 100.0},
        "eval_throughput": {"250000": 30.0},
        "optimal_pl": 250_000,
    }
    job.profile.write_text(json.dumps(old))
    job.train(job.run(), epochs=1)
    assert set(job.limits) == {150}
    assert job.power() == old


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpus": ["NVIDIA A40"]}, "was measured on 1 NVIDIA A40, and this is 1 "),
        (
            {"train_power": {"300000": 1.0}, "train_throughput": {"300000": 1.0}},
            "another limit: 300 W is outside 100 to 250 W",
        ),
        ({"train_power": {"250000": -1.0}}, "is not a power profile"),
        (None, "is not a power profile"),
    ],
)
def test_a_profile_that_does_not_fit_is_measured_again(
    job: Job, change: dict[str, Any] | None, reason: str
) -> None:
    fits = {"train_power": {"250000": 240.0}, "train_throughput": {"250000": 10.0}}
    job.profile.write_text("{" if change is None else json.dumps({**fits, **change}))
    with pytest.warns(UserWarning, match=rf"{reason}.*It is measured again"):
        job.train(job.run(), epochs=3)
    assert len(job.power()["train_power"]) == len(LIMITS)


def test_partial_measurements_count_although_the_finished_profile_is_of_another_gpu(
    job: Job,
) -> None:
    known = {"train_power": {"250000": 240.0}, "train_throughput": {"250000": 10.0}}
    path = job.profile
    path.write_text(json.dumps({**known, "gpus": ["NVIDIA A40"]}))
    path.with_name(f"{path.name}.partial").write_text(json.dumps(known))
    with pytest.warns(UserWarning, match="was measured on 1 NVIDIA A40"):
        run = job.run()
        job.train(run, epochs=3)
    assert list(dict.fromkeys(job.limits))[:6] == LIMITS[1:]
    found = files.load_profile(path)
    assert (found.train_power[250_000], found.gpus) == (
        pytest.approx(240.0),
        ["Tesla V100-PCIE-16GB"],
    )
    assert len(found.train_power) == len(LIMITS)


def test_gpus_of_other_ranges_have_the_limits_that_all_take(
    virtual_node: OpenNode, tmp_path: Path
) -> None:
    node = virtual_node("v100,rtx6000:setter_ms=0")
    job = Job(node, node.nvml.open_work([0, 1], "model/compute"), tmp_path)
    run = job.run(gpus=2)
    assert run.max_power == 510
    job.train(run, epochs=3)
    tried = files.load_profile(job.profile).train_power
    assert next(iter(tried)) == 250_000
    assert (node.limit_w(0), node.limit_w(1)) == (250, 260)


def test_an_observer_measures_and_stays_at_the_highest_limit(job: Job) -> None:
    run = job.run(use_optimal_pl=False)
    job.train(run, epochs=4)
    assert set(job.limits[: 2 * ITERATIONS]) == set(LIMITS)
    assert set(job.limits[2 * ITERATIONS :]) == {250}
    profile = job.power()
    assert profile["optimal_pl"] < 250_000
    assert list(profile["eval_power"]) == ["250000"]


def test_no_epoch_is_trained_for_more_than_the_threshold(job: Job) -> None:
    whole = job.run()
    costs = job.train_and_cost(whole, epochs=6)
    # The profile is there: every epoch costs as the last did. Three fit, a fourth does not.
    thresh = 3.5 * costs[-1]
    run = job.run(cost_thresh=thresh)
    verdict = job.train(run, epochs=100)
    assert verdict.next_cost == pytest.approx(4 * costs[-1], rel=0.02)
    found = job.result()
    assert (found["num_epochs"], found["reached"], found["stopped_by_cost"]) == (3, False, True)
    assert found["cost"] < thresh <= verdict.next_cost
    # One that reaches its target is reached, though it cost more.
    run = job.run(cost_thresh=0.5 * costs[-1])
    assert job.train(run, epochs=1).reached
    assert job.result()["cost"] > 0.5 * costs[-1]


def test_no_cost_interrupts_profiling(job: Job) -> None:
    run = job.run(cost_thresh=1.0)
    verdict = job.train(run, epochs=100)
    assert verdict.next_cost is not None
    assert run.epochs == 2
    assert len(job.power()["train_power"]) == len(LIMITS)


def test_the_last_epoch_is_the_last(job: Job) -> None:
    run = job.run(max_epochs=3)
    assert job.train(run, epochs=100) == Verdict(True)
    assert job.result()["num_epochs"] == 3
    assert not job.result()["reached"]


def test_an_evaluation_amid_an_epoch_is_in_no_window(job: Job) -> None:
    run = job.run()

    def evaluate(number: int) -> None:
        if number == 15:  # while a limit is measured
            for _ in run.evaluation(range(5)):
                job.node.clock.sleep(6)  # the GPU idles

    job.train(run, epochs=5, each=evaluate)
    points = truth(job)
    profile = job.power()
    assert len(profile["train_power"]) == len(LIMITS)
    # In that epoch, too, the first evaluation was at the highest limit.
    (throughput,) = profile["eval_throughput"].values()
    assert throughput == pytest.approx(1 / points[profile["optimal_pl"] // 1000][0], rel=0.02)
    for limit, (seconds, _) in points.items():
        assert profile["train_throughput"][str(limit * 1000)] == pytest.approx(
            1 / seconds, rel=0.02
        )


def test_epochs_that_end_early_are_taken_as_they_are(job: Job) -> None:
    # The loader has 1000 iterations, and the loop leaves it after 15 each time.
    run = job.run(profile_params=(5, 20))
    job.train(run, epochs=20, iterations=15, known=1000)
    assert len(job.power()["train_power"]) == len(LIMITS)


def test_an_epoch_of_few_iterations_has_a_whole_window(job: Job) -> None:
    # 9 of 10 iterations: one to warm up, and seven that are measured.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = job.run()
        costs = job.train_and_cost(run, epochs=9, iterations=10, known=10)
    assert costs[7] == pytest.approx(costs[8], rel=0.02)  # seven for as many limits
    assert all(abs(cost / costs[8] - 1) > 0.02 for cost in costs[:2])
    assert len(job.power()["train_power"]) == len(LIMITS)


def test_epochs_of_two_iterations_are_measured_anyway(job: Job) -> None:
    run = job.run()
    with pytest.warns(UserWarning, match="A stretch of 2 steps .* each limit is measured over"):
        job.train(run, epochs=12, iterations=2, known=2)
    assert job.result()["reached"]
    assert len(job.power()["train_power"]) == len(LIMITS)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (None, (10, 40)),
        (51, (10, 40)),
        (50, (9, 39)),
        (26, (5, 20)),
        (7, (1, 4)),
        (3, (1, 1)),
        (1, (1, 1)),
    ],
)
def test_short_epochs_make_short_windows(iterations: int | None, expected: tuple[int, int]) -> None:
    assert fitted(10, 40, iterations) == expected


def test_several_gpus_are_limited_and_measured_together(
    virtual_node: OpenNode, tmp_path: Path
) -> None:
    node = virtual_node("2xv100:setter_ms=0")
    job = Job(node, node.nvml.open_work([0, 1], WORKLOAD), tmp_path)
    run = job.run(gpus=2)
    assert run.max_power == 500
    others: list[float] = []
    job.train(run, epochs=3, each=lambda _: others.append(node.limit_w(1)))
    assert job.limits == others
    assert set(others) == {*LIMITS}
    found = job.result()
    assert found["cost"] == pytest.approx(zeus_cost(found["energy"], found["time"], 0.5, 500))
    assert job.power()["train_power"]["250000"] > 400  # of both
    assert node.limit_w(0) == node.limit_w(1) == 250

"""A run on simulated GPUs: what it measures, chooses and writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.in_trainers import WORKLOAD
from tests.zeus.node import VirtualNode
from tests.zeus.run.sessions import (
    ITERATIONS,
    OpenNode,
    power,
    result,
    session,
    settings,
    train,
    train_and_cost,
    train_epoch,
)
from zeus.policy.recurrence import Verdict
from zeus.run import files
from zeus.run.session import fitted
from zeus.utils.metric import zeus_cost
from zeusd.devices.simulated import Work

LIMITS = [250, 225, 200, 175, 150, 125, 100]


def truth(node: VirtualNode, work: Work) -> dict[int, tuple[float, float]]:
    """The true time and power of an iteration at each limit."""
    points = {}
    for limit in LIMITS:
        node.client.set_power_limit(node.nvml.uuid(0), limit * 1000)
        work.run(20)
        before = node.clock(), node.nvml.true_energy_j(0)
        work.run(50)
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
def test_the_limit_that_is_chosen_is_the_best_there_is(
    node: VirtualNode, work: Work, tmp_path: Path, eta: float
) -> None:
    points = truth(node, work)
    seen: list[float] = []
    run = session(node, settings(tmp_path, eta_knob=eta))
    verdict = train(run, work, epochs=4, each=lambda number: seen.append(node.limit_w()))
    assert verdict == Verdict(True, True)
    assert list(dict.fromkeys(seen))[: len(LIMITS)] == LIMITS
    chosen = best(points, eta)
    assert seen[-1] == chosen
    assert node.limit_w() == 250
    assert node.client.leases() == []

    profile = power(tmp_path)
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
    assert not (tmp_path / "bs64.power.json.partial").exists()


def test_the_units_of_energy_and_time_are_the_same(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    # With time a thousand times too heavy, the fastest limit would be chosen: the highest.
    points = truth(node, work)
    assert best(points, 0.5) < max(limit for limit in LIMITS if best(points, 0.0) == limit)
    train(session(node, settings(tmp_path)), work, epochs=4)
    assert power(tmp_path)["optimal_pl"] / 1000 == best(points, 0.5)


def test_limits_are_never_below_the_lowest_which_is_one_of_them(
    virtual_node: OpenNode, tmp_path: Path
) -> None:
    node = virtual_node("rtx6000:setter_ms=0")
    run = session(node, settings(tmp_path))
    tried = [260, 235, 210, 185, 160, 135, 110, 100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, node.nvml.open_work([0], "model/compute"), epochs=3)
    assert run.optimizer is not None
    assert run.optimizer.power_limits == [limit * 1000 for limit in tried]
    assert [int(limit) // 1000 for limit in power(tmp_path)["train_power"]] == tried


def test_the_result_is_what_the_run_took(node: VirtualNode, work: Work, tmp_path: Path) -> None:
    run = session(node, settings(tmp_path, eta_knob=0.25))
    before = node.clock(), node.nvml.true_energy_j(0)
    costs = train_and_cost(run, work, epochs=5)
    found = result(tmp_path)
    seconds = (node.clock() - before[0]) / 1e9
    joules = node.nvml.true_energy_j(0) - before[1]
    assert found["time"] == pytest.approx(seconds, rel=0.01)
    assert found["energy"] == pytest.approx(joules, rel=0.02)
    assert found["cost"] == pytest.approx(zeus_cost(found["energy"], found["time"], 0.25, 250))
    assert (found["num_epochs"], found["reached"], found["stopped_by_cost"]) == (5, True, False)
    # Five limits in the first epoch, two in the second, and the rest at the choice.
    extra = sum(cost - costs[-1] for cost in costs[:2])
    assert costs[2:] == pytest.approx([costs[-1]] * 3, rel=0.02)
    assert found["overhead"] == pytest.approx(max(0.0, extra), abs=0.02 * found["cost"])


def test_a_run_that_knows_its_limit_has_it_from_the_first_iteration(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    train(session(node, settings(tmp_path)), work, epochs=3)
    chosen = power(tmp_path)["optimal_pl"] / 1000
    kept = (tmp_path / "bs64.power.json").read_bytes()
    seen: set[float] = set()
    run = session(node, settings(tmp_path))
    train(run, work, epochs=2, each=lambda number: seen.add(node.limit_w()))
    assert seen == {chosen}
    assert result(tmp_path)["overhead"] == 0
    assert (tmp_path / "bs64.power.json").read_bytes() == kept


def test_a_run_that_ended_early_is_continued(node: VirtualNode, work: Work, tmp_path: Path) -> None:
    seen: list[float] = []

    def look(number: int) -> None:
        seen.append(node.limit_w())

    first = session(node, settings(tmp_path))
    train_epoch(first, work, each=look)  # and is killed
    first.close()
    assert not (tmp_path / "bs64.power.json").exists()
    known = power(tmp_path, "bs64.power.json.partial")
    assert known["optimal_pl"] is None
    assert [int(limit) // 1000 for limit in known["train_power"]] == LIMITS[:5]

    seen.clear()
    second = session(node, settings(tmp_path))
    train_epoch(second, work, each=look)
    assert list(dict.fromkeys(seen))[:3] == [125, 100, power(tmp_path)["optimal_pl"] / 1000]
    assert power(tmp_path)["train_power"].items() >= known["train_power"].items()
    assert not (tmp_path / "bs64.power.json.partial").exists()


def test_a_profile_of_the_reference_is_chosen_from_again(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    # It contains 250 W, in the wrong unit, and no lowest limit, so the run measures again.
    old = {
        "job_id": "rec01+try01",
        "train_power": {"250000": 240.0, "150000": 140.0},
        "train_throughput": {"250000": 10.0, "150000": 9.5},
        "eval_power": {"250000": 100.0},
        "eval_throughput": {"250000": 30.0},
        "optimal_pl": 250_000,
    }
    (tmp_path / "bs64.power.json").write_text(json.dumps(old))
    seen: set[float] = set()
    train(
        session(node, settings(tmp_path)), work, epochs=1, each=lambda _: seen.add(node.limit_w())
    )
    assert seen == {150}
    assert power(tmp_path) == old


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
    node: VirtualNode, work: Work, tmp_path: Path, change: dict[str, Any] | None, reason: str
) -> None:
    path = tmp_path / "bs64.power.json"
    fits = {"train_power": {"250000": 240.0}, "train_throughput": {"250000": 10.0}}
    path.write_text("{" if change is None else json.dumps({**fits, **change}))
    with pytest.warns(UserWarning, match=rf"{reason}.*It is measured again"):
        train(session(node, settings(tmp_path)), work, epochs=3)
    assert len(files.load_profile(path).train_power) == len(LIMITS)


def test_partial_measurements_count_although_the_finished_profile_is_of_another_gpu(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    known = {"train_power": {"250000": 240.0}, "train_throughput": {"250000": 10.0}}
    path = tmp_path / "bs64.power.json"
    path.write_text(json.dumps({**known, "gpus": ["NVIDIA A40"]}))
    path.with_name(f"{path.name}.partial").write_text(json.dumps(known))
    seen: list[float] = []
    with pytest.warns(UserWarning, match="was measured on 1 NVIDIA A40"):
        run = session(node, settings(tmp_path))
        train(run, work, epochs=3, each=lambda number: seen.append(node.limit_w()))
    assert list(dict.fromkeys(seen))[:6] == LIMITS[1:]
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
    work = node.nvml.open_work([0, 1], "model/compute")
    run = session(node, settings(tmp_path), gpus=2)
    assert run.max_power == 510
    train(run, work, epochs=3)
    tried = files.load_profile(tmp_path / "bs64.power.json").train_power
    assert next(iter(tried)) == 250_000
    assert (node.limit_w(0), node.limit_w(1)) == (250, 260)


def test_an_observer_measures_and_stays_at_the_highest_limit(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    seen: list[float] = []
    run = session(node, settings(tmp_path, use_optimal_pl=False))
    train(run, work, epochs=4, each=lambda number: seen.append(node.limit_w()))
    assert set(seen[: 2 * ITERATIONS]) == set(LIMITS)
    assert set(seen[2 * ITERATIONS :]) == {250}
    profile = power(tmp_path)
    assert profile["optimal_pl"] < 250_000
    assert list(profile["eval_power"]) == ["250000"]


def test_no_epoch_is_trained_for_more_than_the_threshold(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    whole = session(node, settings(tmp_path))
    costs = train_and_cost(whole, work, epochs=6)
    # The profile is there: every epoch costs as the last did. Three fit, a fourth does not.
    thresh = 3.5 * costs[-1]
    run = session(node, settings(tmp_path, cost_thresh=thresh))
    verdict = train(run, work, epochs=100)
    assert verdict.next_cost == pytest.approx(4 * costs[-1], rel=0.02)
    found = result(tmp_path)
    assert (found["num_epochs"], found["reached"], found["stopped_by_cost"]) == (3, False, True)
    assert found["cost"] < thresh <= verdict.next_cost
    # One that reaches its target is reached, though it cost more.
    run = session(node, settings(tmp_path, cost_thresh=0.5 * costs[-1]))
    assert train(run, work, epochs=1).reached
    assert result(tmp_path)["cost"] > 0.5 * costs[-1]


def test_no_cost_interrupts_profiling(node: VirtualNode, work: Work, tmp_path: Path) -> None:
    run = session(node, settings(tmp_path, cost_thresh=1.0))
    verdict = train(run, work, epochs=100)
    assert verdict.next_cost is not None
    assert run.epochs == 2
    assert len(power(tmp_path)["train_power"]) == len(LIMITS)


def test_the_last_epoch_is_the_last(node: VirtualNode, work: Work, tmp_path: Path) -> None:
    run = session(node, settings(tmp_path), max_epochs=3)
    assert train(run, work, epochs=100) == Verdict(True)
    assert result(tmp_path)["num_epochs"] == 3
    assert not result(tmp_path)["reached"]


def test_an_evaluation_amid_an_epoch_is_in_no_window(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    run = session(node, settings(tmp_path))

    def evaluate(number: int) -> None:
        if number == 15:  # while a limit is measured
            for _ in run.evaluation(range(5)):
                node.clock.sleep(6)  # the GPU idles

    train(run, work, epochs=5, each=evaluate)
    points = truth(node, work)
    profile = power(tmp_path)
    assert len(profile["train_power"]) == len(LIMITS)
    # In that epoch, too, the first evaluation was at the highest limit.
    (throughput,) = profile["eval_throughput"].values()
    assert throughput == pytest.approx(1 / points[profile["optimal_pl"] // 1000][0], rel=0.02)
    for limit, (seconds, _) in points.items():
        assert profile["train_throughput"][str(limit * 1000)] == pytest.approx(
            1 / seconds, rel=0.02
        )


def test_epochs_that_end_early_are_taken_as_they_are(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    # The loader has 1000 iterations, and the loop leaves it after 15 each time.
    run = session(node, settings(tmp_path, profile_params=(5, 20)))
    train(run, work, epochs=20, iterations=15, known=1000)
    assert len(power(tmp_path)["train_power"]) == len(LIMITS)


def test_an_epoch_of_few_iterations_has_a_whole_window(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    # 9 of 10 iterations: one to warm up, and seven that are measured.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = session(node, settings(tmp_path))
        costs = train_and_cost(run, work, epochs=9, iterations=10, known=10)
    assert costs[7] == pytest.approx(costs[8], rel=0.02)  # seven for as many limits
    assert all(abs(cost / costs[8] - 1) > 0.02 for cost in costs[:2])
    assert len(power(tmp_path)["train_power"]) == len(LIMITS)


def test_epochs_of_two_iterations_are_measured_anyway(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    run = session(node, settings(tmp_path))
    with pytest.warns(UserWarning, match="A stretch of 2 steps .* each limit is measured over"):
        train(run, work, epochs=12, iterations=2, known=2)
    assert result(tmp_path)["reached"]
    assert len(power(tmp_path)["train_power"]) == len(LIMITS)


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
    work = node.nvml.open_work([0, 1], WORKLOAD)
    seen: set[tuple[float, float]] = set()
    run = session(node, settings(tmp_path), gpus=2)
    assert run.max_power == 500
    train(run, work, epochs=3, each=lambda _: seen.add((node.limit_w(0), node.limit_w(1))))
    assert seen == {(limit, limit) for limit in LIMITS}
    found = result(tmp_path)
    assert found["cost"] == pytest.approx(zeus_cost(found["energy"], found["time"], 0.5, 500))
    assert power(tmp_path)["train_power"]["250000"] > 400  # of both
    assert node.limit_w(0) == node.limit_w(1) == 250

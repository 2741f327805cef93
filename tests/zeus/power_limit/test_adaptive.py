"""The adaptive power limit optimizer as a training loop sees it, on a simulated node."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import for_users, in_a_notebook, wait_for
from tests.zeus.node import VirtualNode, train
from zeus.exceptions import ZeusdError
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    PowerLimitMeasurement,
    Time,
    ZeusCost,
    held,
)
from zeus.optimizer.power_limit.search import expected_steps
from zeus_ipc.errors import DaemonUnavailable
from zeusd.devices.simulated import Work
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import MeasuredTable, ModelWorkload, catalog

OpenNode = Callable[[str], VirtualNode]
RESNET = "profiles/A40+resnet50+gpu0"


def table(name: str = RESNET) -> dict[int, tuple[float, float]]:
    """Time (s) and energy (J) of a step by limit (W)."""
    found = catalog()[name]
    assert isinstance(found, MeasuredTable)
    return {
        int(limit): (found.unit_s[i], found.unit_s[i] * sum(gpu[i] for gpu in found.power_w))
        for i, limit in enumerate(found.limits_w)
    }


@pytest.fixture
def node(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> VirtualNode:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return virtual_node("a40:setter_ms=0")


@pytest.fixture
def work(node: VirtualNode) -> Work:
    return node.nvml.open_work([0], RESNET)


def optimizer(node: VirtualNode, *args: Any, **options: Any) -> GlobalPowerLimitOptimizer:
    return GlobalPowerLimitOptimizer(node.monitor(), *args, **options)


def chosen_w(plo: GlobalPowerLimitOptimizer) -> float:
    assert isinstance(plo.state, Done)
    return plo.state.optimal_power_limit / 1000


def cost(limit_w: float) -> float:
    """As ZeusCost(0.5) has it, of the true table."""
    seconds, joules = table()[int(limit_w)]
    return 0.5 * joules + 0.5 * max(table()) * seconds


# ------------------------------------------------------------------------------------- the search


def test_it_is_the_default_and_takes_a_third_of_the_steps_at_most(
    node: VirtualNode, work: Work
) -> None:
    plo = optimizer(node)
    taken = train(plo, work, 1000, until_done=True)
    assert taken <= 451 / 3
    assert cost(chosen_w(plo)) <= 1.01 * min(map(cost, table()))
    assert node.limit_w() == chosen_w(plo)
    assert plo.progress[0] == plo.progress[1] == expected_steps("adaptive", 9, 10, 40)
    for one in plo.measurements:
        seconds, joules = table()[int(one.power_limit)]
        assert one.time / 40 == pytest.approx(seconds, rel=0.04)
        assert one.energy / 40 == pytest.approx(joules, rel=0.04)


def test_a_custom_selector_gets_every_limit(node: VirtualNode, work: Work) -> None:
    seen: list[int] = []

    class Third(OptimumSelector):
        def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
            seen.append(len(measurements))
            return measurements[2].power_limit

    plo = optimizer(node, Third())
    train(plo, work, 1000, until_done=True)
    assert seen == [9]
    assert node.limit_w() == 250


def test_costs_that_fail_cost_nothing(node: VirtualNode, work: Work) -> None:
    class Broken(Energy):
        def costs(self, measurements: object) -> list[float]:
            raise KeyError("oops")

    plo = optimizer(node, Broken())
    train(plo, work, 1000, until_done=True)
    assert not plo.disabled
    assert len(plo.measurements) == 9


def test_a_choice_that_was_not_measured_ends_only_the_search(node: VirtualNode, work: Work) -> None:
    class Odd(OptimumSelector):
        def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
            return 123

    plo = optimizer(node, Odd())
    with pytest.warns(UserWarning, match="chose 123 W, which was not measured"):
        train(plo, work, 1000)
    assert node.limit_w() == 300


def test_the_first_lower_limit_is_one_that_binds_where_the_driver_counts_it(
    virtual_node: OpenNode,
) -> None:
    """A job that draws 200 W of the highest limit's 400 W."""
    tried: list[list[int]] = []
    for spec in ("a100-sxm-80:setter_ms=0", "a100-sxm-80:setter_ms=0:lacks=limited"):
        node = virtual_node(spec)
        work = node.nvml.open_work([0], ModelWorkload(ModelLoad(unit_s=0.5, k=0.4, power_w=200.0)))
        limits: list[int] = []
        plo = optimizer(node, Energy())
        while not isinstance(plo.state, Done):
            plo.on_step_begin()
            if plo.current_power_limit not in limits:
                limits.append(plo.current_power_limit)
            work.run(1)
            plo.on_step_end()
        tried.append(limits)
        plo.close()
    counted, uncounted = tried
    assert counted[1] <= 200_000 < uncounted[1]
    assert len(counted) <= len(uncounted)


@pytest.mark.parametrize("hook", ["on_progress", "on_metrics"])
def test_a_hook_that_fails_ends_only_the_search(node: VirtualNode, work: Work, hook: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the logger is full")

    plo = optimizer(node)
    setattr(plo, hook, fail)
    with pytest.warns(UserWarning, match="RuntimeError: the logger is full") as caught:
        assert train(plo, work, 100) == 100
    assert len(for_users(caught)) == 1
    assert plo.disabled
    assert node.limit_w() == 300
    assert plo.monitor.measurement_states == {}
    assert node.client.leases() == []


# --------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("every", [3, 7, 20])
def test_evaluations_every_few_steps_neither_stop_the_search_nor_get_into_it(
    node: VirtualNode, work: Work, every: int
) -> None:
    plo = optimizer(node)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3000):
            plo.on_step_begin()
            work.run(1)
            plo.on_step_end()
            if step % every == every - 1:
                with plo.paused():
                    assert isinstance(plo.state, Done) or node.limit_w() == 300
                    work.wait()
                    node.clock.sleep(10)
            if isinstance(plo.state, Done):
                break
    assert cost(chosen_w(plo)) <= 1.03 * min(map(cost, table()))
    for one in plo.measurements:
        assert one.time / 40 == pytest.approx(table()[int(one.power_limit)][0], rel=0.06)


# ------------------------------------------------------------------------------------- the profile


def test_a_profile_names_what_it_was_measured_on(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    plo = optimizer(node, profile_path=path)
    train(plo, work, 1000, until_done=True)
    kept = json.loads(path.read_text())
    assert kept["gpus"] == ["NVIDIA A40"]
    assert kept["range"] == [100, 300]
    assert kept["selector"] == "ZeusCost(eta_knob=0.5, world_size=1)"
    assert [row["power_limit"] for row in kept["measurements"]] == [
        one.power_limit for one in plo.measurements
    ]
    assert sum(row["steps"] for row in kept["samples"]) == sum(one.steps for one in plo.estimates)
    again = optimizer(node, profile_path=path)
    assert isinstance(again.state, Done)
    assert again.measurements == plo.measurements
    assert chosen_w(again) == chosen_w(plo)


def test_a_job_that_was_ended_continues_where_it_was(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    whole = optimizer(node)
    steps = train(whole, work, 1000, until_done=True)
    whole.on_train_end()
    first = optimizer(node, profile_path=path)
    train(first, work, steps * 2 // 3)
    first.on_train_end()
    assert not path.exists()
    before = {row["power_limit"] for row in json.loads(partial(path).read_text())["measurements"]}
    assert len(before) >= 2
    second = optimizer(node, profile_path=path)
    assert node.limit_w() == 300
    taken = train(second, work, 1000, until_done=True)
    assert taken < steps
    assert path.exists()
    assert not partial(path).exists()
    assert cost(chosen_w(second)) <= 1.01 * min(map(cost, table()))


def partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def test_another_selector_continues_from_a_profile(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    first = optimizer(node, Time(), profile_path=path)
    train(first, work, 1000, until_done=True)
    first.on_train_end()
    second = optimizer(node, Energy(), profile_path=path)
    train(second, work, 1000, until_done=True)
    energies = {limit: joules for limit, (_, joules) in table().items()}
    assert energies[int(chosen_w(second))] <= 1.01 * min(energies.values())


# -------------------------------------------------------------------------------- after the choice


def test_training_that_has_changed_is_measured_again(
    node: VirtualNode, work: Work, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    plo = optimizer(node, profile_path=path)
    train(plo, work, 1000, until_done=True)
    first = chosen_w(plo)
    with caplog.at_level(logging.INFO, "zeus.optimizer.power_limit"):
        train(plo, work, 1000)
        assert chosen_w(plo) == first
        assert "again" not in caplog.text
        # A larger model: compute-bound, at any limit slower, and so worth the highest one.
        work.close()
        heavier = node.nvml.open_work([0], ModelWorkload(ModelLoad(1.0, 1.0, 290.0)))
        train(plo, heavier, 1000)
    assert "training has changed (a step takes" in caplog.text
    assert len(plo.estimates) >= 2
    assert plo.estimates[0].time_s == pytest.approx(1.0, rel=0.1)
    assert node.limit_w() == chosen_w(plo)
    assert json.loads(path.read_text())["measurements"][0]["time"] == pytest.approx(40, rel=0.1)


def test_a_profile_of_another_workload_is_detected_soon(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    first = optimizer(node, profile_path=path)
    train(first, work, 1000, until_done=True)
    first.on_train_end()
    second = optimizer(node, profile_path=path)
    assert isinstance(second.state, Done)
    work.close()
    heavier = node.nvml.open_work([0], ModelWorkload(ModelLoad(1.0, 1.0, 290.0)))
    assert second.measurements[0].time / 40 == pytest.approx(table()[300][0], rel=0.1)
    train(second, heavier, 100)
    found_out = second.measurements[0].time / 40 == pytest.approx(1.0, rel=0.1)
    assert found_out or not isinstance(second.state, Done)


def test_evaluations_after_the_choice_are_no_change(node: VirtualNode, work: Work) -> None:
    plo = optimizer(node)
    train(plo, work, 1000, until_done=True)
    for _ in range(40):
        train(plo, work, 30)
        work.wait()
        node.clock.sleep(10)
        plo.on_epoch_end()
    assert isinstance(plo.state, Done)
    assert plo.monitor.measurement_states == {}


def test_the_next_training_sets_the_choice_again(node: VirtualNode, work: Work) -> None:
    plo = optimizer(node)
    with plo:
        train(plo, work, 1000, until_done=True)
        choice = chosen_w(plo)
    assert node.limit_w() == 300
    with plo:
        assert node.limit_w() == choice
    with optimizer(node) as short:
        train(short, work, 15)
    assert node.limit_w() == 300
    with short:
        train(short, work, 1000, until_done=True)
        assert chosen_w(short) == choice == node.limit_w()


# ---------------------------------------------------------------------------------------- results


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[GlobalPowerLimitOptimizer], list[bool]]:
    """Has zeusd not answer when limits are released, until the list it returns is emptied."""
    monkeypatch.setattr(held, "RETRY_S", 0.01)

    def make(plo: GlobalPowerLimitOptimizer) -> list[bool]:
        gone = [True]
        real = plo.monitor.gpus.release_all

        def release_all(indices: Any) -> None:
            if gone:
                gone.append(True)
                raise ZeusdError("no zeusd listens") from DaemonUnavailable("no zeusd listens")
            real(indices)

        monkeypatch.setattr(plo.monitor.gpus, "release_all", release_all)
        return gone

    return make


def test_a_zeusd_that_was_away_is_informed_when_it_is_back(
    node: VirtualNode, work: Work, away: Callable[[GlobalPowerLimitOptimizer], list[bool]]
) -> None:
    plo = optimizer(node)
    train(plo, work, 25)
    gone = away(plo)
    plo.on_train_end()
    assert node.limit_w() < 300  # zeusd keeps the settings of a running process
    wait_for(lambda: len(gone) > 3, "it to be told again")
    gone.clear()
    wait_for(lambda: node.limit_w() == 300, "the limit to be back")
    wait_for(lambda: not node.client.leases(), "all leases to end")  # one after another


def test_a_limit_that_is_wanted_again_is_not_released_late(
    node: VirtualNode, work: Work, away: Callable[[GlobalPowerLimitOptimizer], list[bool]]
) -> None:
    plo = optimizer(node)
    train(plo, work, 1000, until_done=True)
    gone = away(plo)
    others = threading.enumerate()  # an earlier test's zeusd may be away for good
    plo.on_train_end()
    plo.on_train_begin()
    gone.clear()
    wait_for(lambda: not {*threading.enumerate()} - {*others}, "the thread to end")
    assert node.limit_w() == chosen_w(plo) < 300


def test_gpus_of_the_cost_are_distinguished_from_gpus_that_train(
    node: VirtualNode, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    plo = optimizer(node, ZeusCost(0.5, world_size=4))
    train(plo, work, 1000, until_done=True)
    assert "world_size=4, and 1 GPUs train" in caplog.text


def test_figures_are_shown_as_they_come(node: VirtualNode, work: Work) -> None:
    shown: list[dict[str, float]] = []
    plo = optimizer(node)
    plo.on_metrics = shown.append
    train(plo, work, 1000, until_done=True)
    assert set(shown[0]) == {
        "zeus/power_limit_w",
        "zeus/step_time_s",
        "zeus/step_energy_j",
        "zeus/power_w",
    }
    assert shown[0]["zeus/power_limit_w"] == 300
    assert shown[0]["zeus/step_time_s"] == pytest.approx(table()[300][0], rel=0.05)
    assert shown[0]["zeus/step_energy_j"] == pytest.approx(table()[300][1], rel=0.05)
    report = plo.report()
    assert shown[-1] == {
        "zeus/chosen_power_limit_w": chosen_w(plo),
        "zeus/energy_saving": pytest.approx(report.saving),
        "zeus/slowdown": pytest.approx(report.slowdown),
    }


def test_a_report_says_and_draws_what_was_found(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    plo = optimizer(node, MaxSlowdownConstraint(1.1))
    assert str(plo.report()) == "No power limit has been measured yet."
    with pytest.warns(UserWarning, match="nothing to draw yet"):
        plo.report(tmp_path / "early.png")
    train(plo, work, 30)
    assert "No power limit is chosen after 28 steps" in str(plo.report())
    train(plo, work, 1000, until_done=True)
    report = plo.report(tmp_path / "trade-off.png")
    seconds, joules = table()[int(chosen_w(plo))]
    assert report.saving == pytest.approx(1 - joules / table()[300][1], abs=0.03)
    assert report.slowdown == pytest.approx(seconds / table()[300][0] - 1, abs=0.03)
    assert 0 < report.saving_error < 0.05
    lines = str(report).splitlines()
    assert len(lines) == len(plo.measurements) + 2
    assert [line.split()[0] for line in lines if line.endswith("<- chosen")] == [
        f"{chosen_w(plo):g}"
    ]
    assert f"At {chosen_w(plo):g} W instead of 300 W a step takes" in lines[-1]
    assert (tmp_path / "trade-off.png").read_bytes().startswith(b"\x89PNG")
    assert f"In force: {chosen_w(plo):g} W." in lines[-1]
    assert str(report) in in_a_notebook(report).replace("&lt;", "<")
    assert "</svg>" in in_a_notebook(report)
    plo.report(tmp_path / "trade-off.svg")
    assert f"{chosen_w(plo):g} W" in (tmp_path / "trade-off.svg").read_text()
    with pytest.warns(UserWarning, match="not drawn"):
        plo.report(tmp_path / "nowhere" / "trade-off.png")

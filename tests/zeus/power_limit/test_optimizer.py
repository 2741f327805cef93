from __future__ import annotations

import gc
import json
import math
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import for_users, wait_for
from tests.zeus.node import VirtualNode, train
from zeus.callback import Callback, CallbackSet
from zeus.measure import EnergyCallback
from zeus.monitor import Measurement
from zeus.optimizer import GlobalPowerLimitOptimizer
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    PowerLimitMeasurement,
    Profiling,
    Ready,
    Time,
    Warmup,
    ZeusCost,
    effects,
    others,
)
from zeus.utils.metric import zeus_cost
from zeus_ipc.errors import LeaseHeld
from zeusd.devices.simulated import Work
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload

OpenNode = Callable[[str], VirtualNode]
SMALL: dict[str, Any] = {
    "warmup_steps": 2,
    "profile_steps": 30,
    "pl_step": 50,
    "search": "exhaustive",
}
WORKLOAD = ModelWorkload(ModelLoad(unit_s=0.1, k=0.4, power_w=240.0))


@pytest.fixture
def node(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> VirtualNode:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return virtual_node("2xv100:setter_ms=0")


@pytest.fixture
def work(node: VirtualNode) -> Work:
    return node.nvml.open_work([0], WORKLOAD)


def optimizer(node: VirtualNode, *args: Any, **options: Any) -> GlobalPowerLimitOptimizer:
    monitor = options.pop("monitor", None) or node.monitor(gpu_indices=[0])
    return GlobalPowerLimitOptimizer(monitor, *args, **{**SMALL, **options})


def measured(*rows: tuple[float, float, float]) -> list[PowerLimitMeasurement]:
    return [PowerLimitMeasurement(power_limit=w, energy=j, time=s) for w, j, s in rows]


ROWS = measured((300, 100.0, 10.0), (250, 90.0, 10.5), (200, 80.0, 11.0), (150, 95.0, 15.0))


# -------------------------------------------------------------------------------------- selectors


def test_the_selectors_choose_by_their_own_criterion() -> None:
    assert Energy().select(ROWS) == 200
    assert Time().select(ROWS) == 300
    assert MaxSlowdownConstraint(1.05).select(ROWS) == 250
    assert MaxSlowdownConstraint(1.0).select(ROWS) == 300
    assert MaxSlowdownConstraint(9.0).select(ROWS) == 150
    assert ZeusCost(1.0).select(ROWS) == 200
    assert ZeusCost(0.0).select(ROWS) == 300
    costs = [zeus_cost(one.energy, one.time, 0.5, 600) for one in ROWS]
    assert ZeusCost(0.5, world_size=2).costs(ROWS) == costs
    assert costs[0] == pytest.approx(0.5 * 100 + 0.5 * 600 * 10)


def test_of_equals_the_highest_limit_is_chosen() -> None:
    rows = measured((300, 90.0, 10.0), (250, 90.0, 10.0))
    assert Energy().select(rows) == Time().select(rows) == 300


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ZeusCost(1.1), "eta_knob must be between 0 and 1, inclusive both sides."),
        (lambda: ZeusCost(0.5, 0), "world_size must be greater than or equal to 1."),
        (lambda: MaxSlowdownConstraint(0.9), r"greater than or equal to 1.0. Got 0.9"),
    ],
)
def test_wrong_arguments_of_selectors(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_arguments_of_selectors_that_are_probably_meant_otherwise_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = r"\(10\) lets training take 10 times as long; for 10 % more time give 1\.1"
    with pytest.warns(UserWarning, match=words):
        MaxSlowdownConstraint(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MaxSlowdownConstraint(2.9)
    assert ZeusCost(0.5).of(3).costs(ROWS) == ZeusCost(0.5, 3).costs(ROWS)
    two = ZeusCost(0.5, 2)
    assert two.of(2) is two
    assert caplog.messages == []
    assert two.of(3) is two
    assert caplog.messages == [
        "ZeusCost was made for world_size=2, and 3 GPUs train; leave world_size out"
    ]


def test_gpus_of_different_ranges_are_refused(virtual_node: OpenNode) -> None:
    node = virtual_node("v100,a40")
    with pytest.raises(ValueError, match="not uniform"):
        optimizer(node, monitor=node.monitor())


# ---------------------------------------------------------------------------------- state machine


def test_each_limit_is_held_for_its_steps_from_the_highest_down(
    node: VirtualNode, work: Work
) -> None:
    plo = optimizer(node, Energy(), wait_steps=3)
    seen: list[tuple[str, float]] = []
    plo.on_epoch_begin()
    while not isinstance(plo.state, Done):
        plo.on_step_begin()
        seen.append((type(plo.state).__name__, node.limit_w()))
        work.run(1)
        plo.on_step_end()
    expected: list[tuple[str, float]] = [("Ready", 250)] * 3
    for watts in (250, 200, 150, 100):
        expected += [("Warmup", watts)] * 2 + [("Profiling", watts)] * 30
    assert seen[: len(expected)] == expected
    # The last limit is held until its energy is known, which delays no step.
    last = seen[len(expected) : -1]
    assert last == [("Profiling", 100)] * len(last)
    assert len(last) * 0.1 < 0.3
    assert seen[-1][0] == "Done"
    assert plo.progress == (128, 128)


def test_windows_have_their_known_names_and_measure_only_profiled_steps(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    monitor = node.monitor(gpu_indices=[0], log_file=tmp_path / "log.csv")
    plo = optimizer(node, Energy(), monitor=monitor)
    train(plo, work, 1000, until_done=True)
    monitor.flush()
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()[1:]]
    assert [row[1] for row in rows[:4]] == [
        f"__GlobalPowerLimitOptimizer_{watts}" for watts in (250, 200, 150, 100)
    ]
    assert float(rows[0][2]) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("interrupt", ["epoch", "evaluation"])
def test_an_interruption_drops_the_window_and_tries_the_limit_again(
    node: VirtualNode, work: Work, interrupt: str
) -> None:
    plo = optimizer(node, Energy())
    plo.on_epoch_begin()
    while not (isinstance(plo.state, Profiling) and plo.state.current_power_limit == 200_000):
        plo.on_step_begin()
        work.run(1)
    if interrupt == "epoch":
        plo.on_epoch_end()
    else:
        plo.on_evaluate(0.5)
    assert node.limit_w() == 250
    assert plo.monitor.measurement_states == {}
    work.wait()
    node.clock.sleep(60)  # an evaluation, which must not be measured
    assert isinstance(plo.state, Ready)
    assert plo.state.next_power_limit == 200_000
    plo.on_epoch_begin()
    plo.on_step_begin()
    assert isinstance(plo.state, Warmup)
    assert node.limit_w() == 200
    work.run(1)
    train(plo, work, 1000, until_done=True)
    assert [one.power_limit for one in plo.measurements] == [250, 200, 150, 100]
    assert all(one.time < 10 for one in plo.measurements)


def test_no_call_is_made_while_the_limit_stays(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    plo = optimizer(node, Energy())
    calls: list[int] = []
    real = node.nvml.set_power_limit
    monkeypatch.setattr(
        node.nvml, "set_power_limit", lambda gpu, mw: (calls.append(mw), real(gpu, mw))
    )
    train(plo, work, 1000, until_done=True)
    train(plo, work, 50)
    assert calls == [200_000, 150_000, 100_000]  # the last is the choice


def test_all_gpus_of_the_monitor_get_the_limit_and_their_energy_is_added(
    node: VirtualNode,
) -> None:
    monitor = node.monitor()
    work = node.nvml.open_work([0, 1], WORKLOAD)
    plo = GlobalPowerLimitOptimizer(monitor, Energy(), **SMALL)
    train(plo, work, 1000, until_done=True)
    assert node.limit_w(0) == node.limit_w(1) == plo.state.optimal_power_limit / 1000
    first = plo.measurements[0]
    assert first.energy / first.time == pytest.approx(480, rel=0.03)


def test_the_default_selector_counts_every_gpu_that_trains(node: VirtualNode) -> None:
    """With the energy of two GPUs and the power of one, it would choose too low."""
    workload = ModelWorkload(ModelLoad(unit_s=0.1, k=0.9, power_w=240.0))
    work = node.nvml.open_work([0, 1], workload)
    for selector in (None, ZeusCost(0.5)):
        plo = optimizer(node, selector, monitor=node.monitor(), pl_step=5)
        train(plo, work, 3000, until_done=True)
        assert isinstance(plo.state, Done)
        best = ZeusCost(0.5, world_size=2).select(plo.measurements)
        assert plo.state.optimal_power_limit == best * 1000
        assert best != ZeusCost(0.5, world_size=1).select(plo.measurements)
        plo.on_train_end()


# --------------------------------------------------------------------------------------- defects


@pytest.mark.parametrize("steps", [3, 33])
def test_short_epochs_make_progress_with_one_warning(
    node: VirtualNode, work: Work, steps: int
) -> None:
    plo = optimizer(node, Energy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            train(plo, work, steps)
            plo.on_epoch_end()
            node.clock.sleep(5)  # an evaluation
            if isinstance(plo.state, Done):
                break
    assert isinstance(plo.state, Done)
    assert len(plo.measurements) == 4
    assert plo.measurements[0].time == pytest.approx(3.0, rel=0.05)
    short = [one for one in caught if "shorter than" in str(one.message)]
    assert len(short) == (1 if steps < 33 else 0)
    assert all("of 3 steps" in str(one.message) for one in short)
    assert all("shorter than the 33 that" in str(one.message) for one in short)


def test_the_lowest_limit_is_always_tried(node: VirtualNode) -> None:
    plo = optimizer(node, Energy(), pl_step=60)
    assert plo.power_limits == [250_000, 190_000, 130_000, 100_000]


def test_a_minimum_with_half_a_watt(virtual_node: OpenNode, tmp_path: Path) -> None:
    node = virtual_node("v100:setter_ms=0")
    info = node.client.node().gpus[0].model_copy(update={"power_limit_min_mw": 125_500})
    monitor = node.monitor()
    monitor.gpus[0].info = info
    work = node.nvml.open_work([0], WORKLOAD)

    class Lowest(OptimumSelector):
        def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
            return measurements[-1].power_limit

    plo = GlobalPowerLimitOptimizer(
        monitor, Lowest(), **SMALL, profile_path=tmp_path / "profile.json"
    )
    train(plo, work, 1000, until_done=True)
    assert plo.power_limits == [250_000, 200_000, 150_000, 125_500]
    assert node.limit_w() == 125.5
    limits = [
        one["power_limit"]
        for one in json.loads((tmp_path / "profile.json").read_text())["measurements"]
    ]
    assert limits == [250, 200, 150, 125.5]


def test_without_permission_one_warning_and_training_continues(virtual_node: OpenNode) -> None:
    node = virtual_node("v100:setter_ms=0:unprivileged")
    work = node.nvml.open_work([0], WORKLOAD)
    with pytest.warns(UserWarning, match="CAP_SYS_ADMIN") as caught:
        plo = optimizer(node, Energy())
        train(plo, work, 200)
        plo.on_epoch_end()
        plo.on_train_end()
    assert len(for_users(caught)) == 1
    assert plo.disabled
    assert node.limit_w() == 250


def test_a_limit_refused_before_the_model_is_on_the_gpu_is_set_then(
    node: VirtualNode, work: Work
) -> None:
    """Where a site lets only those set limits who compute, and the optimizer comes first."""
    node.nvml.inject(0, "set_power_limit", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plo = optimizer(node, Energy())
        node.nvml.clear_faults()
        train(plo, work, 1000, until_done=True)
    assert not plo.disabled
    assert plo.power_limits[0] == 250_000
    assert node.limit_w() < 250


@pytest.mark.parametrize(
    ("call", "limit"),
    [
        ("set_power_limit", r"200 W on GPU 0 \(`zeusctl status` says who set it\)"),
        ("sensors", "the highest limit"),
    ],
)
def test_a_gpu_that_fails_in_the_middle_ends_only_the_search(
    node: VirtualNode, work: Work, call: str, limit: str
) -> None:
    plo = optimizer(node, Energy())
    with pytest.warns(UserWarning, match=f"training continues at {limit}: ") as caught:
        for step in range(300):
            plo.on_step_begin()
            work.run(1)
            plo.on_step_end()
            if step == 50:
                node.nvml.inject(0, call, 999)
            elif step == 150:
                node.nvml.clear_faults()
        plo.on_train_end()
    assert len(for_users(caught)) == 1
    assert plo.disabled
    wait_for(lambda: node.limit_w() == 250, "zeusd to put the limit back, in real time")
    assert plo.monitor.measurement_states == {}


@pytest.mark.parametrize(
    "error", [RuntimeError("no idea"), LeaseHeld("power_limit of GPU 0 is held by process 7")]
)
def test_an_error_while_a_limit_is_set_ends_only_the_search(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plo = optimizer(node)
    train(plo, work, 5)

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(node.client, "set_power_limit", fail)
    with pytest.warns(UserWarning, match=f"training continues at.*: .*{error}") as told:
        train(plo, work, 200)
    assert plo.disabled
    assert len(for_users(told)) == 1


def test_a_window_of_five_milliseconds_is_measured_anyway(node: VirtualNode) -> None:
    short = node.nvml.open_work([0], ModelWorkload(ModelLoad(5e-3, 0.4, 240.0)))
    plo = optimizer(node, Energy(), profile_steps=1)
    train(plo, short, 2000, until_done=True)
    assert not plo.disabled
    assert all(one.energy > 0 for one in plo.measurements)
    assert len(plo.measurements) == 4


def test_a_window_of_zero_joules_ends_only_the_search(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = node.client.windows

    def nothing(*args: Any, **options: Any) -> Any:
        return {
            name: found.model_copy(update={"energy_uj": [0] * len(found.energy_uj)})
            for name, found in real(*args, **options).items()
        }

    monkeypatch.setattr(node.client, "windows", nothing)
    plo = optimizer(node, Energy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(plo, work, 1000)
    assert plo.disabled
    assert sum("measured as 0 J" in str(one.message) for one in caught) == 1
    assert node.limit_w() == 250


@pytest.mark.parametrize("times", [1, 2])
def test_a_lease_that_was_lost_is_acquired_again(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As by a program that stood still for longer than the lease lasts; or lost again before it
    could be used, as zeusd was restarted twice."""
    from zeus.optimizer.power_limit import held
    from zeus_ipc.errors import LeaseExpired

    real, acquire = node.client.set_power_limit, node.client.acquire
    acquired: list[tuple[Any, ...]] = []

    def set_power_limit(*args: Any, **kwargs: Any) -> None:
        if len(acquired) < times:
            raise LeaseExpired("this process lost its lease on power_limit")
        real(*args, **kwargs)

    def acquire_again(*args: Any, **kwargs: Any) -> Any:
        acquired.append(args)
        return acquire(*args, **kwargs)

    plo = optimizer(node, Energy())
    train(plo, work, 30)
    monkeypatch.setattr(node.client, "set_power_limit", set_power_limit)
    monkeypatch.setattr(node.client, "acquire", acquire_again)
    monkeypatch.setattr(held, "RETRY_S", 0.0)
    train(plo, work, 1000, until_done=True)
    assert not plo.disabled
    assert [names for _, names, *_ in acquired] == [["power_limit"]] * times


def test_the_same_monitor_serves_a_second_run(node: VirtualNode, work: Work) -> None:
    monitor = node.monitor(gpu_indices=[0])
    first = optimizer(node, Energy(), monitor=monitor)
    train(first, work, 20)  # the notebook's cell was interrupted
    second = optimizer(node, Energy(), monitor=monitor)
    train(second, work, 1000, until_done=True)
    assert len(second.measurements) == 4


@pytest.mark.parametrize("told", [True, False])
def test_of_two_optimizers_the_last_one_has_the_gpu(
    node: VirtualNode, work: Work, told: bool
) -> None:
    """Whether they are told that training begins, or only get steps."""

    def begin(plo: GlobalPowerLimitOptimizer) -> None:
        if told:
            plo.on_train_begin()
        for _ in range(5):
            train(plo, work, 1)
            assert plo.current_power_limit == node.limit_w() * 1000

    first, second = optimizer(node, Energy()), optimizer(node, Energy())
    for plo in (first, second):  # created before, and trained one after the other
        begin(plo)
        train(plo, work, 1000, until_done=True)
        assert plo.state == Done(optimal_power_limit=round(node.limit_w() * 1000))
    with pytest.warns(UserWarning, match="another power limit optimizer of this process has"):
        train(first, work, 1)
    assert first.disabled
    assert node.limit_w() == second.current_power_limit / 1000 < 250, "it restores nothing"
    third = optimizer(node, Energy())
    with pytest.warns(UserWarning, match="another power limit optimizer of this process has"):
        train(second, work, 1)
    begin(third)
    train(third, work, 1000, until_done=True)
    assert not third.disabled


@pytest.mark.parametrize("ended", [True, False])
def test_an_optimizer_that_lost_a_gpu_restores_those_that_nobody_took(
    node: VirtualNode, ended: bool
) -> None:
    highest_w, work = node.limit_w(), node.nvml.open_work([0, 1], WORKLOAD)
    first = optimizer(node, Energy(), monitor=node.monitor())
    train(first, work, 1000, until_done=True)
    assert node.limit_w(0) == node.limit_w(1) < highest_w
    second = optimizer(node, Energy())  # on GPU 0
    train(second, work, 1000, until_done=True)
    if ended:
        first.close()
    else:
        with pytest.warns(UserWarning, match="another power limit optimizer of this process has"):
            train(first, work, 1)
    assert node.limit_w(0) == second.current_power_limit / 1000 < highest_w
    assert node.limit_w(1) == highest_w
    second.close()
    assert node.limit_w(0) == highest_w


def test_an_optimizer_that_lost_its_gpu_to_one_that_has_ended_gives_up(
    node: VirtualNode, work: Work
) -> None:
    first = optimizer(node, Energy())
    train(first, work, 1000, until_done=True)
    assert node.limit_w() < 250
    optimizer(node, Energy()).close()
    assert node.limit_w() == 250
    with pytest.warns(UserWarning, match="another power limit optimizer of this process has"):
        train(first, work, 1)  # whose limit is not in force any more
    assert first.disabled


def test_what_an_optimizer_has_set_that_is_gone_is_restored_by_the_one_before(
    node: VirtualNode, work: Work
) -> None:
    highest_w = node.limit_w()
    first, second = optimizer(node, Energy()), optimizer(node, Energy())
    train(second, work, 1000, until_done=True)
    assert node.limit_w() < highest_w
    del second
    gc.collect()
    first.close()
    assert node.limit_w() == highest_w


def test_a_search_that_ended_without_a_choice_is_reported(node: VirtualNode, work: Work) -> None:
    plo = optimizer(node, Energy())
    with plo:
        train(plo, work, 70)
        assert "No power limit is chosen after 68 steps" in str(plo.report())
        assert "In force: 150 W." in str(plo.report())
    assert isinstance(plo.state, Done)
    assert not plo.state.chosen
    assert plo.state.reason == "training ended before it finished"
    text = str(plo.report())
    assert len(plo.report().estimates) == 2  # the table survives
    assert "The search ended: training ended before it finished." in text
    assert "This optimizer holds no limit now." in text
    failed = optimizer(node, Energy())
    train(failed, work, 70)
    node.nvml.inject(0, "set_power_limit", 999)
    with pytest.warns(UserWarning, match="training continues at"):
        train(failed, work, 100)
    assert "an internal driver error occurred" in str(failed.report())
    assert len(failed.report().estimates) >= 2


def test_the_limit_is_restored_when_training_ends(node: VirtualNode, work: Work) -> None:
    plo = optimizer(node, Energy())
    assert node.nvml.persistence_mode(0)
    train(plo, work, 100)
    assert node.limit_w() < 250
    plo.on_train_end()
    assert node.limit_w() == 250
    assert not node.nvml.persistence_mode(0)
    assert node.client.leases() == []
    plo.on_step_begin()
    assert node.limit_w() == 250


def test_an_administrators_cap_is_the_highest_limit_and_is_restored(
    virtual_node: OpenNode,
) -> None:
    node = virtual_node("v100:setter_ms=0")
    node.nvml.set_outside(0, 200_000)
    node.client.set_power_limit(node.nvml.uuid(0), 150_000)  # zeusd notices
    node.client.release()
    assert node.limit_w() == 200
    plo = optimizer(node, Energy())
    assert plo.power_limits == [200_000, 150_000, 100_000]
    train(plo, node.nvml.open_work([0], WORKLOAD), 1000, until_done=True)
    plo.on_train_end()
    assert node.limit_w() == 200


# ---------------------------------------------------------------------------------------- profile


def test_a_profile_is_written_once_and_used_by_the_next_run(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "profile.json"
    first = optimizer(node, Energy(), profile_path=path)
    assert path.parent.is_dir()
    train(first, work, 1000, until_done=True)
    first.on_train_end()
    text = path.read_text()
    rows = json.loads(text)["measurements"]
    assert [row["power_limit"] for row in rows] == [250, 200, 150, 100]
    assert all(isinstance(row["power_limit"], int) for row in rows)
    assert text.startswith('{\n    "measurements": [\n        {\n            "power_limit": 250,')
    assert list(path.parent.iterdir()) == [path]
    second = optimizer(node, Time(), profile_path=path)
    assert isinstance(second.state, Done)
    assert second.measurements == first.measurements
    assert node.limit_w() == Time().select(first.measurements)


ROW = {"power_limit": 200, "energy": 1.0, "time": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"measurements": []}, "holds no measurements"),
        ({"measurements": [{**ROW, "power_limit": 700}]}, "another GPU"),
        ({"measurements": [{**ROW, "energy": 0}]}, "not a power limit"),
        ("not json", "not a power limit profile"),
        (
            {"measurements": [{**ROW, "energy": math.inf}]},
            "not a power limit profile: measurements.0.energy: Input should be a finite",
        ),
        (
            {"measurements": [ROW], "gpus": ["NVIDIA H100 80GB HBM3"]},
            "was measured on 1 NVIDIA H100 80GB HBM3, and this is 1 Tesla V100",
        ),
        (
            {"measurements": [ROW], "gpus": ["Tesla V100-PCIE-16GB"] * 2},
            "on 2 Tesla V100-PCIE-16GB, and this is 1 Tesla V100-PCIE-16GB",
        ),
        (
            {"measurements": [ROW], "range": [100, 300]},
            "is of limits from 100 to 300 W, and here they are 100 to 250 W",
        ),
    ],
)
def test_a_profile_that_does_not_fit_is_measured_again(
    node: VirtualNode, tmp_path: Path, content: object, words: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content).replace("Infinity", "1e400"))
    with pytest.warns(UserWarning, match=words):
        plo = optimizer(node, Energy(), profile_path=path)
    assert isinstance(plo.state, Ready)


def test_a_profile_that_cannot_be_written_costs_a_warning(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    plo = optimizer(node, Energy(), profile_path=path)
    path.mkdir()
    with pytest.warns(UserWarning, match="could not be written"):
        train(plo, work, 1000, until_done=True)
    assert not plo.disabled


@pytest.mark.parametrize("search", ["adaptive", "exhaustive"])
def test_a_step_left_by_break_at_its_beginning_is_not_measured(
    node: VirtualNode, work: Work, search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(monotonic=lambda: node.clock() / 1e9)
    monkeypatch.setattr("zeus.optimizer.power_limit.optimizer.time", clock)
    plo = optimizer(node, Energy(), search=search)
    figures: list[dict[str, float]] = []
    plo.on_metrics = figures.append
    with plo:
        while not isinstance(plo.state, Done):
            for batch in plo.steps(range(100)):
                if batch == 5:
                    break
                work.run(1)
                work.wait()
    times_s = [one["zeus/step_time_s"] for one in figures if "zeus/step_time_s" in one]
    assert times_s
    assert min(times_s) > 0.09, "a step takes 0.1 s at the highest limit"


def test_an_evaluation_that_was_not_announced_is_in_no_measurement(
    node: VirtualNode, work: Work
) -> None:
    plo = optimizer(node, Energy(), search="adaptive", profile_steps=4)
    figures: list[dict[str, float]] = []
    plo.on_metrics = figures.append
    with plo:
        for batch in plo.steps(range(1000)):
            work.run(1)
            work.wait()
            if batch % 5 == 0:
                node.clock.sleep(5)
                plo.on_evaluate(0.5)
            if isinstance(plo.state, Done):
                break
    times_s = [one["zeus/step_time_s"] for one in figures if "zeus/step_time_s" in one]
    assert isinstance(plo.state, Done)
    assert max(times_s) < 1


# --------------------------------------------------------------------------------------- callback


def test_steps_have_the_length_of_what_they_pass_on() -> None:
    callback = Callback()
    steps = callback.steps([1, 2, 3])
    assert len(steps) == 3
    assert list(steps) == list(steps) == [1, 2, 3]
    assert next(callback.steps(iter([7]))) == 7
    with pytest.raises(TypeError):
        len(callback.steps(iter([7])))


def test_an_epoch_ends_when_its_loop_is_left() -> None:
    ended: list[str] = []

    class Recorder(Callback):
        def on_epoch_end(self) -> None:
            ended.append("epoch")

    for _ in Recorder().steps(range(3)):
        break
    assert ended == ["epoch"]


def test_a_set_calls_every_callback_in_order() -> None:
    calls: list[str] = []

    class Recorder(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_step_begin(self) -> None:
            calls.append(f"{self.name} step")

        def on_evaluate(self, metric: float) -> None:
            calls.append(f"{self.name} {metric}")

        def on_instruction_end(self, name: str) -> None:
            calls.append(f"{self.name} {name}")

    both = CallbackSet([Recorder("a"), Recorder("b")])
    for point in ("train_begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "train_end"):
        getattr(both, f"on_{point}")()
    both.on_evaluate(0.5)
    both.on_instruction_begin("forward")
    both.on_instruction_end("forward")
    assert calls == ["a step", "b step", "a 0.5", "b 0.5", "a forward", "b forward"]


# --------------------------------------------------------------- a power budget over many nodes


def test_a_search_publishes_what_each_limit_is_worth(node: VirtualNode, work: Work) -> None:
    plo = optimizer(node, Energy())
    train(plo, work, 300, until_done=True)

    def lease() -> Any:
        (found,) = [one for one in node.client.leases() if one.control == "power_limit"]
        return found

    wait_for(lambda: lease().profile is not None, "the profile, which a thread publishes")
    assert lease().profile.limits_mw == [100_000, 150_000, 200_000, 250_000]
    progress = lease().profile.progress
    assert progress[-1] == 1.0
    assert progress[0] < 0.8


class BoundGpus:
    """GPUs whose fleet ceiling is raised after some readings; None: there is none."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks
        self.done: list[tuple[str, Any]] = []

    def bounded_by(self, indices: Any, ceiling: str) -> bool | None:
        if self.looks is None:
            return None
        self.looks -= 1
        return self.looks >= 0

    def acquire(self, indices: Any, control: str) -> None:
        self.done.append(("acquire", indices))

    def publish_profile(self, indices: Any, progress: Any, measuring: bool = False) -> None:
        self.done.append(("publish", measuring))


@pytest.mark.parametrize(("looks", "waits"), [(None, 0), (0, 0), (3, 2)])
def test_a_search_waits_for_its_highest_limit(
    monkeypatch: pytest.MonkeyPatch, looks: int | None, waits: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(others.time, "sleep", slept.append)
    gpus: Any = BoundGpus(looks)
    others.borrow(gpus, [0])
    assert len(slept) == waits
    assert gpus.done == ([] if looks is None else [("acquire", [0]), ("publish", True)])


def test_a_search_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: Any = BoundGpus(10**9)
    others.borrow(gpus, [0], wait_s=0.0)
    assert gpus.looks > 10**9 - 5


def test_all_waits_of_a_step_together_are_short(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does not return; a step sets a limit, gives up, and asks what is in force."""
    plo = optimizer(node, Energy())
    train(plo, work, 5)
    waited: list[float] = []
    monkeypatch.setattr(effects, "time", types.SimpleNamespace(monotonic=lambda: sum(waited)))
    never = types.SimpleNamespace(wait=lambda seconds: waited.append(seconds))
    for step in (1, 2):
        plo.on_step_begin()
        for _ in range(4):
            plo._effects._wait(never)
        assert sum(waited) == pytest.approx(step * effects.STEP_WAIT_S)


def test_other_uses_of_its_monitor_do_not_disturb_a_search(
    virtual_node: Callable[[str], VirtualNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that nobody reads and callbacks take none of the node's time; what reads take of it
    is in no measurement.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("zeus.monitor.energy.synchronize", lambda *given: True)  # as `work.wait`
    monkeypatch.setattr("zeus_ipc.circuit.PROMPT_S", 60.0)  # of the machine, not the node
    taken: dict[str, tuple[int, int]] = {}
    costs: dict[str, dict[float, tuple[float, float]]] = {}
    for beside in ("nothing", "windows", "callback", "reads"):
        node = virtual_node("a100-sxm-80:setter_ms=0")
        monitor = node.monitor()
        plo = GlobalPowerLimitOptimizer(monitor, Energy())
        callback = EnergyCallback(
            monitor, log=lambda figures, step: None, log_every=1, print_summary=False
        )
        work = node.nvml.open_work([0], "model/compute")
        plo.on_epoch_begin()
        kept: list[Measurement] = []
        steps = 0
        while not isinstance(plo.state, Done):
            plo.on_step_begin()
            if beside == "callback":
                callback.on_step_begin()
            elif beside != "nothing":
                monitor.begin_window("step")
            work.run(1)
            work.wait()
            if beside == "callback":
                callback.on_step_end()
            elif beside != "nothing":
                kept.append(monitor.end_window("step"))
            if beside == "reads":
                assert kept[-1].total_energy > 0
            plo.on_step_end()
            steps += 1
        taken[beside] = steps, plo.state.optimal_power_limit
        costs[beside] = {one.power_limit: (one.time, one.energy) for one in plo.measurements}
        plo.close()
    assert taken["windows"] == taken["callback"] == taken["nothing"]
    assert taken["reads"][1] == taken["nothing"][1]
    for limit in costs["reads"].keys() & costs["nothing"].keys():
        for found, alone, error in zip(
            costs["reads"][limit], costs["nothing"][limit], (0.005, 0.03), strict=True
        ):
            assert found == pytest.approx(alone, rel=error), limit
    assert taken["reads"][0] < 1.6 * taken["nothing"][0], "alone, it is 90 to 140"

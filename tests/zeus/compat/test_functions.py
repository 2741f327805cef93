"""Functions that programs for ml-energy/zeus call and this project has no other use for."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import for_users
from tests.zeus.node import VirtualNode, train
from zeus.compat.early_stop import EarlyStopController
from zeus.compat.functions import get_env, get_ip_lat_long, get_logger, resolve_gpu_indices
from zeus.compat.power_log import avg_power, energy
from zeus.compat.replay import ReplayZeusMonitor
from zeus.device import get_gpus, get_soc
from zeus.exceptions import ZeusArgumentError
from zeus.monitor import Measurement
from zeus.monitor import energy as energy_module
from zeus.optimizer.power_limit import (
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    ZeusCost,
)
from zeusd.devices.simulated import Work

framework = importlib.import_module("zeus.util.framework")

OpenNode = Callable[[str], VirtualNode]


# ------------------------------------------------------------------------------- environment


def test_environment_variables_have_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "1.5")
    assert get_env("X", float) == 1.5
    assert get_env("X", str) == "1.5"
    with pytest.raises(ValueError, match=r"X must be of type int, not '1\.5'"):
        get_env("X", int)
    monkeypatch.delenv("X")
    assert get_env("X", float, default=1.1) == 1.1
    assert get_env("X", bool, default=False) is False
    with pytest.raises(ValueError, match="X is not set"):
        get_env("X", float)
    for text, value in (("True", True), ("false", False)):
        monkeypatch.setenv("X", text)
        assert get_env("X", bool) is value
    monkeypatch.setenv("X", "1")
    with pytest.raises(ValueError, match="must be true or false, not '1'"):
        get_env("X", bool)


def test_gpu_indices_are_those_of_cuda_and_of_nvml(
    virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    virtual_node("3xv100")
    assert resolve_gpu_indices(None) == ([0, 1], [2, 0])
    assert resolve_gpu_indices([1]) == ([1], [0])
    with pytest.raises(ValueError, match="None, or name a GPU"):
        resolve_gpu_indices([])
    with pytest.raises(ValueError, match="no GPU 2"):
        resolve_gpu_indices([2])


def test_a_logger_prints_once_and_is_made_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_LOG_LEVEL", "WARNING")
    name = "zeus.test.compat"
    logging.Logger.manager.loggerDict.pop(name, None)
    logger = get_logger(name)
    assert get_logger(name) is logger
    logger.info("quiet")
    logger.warning("loud")
    printed = capsys.readouterr().out
    assert printed.endswith("loud\n")
    assert printed.count("\n") == 1
    assert f"[{name}](test_functions.py:" in printed


# --------------------------------------------------------------------------------- framework


def test_alone_values_stay_as_they_are() -> None:
    assert framework.all_reduce([1, 2.5], "sum") == [1, 2.5]
    assert (framework.get_rank(), framework.get_world_size()) == (0, 1)
    assert framework.is_distributed() is False
    with pytest.raises(ValueError, match='"sum" or "max"'):
        framework.all_reduce([1], "mean")


def test_gloo_never_drops_the_last_reference_to_a_reduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reduction:
        def wait(self) -> None:
            pass

    class Tensor(list[float]):
        def tolist(self) -> list[float]:
            return list(self)

    begun: list[weakref.ref[Reduction]] = []
    made: list[Any] = []

    def all_reduce(tensor: Tensor, op: str, async_op: bool) -> Reduction:
        assert async_op
        tensor[:] = [2 * value if op == "add" else value + 1 for value in tensor]
        work = Reduction()
        begun.append(weakref.ref(work))
        return work

    distributed = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_backend=lambda: backend,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        all_reduce=all_reduce,
        ReduceOp=types.SimpleNamespace(SUM="add", MAX="most"),
    )
    torch = types.SimpleNamespace(
        distributed=distributed,
        float64="double",
        tensor=lambda values, dtype, device: made.append((dtype, device)) or Tensor(values),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    backend = "gloo"
    assert framework.all_reduce([1, 2.5], "sum") == [2, 5]
    backend = "nccl"
    assert framework.all_reduce([3], "max") == [4]
    assert made == [("double", "cpu"), ("double", "cuda")]
    assert (framework.get_rank(), framework.get_world_size()) == (1, 2)
    gc.collect()
    assert [work() is None for work in begun] == [True, False]


def test_missing_frameworks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert framework.cupy_is_available() is False
    with pytest.raises(RuntimeError, match=r"cupy cannot be imported.*install it"):
        framework.cupy_is_available(ensure_available=True)
    cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert framework.torch_is_available(ensure_cuda=False)
    with pytest.raises(RuntimeError, match="no CUDA GPU"):
        framework.torch_is_available()
    framework.sync_execution([0])  # nothing to wait for
    framework.cuda_sync()


# ------------------------------------------------------------------------------------ replay


def test_names_of_0_8_are_the_present_ones(
    node: VirtualNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[object] = []
    monkeypatch.setattr(energy_module, "synchronize", lambda *of: bool(waits.append(of)))
    path = tmp_path / "log.csv"
    monitor = node.monitor(log_file=path)
    for sync_cuda in (False, True):
        monitor.begin_window("step", sync_cuda=sync_cuda)
        node.clock.sleep(1)
        measurement = monitor.end_window("step", sync_cuda=sync_cuda)
        assert measurement.energy == measurement.gpu_energy
    monitor.flush()
    replay = ReplayZeusMonitor(log_file=path)
    for sync_cuda in (False, True):
        replay.begin_window("step", sync_cuda=sync_cuda)
        replay.end_window("step", sync_cuda=sync_cuda)
    assert waits == 4 * [("torch", [0])]


def test_a_monitors_file_can_be_replayed(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    monitor = node.monitor(log_file=path)
    monitor.begin_window("epoch")
    monitor.begin_window("step, one")
    node.clock.sleep(1)
    taken = [monitor.end_window("step, one")]
    node.clock.sleep(1)
    taken.append(monitor.end_window("epoch"))
    node.clock.sleep(1)
    monitor.flush()
    replay = ReplayZeusMonitor(log_file=path)
    assert replay.gpu_indices == replay.nvml_gpu_indices == [0]
    assert replay.cpu_indices == []
    replay.begin_window("epoch")
    replay.begin_window("step, one")
    assert replay.ongoing_windows == ["epoch", "step, one"]
    assert [replay.end_window("step, one"), replay.end_window("epoch")] == taken
    replay.begin_window("epoch")
    assert replay.end_window("epoch", cancel=True) == Measurement(0.0, {0: 0.0})
    replay.begin_window("epoch")
    with pytest.raises(RuntimeError, match="no line for the window 'epoch': it has ended"):
        replay.end_window("epoch")


def test_a_replay_of_other_windows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("start_time,window_name,elapsed_time,gpu0_energy,gpu2_energy\n1,a,2,3,4\n")
    replay = ReplayZeusMonitor(log_file=path)
    assert replay.gpu_indices == [0, 2]
    replay.begin_window("b")
    with pytest.raises(RuntimeError, match="'b' already exists; end it, or give restart=True"):
        replay.begin_window("b")
    replay.begin_window("b", restart=True)
    with pytest.raises(RuntimeError, match="has the window 'a' next, not 'b'"):
        replay.end_window("b")
    replay = ReplayZeusMonitor(log_file=path, match_window_name=False)
    replay.begin_window("b")
    assert replay.end_window("b").gpu_energy == {0: 3.0, 2: 4.0}
    with pytest.raises(ValueError, match="give log_file"):
        ReplayZeusMonitor()
    path.write_text("Time,Power\n")
    with pytest.raises(ValueError, match="not a file of ZeusMonitor"):
        ReplayZeusMonitor(log_file=path)


# --------------------------------------------------------------------------------- power log


def test_energy_of_a_power_log(tmp_path: Path) -> None:
    path = tmp_path / "gpu0.power.log"
    seconds = [f"2022-07-13 02:07:{second:02d}.5" for second in range(11)]
    rows = [f"{when},{1000 * second}" for second, when in enumerate(seconds)]
    path.write_text("\n".join(["Time,Power", *rows, "2022-07-13 02:0"]))
    # Power grows by 1 W each second, from 0 to 10 W.
    assert energy(path) == pytest.approx(50)
    assert avg_power(str(path)) == pytest.approx(5)
    assert energy(path, start=0) == pytest.approx(50)
    assert energy(path, end=2) == energy(path, start=0, end=2) == pytest.approx(2)
    assert energy(path, start=2, end=4) == pytest.approx(6)
    assert energy(path, start=-2) == pytest.approx(18)
    assert avg_power(path, end=-8) == pytest.approx(1)
    with pytest.raises(ValueError, match="fewer than two samples"):
        energy(path, start=100)
    path.write_text("start_time,window_name\n")
    with pytest.raises(ValueError, match="header is not Time,Power"):
        energy(path)
    rows = ["2022-07-13 02:07:36.25,1000", "2022-07-13 02:07:37,3000", "cut off"]
    path.write_text("\n".join(["Time,Power", *rows]))
    assert energy(path) == pytest.approx(1.5), "0.75 s"


# -------------------------------------------------------------------------------- early stop


def test_training_stops_at_what_comes_first(node: VirtualNode, work: Work) -> None:
    controller = EarlyStopController(max_epochs=2)
    for expected in (False, True):
        controller.on_epoch_begin()
        controller.on_epoch_end()
        assert controller.should_training_stop is expected
    controller = EarlyStopController(target_metric=0.9, higher_is_better=True)
    for metric, expected in ((0.8, False), (0.9, True), (0.1, True)):
        controller.on_evaluate(metric)
        assert controller.should_training_stop is expected
    controller = EarlyStopController(node.monitor(), eta_knob=1.0, cost_threshold=1000.0)
    for expected in (False, False, True):  # 240 J each, and one more is foreseen
        controller.on_epoch_begin()
        work.run(12)
        controller.on_epoch_end()
        assert controller.should_training_stop is expected
    assert len(controller.epoch_costs) == 3
    controller = EarlyStopController(node.monitor(), eta_knob=0.0, cost_threshold=9e9)
    controller.on_epoch_begin()
    node.clock.sleep(2)
    controller.on_epoch_end()
    assert controller.epoch_costs == [pytest.approx(2 * 250)], "its time at the highest limit"


def test_training_stops_at_its_cost_although_that_of_an_epoch_is_not_known(
    node: VirtualNode, work: Work
) -> None:
    monitor = node.monitor()
    controller = EarlyStopController(monitor, eta_knob=1.0, cost_threshold=1000.0)
    for epoch, expected in enumerate((False, False, True)):
        controller.on_epoch_begin()
        work.run(12)
        if epoch == 0:  # began before zeusd's history
            (state,) = monitor.measurement_states.values()
            state.t_ns = 0
            with pytest.warns(UserWarning, match="nan until it can be known"):
                controller.on_epoch_end()
        else:
            controller.on_epoch_end()
        assert controller.should_training_stop is expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": 0},
        {"cost_threshold": 1.0},
        {"target_metric": 1.0},
        {"cost_threshold": -1.0, "monitor": object()},
    ],
)
def test_half_a_criterion_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"positive|together"):
        EarlyStopController(**arguments)


# --------------------------------------------------------------------------------- and others


def test_a_missing_system_on_chip_is_reported_by_the_monitor(node: VirtualNode) -> None:
    from zeus.device.soc import ZeusSoCInitError

    with pytest.raises(ZeusSoCInitError, match="https://"):
        get_soc()
    monitor = node.monitor()
    assert monitor.soc_is_present is False
    with pytest.raises(ValueError, match="No supported system-on-chip"):
        monitor.soc.get_total_energy_consumption()
    assert monitor.soc.get_available_metrics() == set()
    assert monitor.power_monitor is None
    assert monitor.gpus._gpus == monitor.gpus.gpus
    assert get_gpus()._gpus[0].get_name()


def test_where_this_machine_is_can_be_unknown() -> None:
    with pytest.raises(ConnectionError, match="pass latitude and longitude"):
        get_ip_lat_long("http://127.0.0.1:9")


# ---------------------------------------------------------------------- mistaken arguments


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ({"optimum_selector": MaxSlowdownConstraint}, r"give MaxSlowdownConstraint\(\.\.\.\)"),
        ({"optimum_selector": Energy}, r"not the class Energy: give Energy\(\.\.\.\)"),
        ({"optimum_selector": 1.1}, r"not 1\.1: give MaxSlowdownConstraint\(1\.1\)"),
        ({"pl_step": 25_000}, "did you mean 25 W\\? pl_step is in watts"),
        ({"pl_step": "25"}, "must be a number of watts, not '25'"),
        ({"pl_step": 0}, "pl_step must be positive"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number of steps, not 1.5"),
        ({"wait_steps": -1}, "wait_steps must be non-negative"),
        ({"warmup_steps": -1}, "warmup_steps must be non-negative"),
        ({"profile_steps": 0}, "profile_steps must be positive"),
        ({"search": "fast"}, "adaptive or exhaustive, not 'fast'"),
        ({"profile_steps": True}, "profile_steps must be a whole number"),
        ({"profile_path": "/proc/pl.json"}, "cannot be written to /proc/pl.json"),
        ({"profile_path": "/proc/none/pl.json"}, "cannot be written to /proc/none/pl.json"),
        ({"profile_path": "/tmp"}, "is a folder: give a file"),
    ],
)
def test_a_mistaken_argument_says_what_to_give(
    node: VirtualNode, arguments: dict[str, Any], instead: str
) -> None:
    with pytest.raises(ZeusArgumentError, match=instead) as raised:
        GlobalPowerLimitOptimizer(node.monitor(), **arguments)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, TypeError)
    assert node.limit_w() == 250, "nothing was set"


@pytest.mark.parametrize("knob", ["x", None, [1]])
def test_a_knob_that_is_no_number_is_refused(knob: Any) -> None:
    with pytest.raises(ZeusArgumentError, match=r"^eta_knob must be a number such as 0\.5, not "):
        ZeusCost(knob)
    with pytest.raises(ZeusArgumentError, match=r"a number such as 1\.1, not "):
        MaxSlowdownConstraint(knob)


def test_a_monitor_that_is_none_is_refused(node: VirtualNode) -> None:
    with pytest.raises(ZeusArgumentError, match=r"monitor must be a ZeusMonitor, not None"):
        GlobalPowerLimitOptimizer(None)
    with pytest.raises(ZeusArgumentError, match="has no GPU"):
        GlobalPowerLimitOptimizer(node.monitor(gpu_indices=[]))


def test_a_step_after_the_end_is_warned_of_once(node: VirtualNode, work: Work) -> None:
    optimizer = GlobalPowerLimitOptimizer(node.monitor())
    train(optimizer, work, 3)
    optimizer.on_train_end()
    with pytest.warns(UserWarning, match="after the power limit optimizer had ended") as seen:
        train(optimizer, work, 3)
    assert len(for_users(seen)) == 1
    assert node.client.leases() == []

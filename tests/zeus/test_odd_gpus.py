"""GPUs that lack something, behind the real binding and without a daemon."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import NvmlDouble
from tests.support import for_users
from tests.zeus.node import VirtualNode
from tests.zeusd.devices.opening import Opener
from zeus import _node
from zeus.exceptions import ZeusGPUNotSupportedError
from zeus.measure import EnergyCallback
from zeus.monitor import PowerMonitor, TemperatureMonitor, ZeusMonitor
from zeus.optimizer.power_limit import Done, GlobalPowerLimitOptimizer
from zeusd import embed
from zeusd.devices.nvml.codes import Return
from zeusd.devices.simulated import SimulatedBackend
from zeusd.nodes import OpenedNode

open_nvml = fixtures.open_nvml

NO_POWER = ("nvmlDeviceGetPowerUsage", "field.185.0", "field.186.0")
NO_LIMIT = tuple(
    f"nvmlDevice{name}"
    for name in (
        *("GetPowerManagementLimit", "GetPowerManagementLimitConstraints"),
        "GetPowerManagementDefaultLimit",
    )
)
DISPLAY = {"name": "Quadro P400", "architecture": 4, "has_energy": 0}
A100 = {"name": "NVIDIA A100-SXM4-80GB", "architecture": 7, "tick_us": 100_000, "window_us": 25_000}

Use = Callable[..., NvmlDouble]


@pytest.fixture
def use(open_nvml: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Makes this process use a node of such GPUs."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with contextlib.ExitStack() as stack:

        def open_node(
            *gpus: dict[str, Any], lacks: Sequence[str] = (), lost: bool = False
        ) -> NvmlDouble:
            """The last GPU lacks these calls, or has fallen off the bus."""
            nvml, double = open_nvml(*gpus)
            for symbol in lacks:
                double.inject(len(gpus) - 1, symbol, Return.NOT_SUPPORTED)
            if lost:
                double.inject(len(gpus) - 1, "*", Return.GPU_IS_LOST)
            client = embed.connect(OpenedNode(nvml, None, lambda: None), state_dir=str(tmp_path))
            stack.callback(client.close)
            stack.enter_context(_node.use(client))
            return double

        yield open_node


@pytest.mark.parametrize(
    "gpu",
    [
        {"name": "Tesla P100-PCIE-16GB", "architecture": 4, "has_energy": 0},
        A100 | {"ignores_scope": 1},
    ],
    ids=["a P100 has no counter", "a driver ignores scopes"],
)
def test_a_gpu_whose_power_reads_the_same_all_the_time_is_measured(
    use: Use, gpu: dict[str, Any]
) -> None:
    use(gpu | {"power_stuck_mw": 30_000, "load_mw": 30_000})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = ZeusMonitor()
        with monitor.window("idle") as window:
            time.sleep(0.3)
        assert window.total_energy == pytest.approx(30 * window.time, abs=1)


@pytest.mark.parametrize("kind", [ZeusMonitor, PowerMonitor, TemperatureMonitor])
def test_a_display_card_without_a_power_sensor_is_left_out_with_one_warning(
    use: Use, kind: type[ZeusMonitor]
) -> None:
    use(A100, DISPLAY, lacks=NO_POWER)
    with pytest.warns(UserWarning, match="not measured") as seen:
        monitor = kind()
    assert [str(one.message) for one in for_users(seen)] == [
        "The energy of GPU 1 (Quadro P400) is not measured: no sensor reports its energy or power. "
        "Give gpu_indices=[0] to measure only the others."
    ]
    assert for_users(seen)[0].filename == __file__
    assert monitor.gpu_indices == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind(gpu_indices=[0]).gpu_indices == [0]
    for given, others in ([0, 1], "[0] to measure only the others"), ([1], "[] to measure none"):
        with pytest.raises(ZeusGPUNotSupportedError) as raised:
            kind(gpu_indices=given)
        assert "GPU 1 (Quadro P400) is not measured: no sensor reports" in str(raised.value)
        assert f"Give gpu_indices={others}." in str(raised.value)


def test_a_callback_measures_the_others_too(use: Use) -> None:
    use(A100, DISPLAY, lacks=NO_POWER)
    with pytest.warns(UserWarning, match="Quadro P400"):
        callback = EnergyCallback(print_summary=False)
    with callback:
        for _ in callback.steps(range(3)):
            time.sleep(0.05)
    assert callback.summary is not None
    assert callback.summary.gpus == 1
    assert callback.summary.energy > 0


def test_without_a_settable_limit_the_optimizer_warns_once_and_training_goes_on(use: Use) -> None:
    laptop = {"name": "NVIDIA GeForce RTX 4090 Laptop GPU", "architecture": 8}
    use(laptop, lacks=NO_LIMIT)
    monitor = ZeusMonitor()
    with pytest.warns(UserWarning, match="no power limit") as seen:
        optimizer = GlobalPowerLimitOptimizer(monitor)
        for _ in range(2):
            with optimizer:
                for _ in optimizer.steps(range(3)):
                    pass
    reason = f"{laptop['name']} has no power limit to set"
    assert [str(one.message) for one in for_users(seen)] == [
        f"The power limit optimizer stopped, and training continues: {reason}"
    ]
    assert for_users(seen)[0].filename == __file__
    assert optimizer.state == Done(optimal_power_limit=0, chosen=False, reason=reason)
    assert (optimizer.disabled, optimizer.power_limits, optimizer.progress) == (True, [], (0, 0))


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_a_process_from_which_all_gpus_are_hidden_measures_none_with_one_warning(
    use: Use, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """As in an actor of Ray without a GPU."""
    use(A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.warns(UserWarning, match="hides all GPUs") as seen:
        monitor = ZeusMonitor()
    assert [str(one.message) for one in for_users(seen)] == [
        f"No GPU is measured: CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs of this node."
    ]
    with monitor.window("step") as window:
        pass
    assert (window.gpu_energy, window.total_energy) == ({}, 0)
    with pytest.warns(UserWarning, match="training continues: the monitor has no GPU"):
        GlobalPowerLimitOptimizer(monitor)
    with pytest.raises(ValueError, match="No GPUs available"):
        ZeusMonitor(gpu_indices=[0])


def test_a_gpu_that_is_lost_at_start_is_named_as_lost(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(A100, A100, lost=True)
    with pytest.warns(UserWarning, match=r"GPU 1 cannot be used.* fallen off the bus"):
        assert ZeusMonitor().gpu_indices == [0]
    lost = r"There is no GPU 1: .*sees 1 GPU \(counted from 0\); .* fallen off the bus"
    with pytest.raises(ValueError, match=lost):
        ZeusMonitor(gpu_indices=[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"\(counted from 0\), as CUDA_VISIBLE_DEVICES is '0';"):
        ZeusMonitor(gpu_indices=[1])


def test_the_only_gpu_that_is_lost_at_start_is_named_as_lost(use: Use) -> None:
    use(A100, lost=True)
    with pytest.warns(UserWarning, match=r"No GPU is measured: GPU 0 .* fallen off the bus"):
        assert ZeusMonitor().gpu_indices == []


def test_the_simulated_node_has_such_gpus(virtual_node: Callable[[str], VirtualNode]) -> None:
    node = virtual_node("a100-sxm-80:setter_ms=0:lacks=counter,a40:lacks=power+limit")
    with pytest.warns(UserWarning, match=r"GPU 1 \(NVIDIA A40\) is not measured"):
        monitor = node.monitor()
    with monitor.window("step") as window:
        node.clock.sleep(5)
    idle_w = node.client.power(monitor.gpus[0].uuid)[monitor.gpus[0].uuid].instant_mw / 1000
    assert window.gpu_energy == {0: pytest.approx(5 * idle_w, rel=0.05)}
    assert not monitor.gpus.supports_get_total_energy_consumption(0)
    assert monitor.gpus.get_power_management_limit_constraints(0)
    with pytest.raises(ZeusGPUNotSupportedError, match="has no power limit to set"):
        monitor.gpus.get_power_management_limit_constraints(1)
    with pytest.raises(ValueError, match="lacks=power, counter, limit or limited"):
        SimulatedBackend("a40:lacks=fans")


def test_a_gpu_whose_sensors_are_silent_at_the_moment_is_not_left_out(use: Use) -> None:
    """As at a slow start: training would not be measured for good."""
    double = use(A100, A100)
    for symbol in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetTotalEnergyConsumption", *NO_POWER):
        double.inject(1, symbol, Return.NOT_SUPPORTED)
    with pytest.raises(ZeusGPUNotSupportedError, match="neither energy nor power at the moment"):
        ZeusMonitor()

"""The monitor and the power limit optimizer on a simulated AMD node, as on any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.zeus.node import VirtualNode, train
from zeus.device import get_gpus
from zeus.device.visible import VARIABLES
from zeus.exceptions import ZeusGPUNotSupportedError
from zeus.optimizer.power_limit import Done, Energy, GlobalPowerLimitOptimizer
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload

WORKLOAD = ModelWorkload(ModelLoad(unit_s=0.1, k=0.6, power_w=700.0))


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_gpus_are_listed_with_their_names_and_ranges(
    virtual_node: Callable[[str], VirtualNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual_node("4xmi300x:setter_ms=0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3,1")
    gpus = get_gpus()
    assert [gpu.info.index for gpu in gpus.gpus] == [3, 1]
    assert gpus.gpus[0].get_name() == "AMD Instinct MI300X"
    assert gpus.get_power_management_limit_constraints(0) == (150_000, 750_000)


def test_a_card_of_two_dies_is_counted_and_limited_once(
    virtual_node: Callable[[str], VirtualNode],
) -> None:
    node = virtual_node("2xmi250x:setter_ms=0")
    monitor = node.monitor()
    work = node.nvml.open_work([0, 1], "model/compute")
    work.run(10)
    before_j = sum(node.nvml.true_energy_j(gpu) for gpu in range(2))
    monitor.begin_window("steps")
    work.run(50)
    measured = monitor.end_window("steps")
    drawn_j = sum(node.nvml.true_energy_j(gpu) for gpu in range(2)) - before_j
    assert measured.gpu_energy[0] == pytest.approx(drawn_j, rel=0.02)
    assert measured.gpu_energy[1] == 0
    optimizer = GlobalPowerLimitOptimizer(
        monitor, Energy(), warmup_steps=5, profile_steps=10, pl_step=200, search="exhaustive"
    )
    train(optimizer, work, 500, until_done=True)
    assert isinstance(optimizer.state, Done)
    assert optimizer.state.chosen
    assert optimizer.power_limits == [560_000, 360_000, 160_000, 100_000]
    gpus = get_gpus()
    with pytest.raises(ZeusGPUNotSupportedError, match="shares its power limit with GPU 0"):
        gpus.set_power_management_limit(1, 300_000)


@pytest.mark.parametrize("spec", ["4xmi250x", "2xmi300x:partitions=2"])
def test_of_several_processes_one_sets_the_limit_of_a_card_or_package(
    virtual_node: Callable[[str], VirtualNode], spec: str
) -> None:
    virtual_node(spec)
    gpus = get_gpus()
    assert len(gpus) == 4
    assert [gpus.with_power_limit([rank], alone=False) for rank in range(4)] == [[0], [], [2], []]
    assert gpus.with_power_limit([1, 0, 3, 2]) == [0, 2]
    assert gpus.with_power_limit([3]) == [3]
    high = gpus[0].get_power_management_limit_constraints()[1]
    (owner,) = gpus.owners_of_limits([1])
    assert owner.uuid == gpus[0].uuid
    assert owner.get_power_management_limit_constraints()[1] == high
    gpus.set_power_management_limits([], high)
    gpus.release_all([])
    gpus.set_power_management_limits([0, 2], high - 100_000)
    assert [gpus[index].get_power_management_limit() for index in (0, 2)] == [high - 100_000] * 2
    gpus.release_all(range(4))
    assert gpus[0].get_power_management_limit() == high


def test_partitions_are_measured_once_and_limited_by_a_job_that_sees_all(
    virtual_node: Callable[[str], VirtualNode],
) -> None:
    node = virtual_node("2xmi300x:setter_ms=0:partitions=2")
    gpus = get_gpus()
    assert [gpu.info.index for gpu in gpus.gpus] == [0, 0, 1, 1]
    with pytest.warns(
        UserWarning, match=r"GPUs 0, 1: 2 of the 2 partitions of one AMD Inst"
    ) as told:
        monitor = node.monitor(gpu_indices=[0, 1, 3])
    assert "GPU 3: 1 of the 2 partitions" in str(told[1].message)
    assert told[0].filename == told[1].filename
    gpus.set_power_management_limits([0, 1], 700_000)
    assert (node.limit_w(0), node.limit_w(1)) == (700, 750)
    gpus.release_all([0, 1])
    work = node.nvml.open_work([0, 1], WORKLOAD)
    work.run(10)
    before_j = [node.nvml.true_energy_j(gpu) for gpu in range(2)]
    monitor.begin_window("steps")
    work.run(50)
    measured = monitor.end_window("steps").gpu_energy
    drawn_j = [node.nvml.true_energy_j(gpu) - before_j[gpu] for gpu in range(2)]
    assert measured[0] == pytest.approx(drawn_j[0], rel=0.01)
    assert measured[1] == 0
    assert measured[3] == pytest.approx(drawn_j[1], rel=0.01)
    optimizer = GlobalPowerLimitOptimizer(
        monitor, Energy(), warmup_steps=5, profile_steps=10, pl_step=200, search="exhaustive"
    )
    train(optimizer, work, 500, until_done=True)
    assert isinstance(optimizer.state, Done)
    assert optimizer.state.chosen
    assert node.limit_w(0) == node.limit_w(1) == optimizer.state.optimal_power_limit / 1000 < 750
    optimizer.close()
    assert node.limit_w(0) == node.limit_w(1) == 750


def test_a_job_that_sees_some_partitions_only_changes_nothing(
    virtual_node: Callable[[str], VirtualNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    node = virtual_node("2xmi300x:setter_ms=0:partitions=8")
    gpus = get_gpus()
    assert [gpu.info.index for gpu in gpus.gpus] == [0, 0]
    for change in (
        lambda: gpus.set_power_management_limits([0], 500_000),
        lambda: gpus.set_power_management_limit(0, 500_000),
        lambda: gpus.set_gpu_locked_clocks(1, 900, 900),
    ):
        with pytest.raises(ZeusGPUNotSupportedError, match="8 partitions, of which this process"):
            change()
    with pytest.warns(UserWarning, match="of the 8 partitions"):
        monitor = node.monitor()
    with pytest.warns(UserWarning, match="sees 2, and its power limit"):
        optimizer = GlobalPowerLimitOptimizer(monitor, Energy())
    assert optimizer.disabled
    assert node.limit_w() == 750

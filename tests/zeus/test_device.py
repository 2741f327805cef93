from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode
from zeus import _node
from zeus.device import get_gpus, gpu
from zeus.exceptions import (
    ZeusGPUHeterogeneousError,
    ZeusGPUInitError,
    ZeusGPUInvalidArgError,
    ZeusGPULeaseHeldError,
    ZeusGPULostError,
    ZeusGPUNoPermissionError,
    ZeusGPUNotSupportedError,
    ZeusGPUUnknownError,
    from_ipc,
)
from zeus_ipc import errors

OpenNode = Callable[[str], VirtualNode]


@pytest.fixture(autouse=True)
def no_cuda_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def test_readings_and_settings_of_a_gpu(virtual_node: OpenNode) -> None:
    node = virtual_node("2xa40:setter_ms=0")
    gpus = get_gpus()
    assert len(gpus) == 2
    assert gpus.get_name(0) == "NVIDIA A40"
    assert gpus.get_power_management_limit_constraints(1) == (100_000, 300_000)
    gpus.set_power_management_limit(1, 200_000)
    assert (gpus.get_power_management_limit(0), gpus.get_power_management_limit(1)) == (
        *(300_000, 200_000),
    )
    gpus.reset_power_management_limit(1)
    assert node.limit_w(1) == 300
    gpus.set_persistence_mode(0, True)
    assert gpus.get_persistence_mode(0) is True
    assert gpus.get_supported_memory_clocks(0) == [7251, 405]
    assert gpus.get_supported_graphics_clocks(0)[0] == 1740
    assert gpus.get_supported_graphics_clocks(0, 405)[0] == 420
    with pytest.raises(ValueError, match="not a memory clock"):
        gpus.get_supported_graphics_clocks(0, 1)
    gpus.set_gpu_locked_clocks(0, 600, 900)
    gpus.set_memory_locked_clocks(0, 405, 405)
    for locked in ([600, 900], [405, 405]), (None, None):
        state = node.client.state(gpus[0].uuid)[gpus[0].uuid]
        assert (state.locked_gpu_clocks_mhz, state.locked_memory_clocks_mhz) == locked
        gpus.reset_locked_clocks(0)
    assert gpus.get_instant_power_usage(0) > 0
    assert gpus.get_average_power_usage(0) > 0
    with pytest.raises(ZeusGPUNotSupportedError, match="memory power"):
        gpus.get_average_memory_power_usage(0)
    assert gpus.supports_get_total_energy_consumption(0)
    assert gpus.get_total_energy_consumption(0) > 0
    assert 20 < gpus.get_gpu_temperature(0) < 90
    gpus[0].release()
    gpus.release_all([1])
    assert node.client.leases() == []


def test_camel_case_names_work_with_one_warning_each(
    virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_aliases_used", set())
    virtual_node("v100:setter_ms=0")
    gpus = get_gpus()
    with pytest.warns(DeprecationWarning, match="get_power_management_limit_constraints"):
        assert gpus.getPowerManagementLimitConstraints(0) == (100_000, 250_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpus.getPowerManagementLimitConstraints(0)
        with pytest.raises(DeprecationWarning):
            gpus[0].setPowerManagementLimit(200_000)
    with pytest.raises(AttributeError):
        _ = gpus.getNothing


def test_the_site_limit_is_the_upper_end(virtual_node: OpenNode) -> None:
    node = virtual_node("v100:setter_ms=0")
    node.nvml.set_outside(0, 200_000)
    node.client.acquire(node.nvml.uuid(0), ["power_limit"])
    with pytest.raises(errors.OutOfRange):
        node.client.set_power_limit(node.nvml.uuid(0), 250_000)
    assert get_gpus().get_power_management_limit_constraints(0) == (100_000, 200_000)


def test_homogeneity_is_checked_at_every_call(virtual_node: OpenNode) -> None:
    virtual_node("v100,a40")
    assert len(get_gpus()) == 2
    for kind in (ValueError, ZeusGPUHeterogeneousError):
        with pytest.raises(kind, match="several models"):
            get_gpus(ensure_homogeneous=True)


def test_hidden_gpus_are_explained(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_node("2xv100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    gpus = get_gpus()
    assert len(gpus) == 0
    with pytest.raises(ValueError, match=r"No GPUs available\. CUDA_VISIBLE_DEVICES='-1' hides"):
        gpus.get_name(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert get_gpus()[0].info.index == 1


def test_errors_keep_nvmls_code(virtual_node: OpenNode) -> None:
    node = virtual_node("2xv100:setter_ms=0,v100:setter_ms=0:unprivileged")
    gpus = get_gpus()
    with pytest.raises(ZeusGPUInvalidArgError):
        gpus.set_power_management_limit(0, 1)
    node.nvml.lose(1)
    with pytest.raises(ZeusGPULostError) as lost:
        gpus.set_power_management_limit(1, 200_000)
    assert lost.value.nvml_code == 15
    with pytest.raises(ZeusGPUNoPermissionError, match="CAP_SYS_ADMIN") as refused:
        gpus.set_power_management_limit(2, 200_000)
    assert refused.value.nvml_code == 4


def test_every_ipc_error_has_a_counterpart() -> None:
    assert isinstance(from_ipc(errors.LeaseHeld("x")), ZeusGPULeaseHeldError)
    assert isinstance(from_ipc(errors.PermissionRefused("x")), ZeusGPUNoPermissionError)
    unknown = from_ipc(errors.DeviceFailure("x", details={"device_code": 23}))
    assert isinstance(unknown, ZeusGPUUnknownError)
    assert unknown.nvml_code == 23
    several = errors.SeveralGpusFailed({"a": errors.GpuLost("x", details={"device_code": 15})})
    assert isinstance(from_ipc(several), ZeusGPULostError)


def test_a_configured_daemon_that_is_down_is_an_error_and_never_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(_node, "_client", None)
    with pytest.raises(ZeusGPUInitError, match="start zeusd"):
        get_gpus()


def test_without_daemon_and_driver_the_reason_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZEUSD_SOCK_PATH", raising=False)
    monkeypatch.setenv("ZEUSD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(_node, "DEFAULT_SOCKET_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(_node, "_client", None)
    monkeypatch.setattr("zeusd.embed.real_node", _node_without_library(tmp_path))
    with pytest.raises(ZeusGPUInitError, match=r"libnvidia-ml|cannot load"):
        get_gpus()


def _node_without_library(tmp_path: Path) -> object:
    from zeusd.nodes import real_node

    return lambda: real_node(str(tmp_path / "libnvidia-ml.so.1"))

"""The benchmark for real GPUs changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.real_kernels import daemon
from tests.fake_nvml import fixtures
from zeus_ipc import Client, errors

nvml_double = fixtures.nvml_double


def test_its_daemon_measures_and_sets_nothing(
    nvml_double: fixtures.MakeDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nvml_double([{"architecture": 9, "tick_ms": 100}])
    library = Path(node.library).parent
    for name, value in {**node.env, "LD_LIBRARY_PATH": str(library)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ZEUSD_SOCK_PATH", os.environ.get("ZEUSD_SOCK_PATH", ""))
    with daemon(tmp_path) as _, Client(tmp_path / "zeusd.sock") as client:
        gpu = client.node().gpus[0].uuid
        with pytest.raises(errors.ZeusIpcError, match="NVML 4"):
            client.set_power_limit(gpu, 150_000)
        with pytest.raises(errors.ZeusIpcError, match="NVML 4"):
            client.set_gpu_clocks(gpu, 900, 900)
        assert client.energy(gpu)[gpu].energy_mj is not None
    assert node.calls() == []

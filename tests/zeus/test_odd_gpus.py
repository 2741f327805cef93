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
from tests.zeusd.devices.opening import Opener
from zeus import _node
from zeus.monitor import ZeusMonitor
from zeusd import embed
from zeusd.nodes import OpenedNode

open_nvml = fixtures.open_nvml

A100 = {"name": "NVIDIA A100-SXM4-80GB", "architecture": 7, "tick_us": 100_000, "window_us": 25_000}

Use = Callable[..., NvmlDouble]


@pytest.fixture
def use(open_nvml: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Makes this process use a node of such GPUs."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with contextlib.ExitStack() as stack:

        def open_node(*gpus: dict[str, Any], absent: Sequence[tuple[int, str]] = ()) -> NvmlDouble:
            nvml, double = open_nvml(*gpus)
            for gpu, symbol in absent:
                double.inject(gpu, symbol, 3)
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

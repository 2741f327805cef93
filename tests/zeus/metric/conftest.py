"""Gateways, and nodes whose metrics go there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.support import wait_for
from tests.zeus.gateway import Double
from tests.zeus.metric.metrics import OpenNode, threads
from tests.zeus.node import VirtualNode
from zeus import _node, _pushgateway, metric
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend
from zeusd.nodes import OpenedNode


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real push gateway; tests keep apart by their `job`."""
    program = needs.tool("pushgateway")
    log_path = tmp_path_factory.mktemp("gateway") / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [program, "--web.listen-address=127.0.0.1:0", "--persistence.file="], stderr=log
        )
    try:
        found = wait_for(
            lambda: re.search(r"address=(127\.0\.0\.1:\d+)", log_path.read_text()),
            "the push gateway to listen",
        )
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def double() -> Iterator[Double]:
    double = Double()
    yield double
    double.close()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fast updates, no rank, and no metric that outlives its test."""
    for name in (*_pushgateway.RANKS, "CUDA_VISIBLE_DEVICES", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric, "PUSH_EVERY_S", 0.03)
    _pushgateway.numbers.clear()
    yield
    with monkeypatch.context() as patch:
        patch.setattr(metric, "CLOSE_S", 0.5)
        metric.close_all()
    # Otherwise its later warnings would appear in the next test.
    wait_for(
        lambda: not threads(),
        "the threads of the metrics to end",
    )


@pytest.fixture
def node(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> VirtualNode:
    """Two V100 whose time passes only when a test lets it; metrics' clocks are the node's."""
    node = virtual_node("2xv100:setter_ms=0")
    monkeypatch.setattr(
        metric,
        "ZeusMonitor",
        lambda gpus, cpus: node.monitor(gpu_indices=gpus, cpu_indices=cpus),
    )
    return node


@pytest.fixture
def real_time(tmp_path: Path) -> Iterator[None]:
    client = embed.connect(
        OpenedNode(SimulatedBackend("2xv100:setter_ms=0"), "simulated", lambda: None),
        state_dir=str(tmp_path),
    )
    with client, _node.use(client):
        yield

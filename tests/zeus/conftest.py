from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.zeus import in_trainers
from tests.zeus.node import VirtualNode
from zeusd.devices.simulated import Work


@pytest.fixture
def virtual_node(tmp_path: Path) -> Iterator[Callable[[str], VirtualNode]]:
    """Opens simulated nodes in virtual time that this process's `zeus` uses."""
    opened: list[VirtualNode] = []

    def open_node(spec: str) -> VirtualNode:
        node = VirtualNode(spec, tmp_path / f"state-{len(opened)}")
        opened.append(node)
        return node

    yield open_node
    for node in reversed(opened):
        node.close()


@pytest.fixture
def node(
    virtual_node: Callable[[str], VirtualNode], monkeypatch: pytest.MonkeyPatch
) -> VirtualNode:
    """One V100."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return virtual_node("v100:setter_ms=0")


@pytest.fixture
def work(node: VirtualNode) -> Work:
    """The work that keeps its GPU busy."""
    return node.nvml.open_work([0], in_trainers.WORKLOAD)


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[float, float]:
    """See `in_trainers.times_in_a_plain_loop`: the same each time, on a new node."""
    plain = VirtualNode("v100:setter_ms=0", tmp_path_factory.mktemp("plain"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            return in_trainers.times_in_a_plain_loop(plain)
    finally:
        plain.close()

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode


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

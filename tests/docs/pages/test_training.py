"""Runs the code of the pages on training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.zeus.node import VirtualNode
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

ROOT = Path(__file__).parents[3]
BLOCKS = [
    block
    for page in ("README.md", "docs/train/power_limit.md", "docs/train/training.md")
    for block in snippets.of(ROOT / page)
    if "zeus.metric" not in block.source  # needs a push gateway: tests/zeus/metric
    and "BatchSizeOptimizer" not in block.source  # test_batch_size.py
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_code_in_the_docs_runs(
    block: snippets.Block,
    virtual_node: Callable[[str], VirtualNode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = virtual_node("a40:setter_ms=0")
    work = node.nvml.open_work([0], "profiles/A40+resnet50+gpu0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("zeus.monitor.ZeusMonitor", node.monitor)
    limits: list[float] = []

    def train_step(*batch: Any) -> None:
        limits.append(node.limit_w())
        work.run(1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        space = block.run(
            ZeusMonitor=node.monitor,
            epochs=5,
            loader=range(40),
            train_step=train_step,
            evaluate=lambda: node.clock.sleep(10),
        )
    optimizers = [one for one in space.values() if isinstance(one, GlobalPowerLimitOptimizer)]
    assert all(not one.disabled for one in optimizers)
    if "epochs" in block.source:
        assert optimizers
        assert min(limits) < 300
        assert limits[-1] < 300  # it has chosen
        assert node.limit_w() == 300
        assert capsys.readouterr().out
    if "power_limit.png" in block.source:
        assert (tmp_path / "power_limit.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_have_such_blocks() -> None:
    assert {block.path.name for block in BLOCKS} == {"README.md", "power_limit.md", "training.md"}

"""Runs the code of docs/train/batch_size_optimizer.md."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import snippets
from tests.zeus.batch_size.client.fakes import Between, job
from tests.zeus.node import VirtualNode
from zeus.optimizer.batch_size import BatchSizeOptimizer
from zeusd.devices.simulated import Work

ROOT = Path(__file__).parents[3]
BLOCKS = snippets.of(ROOT / "docs" / "train" / "batch_size_optimizer.md")


class OutOfMemoryError(RuntimeError):
    """As torch's."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_code_in_the_docs_runs(
    block: snippets.Block,
    kept: Between,
    node: VirtualNode,
    work: Work,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zeus.monitor.ZeusMonitor", node.monitor)
    monkeypatch.setattr("zeus_ipc.circuit.PROMPT_S", 60.0)  # of the machine, not the node
    # A server is not needed to see that the page is right.
    monkeypatch.setattr("zeus.optimizer.batch_size.http.HttpTrials", lambda url: kept(kept.path))
    made: list[int] = []
    evaluations = iter([0.1, 0.2, 0.9, 0.1, 0.9])

    def make_loader(batch_size: int) -> range:
        made.append(batch_size)
        return range(5)

    nowhere = SimpleNamespace(is_available=lambda: False)
    dist = SimpleNamespace(
        **vars(nowhere),
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
    )
    torch = SimpleNamespace(distributed=dist, cuda=nowhere, OutOfMemoryError=OutOfMemoryError)
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    monkeypatch.setitem(sys.modules, "torch", torch)
    names: dict[str, Any] = {
        "make_loader": make_loader,
        "train_step": lambda batch: work.run(1),
        "evaluate": lambda: next(evaluations),
        "job": job(),
        "torch": torch,
    }
    if "optimizer = " not in block.source:
        optimizer = BatchSizeOptimizer(node.monitor(), job=job(), store=kept.path)

        def train(batch_size: int) -> None:
            made.append(batch_size)
            if len(made) == 1:
                raise OutOfMemoryError
            optimizer.on_evaluate(0.9)

        names |= {"optimizer": optimizer, "train": train}
    space = block.run(**names)
    found: BatchSizeOptimizer = space["optimizer"]
    assert found.converged
    trials = kept.trials(str(found.job.job_id))
    assert [trial.batch_size for trial in trials] == made
    assert [trial.status for trial in trials] == ["ok"] if len(made) == 1 else ["oom", "ok"]


def test_the_pages_have_such_blocks() -> None:
    assert len(BLOCKS) == 4

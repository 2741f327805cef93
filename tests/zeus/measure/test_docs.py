"""Runs the code of the page on measuring only."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest

from tests import snippets
from tests.snippets import ROOT
from tests.zeus.measure.test_rates import HISTORY, LATEST
from tests.zeus.node import VirtualNode
from zeus import profile
from zeus.measure import callback as callback_module
from zeus.measure import decorator as decorator_module
from zeus.monitor.rates import JsonService
from zeusd.devices.simulated import Work

PAGE = ROOT / "docs/train/measuring_only.md"
BLOCKS = [block for block in snippets.of(PAGE) if "Trainer" not in block.source]  # test_trainers.py


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_code_on_the_page_runs(
    block: snippets.Block,
    node: VirtualNode,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def get(self: JsonService, path: str, *arguments: Any, **named: Any) -> Any:
        return HISTORY if path.endswith("history") else LATEST

    def run(batch: int = 0) -> None:
        work.run(1)
        work.wait()

    monkeypatch.setattr(JsonService, "get", get)
    monkeypatch.setattr(decorator_module, "_shared", None)
    for module in (decorator_module, callback_module):
        monkeypatch.setattr(module, "ZeusMonitor", node.monitor)
    time = types.SimpleNamespace(sleep=node.clock.sleep, monotonic=lambda: node.clock() / 1e9)
    monkeypatch.setattr(profile, "time", time)
    block.run(
        epochs=2,
        loader=range(20),
        train=run,
        evaluate=lambda: node.clock.sleep(3),
        one_iteration=run,
        monitor=node.monitor(),
    )
    if "measure_energy" in block.source:
        decorator_module.shared_monitor().flush()
    printed = capsys.readouterr()
    if "EnergyCallback" in block.source:
        # The line has the shape that the page shows.
        shown = next(one for one in snippets.every(PAGE) if one.source.startswith("zeus: "))
        shape = re.sub(r"\d+(\\\.\d+)?(e-\d+)?", r"[\\d.e-]+", re.escape(shown.source.strip()))
        assert re.fullmatch(shape, printed.err.strip()), printed.err
        for name in ("step_J", "power_W", "epoch_J", "total_kWh", "mean_W", "cost_EUR", "co2_g"):
            assert f"energy/{name}" in printed.out
    if "measure_energy" in block.source:
        assert re.search(r"^train_one_epoch: [\d.]+ s, [\d.e-]+ J ± [\d.e-]+ J", printed.err)

"""The quickstart's work: measured where it can be, modelled elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support import RunningDaemon, running_daemon
from zeusd.devices.simulated.workloads import catalog

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "v100-pcie,mi300x", gpus=2) as running:
        yield running


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Its modules, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import report
    import train
    import work

    yield {"report": report, "train": train, "work": work}
    for name in {"report", "train", "work"} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("gpu", "workload"),
    [(0, "nsdi23/v100/imagenet/resnet50/adadelta/32"), (1, "model/compute")],
)
def test_it_runs_on_any_simulated_gpu_and_knows_what_is_best(
    daemon: RunningDaemon, example: dict[str, Any], gpu: int, workload: str
) -> None:
    with daemon.client() as client:
        node = client.node()
    info = node.gpus[gpu]
    work = example["work"].ReplayedResNet50(node, info.uuid)
    assert work.workload == workload
    work.step()
    work.finish()
    limits_mw = [info.power_limit_max_mw, info.power_limit_min_mw]
    highest, lowest = example["report"].truth_of(workload, info.name, limits_mw)
    assert highest.time < lowest.time
    if workload in catalog():
        table = catalog()[workload]
        assert (lowest.time, highest.time) == (table.unit_s[0], table.unit_s[-1])


@pytest.mark.parametrize(("span_w", "step_w"), [(150, 25), (600, 75), (1000, 100), (20, 25)])
def test_it_tries_about_nine_limits(example: dict[str, Any], span_w: int, step_w: int) -> None:
    class Gpu:
        def get_power_management_limit_constraints(self) -> tuple[int, int]:
            return 100_000, 100_000 + span_w * 1000

    assert example["train"].limit_step_w(Gpu()) == step_w

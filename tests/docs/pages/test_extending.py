"""Runs the Python of the pages on distributed training, selectors and schedulers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs, snippets
from tests.docs.pages.following import DOCS
from tests.snippets import every
from tests.support import running_daemon
from tests.zeus.node import VirtualNode
from zeus.optimizer.power_limit import Done, GlobalPowerLimitOptimizer, OptimumSelector
from zeus.policy import POLICIES, make_policy
from zeusd.devices.simulated import Work

DISTRIBUTED = DOCS / "train" / "distributed.md"
SELECTOR = DOCS / "integrate" / "own_selector.md"
SCHEDULER = DOCS / "integrate" / "own_scheduler.md"
WORKLOAD = "nsdi23/v100/imagenet/resnet50/adadelta/32"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualNode]:
    """A V100 in virtual time, which advances only by training, and which `zeus` uses."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    opened = VirtualNode("v100-pcie:setter_ms=0", tmp_path / "state")
    monkeypatch.setattr("zeus.monitor.ZeusMonitor", opened.monitor)
    yield opened
    opened.close()


@pytest.fixture
def work(node: VirtualNode) -> Work:
    return node.nvml.open_work([0], WORKLOAD)


def _names(space: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in space.items() if not name.startswith("__")}


# --------------------------------------------------------------------------- distributed training


def test_distributed_training_finds_its_limit(
    node: VirtualNode,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    loop, _ = snippets.of(DISTRIBUTED)

    def train_step(*batch: Any) -> None:
        work.run(1)

    space = loop.run(
        epochs=4, loader=range(60), train_step=train_step, evaluate=lambda: node.clock.sleep(10)
    )
    assert isinstance(space["plo"].state, Done)
    assert not space["plo"].disabled
    assert "<- chosen" in capsys.readouterr().out
    assert node.limit_w() == 250


def test_the_energies_of_ranks_are_added(
    node: VirtualNode, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    needs.module("torch")
    _, sums = snippets.of(DISTRIBUTED)
    sums.run(monitor=node.monitor(gpu_indices=[0]), train=lambda: work.run(10))
    assert " J in 1." in capsys.readouterr().out


# -------------------------------------------------------------------------------------- selectors


@pytest.fixture(scope="module")
def selectors() -> dict[str, Any]:
    """Defines the names of the page's blocks, except the one that trains."""
    space: dict[str, Any] = {}
    for block in snippets.of(SELECTOR):
        if "plo.steps" not in block.source:
            space = block.run(**_names(space))
    return space


def _chosen(
    node: VirtualNode, work: Work, selector: OptimumSelector
) -> tuple[GlobalPowerLimitOptimizer, float]:
    plo = GlobalPowerLimitOptimizer(node.monitor(gpu_indices=[0]), selector)
    with plo:
        for _ in plo.steps(range(400)):
            work.run(1)
        return plo, node.limit_w()


def test_the_block_that_trains_does(
    node: VirtualNode, work: Work, selectors: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (one for one in snippets.of(SELECTOR) if "plo.steps" in one.source)
    space = block.run(
        **_names(selectors),
        monitor=node.monitor(gpu_indices=[0]),
        loader=range(200),
        train_step=lambda batch: work.run(1),
    )
    assert not space["plo"].disabled
    assert "<- chosen" in capsys.readouterr().out


def test_it_says_what_the_comments_say() -> None:
    printed = io.StringIO()
    space: dict[str, Any] = {}
    expected = []
    with contextlib.redirect_stdout(printed):
        for block in snippets.of(SELECTOR):
            if "plo.steps" not in block.source:
                space = block.run(**_names(space))
                lines = block.source.splitlines()
                expected += [line.split("#")[1] for line in lines if line.startswith("print(")]
    assert printed.getvalue().split() == [one.strip() for one in expected]


@pytest.mark.parametrize(
    ("make", "limit_w"),
    [
        (lambda names: names["Price"](per_kwh=0.30, per_hour=0.01), 125),
        (lambda names: names["Price"](per_kwh=0.30, per_hour=2.00), 250),
        (lambda names: names["Deadline"](steps=100_000, seconds=11_500), 175),
        (lambda names: names["Deadline"](steps=100_000, seconds=1_000), 250),
    ],
    ids=["cheap time", "dear time", "by tomorrow", "too late anyway"],
)
def test_each_selector_is_used(
    node: VirtualNode,
    work: Work,
    selectors: dict[str, Any],
    make: Callable[[dict[str, Any]], OptimumSelector],
    limit_w: float,
) -> None:
    plo, chosen_w = _chosen(node, work, make(selectors))
    assert not plo.disabled
    assert chosen_w == limit_w


def test_with_costs_fewer_limits_are_tried(
    node: VirtualNode, work: Work, selectors: dict[str, Any]
) -> None:
    spared, _ = _chosen(node, work, selectors["Price"](0.30, 0.01))

    class Silent(OptimumSelector):
        def select(self, measurements: Any) -> float:
            return float(selectors["Price"](0.30, 0.01).select(measurements))

    thorough, _ = _chosen(node, work, Silent())
    assert len(spared.measurements) < len(thorough.measurements) == 7


def test_a_rank_that_raises_ends_the_search_and_not_training(node: VirtualNode, work: Work) -> None:
    class Broken(OptimumSelector):
        def select(self, measurements: Any) -> float:
            raise ArithmeticError("no idea")

    with pytest.warns(UserWarning, match="no idea"):
        plo, limit_w = _chosen(node, work, Broken())
    assert plo.disabled
    assert limit_w == 250


# -------------------------------------------------------------------------------------- schedulers


def test_a_custom_policy_is_simulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, simulation, naming, _ = snippets.of(SCHEDULER)
    names = _names(policy.run())
    simulation.run(**names)
    (shown,) = (block.source for block in every(SCHEDULER) if block.language == "text")
    assert capsys.readouterr().out == shown
    monkeypatch.setitem(POLICIES, "once-each", lambda seed: make_policy("gp"))
    naming.run(**names)
    assert make_policy("once-each").name == "once-each"


def test_an_agent_shares_a_budget_out(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, agent = snippets.of(SCHEDULER)
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        agent.run()
        set_w = [record["new"] for record in daemon.wait_for_records("set", 2)]
        assert set_w == ["200 W", "200 W"]
        back = [record["new"] for record in daemon.wait_for_records("restore", 2)]
        assert back == ["250 W", "250 W"]

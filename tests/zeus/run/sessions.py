"""Runs of a training job on a node in virtual time, without a framework."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.zeus.node import VirtualNode
from zeus.policy.recurrence import Verdict
from zeus.run import session as module
from zeus.run.session import RunSession
from zeus.run.settings import Settings
from zeusd.devices.simulated import Work

ITERATIONS = 60
OpenNode = Callable[[str], VirtualNode]


def settings(folder: Path, **more: Any) -> Settings:
    """Of a run whose files are in a folder; few iterations at each limit."""
    given = {"target_metric": 0.5, "log_dir": str(folder), "profile_params": (2, 8)}
    return Settings(**{**given, **more})


def session(
    node: VirtualNode, settings: Settings, *, max_epochs: int = 100, gpus: int = 1
) -> RunSession:
    """A session on a node, with a batch size of 64."""
    real, module.ZeusMonitor = module.ZeusMonitor, node.monitor
    try:
        return RunSession(settings, 64, max_epochs, list(range(gpus)))
    finally:
        module.ZeusMonitor = real


def train_epoch(
    run: RunSession,
    work: Work,
    *,
    iterations: int = ITERATIONS,
    known: int | None = ITERATIONS,
    reached: bool = False,
    each: Callable[[int], None] = lambda number: None,
) -> Verdict:
    """An epoch, and its evaluation of ten iterations."""
    run.begin_epoch()
    for number in run.steps(range(iterations), known):
        each(number)
        work.run(1)
    for _ in run.evaluation(range(10)):
        work.run(1)
    return run.end_epoch(reached)


def train(run: RunSession, work: Work, *, epochs: int, **options: Any) -> Verdict:
    """Trains until the verdict ends it; the target is reached in the last of some epochs."""
    verdict = Verdict(False)
    while not verdict.stop:
        verdict = train_epoch(run, work, reached=run.epochs == epochs - 1, **options)
    run.end(verdict)
    return verdict


def train_and_cost(run: RunSession, work: Work, *, epochs: int, **options: Any) -> list[float]:
    """Like `train`; returns the cost of each epoch."""
    total = [0.0]
    for number in range(epochs):
        verdict = train_epoch(run, work, reached=number == epochs - 1, **options)
        total.append(run.cost(run.used.energy, run.used.time))
    run.end(verdict)
    return [after - before for before, after in pairwise(total)]


def power(folder: Path, name: str = "bs64.power.json") -> dict[str, Any]:
    """The power limits that a run has written."""
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def result(folder: Path) -> dict[str, Any]:
    """The files that a run has written."""
    found: dict[str, Any] = json.loads((folder / "zeus+bs64.train.json").read_text())
    return found

"""Runs of a training job on a node in virtual time, without a framework."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.node import VirtualNode
from zeus.policy.recurrence import Verdict
from zeus.run import session as module
from zeus.run.session import RunSession
from zeus.run.settings import Settings
from zeusd.devices.simulated import Work

ITERATIONS = 60
OpenNode = Callable[[str], VirtualNode]


class Job:
    """A job's runs on the GPUs of a node, and their files.

    Attributes:
        limits: The first GPU's limit in each iteration of training, W.
    """

    def __init__(self, node: VirtualNode, work: Work, folder: Path) -> None:
        self.node, self.work, self.folder = node, work, folder
        self.profile = folder / "bs64.power.json"
        self.limits: list[float] = []

    def run(self, *, max_epochs: int = 100, gpus: int = 1, **more: Any) -> RunSession:
        """A run with a batch size of 64, which measures few iterations at each limit."""
        given = {"target_metric": 0.5, "log_dir": str(self.folder), "profile_params": (2, 8)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "ZeusMonitor", self.node.monitor)
            return RunSession(Settings(**{**given, **more}), 64, max_epochs, list(range(gpus)))

    def train_epoch(
        self,
        run: RunSession,
        *,
        iterations: int = ITERATIONS,
        known: int | None = ITERATIONS,
        reached: bool = False,
        each: Callable[[int], object] = lambda number: None,
    ) -> Verdict:
        """An epoch, and its evaluation of ten iterations."""
        run.begin_epoch()
        for number in run.steps(range(iterations), known):
            self.limits.append(self.node.limit_w())
            each(number)
            self.work.run(1)
        for _ in run.evaluation(range(10)):
            self.work.run(1)
        return run.end_epoch(reached)

    def train(self, run: RunSession, *, epochs: int, **options: Any) -> Verdict:
        """Trains until the verdict ends it; the target is reached in the last of some epochs."""
        verdict = Verdict(False)
        while not verdict.stop:
            verdict = self.train_epoch(run, reached=run.epochs == epochs - 1, **options)
        run.end(verdict)
        return verdict

    def train_and_cost(self, run: RunSession, *, epochs: int, **options: Any) -> list[float]:
        """Like `train`; returns the cost of each epoch."""
        total = [0.0]
        for number in range(epochs):
            verdict = self.train_epoch(run, reached=number == epochs - 1, **options)
            total.append(run.cost(run.used.energy, run.used.time))
        run.end(verdict)
        return [after - before for before, after in pairwise(total)]

    def power(self, ending: str = "") -> dict[str, Any]:
        """The power limits that a run has written."""
        found: dict[str, Any] = json.loads(Path(f"{self.profile}{ending}").read_text())
        return found

    def result(self) -> dict[str, Any]:
        """The result that a run has written."""
        found: dict[str, Any] = json.loads((self.folder / "zeus+bs64.train.json").read_text())
        return found

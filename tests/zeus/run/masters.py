"""Helpers for tests of `ZeusMaster`: scripted policies, and scripts that report their arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zeus.job import Job
from zeus.policy import BatchSizeOptimizer, Run
from zeus.run import ZeusMaster

SCRIPT = Path(__file__).with_name("training_script.py")


class Scripted(BatchSizeOptimizer):
    """Takes given sizes in order; all of its copies share its observations."""

    observed: list[Run]

    def __init__(self, *sizes: int, bound: float | None = None) -> None:
        self.sizes = list(sizes)
        self.bound = bound
        self.registered = False
        Scripted.observed = []

    name = "scripted"

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """Only this one's."""
        self.registered = True

    def predict(self, job: Job) -> int:
        """The next."""
        return self.sizes[len(self.observed)]

    def observe(self, *run: Any) -> None:
        """Not used."""
        raise AssertionError

    def observe_run(self, job: Job, run: Run) -> None:
        """See the class."""
        self.observed.append(run)

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float | None:
        """None, or the given value."""
        return self.bound


def result(cost: float, reached: bool = True, **more: Any) -> dict[str, Any]:
    """The result file of a run with 10 epochs."""
    given = {"energy": 4 * cost, "time": 2.0, "cost": cost, "num_epochs": 10, "reached": reached}
    return {"result": {**given, **more}}


class Jobs:
    """A folder with a job in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work").mkdir()

    def job(self, does: dict[int, dict[str, Any]], **more: Any) -> Job:
        """A job whose script does this for each batch size."""
        (self.folder / "script.json").write_text(json.dumps(does))
        words = ["{bs}", "{lr}", "{seed}", "{epochs}", "{slice_number}", "{target_metric}"]
        given: dict[str, Any] = {
            "dataset": "cifar",
            "network": "net",
            "optimizer": "sgd",
            "target_metric": 0.6,
            "max_epochs": 10,
            "default_bs": 64,
            "default_lr": 0.1,
            "workdir": str(self.folder / "work"),
            "command": [sys.executable, str(SCRIPT), str(self.folder), *words, "--b={bs}"],
        }
        return Job(**{**given, **more})

    def master(self, policy: BatchSizeOptimizer, **more: Any) -> ZeusMaster:
        """A master whose files go to `logs`."""
        return ZeusMaster(policy, str(self.folder / "logs"), "/opt/zeus_monitor", **more)

    @property
    def logdir(self) -> Path:
        """Of the only job that ran."""
        (found,) = (self.folder / "logs").iterdir()
        return found

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The arguments that the scripts got."""
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

"""Jobs that train without a GPU, with given costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from zeus.optimizer.batch_size.common import (
    JobSpecFromClient,
    NewTrial,
    ReportResponse,
    TrainingResult,
    Trials,
)

MAX_POWER = 300.0
EPOCHS = 4
"""A run reaches its target after so many."""

Cost = Callable[[int], float | None]
"""Cost of a whole run with a batch size, J; None where it does not reach the target."""


def body(job_id: str | None = "job", **more: Any) -> dict[str, Any]:
    """The body that registers a job."""
    return {
        "job_id": job_id,
        "job_id_prefix": "job",
        "batch_sizes": [8, 16, 32, 64, 128, 256],
        "default_batch_size": 64,
        "max_epochs": 10,
        "max_power": MAX_POWER,
        "number_of_gpus": 1,
        "gpu_model": "V100",
        "mab_seed": 1,
        **more,
    }


def spec(job_id: str | None = "job", **more: Any) -> JobSpecFromClient:
    """The same, as a message."""
    return JobSpecFromClient(**body(job_id, **more))


def convex(batch_size: int) -> float:
    """Cheapest at 32, where a run costs 1000 J."""
    return 1000 * (1 + 0.3 * math.log2(batch_size / 32) ** 2)


def result(trial: NewTrial, epoch: int, cost: float | None, **more: Any) -> TrainingResult:
    """The report of an epoch; a run of no cost never reaches the target, at 1000 J for `EPOCHS`."""
    share = epoch / EPOCHS * (1000.0 if cost is None else cost)
    return TrainingResult(
        **{
            "job_id": trial.job_id,
            "batch_size": trial.batch_size,
            "trial_number": trial.trial_number,
            "time": share / MAX_POWER,
            "energy": share,
            "metric": 0.5 if cost is not None and epoch >= EPOCHS else 0.1,
            "current_epoch": epoch,
            **more,
        }
    )


def train(trials: Trials, trial: NewTrial, cost: Cost = convex) -> ReportResponse:
    """Trains until it must stop."""
    epoch = 0
    while True:
        epoch += 1
        answer = trials.report(result(trial, epoch, cost(trial.batch_size)))
        if answer.stop_train:
            return answer

"""A run without a connection to the store."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from zeus.optimizer.batch_size.common import (
    CreatedJob,
    JobSpecFromClient,
    NewTrial,
    ReportResponse,
    TrainingResult,
)
from zeus.utils.atomic import write_text

log = logging.getLogger(__name__)


class BestKnown:
    """A JSON file with the last known best batch size of each job. Never raises: the default size
    is used if none is known.

    Args:
        path: The file; None: `zeus/batch_sizes.json` in the user's cache folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is None:
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            path = Path(cache) / "zeus" / "batch_sizes.json"
        self.path = Path(path)

    def get(self, spec: JobSpecFromClient) -> int | None:
        """Returns the best known size of a job, if any."""
        found = self._read().get(_key(spec))
        return found if found in spec.batch_sizes else None

    def put(self, spec: JobSpecFromClient, batch_size: int) -> None:
        """Stores it."""
        sizes = self._read()
        if sizes.get(_key(spec)) == batch_size:
            return
        sizes[_key(spec)] = batch_size
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(sizes, indent=1, sort_keys=True))
        except OSError as error:
            log.info("the best batch size is not kept in %s: %s", self.path, error)

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: size for key, size in found.items() if isinstance(size, int)}


def _key(spec: JobSpecFromClient) -> str:
    return f"{spec.job_id} on {spec.number_of_gpus} {spec.gpu_model}"


def judge(spec: CreatedJob, trial: NewTrial, result: TrainingResult) -> ReportResponse:
    """Decides whether a run stops, by the store's rules, without its learning curve.

    Args:
        spec: Its job.
        trial: Its trial, with its cost bound.
        result: Its totals so far.
    """
    from zeus.optimizer.batch_size.trials import JobRecord, Trial, reported

    now_s = time.time()
    began = Trial(trial.trial_number, trial.batch_size, now_s, now_s)
    began = replace(began, cost_bound=trial.cost_bound, eta_knob=trial.eta_knob)
    alone = result.model_copy(update={"rerun_cost": None})  # that would need numpy
    return reported(JobRecord(spec, 0, now_s), began, alone, now_s, 1)[1]

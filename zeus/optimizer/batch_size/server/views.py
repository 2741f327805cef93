"""Jobs as the page, `bso` and `GET /jobs` show them. Times are in s since 1970."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zeus.optimizer.batch_size.choosing import analyze
from zeus.optimizer.batch_size.trials import JobRecord, Overview, Trial


def summary(found: Overview, now_s: float) -> dict[str, Any]:
    """A job's summary."""
    job, spec, heard_s, cheapest = found.job, found.job.spec, found.heard_s, found.cheapest
    return {
        "job_id": job.job_id,
        "gpu_model": spec.gpu_model,
        "number_of_gpus": spec.number_of_gpus,
        "policy": spec.policy,
        "created_s": job.created_s,
        "heard_ago_s": None if heard_s is None else max(0.0, now_s - heard_s),
        "counts": found.counts,
        "converged": found.converged,
        "default_batch_size": spec.default_batch_size,
        "default_mean_cost_j": found.mean_cost(spec.default_batch_size),
        "cheapest_batch_size": cheapest,
        "cheapest_mean_cost_j": None if cheapest is None else found.mean_cost(cheapest),
        "time_s": found.time,
        "energy_j": found.energy,
        "cost_j": found.cost,
    }


def detail(sums: Overview, trials: Sequence[Trial], now_s: float) -> dict[str, Any]:
    """A job's details."""
    job = sums.job
    found = analyze(job, trials)
    estimates = [
        {
            "batch_size": one.batch_size,
            "mean_j": _number(one.mean),
            "low_j": _number(one.low),
            "high_j": _number(one.high),
            "probability_best": one.probability_best,
            "runs": one.runs,
            "explored": one.explored,
            "excluded": found.excluded.get(one.batch_size),
            "measured_mean_j": sums.mean_cost(one.batch_size),
        }
        for one in found.estimates
    ]
    return {
        **summary(sums, now_s),
        "spec": job.spec.model_dump(),
        "best_batch_size": found.best,
        "best_cost_j": found.best_cost,
        "estimates": estimates,
        "regret": [
            {"trial_number": one.trial_number, "cost_j": one.cost, "regret_j": one.regret}
            for one in found.regret
        ],
        "trials": [of_trial(job, trial, now_s) for trial in trials],
    }


def of_trial(job: JobRecord, trial: Trial, now_s: float) -> dict[str, Any]:
    """A trial."""
    return {
        "trial_number": trial.number,
        "batch_size": trial.batch_size,
        "status": trial.status,
        "converged": trial.converged,
        "stopped_by_cost": trial.stopped_by_cost,
        "began_s": trial.began_s,
        "ended_s": trial.ended_s,
        "heard_ago_s": max(0.0, now_s - trial.heard_s),
        "lease_s": trial.lease_s,
        "epochs": trial.epochs,
        "metric": trial.metric,
        "time_s": trial.time,
        "energy_j": trial.energy,
        "overhead_time_s": trial.overhead_time,
        "overhead_energy_j": trial.overhead_energy,
        "cost_j": job.cost(trial.energy, trial.time),
        "cost_bound_j": trial.cost_bound,
    }


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None

"""Jobs as the page, `bso` and `GET /jobs` show them. Times are in s since 1970."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zeus.optimizer.batch_size.choosing import Known
from zeus.optimizer.batch_size.trials import STATUSES, JobRecord, Trial


def summary(job: JobRecord, groups: Sequence[Any], now_s: float) -> dict[str, Any]:
    """A job's summary.

    Args:
        groups: Its trials, or groups of them (`rows.summed`).
    """
    spec, costs = job.spec, mean_costs(job, groups)
    counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
    for group in groups:
        counts[group.status] += group.trials
    energy, time = sum(group.energy for group in groups), sum(group.time for group in groups)
    heard_s = max((group.heard_s for group in groups), default=None)
    cheapest = min(costs, key=lambda size: costs[size], default=None)
    return {
        "job_id": job.job_id,
        "gpu_model": spec.gpu_model,
        "number_of_gpus": spec.number_of_gpus,
        "policy": spec.policy,
        "created_s": job.created_s,
        "heard_s": heard_s,
        "heard_ago_s": None if heard_s is None else max(0.0, now_s - heard_s),
        "counts": counts,
        "converged": sum(group.trials for group in groups if group.converged),
        "default_batch_size": spec.default_batch_size,
        "default_mean_cost_j": costs.get(spec.default_batch_size),
        "cheapest_batch_size": cheapest,
        "cheapest_mean_cost_j": None if cheapest is None else costs[cheapest],
        "time_s": time,
        "energy_j": energy,
        "cost_j": job.cost(energy, time),
    }


def mean_costs(job: JobRecord, groups: Sequence[Any]) -> dict[int, float]:
    """Mean cost, J, of the trials that reached the target, by batch size, ascending."""
    costs: dict[int, float] = {}
    for size in sorted({group.batch_size for group in groups if group.converged}):
        of_size = [one for one in groups if one.converged and one.batch_size == size]
        cost = sum(job.cost(one.energy, one.time) for one in of_size)
        costs[size] = cost / sum(one.trials for one in of_size)
    return costs


def detail(job: JobRecord, trials: Sequence[Trial], now_s: float) -> dict[str, Any]:
    """A job's details."""
    known, costs = Known(job, trials), mean_costs(job, trials)
    estimates = [
        {
            "batch_size": one.batch_size,
            "mean_j": _number(one.mean),
            "low_j": _number(one.low),
            "high_j": _number(one.high),
            "probability_best": one.probability_best,
            "runs": one.runs,
            "explored": one.explored,
            "excluded": known.excluded.get(one.batch_size),
            "measured_mean_j": costs.get(one.batch_size),
        }
        for one in known.estimates
    ]
    return {
        **summary(job, trials, now_s),
        "spec": job.spec.model_dump(),
        "best_batch_size": known.best,
        "best_cost_j": known.best_cost,
        "estimates": estimates,
        "regret": [
            {"trial_number": number, "cost_j": cost, "regret_j": regret}
            for number, cost, regret in known.regret
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

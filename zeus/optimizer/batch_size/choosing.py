"""What the next run of a job trains with, and what is known of its batch sizes. Pure, too.

A job's state is its specification and its trials; everything else is recomputed from them when it
is asked for, which takes a policy a few milliseconds.

- A size for which GPU memory did not suffice, and all larger ones, are not chosen again. A size
  whose last `CRASHES` runs crashed is not chosen again, nor one whose last `SILENT` runs were lost
  before their first epoch. Runs that were cancelled say nothing. A person may release a job: what
  came before then no longer keeps a size out.
- The policy knows only the sizes that are left, and of these all runs that ended by a report, in
  the order in which they ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

try:
    import numpy as np
except ImportError:
    raise ImportError("choosing batch sizes needs numpy: pip install 'zeusd[bso-server]'") from None

from zeus.job import Job
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import JobRecord, Trial
from zeus.policy import make_policy
from zeus.policy.interface import BatchSizeOptimizer, Estimate, Run

CRASHES = 2
"""A size is parked after so many crashes in a row."""

SILENT = 5
"""And after so many runs in a row that were lost before their first epoch: what kills the whole
machine leaves nobody to report it."""

_FOR_ESTIMATES = 0
"""Trials count from 1; what is believed of sizes is drawn with this number's seed."""


@dataclass(frozen=True)
class Choice:
    """What a trial begins with.

    Attributes:
        batch_size: Its batch size.
        cost_bound: Cost at which it is given up, J; None for never.
        best: The size that is thought cheapest by now; None while no run has converged.
    """

    batch_size: int
    cost_bound: float | None
    best: int | None


@dataclass(frozen=True)
class Spent:
    """What a job has spent beyond what its best batch size would have.

    Attributes:
        trial_number: After this trial's end.
        cost: What the trial cost, J.
        regret: Cost of all trials that have ended by then, less the best cost for each that reached
            the target, J.
    """

    trial_number: int
    cost: float
    regret: float


@dataclass(frozen=True)
class Analysis:
    """What is known of a job.

    Attributes:
        estimates: What is believed of each batch size, ascending.
        excluded: Of each size that is not chosen again why.
        best: The batch size that costs least of those that have reached the target.
        best_cost: Its expected cost, J.
        regret: In the order in which the trials ended; empty while no best cost is known.
    """

    estimates: list[Estimate]
    excluded: dict[int, str]
    best: int | None
    best_cost: float | None
    regret: list[Spent]


def choose(job: JobRecord, trials: Sequence[Trial], number: int) -> Choice:
    """What the next trial begins with.

    Args:
        job: Its job.
        trials: Those before it; what is lost must be marked so.
        number: Its number. The choice is the same each time that it is made.

    Raises:
        ZeusBSORuntimeError: No size is left (409).
    """
    policy, as_known = _policy(job, trials, number)
    in_flight = [trial.batch_size for trial in trials if trial.running]
    if in_flight:
        batch_size = policy.predict_beside(as_known, in_flight)
    else:
        batch_size = policy.predict(as_known)
    best, _ = _best(job, trials, policy.estimates(as_known))
    return Choice(batch_size, _bound(job, trials, policy, as_known), best)


def _bound(
    job: JobRecord, trials: Sequence[Trial], policy: BatchSizeOptimizer, as_known: Job
) -> float | None:
    beta = job.spec.beta_knob
    if beta is None:
        return None
    ended = told(trials)
    failures = 0
    while failures < len(ended) and not ended[-1 - failures].converged:
        failures += 1
    bound = policy.cost_bound(as_known, beta, failures)
    if bound is None:
        costs = [job.cost(trial.energy, trial.time) for trial in ended if trial.converged]
        bound = beta * min(costs) if costs else math.inf
    return bound if math.isfinite(bound) else None


def told(trials: Iterable[Trial]) -> list[Trial]:
    """Those that ended by a report, in the order in which they ended."""
    return sorted(
        (trial for trial in trials if trial.status == "ok"), key=lambda trial: trial.order
    )


def excluded(job: JobRecord, trials: Iterable[Trial]) -> dict[int, str]:
    """The sizes that are not chosen again, and of each why."""
    found: dict[int, str] = {}
    ended = sorted(
        (trial for trial in trials if trial.order > job.released), key=lambda trial: trial.order
    )
    crashes: dict[int, int] = {}
    silent: dict[int, int] = {}
    for trial in ended:
        size = trial.batch_size
        if trial.status == "ok":
            crashes[size] = silent[size] = 0
        elif trial.status == "failed":
            crashes[size] = crashes.get(size, 0) + 1
        elif trial.status == "lost" and not trial.epochs:
            silent[size] = silent.get(size, 0) + 1
    for size, count in crashes.items():
        if count >= CRASHES:
            found[size] = f"its last {count} runs crashed"
    for size, count in silent.items():
        if count >= SILENT:
            found[size] = f"its last {count} runs were lost before their first epoch"
    too_large = min((trial.batch_size for trial in ended if trial.status == "oom"), default=None)
    if too_large is not None:
        for size in job.spec.batch_sizes:
            if size >= too_large:
                found[size] = f"GPU memory does not suffice for {too_large}"
    return dict(sorted(found.items()))


def _policy(job: JobRecord, trials: Sequence[Trial], number: int) -> tuple[BatchSizeOptimizer, Job]:
    """A policy that knows what there is to know, and the job as it knows it."""
    spec = job.spec
    out = excluded(job, trials)
    left = [size for size in spec.batch_sizes if size not in out]
    if not left:
        raise ZeusBSORuntimeError(
            f"no batch size of job {job.job_id} is left: "
            + "; ".join(f"{size}: {why}" for size, why in out.items())
            + ". Once the cause is gone, release the job (bso release)",
            409,
        )
    policy = make_policy(
        spec.policy,
        seed=_seed(job, number),
        window_size=spec.window_size,
        prior_mean=spec.mab_prior_mean,
        prior_precision=spec.mab_prior_precision,
        num_exploration=spec.mab_num_explorations,
        num_pruning_rounds=spec.num_pruning_rounds,
        replay=True,
    )
    as_known = Job(
        dataset=spec.job_id,
        network=spec.gpu_model,
        optimizer="",
        target_metric=spec.target_metric,
        max_epochs=spec.max_epochs,
        default_bs=_nearest(spec.default_batch_size, left),
    )
    policy.register_job(as_known, left)
    for trial in told(trials):
        if trial.batch_size in left:
            policy.observe_run(as_known, _run(job, trial))
    return policy, as_known


def _seed(job: JobRecord, number: int) -> int:
    spawned = np.random.SeedSequence(entropy=job.seed, spawn_key=(number,))
    return int(spawned.generate_state(1, np.uint64)[0])


def _nearest(default: int, left: Sequence[int]) -> int:
    return min(left, key=lambda size: (abs(math.log(size / default)), size))


def _run(job: JobRecord, trial: Trial) -> Run:
    return Run(
        batch_size=trial.batch_size,
        cost=job.cost(trial.energy, trial.time),
        converged=trial.converged,
        epochs=trial.epochs,
        overhead=job.cost(trial.overhead_energy, trial.overhead_time),
        cost_bound=trial.cost_bound,
        stopped_by_cost=trial.stopped_by_cost,
        utilization=_utilization(job, trial),
    )


def _utilization(job: JobRecord, trial: Trial) -> float | None:
    time = trial.time - trial.overhead_time
    if time <= 0:
        return None
    return min(1.0, (trial.energy - trial.overhead_energy) / (time * job.spec.max_power))


def analyze(job: JobRecord, trials: Sequence[Trial]) -> Analysis:
    """What is believed of each batch size, which is best, and what finding it has cost."""
    out = excluded(job, trials)
    runs: dict[int, int] = {}
    for trial in told(trials):
        runs[trial.batch_size] = runs.get(trial.batch_size, 0) + 1
    found: dict[int, Estimate] = {}
    if len(out) < len(job.spec.batch_sizes):
        policy, as_known = _policy(job, trials, _FOR_ESTIMATES)
        found = {one.batch_size: one for one in policy.estimates(as_known)}
    estimates = []
    for size in job.spec.batch_sizes:
        nothing = Estimate(size, None, None, None, 0.0, runs.get(size, 0), size not in out)
        estimates.append(found.get(size, nothing))
    best, best_cost = _best(job, trials, estimates)
    return Analysis(estimates, out, best, best_cost, _regret(job, trials, best_cost))


def _best(
    job: JobRecord, trials: Sequence[Trial], estimates: Iterable[Estimate]
) -> tuple[int | None, float | None]:
    costs: dict[int, list[float]] = {}
    for trial in told(trials):
        if trial.converged:
            costs.setdefault(trial.batch_size, []).append(job.cost(trial.energy, trial.time))
    means = {one.batch_size: one.mean for one in estimates if one.explored}
    expected: dict[int, float] = {}
    for size, of_size in costs.items():
        mean = means.get(size)
        # Of a size that is not chosen again the policy has no opinion; its runs have been, though.
        expected[size] = sum(of_size) / len(of_size) if mean is None else mean
    left = {size: cost for size, cost in expected.items() if size in means} or expected
    if not left:
        return None, None
    best = min(left, key=lambda size: left[size])
    return best, left[best]


def _regret(job: JobRecord, trials: Iterable[Trial], best_cost: float | None) -> list[Spent]:
    if best_cost is None:
        return []
    spent, found = 0.0, []
    for trial in sorted((one for one in trials if not one.running), key=lambda trial: trial.order):
        cost = job.cost(trial.energy, trial.time)
        spent += cost - (best_cost if trial.converged else 0.0)
        found.append(Spent(trial.number, cost, spent))
    return found

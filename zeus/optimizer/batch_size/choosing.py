"""Chooses the batch size of a job's next run, and estimates its batch sizes. Pure.

A job's state is its specification and its trials; everything else follows from them. `Known` holds
that, and can be updated with the trials that have changed.

- A size for which GPU memory did not suffice, and all larger ones, are not chosen again; nor is one
  whose last `CRASHES` runs crashed, or whose last `SILENT` runs were lost before their first epoch.
  Cancelled runs have no effect. A person may release a job: its earlier runs then exclude no size.
- The policy knows only the sizes that are left, and of these all runs that ended by a report, in
  the order in which they ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

try:
    import numpy as np
except ImportError:
    raise ImportError("choosing batch sizes needs numpy: pip install 'zeusd[bso-server]'") from None

from zeus.job import Job
from zeus.optimizer.batch_size.common import CreatedJob
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import JobRecord, Trial
from zeus.policy.gp import EXPLORED_RUNS
from zeus.policy.interface import BatchSizeOptimizer, Estimate, Explains, Run
from zeus.policy.knowledge import Knowledge
from zeus.policy.make import make_policy
from zeus.policy.recurrence import Runs, Start, give, learned

CRASHES = 2
"""A size is parked after this many consecutive crashes."""

SILENT = 5
"""And after this many consecutive runs that were lost before their first epoch: if the whole
machine crashes, nothing can report it."""

_DRAWS = 4000
_NORMAL_95 = 1.645
"""90 % of a normal distribution lies within so many standard deviations."""

_FOR_ESTIMATES = 0
"""Trials count from 1; estimates use this number as the seed."""


class Known:
    """Knowledge about a job.

    Args:
        trials: All its trials; lost ones must be marked.

    Attributes:
        job: The job, as of the last update.
        last_trial: The highest number of a trial.
    """

    def __init__(self, job: JobRecord, trials: Iterable[Trial] = ()) -> None:
        self.job = job
        self.last_trial = 0
        self._trials: dict[int, Trial] = {}
        self._observed: list[Trial] = []
        self._kept_out = _KeptOut(job)
        self._policy: BatchSizeOptimizer | None = None
        self.update(job, trials)

    @property
    def running(self) -> list[Trial]:
        """The trials that have not ended."""
        return [trial for trial in self._trials.values() if trial.running]

    @property
    def excluded(self) -> dict[int, str]:
        """The excluded sizes, each with its reason."""
        return self._kept_out.sizes

    def update(self, job: JobRecord, changed: Iterable[Trial]) -> None:
        """Updates it with trials that have begun, reported, or ended.

        Args:
            changed: At least the trials that have changed since the last update.
        """
        again = job.released != self.job.released
        ended = []
        for trial in changed:
            before = self._trials.get(trial.number)
            self._trials[trial.number] = trial
            self.last_trial = max(self.last_trial, trial.number)
            if before is not None and not before.running:
                # An ended trial may run again, or have reached its target after all.
                again |= before.status != trial.status
            elif not trial.running:
                ended.append(trial)
        self.job = job
        if again:
            self._kept_out, self._observed, self._policy = _KeptOut(job), [], None
            ended = [trial for trial in self._trials.values() if not trial.running]
        ended.sort(key=lambda trial: trial.order)
        for trial in ended:
            self._kept_out.add(trial)
        newly_observed = [trial for trial in ended if trial.status == "ok"]
        self._observed += newly_observed
        if self._policy is not None and self._left() == self._sizes:
            for trial in newly_observed:
                self._observe(trial)
        else:
            self._policy = None

    def choose(self, number: int) -> Start:
        """Chooses the parameters of the next trial.

        Args:
            number: Its number, from which the policy's draws follow.

        Raises:
            ZeusBSORuntimeError: No size is left (409).
        """
        self._ready()
        in_flight = [trial.batch_size for trial in self.running]
        return self._runs.next(in_flight, _seed(self.job, number))

    @property
    def best(self) -> int | None:
        """The cheapest size that has reached the target; None if none has."""
        if not self._left():
            return None
        policy = self._ready()
        if isinstance(policy, Explains):
            return policy.best(self._as_known)
        means = {size: float(np.mean(costs)) for size, costs in self._costs().items() if costs}
        return min(means, key=lambda size: means[size], default=None)

    @property
    def estimates(self) -> list[Estimate]:
        """Estimates by batch size, ascending; of an excluded size no more than its runs."""
        runs = Counter(trial.batch_size for trial in self._observed)
        by_size: dict[int, Estimate] = {}
        if self._left():
            policy = self._ready()
            believed = (
                policy.estimates(self._as_known)
                if isinstance(policy, Explains)
                else measured(self._costs(), runs)
            )
            by_size = {one.batch_size: one for one in believed}
        return [
            by_size.get(size, Estimate(size, None, None, None, 0.0, runs[size], explored=False))
            for size in self.job.spec.batch_sizes
        ]

    @property
    def best_cost(self) -> float | None:
        """Expected cost of the best size, J."""
        best = self.best
        return next((one.mean for one in self.estimates if one.batch_size == best), None)

    @property
    def regret(self) -> list[tuple[int, float, float]]:
        """After each trial, in the order in which they ended, its number, its cost, and the cost of
        all so far, less the best cost for each that reached the target, J; empty while no best cost
        is known.
        """
        best_cost, spent, regrets = self.best_cost, 0.0, []
        if best_cost is None:
            return []
        ended = (trial for trial in self._trials.values() if not trial.running)
        for trial in sorted(ended, key=lambda trial: trial.order):
            cost = self.job.cost(trial.energy, trial.time)
            spent += cost - (best_cost if trial.converged else 0.0)
            regrets.append((trial.number, cost, spent))
        return regrets

    def knowledge(self) -> Knowledge | None:
        """Returns the knowledge for the same job on another GPU."""
        if not any(trial.converged for trial in self._observed) or not self._left():
            return None
        return learned(self._ready(), self._as_known)

    # --------------------------------------------------------------------------------- internals

    def _costs(self) -> dict[int, list[float]]:
        """Returns what the runs that reached the target cost, J, by the sizes that are left."""
        costs: dict[int, list[float]] = {size: [] for size in self._left()}
        for trial in self._observed:
            if trial.converged and trial.batch_size in costs:
                costs[trial.batch_size].append(self.job.cost(trial.energy, trial.time))
        return costs

    def _left(self) -> list[int]:
        return [size for size in self.job.spec.batch_sizes if size not in self.excluded]

    def _ready(self) -> BatchSizeOptimizer:
        """Returns the policy, which knows all runs."""
        if self._policy is None:
            self._policy = self._make()
            for trial in self._observed:
                self._observe(trial)
        return self._policy

    def _make(self) -> BatchSizeOptimizer:
        """Makes the policy, and `_as_known`, the job in its form."""
        spec, left = self.job.spec, self._left()
        if not left:
            raise ZeusBSORuntimeError(
                f"no batch size of job {self.job.job_id} is left: "
                + "; ".join(f"{size}: {why}" for size, why in self.excluded.items())
                + ". Once the cause is gone, release the job (bso release)",
                409,
            )
        # What is released is explored as if it were new.
        released = sum(trial.order <= self.job.released for trial in self._observed)
        policy = policy_of(spec, _seed(self.job, _FOR_ESTIMATES), released)
        self._sizes = left
        self._as_known = Job(
            dataset=spec.job_id,
            network=spec.gpu_model,
            optimizer="",
            target_metric=spec.target_metric,
            max_epochs=spec.max_epochs,
            default_bs=_nearest(spec.default_batch_size, left),
        )
        policy.register_job(self._as_known, left)
        if self.job.knowledge is not None:
            give(policy, self._as_known, self.job.knowledge)
        self._runs = Runs(policy, self._as_known, spec.beta_knob)
        return policy

    def _observe(self, trial: Trial) -> None:
        run = _run(self.job, trial)
        if trial.batch_size in self._sizes:
            self._runs.observe(run)
        else:
            self._runs.count(run)


class _KeptOut:
    """Determines the excluded sizes from the ended trials, in their order."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._crashes: dict[int, int] = {}
        self._silent: dict[int, int] = {}
        self._too_large: int | None = None
        self.sizes: dict[int, str] = {}
        """The reason for each."""

    def add(self, trial: Trial) -> None:
        if trial.order <= self._job.released:
            return
        size, crashes, silent = trial.batch_size, self._crashes, self._silent
        if trial.status == "ok":
            crashes[size] = silent[size] = 0
        elif trial.status == "failed":
            crashes[size] = crashes.get(size, 0) + 1
        elif trial.status == "lost" and not trial.epochs:
            silent[size] = silent.get(size, 0) + 1
        elif trial.status == "oom":
            self._too_large = min(size, self._too_large or size)
        reasons = {n: f"its last {k} runs crashed" for n, k in crashes.items() if k >= CRASHES}
        for n, k in silent.items():
            if k >= SILENT:
                reasons[n] = f"its last {k} runs were lost before their first epoch"
        if self._too_large is not None:
            for n in self._job.spec.batch_sizes:
                if n >= self._too_large:
                    reasons[n] = f"GPU memory does not suffice for {self._too_large}"
        self.sizes = dict(sorted(reasons.items()))


def measured(costs: Mapping[int, Sequence[float]], runs: Mapping[int, int]) -> list[Estimate]:
    """Estimates each batch size by the mean of its own runs.

    Args:
        costs: Of each size, what its runs that reached the target cost, J.
        runs: Of each size, its runs.
    """
    by_size = {size: Estimate(size, None, None, None, 0.0, runs[size]) for size in costs}
    known = [size for size in costs if costs[size]]
    if known:
        means = np.array([np.mean(costs[size]) for size in known])
        errors = np.array([np.std(costs[size]) / math.sqrt(len(costs[size])) for size in known])
        draws = np.random.default_rng(0).normal(means, errors, (_DRAWS, len(known)))
        wins = np.bincount(draws.argmin(axis=1), minlength=len(known)) / _DRAWS
        for size, mean, error, best in zip(known, means, errors, wins, strict=True):
            low = high = None
            if len(costs[size]) > 1:  # after one run it is not known how much they differ
                low, high = (float(mean + side * _NORMAL_95 * error) for side in (-1, 1))
            by_size[size] = Estimate(size, float(mean), low, high, float(best), runs[size])
    return list(by_size.values())


def policy_of(spec: CreatedJob, seed: int = 0, released: int = 0) -> BatchSizeOptimizer:
    """Makes the policy of a job.

    Args:
        released: Number of its runs that ended before its sizes were released.

    Raises:
        ZeusBSORuntimeError: There is no policy of this name (422).
    """
    try:
        return make_policy(
            spec.policy,
            seed=seed,
            window_size=spec.window_size,
            prior_mean=spec.mab_prior_mean,
            prior_precision=spec.mab_prior_precision,
            num_exploration=spec.mab_num_explorations,
            num_pruning_rounds=spec.num_pruning_rounds,
            replay=True,
            explored_runs=EXPLORED_RUNS + released,
        )
    except ValueError as error:
        raise ZeusBSORuntimeError(f"policy: {error}", 422) from None


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

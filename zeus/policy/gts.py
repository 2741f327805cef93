"""A bandit with an arm for each batch size, each on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zeus.job import Job
from zeus.policy.best import BestKnown
from zeus.policy.interface import BatchSizeOptimizer, Estimate
from zeus.policy.mab import GaussianTS, deviation, precision_of
from zeus_ipc.overriding import override

_DRAWS = 4000
_NORMAL_95 = 1.645
"""Of a normal distribution 90 % lies within so many standard deviations."""


class GTSBatchSizeOptimizer(BatchSizeOptimizer):
    """Gaussian Thompson sampling over all batch sizes; no size is ever pruned.

    Args:
        learn_reward_precision: Whether an arm's precision is that of its rewards so far.
        reward_precision: The precision otherwise.
        prior_mean: See `GaussianTS`.
        prior_precision: See `GaussianTS`.
        num_exploration: See `GaussianTS`.
        seed: See `GaussianTS`.
        verbose: Whether to print what is chosen.
        replay: Whether it is recomputed from a log; see `predict_beside`.
    """

    def __init__(
        self,
        learn_reward_precision: bool,
        reward_precision: float = 0.0,
        prior_mean: float = 0.0,
        prior_precision: float = 0.0,
        num_exploration: int = 1,
        seed: int = 123456,
        verbose: bool = True,
        *,
        replay: bool = False,
    ) -> None:
        self.learn_reward_precision = learn_reward_precision
        self.reward_precision = reward_precision
        self.prior_mean = prior_mean
        self.prior_precision = prior_precision
        self.num_exploration = num_exploration
        self.seed = seed
        self.verbose = verbose
        self.replay = replay
        self.mabs: dict[Job, GaussianTS] = {}
        self.batch_sizes: dict[Job, list[int]] = {}
        self.history: dict[Job, dict[int, list[float]]] = {}
        self._best = BestKnown()

    @property
    @override
    def name(self) -> str:
        return "GaussianTS BSO"

    @override
    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """A job that is known stays as it is."""
        if job in self.mabs:
            return
        self.mabs[job] = GaussianTS(
            batch_sizes,
            self.reward_precision,
            self.prior_mean,
            self.prior_precision,
            self.num_exploration,
            self.seed,
            self.verbose,
        )
        self.batch_sizes[job] = batch_sizes
        self.history[job] = {}

    @override
    def predict(self, job: Job) -> int:
        batch_size = self.mabs[job].predict()
        if self.verbose:
            print(f"[{self.name}] {job}: batch size {batch_size}")
        return batch_size

    @override
    def predict_beside(self, job: Job, in_flight: Sequence[int]) -> int:
        """Another draw where a log is replayed; else the best known size, as in the published
        simulation of a cluster.
        """
        best = None if self.replay else self._best.batch_size(job)
        return self.predict(job) if best is None else best

    @override
    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        """Raises:
        ValueError: The job has no such batch size.
        """
        if batch_size not in self.batch_sizes[job]:
            raise ValueError(f"{batch_size} is none of the batch sizes of {job}")
        self._best.observe(job, batch_size, cost, converged)
        rewards = self.history[job].setdefault(batch_size, [])
        rewards.append(-cost)
        mab = self.mabs[job]
        if self.learn_reward_precision:
            all_of_arm = np.array(rewards)
            mab.arm_reward_prec[batch_size] = precision_of(all_of_arm)
            mab.fit_arm(batch_size, all_of_arm, reset=True)
        else:
            mab.fit_arm(batch_size, np.array([-cost]), reset=False)

    @override
    def exclude(self, job: Job, batch_sizes: Sequence[int]) -> bool:
        mab = self.mabs[job]
        mab.arms = [arm for arm in mab.arms if arm not in batch_sizes]
        return True

    @override
    def estimates(self, job: Job) -> list[Estimate]:
        seen = {size: len(rewards) for size, rewards in self.history[job].items()}
        return of_arms(self.mabs[job], self.batch_sizes[job], seen)


def of_arms(
    mab: GaussianTS | None, batch_sizes: Sequence[int], runs: Mapping[int, int]
) -> list[Estimate]:
    """What a bandit believes of the cost of each batch size.

    Args:
        mab: The bandit; None while there is none.
        batch_sizes: All sizes, also those that have no arm (any more).
        runs: Runs observed of each size.
    """
    arms = [arm for arm in mab.arms if mab.arm_num_observations[arm]] if mab else []
    best: dict[int, float] = {}
    if mab and arms:
        means = np.array([-mab.arm_param_mean[arm] for arm in arms])
        deviations = np.array([deviation(mab.arm_param_prec[arm]) for arm in arms])
        # Draws of its own: asking must not change what is chosen next.
        draws = np.random.default_rng(0).normal(means, deviations, (_DRAWS, len(arms)))
        wins = np.bincount(draws.argmin(axis=1), minlength=len(arms)) / _DRAWS
        best = dict(zip(arms, wins.tolist(), strict=True))
    found = []
    for size in sorted(batch_sizes):
        mean = low = high = None
        if mab and size in best:
            mean = -mab.arm_param_mean[size]
            reach = _NORMAL_95 * deviation(mab.arm_param_prec[size])
            low, high = mean - reach, mean + reach
        explored = mab is None or size in mab.arms
        found.append(
            Estimate(size, mean, low, high, best.get(size, 0.0), runs.get(size, 0), explored)
        )
    return found

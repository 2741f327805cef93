"""A bandit with an arm for each batch size, each on its own."""

from __future__ import annotations

from collections.abc import Sequence

from zeus.job import Job
from zeus.policy.mab import Array
from zeus.policy.pruning import PruningGTSBatchSizeOptimizer
from zeus_ipc.overriding import override


class GTSBatchSizeOptimizer(PruningGTSBatchSizeOptimizer):
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
        super().__init__(
            prior_mean,
            prior_precision,
            concurrency=True,
            seed=seed,
            verbose=verbose,
            num_pruning_rounds=0,
            num_exploration=num_exploration,
            replay=replay,
        )
        self.learn_reward_precision = learn_reward_precision
        self.reward_precision = reward_precision

    @property
    @override
    def name(self) -> str:
        return "GaussianTS BSO"

    @override
    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """A job that is known stays as it is."""
        if job not in self.history:
            self._register(job, batch_sizes, batch_sizes[0])

    @override
    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        """Raises:
        ValueError: The job has no such batch size.
        """
        if batch_size not in self._sizes[job]:
            raise ValueError(f"{batch_size} is none of the batch sizes of {job}")
        super().observe(job, batch_size, cost, converged)

    @override
    def exclude(self, job: Job, batch_sizes: Sequence[int]) -> bool:
        mab = self._mab(job)
        mab.arms = [arm for arm in mab.arms if arm not in batch_sizes]
        return True

    @override
    def _precision(self, rewards: Array) -> float:
        return super()._precision(rewards) if self.learn_reward_precision else self.reward_precision

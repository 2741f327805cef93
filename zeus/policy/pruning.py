"""The published policy: prune the sizes that miss the target, then a bandit over the others.

Source: You, Chung, Chowdhury, "Zeus: Understanding and Optimizing GPU Energy Consumption of DNN
Training", NSDI 2023, section 4.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer
from zeus.policy.mab import Array, GaussianTS, precision_of
from zeus_ipc.overriding import override

NOTHING = 0
"""Expected while the last result is in and the next size is not asked for yet."""


class PruningExploreManager:
    """Walks over the batch sizes and drops those that miss the target, and all beyond them.

    A round goes from the default down, then from above it up; a size that misses the target ends
    its direction. The next round is over the sizes that are left, from the cheapest of this one.

    Args:
        default: Where the first round begins.

    Raises:
        ValueError: The default is none of the sizes.
    """

    def __init__(self, batch_sizes: list[int], default: int, num_pruning_rounds: int = 2) -> None:
        if default not in batch_sizes:
            raise ValueError(f"the default batch size {default} is not among {batch_sizes}")
        self.batch_sizes = sorted(batch_sizes)
        self.default = default
        self.num_pruning_rounds = num_pruning_rounds
        self.expecting = NOTHING
        self._rounds_left = num_pruning_rounds
        self._ways: list[list[int]] = []
        self._good: list[int] = []
        self._best_cost = math.inf
        if self._rounds_left > 0:
            self._begin_round()
            self.expecting = default

    @property
    def wanted(self) -> int | None:
        """The size that the walk is at, whether it was asked for or not; None at the end."""
        return self._ways[0][0] if self._ways else None

    def next_batch_size(self) -> int:
        """The next size to explore; the same again while its result is out.

        Raises:
            StopIteration: The walk is over; its `value` are the sizes that are left, ascending.
        """
        wanted = self.wanted
        if wanted is None:
            raise StopIteration(list(self.batch_sizes))
        self.expecting = wanted
        return wanted

    def report_batch_size_result(self, batch_size: int, cost: float, reached: bool) -> None:
        """The result of the size that is expected.

        Args:
            cost: What its run cost, J.
            reached: Whether it reached the target.

        Raises:
            RuntimeError: Another size is expected.
        """
        if batch_size != self.wanted:
            raise RuntimeError(
                f"a result of batch size {batch_size} came while {self.wanted} was explored"
            )
        self.expecting = NOTHING
        way = self._ways[0]
        if reached:
            way.pop(0)
            self._good.append(batch_size)
            if cost < self._best_cost:
                self._best_cost = cost
                self.default = batch_size
        else:
            way.clear()
        self._ways = [way for way in self._ways if way]
        if not self._ways:
            self._end_round()

    def _begin_round(self) -> None:
        at = self.batch_sizes.index(self.default)
        ways = [self.batch_sizes[: at + 1][::-1], self.batch_sizes[at + 1 :]]
        self._ways = [way for way in ways if way]
        self._good = []
        self._best_cost = math.inf

    def _end_round(self) -> None:
        # Where even the default missed the target this time, it is all there is to go on with.
        self.batch_sizes = sorted(self._good) or [self.default]
        self._rounds_left -= 1
        if self._rounds_left > 0:
            self._begin_round()


class PruningGTSBatchSizeOptimizer(BatchSizeOptimizer):
    """Prunes by `PruningExploreManager`, then Gaussian Thompson sampling over the sizes left.

    An arm's precision is that of its own rewards.

    Args:
        window_size: So many of each size's last runs count; 0 for all.
        concurrency: Whether runs may end in another order than they were asked for. A result that
            the walk does not expect then counts for its arm only; otherwise it is an error.
        verbose: Whether to print what is chosen.
        replay: Whether results count for the walk though nobody asked in between: for who
            recomputes the policy from a log. Implies `concurrency`.
    """

    def __init__(
        self,
        prior_mean: float = 0.0,
        prior_precision: float = 0.0,
        window_size: int = 0,
        concurrency: bool = False,
        seed: int = 123456,
        verbose: bool = True,
        *,
        num_pruning_rounds: int = 2,
        num_exploration: int = 2,
        replay: bool = False,
    ) -> None:
        self.prior_mean = prior_mean
        self.prior_precision = prior_precision
        self.window_size = window_size
        self.concurrency = concurrency or replay
        self.seed = seed
        self.verbose = verbose
        self.num_pruning_rounds = num_pruning_rounds
        self.num_exploration = num_exploration
        self.replay = replay
        self.mabs: dict[Job, GaussianTS] = {}
        self.exp_manager: dict[Job, PruningExploreManager] = {}
        self.history: dict[Job, list[tuple[int, float]]] = {}
        # Of each size that reached the target the lowest cost.
        self._reached: dict[Job, dict[int, float]] = defaultdict(dict)

    @property
    @override
    def name(self) -> str:
        return "Pruning GaussianTS BSO"

    @override
    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        if job.default_bs is None:
            raise ValueError(f"{job} has no default batch size; give Job(default_bs=...)")
        self._register(job, batch_sizes, job.default_bs)

    def _register(self, job: Job, batch_sizes: list[int], default: int) -> None:
        self.exp_manager[job] = PruningExploreManager(batch_sizes, default, self.num_pruning_rounds)
        self.history[job] = []

    @override
    def predict(self, job: Job) -> int:
        walk = self.exp_manager[job]
        pruning = walk.wanted is not None
        batch_size = walk.next_batch_size() if pruning else self._mab(job).predict()
        if self.verbose:
            stage = "pruning" if pruning else "sampling"
            print(f"[{self.name}] {job}, {stage}: batch size {batch_size}")
        return batch_size

    def predict_beside(self, job: Job, in_flight: Sequence[int], seed: int | None = None) -> int:
        """The walk cannot be at two sizes at once.

        Where a log is replayed, the best known size is given only while the walk waits for one of
        the runs in flight, so that a job whose runs always overlap goes on with its search; else
        always, as in the published simulation of a cluster.
        """
        walk = self.exp_manager[job]
        if seed is not None and walk.wanted is None:
            self._mab(job).rng = np.random.default_rng(seed)
        if not in_flight or (self.replay and walk.wanted not in in_flight):
            return self.predict(job)
        if self._reached[job]:
            return min(self._reached[job], key=lambda size: self._reached[job][size])
        if walk.wanted is None or job.default_bs is None:
            return self.predict(job)
        return job.default_bs

    @override
    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        """Raises:
        RuntimeError: Another size's result is expected, and runs do not overlap.
        """
        self.history[job].append((batch_size, -cost))
        if converged:
            reached = self._reached[job]
            reached[batch_size] = min(cost, reached.get(batch_size, math.inf))
        mab = self.mabs.get(job)
        if mab is not None:
            if batch_size in mab.arms:
                self._fit(mab, job, batch_size)
            return
        walk = self.exp_manager[job]
        expected = walk.wanted if self.replay else walk.expecting
        if not self.concurrency or expected == batch_size:
            walk.report_batch_size_result(batch_size, cost, bool(converged))

    def _mab(self, job: Job) -> GaussianTS:
        if job not in self.mabs:
            mab = GaussianTS(
                list(self.exp_manager[job].batch_sizes),
                0.0,
                self.prior_mean,
                self.prior_precision,
                self.num_exploration,
                self.seed,
                self.verbose,
            )
            for batch_size in mab.arms:
                self._fit(mab, job, batch_size)
            self.mabs[job] = mab
        return self.mabs[job]

    def _fit(self, mab: GaussianTS, job: Job, batch_size: int) -> None:
        rewards = [reward for size, reward in self.history[job] if size == batch_size]
        if rewards:
            counted = np.array(rewards[-self.window_size :])
            mab.arm_reward_prec[batch_size] = self._precision(counted)
            mab.fit_arm(batch_size, counted, reset=True)

    def _precision(self, rewards: Array) -> float:
        return precision_of(rewards)


class GTSBatchSizeOptimizer(PruningGTSBatchSizeOptimizer):
    """Gaussian Thompson sampling over all batch sizes, each on its own; no size is ever pruned.

    Args:
        learn_reward_precision: Whether an arm's precision is that of its rewards so far.
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
        if batch_size not in self.exp_manager[job].batch_sizes:
            raise ValueError(f"{batch_size} is none of the batch sizes of {job}")
        super().observe(job, batch_size, cost, converged)

    def exclude(self, job: Job, batch_sizes: Sequence[int]) -> None:
        """See `zeus.policy.interface.Excludes`."""
        mab = self._mab(job)
        mab.arms = [arm for arm in mab.arms if arm not in batch_sizes]

    @override
    def _precision(self, rewards: Array) -> float:
        return super()._precision(rewards) if self.learn_reward_precision else self.reward_precision

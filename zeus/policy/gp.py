"""The default policy: what all runs say about every batch size, and information-directed sampling.

A run's cost is the cost of an epoch times the epochs to the target. Both are curves over the batch
size whose course is known roughly before the first run: an epoch becomes cheaper until the GPU is
busy, and takes more epochs beyond a critical size. So a run of one size gives information about its
neighbours, and what an epoch costs is known almost without noise. Whether a run reaches its target
at all is a matter of each size by itself. `zeus.policy.gp_model` is the model.

The next size is the one with the smallest expected regret for what its run shows about the best
size; a run that misses the target costs as much as one that is given up, and the run after it.
Source: Russo and Van Roy, "Learning to Optimize via Information-Directed Sampling", 2018.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zeus.job import Job
from zeus.policy.curves import Array
from zeus.policy.gp_model import Elsewhere, GPFit, Model
from zeus.policy.interface import BatchSizeOptimizer, Estimate, Run
from zeus.policy.knowledge import Knowledge
from zeus_ipc.overriding import override

MOST_SIZES = 48
"""Of more sizes than these the policy considers so many, evenly spread over their octaves: their
neighbours differ by a few percent."""

_SAME_OCTAVES = 0.1
"""Sizes of two GPUs that are so close count as the same."""

_DRAWS = 300
_REACH_OCTAVES = 2.0
"""So far beyond the sizes that reached the target the next may be."""

EXPLORED_RUNS = 60
"""After so many runs, sizes that have never reached the target are not chosen any more."""

_GIVEN_UP = 2.0
"""What a run costs at most, in costs of the best size: with the usual `beta_knob` it is given up
then. The best follows once more, as the recurrence begins again."""

_REGRET_POWER = 2.0
"""Regret counts by this power; less would explore more."""
_LEAST_INFORMATION = 1e-5
"""Squared costs of the best size: so much every run is taken to tell."""
_PATIENCE = 1.5
"""From the second failure in a row on, each makes the bound so many times larger: what was cheap
once may never be so cheap again."""


class GPBatchSizeOptimizer(BatchSizeOptimizer):
    """Shares strength between neighbouring batch sizes.

    Args:
        window_size: So many of each size's last runs count; 0 for all.
        verbose: Whether to print what is chosen.
        explored_runs: After so many runs, sizes that have never reached the target are not chosen
            any more.
    """

    def __init__(
        self,
        window_size: int = 0,
        seed: int = 123456,
        verbose: bool = True,
        explored_runs: int = EXPLORED_RUNS,
    ) -> None:
        self.window_size = window_size
        self.seed = seed
        self.verbose = verbose
        self.explored_runs = explored_runs
        self._jobs: dict[Job, _Known] = {}

    @property
    @override
    def name(self) -> str:
        return "GP BSO"

    @override
    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """A job that is known stays as it is."""
        if job not in self._jobs:
            self._jobs[job] = _Known(
                job, batch_sizes, self.window_size, self.seed, self.explored_runs
            )

    @override
    def predict(self, job: Job) -> int:
        return self.predict_beside(job, ())

    def predict_beside(self, job: Job, in_flight: Sequence[int], seed: int | None = None) -> int:
        """What runs in flight will tell is not asked for again."""
        batch_size = self._jobs[job].choose(in_flight, seed)
        if self.verbose:
            print(f"[{self.name}] {job}: batch size {batch_size}")
        return batch_size

    @override
    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        """`observe_run` tells more."""
        self.observe_run(job, Run(batch_size, cost, converged is not False))

    def observe_run(self, job: Job, run: Run) -> None:
        """Raises:
        ValueError: The job has no such batch size.
        """
        self._jobs[job].observe(run)

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float:
        """`beta_knob` times the expected cost of the best size that reached the target.

        An expectation follows a job that becomes costlier, unlike the cheapest run there ever was.
        """
        best = self._jobs[job].best_cost()
        return beta_knob * best * _PATIENCE ** max(0, failures - 1)

    def knowledge(self, job: Job) -> Knowledge | None:
        """See `zeus.policy.interface.Transfers`; None before a run has told its epochs."""
        return self._jobs[job].knowledge()

    def transfer(self, job: Job, knowledge: Knowledge) -> None:
        """The first run has its best size, not the default."""
        self._jobs[job].transfer(knowledge)

    def exclude(self, job: Job, batch_sizes: Sequence[int]) -> None:
        """See `zeus.policy.interface.Excludes`."""
        self._jobs[job].exclude(batch_sizes)

    def best(self, job: Job) -> int | None:
        """The cheapest of the sizes that have reached the target; None where none has."""
        return self._jobs[job].best()

    def estimates(self, job: Job) -> list[Estimate]:
        """What is believed of each batch size, in ascending order; the means are medians."""
        return self._jobs[job].estimates()


class _Known:
    """What is known of one job."""

    def __init__(
        self, job: Job, batch_sizes: list[int], window: int, seed: int, explored_runs: int
    ) -> None:
        if job.default_bs is None or job.default_bs not in batch_sizes:
            raise ValueError(f"the default batch size {job.default_bs} is not among {batch_sizes}")
        self._all = sorted(set(batch_sizes))
        self._sizes = considered(self._all, job.default_bs)
        self._index = _nearest(self._all, self._sizes)
        self._x = np.log2(np.array(self._sizes) / job.default_bs)
        self._window = window
        self._seed = seed
        self._explored_runs = explored_runs
        self._rng = np.random.default_rng(seed)
        self._runs: list[tuple[int, Run]] = []
        self._last_of: dict[int, deque[int]] = {}
        self._converged: list[int] = []
        self._out: set[int] = set()
        self._from: Knowledge | None = None
        self._utilization: tuple[int, float] | None = None
        self._model: Model | None = None
        self._fitted: GPFit | None = None

    def knowledge(self) -> Knowledge | None:
        if not self._converged:
            return None
        fit = self._fit()
        curves = fit.curves()
        if curves is None:
            return None
        epochs, epoch_cost = (tuple(map(float, curve)) for curve in curves)
        reached, missed = (
            tuple(map(float, runs)) for runs in (fit.reach.reached, fit.reach.missed)
        )
        best = self._sizes[self._best()]
        return Knowledge(tuple(self._sizes), epochs, epoch_cost, reached, missed, best)

    def transfer(self, knowledge: Knowledge) -> None:
        self._from = knowledge
        self._model = self._fitted = None

    def exclude(self, batch_sizes: Sequence[int]) -> None:
        gone = set(batch_sizes)
        self._out |= {at for at, size in enumerate(self._sizes) if size in gone}
        self._converged = [at for at in self._converged if at not in self._out]

    def best(self) -> int | None:
        return self._sizes[self._best()] if self._converged else None

    def observe(self, run: Run) -> None:
        at = self._index.get(run.batch_size)
        if at is None:
            raise ValueError(f"{run.batch_size} is none of the batch sizes {self._all}")
        self._last_of.setdefault(at, deque(maxlen=self._window or None)).append(len(self._runs))
        self._runs.append((at, run))
        if run.converged and at not in self._converged and at not in self._out:
            self._converged = sorted([*self._converged, at])
        if self._utilization is None and run.utilization is not None:
            self._utilization = (at, run.utilization)
        self._fitted = None
        if self._model is not None and not self._window and self._model.takes(run):
            self._model.observe(at, run)
        else:
            self._model = None

    def choose(self, in_flight: Sequence[int], seed: int | None = None) -> int:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if not self._converged:
            return self._sizes[self._least_failed()]
        if not self._runs[-1][1].converged:
            # The job has to be done: now with what is known to reach the target.
            return self._sizes[self._best()]
        fit = self._fit()
        best = float(fit.log_cost[self._best()])
        pending = [self._index[size] for size in in_flight if size in self._index]
        within = self._within_reach()
        if pending:
            fit = fit.with_pending(pending)
            # Whether an untried size reaches the target at all is known when its first run ends.
            within[[i for i in pending if i not in self._converged]] = False
        reached = fit.draw(self._rng, _DRAWS)
        reach = fit.reach.draw(self._rng, _DRAWS)
        paid = _paid(reached[:, within] - best, reach[:, within])
        return self._sizes[int(np.flatnonzero(within)[most_informative(paid)])]

    def best_cost(self) -> float:
        """Expected cost of a run of the best size, if it reaches the target, J; infinite before
        one did."""
        if not self._converged:
            return math.inf
        return float(np.exp(self._fit().log_cost[self._best()]))

    def estimates(self) -> list[Estimate]:
        runs = Counter(run.batch_size for _, run in self._runs)
        if not self._converged:
            return [Estimate(size, None, None, None, 0.0, runs[size]) for size in self._all]
        # Draws of their own: asking must not change what is chosen next.
        rng = np.random.default_rng(self._seed)
        fit = self._fit()
        best = float(fit.log_cost[self._best()])
        drawn = fit.draw(rng, 10 * _DRAWS)
        costs = np.exp(drawn)
        reach = fit.reach.draw(rng, len(costs))
        wins = np.bincount(
            _paid(drawn - best, reach).argmin(axis=1),
            minlength=len(self._sizes),
        ) / len(costs)
        low, middle, high = np.quantile(costs, (0.05, 0.5, 0.95), axis=0)
        within = self._within_reach()
        estimates = []
        for size in self._all:
            i = self._index[size]
            is_considered = self._sizes[i] == size
            estimates.append(
                Estimate(
                    size,
                    float(middle[i]),
                    float(low[i]),
                    float(high[i]),
                    float(wins[i]) if is_considered else 0.0,
                    runs[size],
                    bool(within[i]) and is_considered,
                    float(fit.reach.mean[i]),
                )
            )
        return estimates

    def _best(self) -> int:
        """Of the sizes that reached the target, that of the lowest expected cost, reruns
        included."""
        fit = self._fit()
        least = min(float(fit.log_cost[i]) for i in self._converged)
        paid = _paid(fit.log_cost - least, fit.reach.mean)
        return min(self._converged, key=lambda i: float(paid[i]))

    def _least_failed(self) -> int:
        """Where nothing reached the target yet: the default, then what is nearest to it."""
        if self._from is not None and not self._runs:
            logs = np.abs(np.log(np.array(self._sizes) / self._from.best))
            logs[list(self._out)] = np.inf
            return int(logs.argmin())
        failures = Counter(at for at, _ in self._runs)
        x = self._x
        left = [i for i in range(len(x)) if i not in self._out] or range(len(x))
        return min(left, key=lambda i: (failures[i], abs(x[i]), x[i]))

    def _within_reach(self) -> NDArray[np.bool_]:
        x, low, high = self._x, self._converged[0], self._converged[-1]
        slack = _REACH_OCTAVES + 1e-9
        within = (x >= x[low] - slack) & (x <= x[high] + slack)
        within[max(low - 1, 0)] = within[min(high + 1, len(x) - 1)] = True
        within[list(self._out)] = False
        if len(self._runs) >= self._explored_runs:
            within &= np.isin(np.arange(len(x)), self._converged)
        return np.asarray(within)

    def _fit(self) -> GPFit:
        if self._model is None:
            self._model = self._model_of(self._counted())
        if self._fitted is None:
            self._fitted = self._model.fit(self._utilization)
        return self._fitted

    def _model_of(self, counted: list[tuple[int, Run]]) -> Model:
        # With a window those that count may all have missed the target, and told no epochs.
        apart = any(run.epochs for _, run in counted) and all(
            run.epochs for _, run in counted if run.converged
        )
        model = Model(self._x, apart, self._there())
        for at, run in counted:
            model.observe(at, run)
        return model

    def _there(self) -> Elsewhere | None:
        """What is known from another GPU, of the sizes that are considered here."""
        known = self._from
        if known is None:
            return None
        here, there = np.log2(np.array(self._sizes)), np.log2(np.array(known.batch_sizes))
        nearest = np.abs(here[:, None] - there[None, :]).argmin(axis=1)
        same = np.abs(here - there[nearest]) < _SAME_OCTAVES
        return Elsewhere(
            np.interp(here, there, known.log_epochs),
            np.interp(here, there, known.log_epoch_cost),
            np.where(same, np.array(known.reached)[nearest], 0.0),
            np.where(same, np.array(known.missed)[nearest], 0.0),
            known.same_gpu,
        )

    def _counted(self) -> list[tuple[int, Run]]:
        """The runs that count, in order: with a window, the last ones of each size, and the newest
        run that reached the target if none of these did."""
        if not self._window:
            return self._runs
        counted = {i for of in self._last_of.values() for i in of}
        if not any(self._runs[i][1].converged for i in counted):
            counted |= {*[i for i, (_, run) in enumerate(self._runs) if run.converged][-1:]}
        return [self._runs[i] for i in sorted(counted)]


def considered(batch_sizes: Sequence[int], default: int, most: int = MOST_SIZES) -> list[int]:
    """The sizes among which the policy chooses, ascending: all, or some of too many.

    Of sizes that are close to each other the one is taken that the most powers of two divide, as
    GPUs like it best; the default is always among them.
    """
    if len(batch_sizes) <= most:
        return list(batch_sizes)
    low, high = math.log(batch_sizes[0]), math.log(batch_sizes[-1])
    of_bin: dict[int, int] = {}
    for size in batch_sizes:
        at = min(most - 1, int((math.log(size) - low) / (high - low) * most))
        if at not in of_bin or (size & -size) > (of_bin[at] & -of_bin[at]):
            of_bin[at] = size
    of_bin[min(most - 1, int((math.log(default) - low) / (high - low) * most))] = default
    return sorted(of_bin.values())


def _nearest(batch_sizes: Sequence[int], among: Sequence[int]) -> dict[int, int]:
    """Of each size the index of the nearest of those that are considered."""
    logs = np.log(np.array(among))
    nearest = np.abs(np.log(np.array(batch_sizes))[:, None] - logs[None, :]).argmin(axis=1)
    return {size: int(at) for size, at in zip(batch_sizes, nearest, strict=True)}


def _paid(reached: Array, reach: Array) -> Array:
    """What a run is expected to cost, with the run that must follow where it misses the target.

    Args:
        reached: Logarithm of the cost of a run that reaches the target, in costs of the best size.
        reach: Probability that the target is reached.
    """
    cost = np.exp(reached)
    given_up = _GIVEN_UP + 1
    return np.asarray(reach * np.where(cost > _GIVEN_UP, given_up, cost) + (1 - reach) * given_up)


def most_informative(paid: Array) -> int:
    """Which of the sizes has the least regret for what its run tells about the best one.

    Args:
        paid: Draws of what runs are believed to cost, in costs of the best size, shape (draws,
            sizes).
    """
    best = paid.argmin(axis=1)
    expected = paid.mean(axis=0)
    regret = expected - paid.min(axis=1).mean()
    member = best[:, None] == np.unique(best)[None, :]
    given = (member.T @ paid) / member.sum(axis=0)[:, None]
    information = member.mean(axis=0) @ (given - expected) ** 2
    ratio = np.maximum(regret, 0.0) ** _REGRET_POWER / (information + _LEAST_INFORMATION)
    return int(np.argmin(ratio))

"""The default policy: two curves over the batch sizes, and information-directed sampling.

A run's cost is the cost of an epoch times the epochs to the target. Both are curves over the batch
size whose course is known roughly before the first run: an epoch becomes cheaper until the GPU is
busy, and takes more epochs beyond a critical size. So a run of one size gives information about its
neighbours, and what an epoch costs is known almost without noise.

The next size is the one with the smallest expected regret for what its run shows about the best
size. Source: Russo and Van Roy, "Learning to Optimize via Information-Directed Sampling", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeus.job import Job
from zeus.policy.curves import Array, Belief, Curve, Prior, Tally, critical, saturating
from zeus.policy.interface import BatchSizeOptimizer, Estimate, Run

_KNEES = np.arange(-9.0, 10.0)
"""Where a curve may bend, octaves from the default."""

_DRAWS = 300
_REACH_OCTAVES = 2.0
"""So far beyond the sizes that reached the target the next may be."""

_MISSED = 0.3
"""A run that was given up is taken to have needed e^0.3 = 1.35 times what it had."""

_GIVEN_UP = 2.0
"""What a run costs at most, in costs of the best size, as with the usual `beta_knob` it is given up
then; and once more the best, as the recurrence begins again."""

_REGRET_POWER = 2.0
"""Regret counts by this power; less would explore more."""
_LEAST_INFORMATION = 1e-5
"""Squared costs of the best size: so much every run is taken to tell."""
_PATIENCE = 1.5
"""From the second failure in a row on, each makes the bound so many times larger: what was cheap
once may never be so cheap again."""

_TINY = 1e-9

# Mean power over the maximum is so much for an idle GPU, and so much more for a busy one.
_IDLE, _BUSY, _UTILIZATION_SD = 0.15, 0.55, 0.12


class GPBatchSizeOptimizer(BatchSizeOptimizer):
    """Shares strength between neighbouring batch sizes.

    Args:
        window_size: So many of each size's last runs count; 0 for all.
        seed: Of its draws.
        verbose: Whether to print what is chosen.
    """

    def __init__(self, window_size: int = 0, seed: int = 123456, verbose: bool = True) -> None:
        self.window_size = window_size
        self.seed = seed
        self.verbose = verbose
        self._jobs: dict[Job, _Known] = {}

    @property
    def name(self) -> str:
        """See `BatchSizeOptimizer`."""
        return "GP BSO"

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """See `BatchSizeOptimizer`. A job that is known stays as it is."""
        if job not in self._jobs:
            self._jobs[job] = _Known(job, batch_sizes, self.window_size, self.seed)

    def predict(self, job: Job) -> int:
        """See `BatchSizeOptimizer`."""
        return self.predict_beside(job, ())

    def predict_beside(self, job: Job, in_flight: Sequence[int]) -> int:
        """See `BatchSizeOptimizer`. What runs in flight will tell is not asked for again."""
        batch_size = self._jobs[job].choose(in_flight)
        if self.verbose:
            print(f"[{self.name}] {job}: batch size {batch_size}")
        return batch_size

    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        """See `BatchSizeOptimizer`. `observe_run` tells more."""
        self.observe_run(job, Run(batch_size, cost, converged is not False))

    def observe_run(self, job: Job, run: Run) -> None:
        """See `BatchSizeOptimizer`.

        Raises:
            ValueError: The job has no such batch size.
        """
        self._jobs[job].observe(run)

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float | None:
        """`beta_knob` times the expected cost of the best size that reached the target.

        An expectation follows a job that becomes costlier, unlike the cheapest run there ever was.
        """
        best = self._jobs[job].best_cost()
        return beta_knob * best * _PATIENCE ** max(0, failures - 1)

    def estimates(self, job: Job) -> list[Estimate]:
        """See `BatchSizeOptimizer`."""
        return self._jobs[job].estimates()


class _Known:
    """What is known of one job."""

    def __init__(self, job: Job, batch_sizes: list[int], window: int, seed: int) -> None:
        if job.default_bs not in batch_sizes:
            raise ValueError(f"the default batch size {job.default_bs} is not among {batch_sizes}")
        assert job.default_bs is not None
        self._sizes = sorted(set(batch_sizes))
        self._x = np.log2(np.array(self._sizes) / job.default_bs)
        self._window = window
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._max_epochs = job.max_epochs
        self._runs: list[Run] = []
        self._converged: list[int] = []
        self._utilization: tuple[int, float] | None = None
        self._model: _Model | None = None
        self._fitted: _Fit | None = None

    def observe(self, run: Run) -> None:
        if run.batch_size not in self._sizes:
            raise ValueError(f"{run.batch_size} is none of the batch sizes {self._sizes}")
        at = self._sizes.index(run.batch_size)
        self._runs.append(run)
        if run.converged and at not in self._converged:
            self._converged = sorted([*self._converged, at])
        if self._utilization is None and run.utilization is not None:
            self._utilization = (at, run.utilization)
        self._fitted = None
        if self._window or (run.converged and not run.epochs):
            self._model = None  # some run counts no more, or all count otherwise
        elif self._model is not None:
            self._model.observe(at, run)

    def choose(self, in_flight: Sequence[int]) -> int:
        if not self._converged:
            return self._sizes[self._least_failed()]
        if not self._runs[-1].converged:
            # The job has to be done: now with what is known to reach the target.
            return self._sizes[self._best()]
        fit = self._fit()
        best = float(fit.log_cost[self._best()])
        pending = [self._sizes.index(size) for size in in_flight if size in self._sizes]
        within = self._within_reach()
        if pending:
            fit = fit.with_pending(pending)
            # Whether an untried size reaches the target at all is known when its first run ends.
            within[[i for i in pending if i not in self._converged]] = False
        costs = np.exp(fit.draw(self._rng, _DRAWS)[:, within] - best)
        return self._sizes[int(np.flatnonzero(within)[_most_informative(costs)])]

    def best_cost(self) -> float:
        """Expected cost of the best size that reached the target, J; infinite before."""
        if not self._converged:
            return math.inf
        return float(np.exp(self._fit().log_cost[self._best()]))

    def estimates(self) -> list[Estimate]:
        runs = [run.batch_size for run in self._runs]
        if not self._converged:
            return [Estimate(size, None, None, None, 0.0, runs.count(size)) for size in self._sizes]
        # Draws of their own: asking must not change what is chosen next.
        costs = np.exp(self._fit().draw(np.random.default_rng(self._seed), 10 * _DRAWS))
        wins = np.bincount(costs.argmin(axis=1), minlength=len(self._sizes)) / len(costs)
        low, middle, high = np.quantile(costs, (0.05, 0.5, 0.95), axis=0)
        within = self._within_reach()
        return [
            Estimate(
                size,
                float(middle[i]),
                float(low[i]),
                float(high[i]),
                float(wins[i]),
                runs.count(size),
                bool(within[i]),
            )
            for i, size in enumerate(self._sizes)
        ]

    def _best(self) -> int:
        """Of the sizes that reached the target, that of the lowest expected cost."""
        log_cost = self._fit().log_cost
        return min(self._converged, key=lambda i: float(log_cost[i]))

    def _least_failed(self) -> int:
        """Where nothing reached the target yet: the default, then what is nearest to it."""
        failures = [0] * len(self._sizes)
        for run in self._runs:
            failures[self._sizes.index(run.batch_size)] += 1
        x = self._x
        return min(range(len(x)), key=lambda i: (failures[i], abs(x[i]), x[i]))

    def _within_reach(self) -> NDArray[np.bool_]:
        x, low, high = self._x, self._converged[0], self._converged[-1]
        slack = _REACH_OCTAVES + 1e-9
        within = (x >= x[low] - slack) & (x <= x[high] + slack)
        within[max(low - 1, 0)] = within[min(high + 1, len(x) - 1)] = True
        return np.asarray(within)

    def _fit(self) -> _Fit:
        if self._model is None:
            counted = self._counted()
            # With a window those that count may all have missed the target, and told no epochs.
            apart = any(run.epochs for run in counted) and all(
                run.epochs for run in counted if run.converged
            )
            self._model = _Model(self._x, self._max_epochs, apart)
            for run in counted:
                self._model.observe(self._sizes.index(run.batch_size), run)
        if self._fitted is None:
            self._fitted = self._model.fit(self._utilization)
        return self._fitted

    def _counted(self) -> list[Run]:
        """The runs that count, in order."""
        if not self._window:
            return self._runs
        counted: list[Run] = []
        of_size: dict[int, int] = {}
        for run in reversed(self._runs):
            of_size[run.batch_size] = of_size.get(run.batch_size, 0) + 1
            if of_size[run.batch_size] <= self._window:
                counted.append(run)
        return counted[::-1]


@dataclass(frozen=True)
class _Missed:
    """A run that missed the target.

    Attributes:
        index: Of its size.
        least: Logarithm of what it would have taken at least.
        of_cost: Whether that is the cost of all its epochs, and not their number.
    """

    index: int
    least: float
    of_cost: bool


class _Model:
    """The runs that count, and both curves.

    Args:
        x: Octaves from the default, shape (sizes,).
        max_epochs: Of the job.
        apart: Whether the cost of an epoch and the number of epochs are known of all runs; where
            they are not, one curve is of their product.
    """

    def __init__(self, x: Array, max_epochs: int, apart: bool) -> None:
        self._x = x
        self._max_epochs = max_epochs
        self._apart = apart
        self._epoch_curve, self._epochs_curve = _curves(x, apart)
        self._epoch: dict[int, Tally] = {}
        self._epochs: dict[int, Tally] = {}
        self._missed: list[_Missed] = []
        # Curves are of the distance from the first run: they know nothing of its level.
        self._epoch_level: float | None = None
        self._epochs_level: float | None = None

    def observe(self, at: int, run: Run) -> None:
        """A run of a size, by its index."""
        cost = max(run.cost - run.overhead, _TINY)
        if self._apart and run.epochs:
            epoch = math.log(cost / run.epochs)
            if self._epoch_level is None:
                self._epoch_level = epoch
            _add(self._epoch, at, epoch - self._epoch_level)
        if run.converged:
            epochs = math.log(run.epochs if self._apart and run.epochs else cost)
            if self._epochs_level is None:
                self._epochs_level = epochs
            _add(self._epochs, at, epochs - self._epochs_level)
        elif run.stopped_by_cost and run.cost_bound is not None:
            self._missed.append(_Missed(at, math.log(run.cost_bound) + _MISSED, of_cost=True))
        elif self._apart:
            self._missed.append(_Missed(at, math.log(self._max_epochs) + _MISSED, of_cost=False))
        else:
            self._missed.append(_Missed(at, math.log(cost) + _MISSED, of_cost=True))

    def fit(self, utilization: tuple[int, float] | None) -> _Fit:
        """What is believed now. At least one run must count; where both curves are known, one that
        has told its epochs.

        Args:
            utilization: Index of a size, and how busy the GPU was with it.
        """
        epoch_level, epochs_level = self._epoch_level or 0.0, self._epochs_level or 0.0
        epoch: Belief | None = None
        if self._epoch_curve is not None:
            evidence = _evidence(self._x, utilization)
            epoch = self._epoch_curve.learn(self._epoch, evidence)
        epochs = dict(self._epochs)
        for missed in self._missed:
            value = missed.least
            if missed.of_cost and epoch is not None:
                value -= epoch_level + float(epoch.mean[missed.index])
            _add(epochs, missed.index, value - epochs_level)
        level = epoch_level + epochs_level
        return _Fit(level, epoch, epochs, self._epochs_curve)


class _Fit:
    """What is believed of both curves; their sum is the logarithm of a run's cost, J."""

    def __init__(
        self, level: float, epoch: Belief | None, epochs: dict[int, Tally], curve: Curve
    ) -> None:
        self._level = level
        self._epoch = epoch
        self._tallies = epochs
        self._curve = curve
        self._epochs = curve.learn(epochs)
        self.log_cost: Array = level + self._epochs.mean + (0.0 if epoch is None else epoch.mean)
        """Mean, shape (sizes,)."""

    def draw(self, rng: np.random.Generator, draws: int) -> Array:
        """Shape (draws, sizes)."""
        drawn = self._level + self._epochs.draw(rng, draws)
        return drawn if self._epoch is None else drawn + self._epoch.draw(rng, draws)

    def with_pending(self, sizes: list[int]) -> _Fit:
        """As if runs of these sizes had ended, with as many epochs as expected."""
        more = dict(self._tallies)
        for i in sizes:
            _add(more, i, float(self._epochs.mean[i]))
        return _Fit(self._level, self._epoch, more, self._curve)


def _add(tallies: dict[int, Tally], at: int, value: float) -> None:
    tallies[at] = tallies.get(at, Tally()).and_also(value)


def _curves(x: Array, apart: bool) -> tuple[Curve | None, Curve]:
    """Of the cost of an epoch and of the epochs; or none, and of their product."""
    saturates = -0.5 * ((_KNEES + 2) / 3) ** 2
    turns = -0.5 * (_KNEES / 5) ** 2
    deviations = (0.05, 0.15, 0.4)
    if apart:
        epoch = Prior(saturating(x, _KNEES), saturates, (0.03, 0.1, 0.3), 0.0, (0.01, 0.04))
        epochs = Prior(critical(x, _KNEES), turns, deviations, 0.05, (0.06, 0.12, 0.24))
        return Curve(x, epoch), Curve(x, epochs)
    both = saturating(x, _KNEES[::2])[:, None] + critical(x, _KNEES[::2])[None]
    weights = saturates[::2, None] + turns[None, ::2]
    shapes = both.reshape(-1, len(x))
    return None, Curve(x, Prior(shapes, weights.ravel(), deviations, 0.05, (0.03, 0.1, 0.3)))


def _evidence(x: Array, utilization: tuple[int, float] | None) -> Array | float:
    """Log likelihood of where an epoch stops becoming cheaper, by how busy the GPU was."""
    if utilization is None:
        return 0.0
    at, seen = utilization
    busy = 1 / (1 + 2.0 ** -(x[at] - _KNEES))
    return np.asarray(-0.5 * ((seen - _IDLE - _BUSY * busy) / _UTILIZATION_SD) ** 2)


def _most_informative(costs: Array) -> int:
    """Which of the sizes has the least regret for what its run tells about the best one.

    Args:
        costs: Draws of what is believed, in costs of the best size, shape (draws, sizes).
    """
    paid = np.where(costs > _GIVEN_UP, _GIVEN_UP + 1, costs)
    best = costs.argmin(axis=1)
    expected = paid.mean(axis=0)
    regret = expected - costs.min(axis=1).mean()
    member = best[:, None] == np.unique(best)[None, :]
    given = (member.T @ paid) / member.sum(axis=0)[:, None]
    information = member.mean(axis=0) @ (given - expected) ** 2
    ratio = np.maximum(regret, 0.0) ** _REGRET_POWER / (information + _LEAST_INFORMATION)
    return int(np.argmin(ratio))

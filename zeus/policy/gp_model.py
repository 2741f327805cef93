"""What runs say about the cost of every batch size: the model behind `zeus.policy.gp`.

The logarithm of a run's cost is the sum of two curves over the batch size, the cost of an epoch and
the epochs to the target; and a coin decides whether the run reaches the target at all. A run that
misses the target counts against it, but for one that was stopped for its cost with a size that had
reached the target: that has become costlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from zeus.policy.curves import Array, Belief, CurveModel, Prior, Tally, critical, saturating
from zeus.policy.interface import Run

_KNEES = np.arange(-9.0, 10.0, dtype=np.float64)
"""Where a curve may bend, octaves from the default."""

_MISSED = 0.3
"""Where a size that has reached the target is given up for its cost, it is taken to have needed
e^0.3 = 1.35 times its bound."""

_TINY = 1e-9

# Mean power over the maximum is so much for an idle GPU, and so much more for a busy one.
_IDLE, _BUSY, _UTILIZATION_SD = 0.15, 0.55, 0.12

_DEVIATIONS = ((0.05, 0.05, 0.0), (0.15, 0.05, 0.0), (0.4, 0.05, 0.0), (0.15, 0.3, -3.0))
_EPOCH_DEVIATIONS = ((0.03, 0.0, 0.0), (0.1, 0.0, 0.0), (0.3, 0.0, 0.0), (0.1, 0.2, -3.0))


# What was learnt on another GPU is one more shape of each curve; it is as probable as this before
# any run, and how far this GPU departs from it is learnt as of any shape.
_EPOCHS_ALIKE, _EPOCH_COST_ALIKE, _SAME_GPU_ALIKE = 0.9, 0.3, 0.9
_RUNS_ELSEWHERE = 0.5
"""A run on another GPU says so much about reaching the target here, ..."""
_MOST_ELSEWHERE = 1.0
"""... and all of one size together no more than so many runs."""


@dataclass(frozen=True)
class Elsewhere:
    """What was learnt on another GPU, of the sizes of this job; each of shape (sizes,).

    Attributes:
        log_epochs: Logarithm of the epochs to the target.
        log_epoch_cost: Logarithm of an epoch's cost.
        reached: Runs that reached the target.
        missed: Runs that did not.
        same_gpu: Whether that is the same GPU model, under other power limits.
    """

    log_epochs: Array
    log_epoch_cost: Array
    reached: Array
    missed: Array
    same_gpu: bool = False


class Model:
    """The runs that count.

    Args:
        x: Octaves (log2) from the default size, shape (sizes,).
        apart: Whether the cost of an epoch and the number of epochs are known of all runs; where
            they are not, one curve is of their product.
        elsewhere: What is known from another GPU.
    """

    def __init__(self, x: Array, apart: bool, elsewhere: Elsewhere | None = None) -> None:
        self._x = x
        self._apart = apart
        self._epoch_curve, self._epochs_curve = _curves(x, apart, elsewhere)
        self._epoch: dict[int, Tally] = {}
        self._epochs: dict[int, Tally] = {}
        self._reached, self._failed = np.zeros(len(x)), np.zeros(len(x))
        self._reached_too: Array = np.zeros(len(x))
        self._missed_too: Array = np.zeros(len(x))  # of which other GPUs are not told
        if elsewhere is not None:
            self._reached_too, self._missed_too = (
                np.minimum(_RUNS_ELSEWHERE * runs, _MOST_ELSEWHERE)
                for runs in (elsewhere.reached, elsewhere.missed)
            )
        # Curves are of the distance from the first run: they know nothing of its level.
        self._epoch_level: float | None = None
        self._epochs_level: float | None = None

    def takes(self, run: Run) -> bool:
        """Whether a run tells as much as those before: its epochs, or none does."""
        return not run.converged or bool(run.epochs) == self._apart

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
            self._reached[at] += 1
        elif run.stopped_by_cost and not self._reached[at]:
            self._missed_too[at] += 1  # not elsewhere, where it may cost less
        elif run.stopped_by_cost and run.cost_bound is not None:
            epoch = (self._epoch_level or 0.0) + self._epoch[at].mean if self._apart else 0.0
            epochs = math.log(max(run.cost_bound, _TINY)) - epoch + _MISSED
            _add(self._epochs, at, epochs - (self._epochs_level or 0.0))
        else:
            self._failed[at] += 1

    def fit(self, utilization: tuple[int, float] | None) -> GPFit:
        """What is believed now. At least one run that reached the target must count; where both
        curves are known, one that has told its epochs.
        """
        epoch_level, epochs_level = self._epoch_level or 0.0, self._epochs_level or 0.0
        epoch: Belief | None = None
        if self._epoch_curve is not None:
            evidence = _evidence(self._x, utilization, len(self._epoch_curve.log_weights))
            epoch = self._epoch_curve.learn(self._epoch, evidence)
        return GPFit(
            epoch_level + epochs_level,
            epoch,
            dict(self._epochs),
            self._epochs_curve,
            Reach(self._reached, self._failed, self._reached_too, self._missed_too),
        )


@dataclass(frozen=True)
class GPFit:
    """What is believed of the curves, whose sum is the logarithm of a run's cost, J, and of the
    coins.

    Attributes:
        level: Logarithm of the cost that the curves are relative to.
        epoch: Of the cost of an epoch; None where one curve is of the product.
        tallies: Logarithms of the epochs, or of the product, seen at each size.
        curve: Their model.
        reach: Of the coins.
    """

    level: float
    epoch: Belief | None
    tallies: dict[int, Tally]
    curve: CurveModel
    reach: Reach

    @cached_property
    def _epochs(self) -> Belief:
        return self.curve.learn(self.tallies)

    @cached_property
    def log_cost(self) -> Array:
        """Mean logarithm of the cost of a run that reaches the target, shape (sizes,)."""
        epoch = 0.0 if self.epoch is None else self.epoch.mean
        return np.asarray(self.level + self._epochs.mean + epoch)

    def draw(self, rng: np.random.Generator, draws: int) -> Array:
        """Logarithms of the cost of a run that reaches the target, shape (draws, sizes)."""
        costs = self.level + self._epochs.draw(rng, draws)
        return costs if self.epoch is None else costs + self.epoch.draw(rng, draws)

    def curves(self) -> tuple[Array, Array] | None:
        """Mean logarithms of the epochs and of an epoch's cost, both but for a constant; None where
        they are not known apart."""
        return None if self.epoch is None else (self._epochs.mean, self.epoch.mean)

    def with_pending(self, sizes: list[int]) -> GPFit:
        """As if runs of these sizes had ended, with as many epochs as expected."""
        more = dict(self.tallies)
        for i in sizes:
            _add(more, i, float(self._epochs.mean[i]))
        return replace(self, tallies=more)


def _add(tallies: dict[int, Tally], at: int, value: float) -> None:
    tallies[at] = tallies.get(at, Tally()).and_also(value)


def _with_shape(
    shapes: Array, log_weights: Array, more: Array, probability: float, x: Array
) -> tuple[Array, Array]:
    """One more shape, as probable as given; 0 at the default, as all are."""
    weight = np.log(np.exp(log_weights).sum() * probability / (1 - probability))
    course = more - more[int(np.argmin(np.abs(x)))]
    return np.concatenate([shapes, course[None]]), np.append(log_weights, weight)


def _curves(
    x: Array, apart: bool, elsewhere: Elsewhere | None
) -> tuple[CurveModel | None, CurveModel]:
    """Of the cost of an epoch and of the epochs; or none, and of their product."""
    saturates = -0.5 * ((_KNEES + 2) / 3) ** 2
    turns = -0.5 * (_KNEES / 5) ** 2
    if apart:
        of_epoch, of_epochs = (saturating(x, _KNEES), saturates), (critical(x, _KNEES), turns)
        if elsewhere is not None:
            alike = _SAME_GPU_ALIKE if elsewhere.same_gpu else _EPOCH_COST_ALIKE
            of_epoch = _with_shape(*of_epoch, elsewhere.log_epoch_cost, alike, x)
            of_epochs = _with_shape(*of_epochs, elsewhere.log_epochs, _EPOCHS_ALIKE, x)
        epoch = Prior(*of_epoch, _EPOCH_DEVIATIONS, (0.01, 0.04))
        epochs = Prior(*of_epochs, _DEVIATIONS, (0.06, 0.12, 0.24))
        return CurveModel(x, epoch), CurveModel(x, epochs)
    both = saturating(x, _KNEES[::2])[:, None] + critical(x, _KNEES[::2])[None]
    weights = saturates[::2, None] + turns[None, ::2]
    shapes = both.reshape(-1, len(x))
    return None, CurveModel(x, Prior(shapes, weights.ravel(), _DEVIATIONS, (0.03, 0.1, 0.3)))


def _evidence(x: Array, utilization: tuple[int, float] | None, shapes: int) -> Array | float:
    """Log likelihood of where an epoch stops becoming cheaper, by how busy the GPU was; of a shape
    that is not one of those, as of the average one."""
    if utilization is None:
        return 0.0
    at, seen = utilization
    busy = 1 / (1 + 2.0 ** -(x[at] - _KNEES))
    of_knees = -0.5 * ((seen - _IDLE - _BUSY * busy) / _UTILIZATION_SD) ** 2
    average = np.log(np.mean(np.exp(of_knees)))
    return np.append(of_knees, [average] * (shapes - len(of_knees)))


_PRIOR_MEAN, _PRIOR_RUNS = 0.9, 0.08
"""Before any run: so probable, with the weight of so many runs."""


class Reach:
    """Probabilities that runs reach the target: one coin per size.

    A size may miss the target always, never, or now and then, whatever its neighbours do: there is
    no order in the probabilities.

    Args:
        reached: Runs that reached the target, shape (sizes,).
        missed: Runs that did not, for another reason than their cost; need not be whole.
        reached_too: What is known from elsewhere, as so many runs.
        missed_too: The same.
    """

    def __init__(
        self,
        reached: Array,
        missed: Array,
        reached_too: Array | float = 0.0,
        missed_too: Array | float = 0.0,
    ) -> None:
        self.reached, self.missed = reached, missed
        self._any_missed = bool(np.any(missed + missed_too))
        self._a = _PRIOR_MEAN * _PRIOR_RUNS + reached_too + reached
        self._b = (1 - _PRIOR_MEAN) * _PRIOR_RUNS + missed_too + missed
        self.mean: Array = self._a / (self._a + self._b)
        """Shape (sizes,)."""

    def draw(self, rng: np.random.Generator, draws: int) -> Array:
        """Probabilities that may be, shape (draws, sizes).

        While no run has missed, none is expected to."""
        if not self._any_missed:
            return np.ones((draws, len(self._a)))
        return np.asarray(rng.beta(self._a, self._b, (draws, len(self._a))))

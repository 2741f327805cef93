"""Invented recurring jobs that were not used to choose any setting, and simple policies to compare
with.

Each seed gives other jobs: thirteen kinds of cost over the batch size (one valley, two, a cliff
beside the default, sizes that miss the target in 15 to 50 % of runs, holes, a sawtooth, no shape),
on models of an A100, an H100 and an L4 and on measured epochs of a P100, an RTX 6000 and an A40.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Run
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import WORKLOADS, power_trace, train_trace

RECURRENCES = 100
_NORMAL = np.vectorize(NormalDist().cdf)
ETA, BETA = 0.5, 2.0
USUAL_EPOCHS = (10.0, 40.0)
MAX_EPOCHS_OVER_USUAL = (2.5, 5.0)
NOISES, NOISE_SHARES = (0.03, 0.08, 0.15, 0.3), (0.3, 0.4, 0.2, 0.1)


@dataclass(frozen=True)
class HeldOut:
    """An invented job. Arrays are over its sizes.

    Attributes:
        kind: Shape of its costs.
        gpu: The GPU model.
        sizes: Batch sizes, ascending.
        default: Index of the default, which always reaches the target.
        reach: Probability that a run reaches the target.
        epochs: Median epochs to the target.
        epoch_cost: Cost of an epoch, J.
        utilization: Mean power over the maximum.
        noise: Standard deviation of the logarithm of a run's epochs.
        max_epochs: A run ends after this many.
        overhead: Extra cost of the first run of a size, in epochs.
    """

    kind: str
    gpu: str
    sizes: tuple[int, ...]
    default: int
    reach: np.ndarray
    epochs: np.ndarray
    epoch_cost: np.ndarray
    utilization: np.ndarray
    noise: float
    max_epochs: int
    overhead: float

    @property
    def job(self) -> Job:
        """As a policy knows it."""
        return Job(self.kind, self.gpu, "sgd", 1.0, self.max_epochs, self.sizes[self.default])

    @property
    def expected(self) -> np.ndarray:
        """Expected cost of a recurrence in which every run has one size, until one reaches the
        target; runs are given up at `BETA` times the least of these. Infinite for no hope."""
        epochs = np.arange(1, self.max_epochs + 1)
        # Runs have whole epochs.
        upper = np.log((epochs[None] + 0.5) / self.epochs[:, None]) / self.noise
        ends = np.diff(_NORMAL(upper), axis=1, prepend=0.0) * self.reach[:, None]
        found = np.where(self.reach > 0, self.epoch_cost * self.epochs, np.inf)
        for _ in range(8):
            most = np.minimum(BETA * found.min() // self.epoch_cost, self.max_epochs)
            within = ends * (epochs[None] <= most[:, None])
            reaches = within.sum(axis=1)
            spent = self.epoch_cost * (within @ epochs + (1 - reaches) * most)
            found = np.full(len(spent), np.inf)
            np.divide(spent, reaches, out=found, where=reaches > 0)
        return found

    def trainer(self, seed: int) -> Callable[[int, float, int], Run | None]:
        """Its runs, as `recurring.play` calls them."""
        rng = np.random.default_rng([seed, len(self.sizes), self.max_epochs])
        profiled: set[int] = set()

        def train(batch_size: int, cost_bound: float, recurrence: int) -> Run | None:
            at = self.sizes.index(batch_size)
            cost = float(self.epoch_cost[at])
            needed = float(self.epochs[at]) * math.exp(rng.normal(0, self.noise))
            reaches = rng.random() < self.reach[at]
            extra = 0.0 if at in profiled else self.overhead * cost
            most = min(self.max_epochs, (cost_bound - extra) // cost)
            if most < 1:
                return None
            profiled.add(at)
            converged = bool(reaches and max(1, round(needed)) <= most)
            epochs = max(1, round(needed)) if converged else int(most)
            return Run(
                batch_size,
                epochs * cost + extra,
                converged,
                epochs,
                extra,
                None if math.isinf(cost_bound) else cost_bound,
                not converged and most < self.max_epochs,
                float(self.utilization[at]),
            )

        return train


# --- GPUs ---------------------------------------------------------------------------------------

_MODELS = {"a100": (400.0, 55.0), "h100": (700.0, 75.0), "l4": (72.0, 16.0)}
_MEASURED = ("p100", "rtx6000", "a40")


@lru_cache
def _measured(gpu: str) -> Measurements:
    return Measurements(train_trace(), power_trace(gpu))


def _epochs_of(
    gpu: str, rng: np.random.Generator
) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Sizes, the cost of an epoch at each (J), and the utilization."""
    if gpu in _MODELS:
        highest, idle = _MODELS[gpu]
        low = int(rng.integers(2, 5))
        count = int(rng.integers(7, 12))
        sizes = tuple(2 ** (low + i) for i in range(count))
        bs = np.array(sizes, dtype=float)
        knee = 2.0 ** rng.uniform(low, low + count / 2)
        busy = bs / (bs + knee)
        time = 100 / busy * np.exp(rng.normal(0, 0.01, count))
        power = idle + (0.85 * highest - idle) * busy
        cost = ETA * power * time + (1 - ETA) * highest * time
        return sizes, cost, power / highest
    tables = None
    while tables is None or len(tables) < 6:
        workload = WORKLOADS[int(rng.integers(len(WORKLOADS)))]
        tables = _measured(gpu).of(workload.job([1]))
    highest = float(max(limit for table in tables.values() for limit in table.power.limits))
    costs, used = [], []
    for table in tables.values():
        power = table.power
        each = (ETA * power.average_power + (1 - ETA) * highest) * power.time_per_epoch
        at = int(each.argmin())
        costs.append(float(each[at]))
        used.append(float(power.average_power[at]) / highest)
    return tuple(tables), np.array(costs), np.array(used)


# --- kinds --------------------------------------------------------------------------------------

Shape = tuple[np.ndarray, np.ndarray]
"""Logarithm of a run's cost, and the probability to reach the target, at each size."""


def _valley(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.uniform(0.02, 0.15) * (x - rng.uniform(-3, 3)) ** 2)


def _one_valley(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    return _valley(x, rng), np.ones(len(x))


def _two_valleys(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    first, second = rng.uniform(-4, -1), rng.uniform(1, 4)
    steep = rng.uniform(0.08, 0.2, 2)
    higher = rng.uniform(-0.3, 0.3)
    cost = np.minimum(steep[0] * (x - first) ** 2, higher + steep[1] * (x - second) ** 2)
    return cost, np.ones(len(x))


def _cliff(x: np.ndarray, at: int, rng: np.random.Generator, side: int) -> Shape:
    """The neighbour on one side of the default costs 10 to 40 % less; beyond, nothing converges."""
    beside = at + side
    cost = 0.06 * (x - x[beside]) ** 2
    cost[beside] = cost[at] + math.log(1 - rng.uniform(0.1, 0.4))
    reach = np.where(side * (x - x[beside]) > 1e-9, 0.0, 1.0)
    return cost, reach


def _cliff_below(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    return _cliff(x, at, rng, -1)


def _cliff_above(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    return _cliff(x, at, rng, 1)


def _two_cliffs(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    below, above = rng.uniform(0.4, 2.4), rng.uniform(0.4, 2.4)
    return _valley(x, rng), np.where((x < -below) | (x > above), 0.0, 1.0)


def _unsure_cheap(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    """The cheapest sizes are those that miss in 15 to 50 % of the runs."""
    cost = _valley(x, rng)
    reach = np.ones(len(x))
    reach[np.argsort(cost)[: rng.integers(1, 4)]] = 1 - rng.uniform(0.15, 0.5)
    return cost, reach


def _unsure_anywhere(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    unsure = rng.random(len(x)) < 0.5
    return _valley(x, rng), np.where(unsure, 1 - rng.uniform(0.15, 0.5, len(x)), 1.0)


def _unsure_side(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    side = rng.choice([-1, 1])
    reach = 1 / (1 + np.exp(2 * (side * x - rng.uniform(0.5, 2.5))))
    return 0.04 * (x - side * rng.uniform(0, 3)) ** 2, reach


def _holes(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    reach = np.ones(len(x))
    reach[rng.choice(len(x), int(rng.integers(1, 4)), replace=False)] = 0.0
    return _valley(x, rng), reach


def _sawtooth(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    cost = _valley(x, rng)
    cost[rng.random(len(x)) < 0.5] += math.log(rng.uniform(1.1, 1.5))
    return cost, np.ones(len(x))


def _shapeless(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    return rng.uniform(0, math.log(2), len(x)), np.ones(len(x))


def _flat(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    return rng.normal(0, 0.03, len(x)), np.ones(len(x))


def _steep(x: np.ndarray, at: int, rng: np.random.Generator) -> Shape:
    return rng.choice([-1, 1]) * rng.uniform(0.2, 0.5) * x, np.ones(len(x))


KINDS: dict[str, Callable[[np.ndarray, int, np.random.Generator], Shape]] = {
    "one valley": _one_valley,
    "two valleys": _two_valleys,
    "cliff below": _cliff_below,
    "cliff above": _cliff_above,
    "two cliffs": _two_cliffs,
    "cheapest sizes miss": _unsure_cheap,
    "some sizes miss": _unsure_anywhere,
    "one side misses": _unsure_side,
    "holes": _holes,
    "sawtooth": _sawtooth,
    "no shape": _shapeless,
    "flat": _flat,
    "steep": _steep,
}
CLIFFS = ("cliff below", "cliff above")


@lru_cache
def jobs_of(seed: int, each: int = 8) -> list[HeldOut]:
    """Jobs: so many of each kind."""
    rng = np.random.default_rng([20_000, seed])
    gpus = (*_MODELS, *_MEASURED)
    made = []
    for _ in range(each):
        for kind, shape in KINDS.items():
            gpu = gpus[len(made) % len(gpus)]
            sizes, epoch_cost, utilization = _epochs_of(gpu, rng)
            default = int(rng.integers(2, len(sizes) - 2))
            x = np.log2(np.array(sizes) / sizes[default])
            log_cost, reach = shape(x, default, rng)
            reach = np.clip(reach, 0.0, 1.0)
            reach[reach < 0.1] = 0.0
            reach[default] = 1.0
            usual = rng.uniform(*USUAL_EPOCHS)
            # The GPU determines the cost of an epoch, the kind determines the number of epochs.
            epochs = np.exp(log_cost - log_cost[default]) * epoch_cost[default] / epoch_cost * usual
            made.append(
                HeldOut(
                    kind,
                    gpu,
                    sizes,
                    default,
                    reach,
                    np.maximum(epochs, 1.0),
                    epoch_cost,
                    utilization,
                    float(rng.choice(NOISES, p=NOISE_SHARES)),
                    math.ceil(usual * rng.uniform(*MAX_EPOCHS_OVER_USUAL)),
                    float(rng.uniform(0, 0.5)),
                )
            )
    return made


# --- what anybody would do ------------------------------------------------------------------------


class Grid(BatchSizeOptimizer):
    """Each size once, from the default outwards; then the cheapest that has reached the target."""

    name = "grid"

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        assert job.default_bs is not None
        default = job.default_bs
        self._left = sorted(batch_sizes, key=lambda size: abs(math.log(size / default)))
        self._costs: dict[int, list[float]] = {}
        self._retry = False

    def predict(self, job: Job) -> int:
        if self._left and not self._retry:
            return self._left[0]
        return min(self._costs, key=lambda size: float(np.mean(self._costs[size])))

    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        if self._left and batch_size == self._left[0]:
            self._left.pop(0)
        self._retry = not converged
        if converged:
            self._costs.setdefault(batch_size, []).append(cost)


class SuccessiveHalving(BatchSizeOptimizer):
    """Rounds over the sizes; after each, the cheaper half continues (Jamieson, Talwalkar, 2016)."""

    name = "successive halving"

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        assert job.default_bs is not None
        default = job.default_bs
        self._round = sorted(batch_sizes, key=lambda size: abs(math.log(size / default)))
        self._left = list(self._round)
        self._costs: dict[int, list[float]] = {}
        self._retry = False

    def predict(self, job: Job) -> int:
        if self._retry or not self._left:
            return min(self._costs, key=self._mean)
        return self._left[0]

    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        self._retry = not converged
        if converged:
            self._costs.setdefault(batch_size, []).append(cost)
        if not self._left or batch_size != self._left[0]:
            return
        self._left.pop(0)
        if not converged:
            self._round.remove(batch_size)
        if not self._left and len(self._round) > 1:
            self._round = sorted(self._round, key=self._mean)[: math.ceil(len(self._round) / 2)]
            self._left = list(self._round) if len(self._round) > 1 else []

    def _mean(self, size: int) -> float:
        return float(np.mean(self._costs[size]))

"""Estimates of every power limit from noisy measurements of some: a Gaussian process.

Time per step and mean power are each estimated on a logarithmic scale, relative to the highest
limit that was measured. Below the power that the job draws by itself, time grows and power falls
with the limit, steeper the lower; above it nothing changes. This gives the mean and the two slopes;
the rest is a smooth deviation, an independent one for each limit, and a drift over the search (a
GPU that warms up). Source of the method: Rasmussen, Williams, "Gaussian Processes for Machine
Learning", 2006, chapter 2; of the shape: You, Chung, Chowdhury, "Zeus", NSDI 2023, figure 2.

Plain Python: a decision takes some thousand operations, and training jobs do not need NumPy for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from zeus.optimizer.power_limit.settings import Setting

STEP_NOISE = 0.03
"""Prior spread of single steps, as a fraction, ..."""
STEP_NOISE_WEIGHT = 3.0
"""... and its weight in chunks."""
DRIFT = 0.01
"""How far time and power may drift over the whole search, one standard deviation."""


@dataclass(frozen=True)
class SettingSample(Setting):
    """Measurement of some steps at one setting, all GPUs together.

    Attributes:
        time_s: Time of all of them, in the slowest process.
        energy_error_j: Uncertainty of their energy, two standard deviations.
        position: Training steps between the beginning of the search and the sample's middle.
    """

    steps: int
    energy_j: float
    time_s: float
    energy_error_j: float = 0.0
    position: float = 0.0


@dataclass(frozen=True)
class LimitEstimate(Setting):
    """A setting's time and energy per step as they are now.

    Attributes:
        time_s: Seconds per step.
        energy_j: Joules per step, of all GPUs together.
        time_error: Standard deviation of `time_s`, as a fraction of it; nan: unknown.
        energy_error: The same of `energy_j`.
        steps: Number of steps measured at it.
        time_ratio_error: Standard deviation of its time over the highest limit's, as a fraction:
            less than the sum of both errors, as the two limits' errors are correlated.
    """

    time_s: float
    energy_j: float
    time_error: float
    energy_error: float
    steps: int
    time_ratio_error: float = 0.0
    energy_ratio_error: float = 0.0


@dataclass(frozen=True)
class LimitCurve:
    """A possible curve: time and energy per step at each limit."""

    time_s: list[float]
    energy_j: list[float]


@dataclass(frozen=True)
class _Shape:
    """Prior mean of a quantity's logarithm, and standard deviations from it.

    `slope` and `bend` multiply by how far a limit is below the job's own draw, and its square.
    """

    slope_mean: float
    bend_mean: float
    level: float
    slope: float
    bend: float
    smooth: float


_OWN = 0.02
"""Deviation of a single limit from the smooth curve, one standard deviation."""
_LENGTH = 0.25  # of the smooth deviation, in the limit's logarithm
_TIME = _Shape(0.2, 0.7, level=0.05, slope=0.3, bend=0.7, smooth=0.02)
_POWER = _Shape(-0.9, 0.0, level=0.05, slope=0.1, bend=0.1, smooth=0.03)


@dataclass(frozen=True)
class _Point:
    """A point of the process: a limit, and how long ago it was measured."""

    limit_mw: int
    log: float
    below: float
    age: float


class _Process:
    """A Gaussian process of one quantity's logarithm, observed with errors, on a grid of points."""

    def __init__(
        self,
        shape: _Shape,
        level: float,
        observed: Sequence[tuple[_Point, float, float]],
        grid: Sequence[_Point],
    ) -> None:
        self._shape = shape
        points = [point for point, _, _ in observed]
        gram = [[self._kernel(a, b) for b in points] for a in points]
        for i, (_, _, variance) in enumerate(observed):
            gram[i][i] += variance + 1e-9
        lower = _cholesky(gram)
        rest = _solve(lower, [value - level - self._mean(point) for point, value, _ in observed])
        across = [_solve(lower, [self._kernel(a, b) for b in points]) for a in grid]
        self.mean = [
            level + self._mean(point) + _dot(row, rest)
            for point, row in zip(grid, across, strict=True)
        ]
        self.covariance = [
            [self._kernel(a, b) - _dot(across[i], across[j]) for j, b in enumerate(grid)]
            for i, a in enumerate(grid)
        ]
        self._lower: list[list[float]] | None = None

    def off_the_first(self, i: int) -> float:
        """Variance of the difference between a point of the grid and the first."""
        both = self.covariance[i][i] + self.covariance[0][0]
        return max(0.0, both - 2 * self.covariance[i][0])

    def draw(self, normals: Sequence[float]) -> list[float]:
        """A random curve on the grid, from as many independent normal numbers."""
        if self._lower is None:
            padded = [list(row) for row in self.covariance]
            for i, row in enumerate(padded):
                row[i] += 1e-9
            self._lower = _cholesky(padded)
        return [
            mean + _dot(row[: i + 1], normals)
            for i, (mean, row) in enumerate(zip(self.mean, self._lower, strict=True))
        ]

    def _mean(self, point: _Point) -> float:
        return (self._shape.slope_mean + self._shape.bend_mean * point.below) * point.below

    def _kernel(self, a: _Point, b: _Point) -> float:
        shape = self._shape
        product = a.below * b.below
        value = shape.level**2 + shape.slope**2 * product + shape.bend**2 * product**2
        value += shape.smooth**2 * math.exp(-(((a.log - b.log) / _LENGTH) ** 2) / 2)
        value += DRIFT**2 * a.age * b.age
        return value + (_OWN**2 if a.limit_mw == b.limit_mw else 0.0)


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """The lower factor, rows of growing length."""
    lower: list[list[float]] = []
    for i, row in enumerate(matrix):
        new: list[float] = []
        for j in range(i):
            new.append((row[j] - _dot(new, lower[j])) / lower[j][j])
        new.append(math.sqrt(max(1e-12, row[i] - _dot(new, new))))
        lower.append(new)
    return lower


def _solve(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    found: list[float] = []
    for i, row in enumerate(lower):
        found.append((right[i] - _dot(found, row)) / row[i])
    return found


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Dot product over the shorter of the two."""
    return float(sum(map(operator.mul, a, b)))


def step_noise(samples: Sequence[SettingSample]) -> float:
    """Spread of a single step's time, as a fraction: from the differences between samples of one
    limit.
    """
    squares = STEP_NOISE_WEIGHT * STEP_NOISE**2
    degrees = STEP_NOISE_WEIGHT
    for group in visits(samples):
        mean = sum(one.time_s for one in group) / sum(one.steps for one in group)
        squares += sum(one.steps * math.log(one.time_s / one.steps / mean) ** 2 for one in group)
        degrees += len(group) - 1
    return math.sqrt(squares / degrees)


def visits(samples: Sequence[SettingSample]) -> list[list[SettingSample]]:
    """Groups samples, in order, by stay at one limit."""
    groups: list[list[SettingSample]] = []
    for one in samples:
        last = groups[-1][-1] if groups else None
        if last is not None and last.power_limit_mw == one.power_limit_mw:
            between = one.position - last.position - (one.steps + last.steps) / 2
            if between <= one.steps + last.steps:
                groups[-1].append(one)
                continue
        groups.append([one])
    return groups


class Estimates:
    """Learns from samples.

    Args:
        limits_mw: All limits, mW, descending.
        gpus: Number of GPUs included in the energies.
        horizon: Steps over which `DRIFT` may happen.
    """

    def __init__(self, limits_mw: Sequence[int], gpus: int, horizon: float) -> None:
        self.limits_mw = list(limits_mw)
        self.gpus = gpus
        self.horizon = max(1.0, horizon)
        self.samples: list[SettingSample] = []

    def add(self, sample: SettingSample) -> None:
        """Adds a sample."""
        self.samples.append(sample)

    def steps_at(self, power_limit_mw: int) -> int:
        """The number of steps measured at a limit."""
        return sum(one.steps for one in self.samples if one.power_limit_mw == power_limit_mw)

    def step_noise(self) -> float:
        """See the function of this name."""
        return step_noise(self.samples)

    def draw_mw(self) -> float:
        """Mean power of a GPU at the highest measured limit.

        Raises:
            ValueError: There is no sample.
        """
        if not self.samples:
            raise ValueError("nothing was measured yet")
        energy_j, time_s, _ = self._total(max(one.power_limit_mw for one in self.samples))
        return energy_j / time_s / self.gpus * 1000

    def step_s(self) -> float:
        """Mean time of a step at the highest measured limit.

        Raises:
            ValueError: There is no sample.
        """
        if not self.samples:
            raise ValueError("nothing was measured yet")
        highest = max(one.power_limit_mw for one in self.samples)
        return self._total(highest)[1] / self.steps_at(highest)

    def fall_at(self, power_limit_mw: int) -> tuple[float, float]:
        """The relative reduction of power compared with the highest limit, and its standard
        deviation.
        """
        highest = self._total(max(one.power_limit_mw for one in self.samples))
        energy_j, time_s, error = self._total(power_limit_mw)
        ratio = energy_j / time_s * highest[1] / highest[0]
        return 1 - ratio, ratio * math.hypot(error, highest[2])

    def _total(self, power_limit_mw: int) -> tuple[float, float, float]:
        """Energy and time of all samples at a limit, and the standard deviation of the power."""
        own = [one for one in self.samples if one.power_limit_mw == power_limit_mw]
        energy_j = sum(one.energy_j for one in own)
        sensor = math.hypot(*(one.energy_error_j / 2 for one in own)) / energy_j
        noise = self.step_noise() / 3 / math.sqrt(sum(one.steps for one in own))
        return energy_j, sum(one.time_s for one in own), math.hypot(sensor, noise)

    def posterior(self, position: float) -> Posterior:
        """Returns the estimates as of a position in the search.

        Raises:
            ValueError: There is no sample.
        """
        if not self.samples:
            raise ValueError("nothing was measured yet")
        return Posterior(self, position)


class Posterior:
    """The estimates of all limits as of one time. Made by `Estimates.posterior`."""

    def __init__(self, source: Estimates, position: float) -> None:
        self._limits = source.limits_mw
        self._steps = [source.steps_at(limit) for limit in self._limits]
        noise = source.step_noise()
        stays = visits(source.samples)
        times: list[tuple[float, float]] = []
        powers: list[tuple[float, float]] = []
        for group in stays:
            steps = sum(one.steps for one in group)
            time_s = sum(one.time_s for one in group)
            energy_j = sum(one.energy_j for one in group)
            sensor = sum(one.energy_error_j for one in group) / 2 / energy_j
            times.append((math.log(time_s / steps), noise**2 / steps))
            # A longer step is more work at about the same power.
            powers.append((math.log(energy_j / time_s), (noise / 3) ** 2 / steps + sensor**2))
        # The job's own power is seen where nothing caps it.
        base = max(range(len(stays)), key=lambda at: stays[at][0].power_limit_mw)
        self._natural_mw = math.exp(powers[base][0]) / source.gpus * 1000
        points = [
            self._point(group[0].power_limit_mw, (_middle(group) - position) / source.horizon)
            for group in stays
        ]
        grid = [self._point(limit, 0.0) for limit in self._limits]

        def process(shape: _Shape, values: list[tuple[float, float]]) -> _Process:
            observed = [(point, *value) for point, value in zip(points, values, strict=True)]
            return _Process(shape, values[base][0], observed, grid)

        self._time = process(_TIME, times)
        self._power = process(_POWER, powers)

    def estimates(self) -> list[LimitEstimate]:
        """One for each limit, measured or not."""
        found = []
        for i, limit in enumerate(self._limits):
            time_var, power_var = self._time.covariance[i][i], self._power.covariance[i][i]
            time_s = math.exp(self._time.mean[i])
            energy_j = time_s * math.exp(self._power.mean[i])
            errors = math.sqrt(max(0.0, time_var)), math.sqrt(max(0.0, time_var + power_var))
            time_off, power_off = self._time.off_the_first(i), self._power.off_the_first(i)
            ratios = math.sqrt(time_off), math.sqrt(time_off + power_off)
            found.append(LimitEstimate(limit, time_s, energy_j, *errors, self._steps[i], *ratios))
        return found

    def curves(
        self, normals: Sequence[tuple[Sequence[float], Sequence[float]]]
    ) -> list[LimitCurve]:
        """Draws random curves from the posterior.

        Args:
            normals: For each curve, two rows of independent normal numbers, one for each limit.
        """
        curves = []
        for for_time, for_power in normals:
            time_s = [math.exp(one) for one in self._time.draw(for_time)]
            power_w = [math.exp(one) for one in self._power.draw(for_power)]
            curves.append(LimitCurve(time_s, [t * p for t, p in zip(time_s, power_w, strict=True)]))
        return curves

    def _point(self, limit_mw: int, age: float) -> _Point:
        # A job's peaks are capped a little before its mean.
        below = max(0.0, math.log(1.04 * self._natural_mw / limit_mw))
        return _Point(limit_mw, math.log(limit_mw), below, age)


def _middle(group: Sequence[SettingSample]) -> float:
    return sum(one.position * one.steps for one in group) / sum(one.steps for one in group)

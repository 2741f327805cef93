"""Estimates of every power limit from noisy measurements of some: a Gaussian process.

Time per step and mean power are each estimated on a logarithmic scale, relative to the highest
limit that was measured. Below the power that the job draws by itself, time grows and power falls
with the limit, steeper the lower; above it nothing changes. This gives the mean and the two slopes;
the rest is a smooth deviation, and an independent one for each limit. Source of the method:
Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006, chapter 2; of the shape: You,
Chung, Chowdhury, "Zeus", NSDI 2023, figure 2.

Plain Python: a decision takes some thousand operations, and training jobs do not need NumPy for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt

from zeus.optimizer.power_limit.settings import Setting

STEP_NOISE = 0.03
"""Prior spread of single steps, as a fraction, ..."""
STEP_NOISE_WEIGHT = 3.0
"""... and its weight in chunks."""


@dataclass(frozen=True)
class SettingSample(Setting):
    """Measurement of some steps at one setting, all GPUs together.

    Attributes:
        time_s: Time of all of them, in the slowest process.
        energy_error_j: Uncertainty of their energy, two standard deviations.
        position: Training steps between the beginning of the search and the sample's middle.
    """

    steps: PositiveInt
    energy_j: PositiveFloat
    time_s: PositiveFloat
    energy_error_j: float = 0.0
    position: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.time_s / self.steps


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

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs together."""
        return self.energy_j / self.time_s

    @property
    def power_error(self) -> float:
        """Standard deviation of `power_w`, as a fraction of it: a longer step is more work at about
        the same power.
        """
        return math.sqrt(self.energy_error**2 - (1 - 1 / 9) * self.time_error**2)


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
    """A point of the process: a limit, and how far it is below the job's own draw."""

    limit_mw: int
    log: float
    below: float


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
    for stay in visits(samples):
        mean_s = merged(stay).step_s
        squares += sum(one.steps * math.log(one.step_s / mean_s) ** 2 for one in stay)
        degrees += len(stay) - 1
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


def merged(samples: Sequence[SettingSample]) -> SettingSample:
    """Samples of one limit as one."""
    steps = sum(one.steps for one in samples)
    return SettingSample(
        samples[0].power_limit_mw,
        steps,
        sum(one.energy_j for one in samples),
        sum(one.time_s for one in samples),
        math.hypot(*(one.energy_error_j for one in samples)),
    )


def averages(samples: Sequence[SettingSample]) -> list[LimitEstimate]:
    """The averages of each measured limit, descending."""
    noise = step_noise(samples)
    found = []
    for limit in sorted({one.power_limit_mw for one in samples}, reverse=True):
        own = merged([one for one in samples if one.power_limit_mw == limit])
        error = noise / math.sqrt(own.steps)
        errors = error, math.hypot(error, own.energy_error_j / 2 / own.energy_j)
        found.append(LimitEstimate(limit, own.step_s, own.energy_j / own.steps, *errors, own.steps))
    return found


class Estimates:
    """The estimates of all limits.

    Args:
        limits_mw: All limits, mW, descending.
        samples: At least one.
        gpus: Number of GPUs included in the energies.
    """

    def __init__(
        self, limits_mw: Sequence[int], samples: Sequence[SettingSample], gpus: int
    ) -> None:
        self._steps = dict.fromkeys(limits_mw, 0)
        noise = step_noise(samples)
        stays = [merged(stay) for stay in visits(samples)]
        for one in stays:
            self._steps[one.power_limit_mw] = self._steps.get(one.power_limit_mw, 0) + one.steps
        # The job's own power is seen where nothing caps it.
        base = max(stays, key=lambda one: one.power_limit_mw)
        natural_mw = base.energy_j / base.time_s / gpus * 1000

        def point(limit_mw: int) -> _Point:
            # A job's peaks are capped a little before its mean.
            below = max(0.0, math.log(1.04 * natural_mw / limit_mw))
            return _Point(limit_mw, math.log(limit_mw), below)

        grid = [point(limit) for limit in limits_mw]
        times: list[tuple[_Point, float, float]] = []
        powers: list[tuple[_Point, float, float]] = []
        for one in stays:
            at = point(one.power_limit_mw)
            sensor = one.energy_error_j / 2 / one.energy_j
            times.append((at, math.log(one.step_s), noise**2 / one.steps))
            # A longer step is more work at about the same power.
            power = math.log(one.energy_j / one.time_s)
            powers.append((at, power, (noise / 3) ** 2 / one.steps + sensor**2))
        self._limits_mw = list(limits_mw)
        self._time = _Process(_TIME, math.log(base.step_s), times, grid)
        self._power = _Process(_POWER, math.log(base.energy_j / base.time_s), powers, grid)

    def limits(self) -> list[LimitEstimate]:
        """One for each limit, measured or not."""
        found = []
        for i, limit in enumerate(self._limits_mw):
            time_var, power_var = self._time.covariance[i][i], self._power.covariance[i][i]
            time_s = math.exp(self._time.mean[i])
            energy_j = time_s * math.exp(self._power.mean[i])
            errors = math.sqrt(max(0.0, time_var)), math.sqrt(max(0.0, time_var + power_var))
            time_off, power_off = self._time.off_the_first(i), self._power.off_the_first(i)
            ratios = math.sqrt(time_off), math.sqrt(time_off + power_off)
            steps = self._steps[limit]
            found.append(LimitEstimate(limit, time_s, energy_j, *errors, steps, *ratios))
        return found

    def curves(
        self, normals: Sequence[tuple[Sequence[float], Sequence[float]]]
    ) -> list[LimitCurve]:
        """Draws random curves.

        Args:
            normals: For each curve, two rows of independent normal numbers, one for each limit.
        """
        curves = []
        for for_time, for_power in normals:
            time_s = [math.exp(one) for one in self._time.draw(for_time)]
            power_w = [math.exp(one) for one in self._power.draw(for_power)]
            curves.append(LimitCurve(time_s, [t * p for t, p in zip(time_s, power_w, strict=True)]))
        return curves

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
from dataclasses import dataclass, replace

from pydantic import PositiveFloat, PositiveInt

from zeus.optimizer.power_limit.settings import Setting

STEP_NOISE = 0.03
"""Prior spread of single steps, as a fraction, ..."""
STEP_NOISE_WEIGHT = 3.0
"""... and its weight in chunks."""
PEAK = 1.04
"""A job's peaks over its mean power: a limit that is higher does nothing."""

Curve = tuple[list[float], list[float]]
"""A possible curve: time, s, and energy, J, per step at each limit."""


@dataclass(frozen=True)
class SettingSample(Setting):
    """Measurement of some steps at one setting, all GPUs together.

    Attributes:
        time_s: Time of all of them, in the slowest process.
        energy_error_j: Uncertainty of their energy, two standard deviations.
        position: Training steps between the beginning of the search and the sample's middle.
        limited_s: Time in which power limited the clocks of a GPU; None: not counted.
    """

    steps: PositiveInt
    energy_j: PositiveFloat
    time_s: PositiveFloat
    energy_error_j: float = 0.0
    position: float = 0.0
    limited_s: float | None = None

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

    def against(self, highest: LimitEstimate) -> LimitEstimate:
        """The same, with errors of the ratios to an independent estimate of the highest limit."""
        return replace(
            self,
            time_ratio_error=math.hypot(self.time_error, highest.time_error),
            energy_ratio_error=math.hypot(self.energy_error, highest.energy_error),
        )

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

    def covariance(self, apart: float, product: float, same: bool) -> float:
        """Of two limits, before anything is measured.

        Args:
            apart: Difference of their logarithms.
            product: Of how far each is below the job's own draw.
            same: Whether they are one limit.
        """
        value = self.level**2 + self.slope**2 * product + self.bend**2 * product**2
        value += self.smooth**2 * math.exp(-((apart / _LENGTH) ** 2) / 2)
        return value + same * _OWN**2


_OWN = 0.02
"""Deviation of a single limit from the smooth curve, one standard deviation."""
_LENGTH = 0.25  # of the smooth deviation, in the limit's logarithm
_TIME = _Shape(0.2, 0.7, level=0.05, slope=0.3, bend=0.7, smooth=0.02)
_POWER = _Shape(-0.9, 0.0, level=0.05, slope=0.1, bend=0.1, smooth=0.03)


class _Process:
    """A Gaussian process of one quantity's logarithm, at all limits.

    Args:
        shape: What is known before any observation.
        level: The logarithm at a limit that does not bind.
        logs: Logarithm of each limit.
        below: How far each limit is below the job's own draw.
    """

    def __init__(
        self, shape: _Shape, level: float, logs: Sequence[float], below: Sequence[float]
    ) -> None:
        self.mean = [level + (shape.slope_mean + shape.bend_mean * one) * one for one in below]
        self.covariance = [
            [
                shape.covariance(logs[i] - logs[j], below[i] * below[j], i == j)
                for j in range(len(logs))
            ]
            for i in range(len(logs))
        ]

    def observe(self, at: int, value: float, variance: float) -> None:
        """Learns the value at a limit, known with this variance."""
        column = [row[at] for row in self.covariance]
        total = column[at] + variance
        off = value - self.mean[at]
        for i, covariance in enumerate(column):
            gain = covariance / total
            self.mean[i] += gain * off
            self.covariance[i] = [
                old - gain * one for old, one in zip(self.covariance[i], column, strict=True)
            ]

    def off_the_first(self, i: int) -> float:
        """Variance of the difference between a limit and the first."""
        both = self.covariance[i][i] + self.covariance[0][0]
        return max(0.0, both - 2 * self.covariance[i][0])

    def draw(self, normals: Sequence[Sequence[float]]) -> list[list[float]]:
        """A random curve from each row of as many independent normal numbers."""
        lower = _cholesky(self.covariance)
        return [
            [mean + _dot(row, own) for mean, row in zip(self.mean, lower, strict=True)]
            for own in normals
        ]


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
    estimates = []
    for limit in sorted({one.power_limit_mw for one in samples}, reverse=True):
        own = merged([one for one in samples if one.power_limit_mw == limit])
        error = noise / math.sqrt(own.steps)
        errors = error, math.hypot(error, own.energy_error_j / 2 / own.energy_j)
        estimates.append(
            LimitEstimate(limit, own.step_s, own.energy_j / own.steps, *errors, own.steps)
        )
    return [*estimates[:1], *(one.against(estimates[0]) for one in estimates[1:])]


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
        base_w = base.energy_j / base.time_s
        # A job's peaks are capped a little before its mean.
        capped_mw = PEAK * base_w / gpus * 1000
        below = [max(0.0, math.log(capped_mw / limit)) for limit in limits_mw]
        logs = [math.log(limit) for limit in limits_mw]
        self._limits_mw = list(limits_mw)
        self._time = _Process(_TIME, math.log(base.step_s), logs, below)
        self._power = _Process(_POWER, math.log(base_w), logs, below)
        for one in stays:
            at = self._limits_mw.index(one.power_limit_mw)
            sensor = one.energy_error_j / 2 / one.energy_j
            self._time.observe(at, math.log(one.step_s), noise**2 / one.steps)
            # A longer step is more work at about the same power.
            variance = (noise / 3) ** 2 / one.steps + sensor**2
            self._power.observe(at, math.log(one.energy_j / one.time_s), variance)

    def limits(self) -> list[LimitEstimate]:
        """One for each limit, measured or not."""
        estimates = []
        for i, limit in enumerate(self._limits_mw):
            time_var, power_var = self._time.covariance[i][i], self._power.covariance[i][i]
            time_s = math.exp(self._time.mean[i])
            energy_j = time_s * math.exp(self._power.mean[i])
            errors = math.sqrt(max(0.0, time_var)), math.sqrt(max(0.0, time_var + power_var))
            time_off, power_off = self._time.off_the_first(i), self._power.off_the_first(i)
            ratios = math.sqrt(time_off), math.sqrt(time_off + power_off)
            steps = self._steps[limit]
            estimates.append(LimitEstimate(limit, time_s, energy_j, *errors, steps, *ratios))
        return estimates

    def curves(
        self, times: Sequence[Sequence[float]], powers: Sequence[Sequence[float]]
    ) -> list[Curve]:
        """Draws random curves, from as many rows of independent normal numbers for each quantity,
        one for each limit.
        """
        curves = []
        for for_time, for_power in zip(
            self._time.draw(times), self._power.draw(powers), strict=True
        ):
            time_s = [math.exp(one) for one in for_time]
            energy_j = [t * math.exp(one) for t, one in zip(time_s, for_power, strict=True)]
            curves.append((time_s, energy_j))
        return curves

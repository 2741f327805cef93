"""Profiles: a job's relative progress by power limit. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MEAN_POINTS = 256
"""Most points of a mean of profiles, about evenly taken from all."""


@dataclass(frozen=True)
class ProgressProfile:
    """Relative progress of a job by its GPUs' power limit.

    Attributes:
        limits_mw: Increasing.
        progress: Progress at each limit; non-decreasing, 1 at the highest limit.

    Raises:
        ValueError: It is not a valid profile.
    """

    limits_mw: tuple[int, ...]
    progress: tuple[float, ...]

    def __post_init__(self) -> None:
        limits, progress = self.limits_mw, self.progress
        if len(limits) < 2 or len(limits) != len(progress):
            raise ValueError("a profile needs the progress of two limits or more")
        if any(low >= high for low, high in itertools.pairwise(limits)):
            raise ValueError("a profile's limits must increase")
        if progress[0] <= 0 or any(low > high for low, high in itertools.pairwise(progress)):
            raise ValueError("a profile's progress must be positive and must not decrease")

    @classmethod
    def measured(cls, times: Mapping[int, float]) -> ProgressProfile:
        """Builds a profile from the time of the same work at each limit.

        If a higher limit was measured as slower, which is noise, both get their mean.

        Args:
            times: Time by limit, mW.
        """
        limits = sorted(times)
        rates = monotone([1 / times[limit] for limit in limits])
        return cls(tuple(limits), tuple(rate / rates[-1] for rate in rates))

    def at(self, limit_mw: float) -> float:
        """The progress at a limit, interpolated; constant beyond what was measured."""
        return interpolated(self.limits_mw, self.progress, limit_mw)

    def limit_for(self, progress: float) -> int:
        """The lowest limit with at least this progress; the highest limit if none has it."""
        index = bisect.bisect_left(self.progress, progress)
        if index == 0:
            return self.limits_mw[0]
        if index == len(self.progress):
            return self.limits_mw[-1]
        (low, high), (slow, fast) = (
            self.limits_mw[index - 1 : index + 1],
            self.progress[index - 1 : index + 1],
        )
        return high - int((high - low) * (fast - progress) / (fast - slow))

    def segments(self, from_mw: int, to_mw: int) -> list[tuple[float, int]]:
        """The segments of the upper concave envelope between two limits: (progress per mW, mW),
        steepest first."""
        inner = [limit for limit in self.limits_mw if from_mw < limit < to_mw]
        points: list[tuple[int, float]] = []
        for limit in dict.fromkeys((from_mw, *inner, to_mw)):
            point = (limit, self.at(limit))
            while len(points) > 1 and _slope(points[-2], points[-1]) <= _slope(points[-1], point):
                points.pop()
            points.append(point)
        return [(_slope(a, b), b[0] - a[0]) for a, b in itertools.pairwise(points)]


def mean(profiles: Iterable[ProgressProfile]) -> ProgressProfile | None:
    """The mean profile, on the limits of all; None if there are none."""
    known = list(profiles)
    if not known:
        return None
    limits = sorted({limit for profile in known for limit in profile.limits_mw})
    limits = [*limits[: -1 : 1 + len(limits) // MEAN_POINTS], limits[-1]]
    sums = [sum(profile.at(limit) for profile in known) / len(known) for limit in limits]
    return ProgressProfile(tuple(limits), tuple(monotone(sums)))


def monotone(values: Iterable[float]) -> list[float]:
    """The nearest non-decreasing values by least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (right, n), (left, m) = pools.pop(), pools.pop()
            pools.append(((left * m + right * n) / (m + n), m + n))
    return [value for value, count in pools for _ in range(count)]


def interpolated(xs: tuple[int, ...], ys: tuple[float, ...], x: float) -> float:
    """Interpolates linearly between points; constant beyond them."""
    index = bisect.bisect_left(xs, x)
    if index == 0:
        return ys[0]
    if index == len(xs):
        return ys[-1]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - xs[index - 1]) / (
        xs[index] - xs[index - 1]
    )


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])

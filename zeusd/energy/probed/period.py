"""The period at which a sensor is updated, its phase and its jitter, from the observed updates. An
update shows only if the value changes, so the observed updates are some of the points of a lattice.
Candidates for its spacing are the gaps between updates and simple fractions of them; each is
refined by regression over twice as many updates at a time, so that no update is ever taken for its
neighbour. Of the spacings that explain the updates the largest is the period. Updates whose error
adds up from one to the next, as of a timer that is armed again each time, lie on no lattice: their
period is the mean gap, and they have no phase.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zeus_common.units import MS
from zeusd.energy.probed.series import ShownUpdate

TOLERANCE = 0.15
"""How far an update may lie from the lattice, as a share of the period."""

ON_LATTICE = 0.8
"""Share of the updates that must lie on the lattice; of random ones, twice `TOLERANCE` do."""

ALIKE = 0.9
"""Share of the updates on a lattice that must lie on a wider one for that to be the period."""

SHARPNESS = 3
"""The period is at least so many times the time between two readings."""

_QUANTILES = (0.05, 0.15, 0.3, 0.5)
_FRACTIONS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class UpdatePeriod:
    """When a sensor is updated.

    Attributes:
        period_ms: Mean time between updates.
        period_uncertainty_ms: Two standard deviations of it.
        phase_ms: Time from the start of the readings to the first update on the lattice, at least
            0 and less than the period; None where updates keep no phase.
        phase_uncertainty_ms: Two standard deviations of it.
        jitter_ms: Standard deviation of an update's time, the time between readings discounted.
        updates: Updates that showed.
        silent_updates: Updates that were due within the readings and did not show.
    """

    period_ms: float
    period_uncertainty_ms: float
    phase_ms: float | None
    phase_uncertainty_ms: float | None
    jitter_ms: float
    updates: int
    silent_updates: int


@dataclass(frozen=True)
class _Lattice:
    spacing: float
    origin: float
    inliers: tuple[int, ...]
    numbers: tuple[int, ...]
    residuals: tuple[float, ...]


def find_period(changes: Sequence[ShownUpdate], begin_ns: int) -> UpdatePeriod | None:
    """Returns the period of updates; None if they show none.

    Args:
        changes: The updates that showed (`Series.changes`).
        begin_ns: Zero of the phase.
    """
    # With fewer updates, no period can be determined.
    if len(changes) < 8:
        return None
    typical = float(sorted(change.width_ns for change in changes)[len(changes) // 4])
    # An update in an interval longer than this many typical ones is ignored: the machine was busy.
    dated = [change for change in changes if change.width_ns <= 3 * typical]
    times = [change.t_ns - begin_ns for change in dated]
    widths = [float(change.width_ns) for change in dated]
    weights = [1 / max(width, typical, 1.0) ** 2 for width in widths]
    for spacing in _candidates(times):
        if spacing < SHARPNESS * typical:
            continue
        lattice = _refine(times, weights, spacing)
        if lattice is not None and len(lattice.inliers) >= ON_LATTICE * len(times):
            return _on_lattice(_widest(lattice, times, weights), times, widths)
    return _drifting(times, widths, typical)


def date(change: ShownUpdate, period: UpdatePeriod | None, begin_ns: int) -> float:
    """Returns the time of an update (ns): its point of the lattice, within its interval.

    Args:
        change: The update.
        period: That of its sensor, if any.
        begin_ns: Zero of the period's phase.
    """
    if period is None or period.phase_ms is None:
        return change.t_ns
    spacing, origin = period.period_ms * MS, begin_ns + period.phase_ms * MS
    nearest = origin + round((change.t_ns - origin) / spacing) * spacing
    return min(max(nearest, change.after_ns), change.until_ns)


def _widest(lattice: _Lattice, times: Sequence[float], weights: Sequence[float]) -> _Lattice:
    """Drops points of a lattice that almost no update lies on."""
    for multiple in range(_FRACTIONS[-1], 1, -1):
        _, most = Counter(number % multiple for number in lattice.numbers).most_common(1)[0]
        if most >= ALIKE * len(lattice.numbers):
            wider = _refine(times, weights, multiple * lattice.spacing)
            if wider is not None and len(wider.inliers) >= ALIKE * len(lattice.inliers):
                return wider
    return lattice


def _candidates(times: Sequence[float]) -> list[float]:
    """Possible spacings, largest first."""
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    periods = []
    for quantile in _QUANTILES:
        gap = gaps[int(quantile * (len(gaps) - 1))]
        alike = [other for other in gaps if abs(other - gap) <= 0.15 * gap]
        if alike:
            periods += [sum(alike) / len(alike) / fraction for fraction in _FRACTIONS]
    return sorted(periods, reverse=True)


def _refine(times: Sequence[float], weights: Sequence[float], spacing: float) -> _Lattice | None:
    """Fits a lattice to twice as many updates at a time, beginning with the three closest ones."""
    middle = min(range(1, len(times) - 1), key=lambda n: times[n + 1] - times[n - 1])
    origin, size = times[middle], 3
    outward = sorted(range(len(times)), key=lambda n: abs(times[n] - times[middle]))
    while True:
        part = outward[:size]
        number = {n: round((times[n] - origin) / spacing) for n in part}
        inliers = [n for n in part if abs(times[n] - origin - number[n] * spacing) < 0.25 * spacing]
        fitted = _regress(
            [number[n] for n in inliers],
            [times[n] for n in inliers],
            [weights[n] for n in inliers],
        )
        if fitted is None:
            return None
        origin, slope = fitted
        if not 0.5 * spacing < slope < 1.5 * spacing:
            return None
        spacing = slope
        if size >= len(times):
            break
        size *= 2
    origin %= spacing  # the phase, and how well it is known, count from the start of the readings
    numbers = [round((time - origin) / spacing) for time in times]
    residuals = [
        time - origin - number * spacing for time, number in zip(times, numbers, strict=True)
    ]
    kept = [n for n, residual in enumerate(residuals) if abs(residual) <= TOLERANCE * spacing]
    return _Lattice(
        spacing,
        origin,
        tuple(kept),
        tuple(numbers[n] for n in kept),
        tuple(residuals[n] for n in kept),
    )


def _regress(
    x: Sequence[float], y: Sequence[float], weights: Sequence[float]
) -> tuple[float, float] | None:
    """Weighted least squares: intercept and slope."""
    total = sum(weights)
    if len(set(x)) < 2:
        return None
    x_mean = sum(w * one for w, one in zip(weights, x, strict=True)) / total
    y_mean = sum(w * one for w, one in zip(weights, y, strict=True)) / total
    spread = sum(w * (one - x_mean) ** 2 for w, one in zip(weights, x, strict=True))
    common = sum(
        w * (one - x_mean) * (other - y_mean) for w, one, other in zip(weights, x, y, strict=True)
    )
    slope = common / spread
    return y_mean - slope * x_mean, slope


def _on_lattice(lattice: _Lattice, times: Sequence[float], widths: Sequence[float]) -> UpdatePeriod:
    count = len(lattice.inliers)
    variance = sum(residual**2 for residual in lattice.residuals) / count
    blur = sum(widths[n] ** 2 for n in lattice.inliers) / count / 12
    mean = sum(lattice.numbers) / count
    spread = sum((number - mean) ** 2 for number in lattice.numbers)
    floor = math.sqrt(max(variance, blur))
    due = lattice.numbers[-1] - lattice.numbers[0] + 1
    return UpdatePeriod(
        period_ms=lattice.spacing / MS,
        period_uncertainty_ms=2 * floor / math.sqrt(spread) / MS,
        phase_ms=(lattice.origin % lattice.spacing) / MS,
        phase_uncertainty_ms=2 * floor * math.sqrt(1 / count + mean**2 / spread) / MS,
        jitter_ms=math.sqrt(max(0.0, variance - blur)) / MS,
        updates=len(times),
        silent_updates=max(0, due - len(set(lattice.numbers))),
    )


def _drifting(
    times: Sequence[float], widths: Sequence[float], typical: float
) -> UpdatePeriod | None:
    """The period of a sensor that measures when it is read, so that updates follow no clock."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    middle = sorted(gaps)[len(gaps) // 2]
    if middle < SHARPNESS * typical:
        return None
    steps = [max(1, round(gap / middle)) for gap in gaps]
    errors = [gap / step - middle for gap, step in zip(gaps, steps, strict=True)]
    near = [n for n, error in enumerate(errors) if abs(error) <= TOLERANCE * middle]
    if len(near) < ON_LATTICE * len(gaps):
        return None
    period = sum(gaps[n] for n in near) / sum(steps[n] for n in near)
    variance = sum((gaps[n] - steps[n] * period) ** 2 for n in near) / len(near)
    blur = sum(width**2 for width in widths) / len(widths) / 6  # both ends of a gap
    return UpdatePeriod(
        period_ms=period / MS,
        period_uncertainty_ms=2 * math.sqrt(variance / len(near)) / MS,
        phase_ms=None,
        phase_uncertainty_ms=None,
        jitter_ms=math.sqrt(max(0.0, variance - blur)) / MS,
        updates=len(times),
        silent_updates=sum(steps) - len(steps),
    )

"""Compares an energy counter with power readings of the same time, and with known bursts of load;
the resolution of counter and power.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeusd.energy.probed.series import ReadingSeries
from zeusd.energy.probed.window import VisibleWindow


@dataclass(frozen=True)
class CounterEnergy:
    """Energy by the counter and by power readings over the same time.

    Attributes:
        counter_j: Increase of the counter.
        integrated_j: Mean of the power readings, times the time.
        span_s: The time, from the counter's first update to its last.
        ratio: Counter over integrated power.
        ratio_uncertainty: Two standard deviations, from the ends and the scatter of power.
        restarts: How often the counter fell, that is, restarted.
    """

    counter_j: float
    integrated_j: float
    span_s: float
    ratio: float
    ratio_uncertainty: float
    restarts: int

    @property
    def same_scope(self) -> bool:
        """Whether counter and power agree."""
        # If counter and power differ by more than this share, they measure different parts of the
        # board.
        return abs(self.ratio - 1) <= max(0.1, self.ratio_uncertainty)


def compare_energy(
    counter_mj: ReadingSeries, power_mw: ReadingSeries, period_ms: float | None
) -> CounterEnergy | None:
    """Compares the counter with integrated power; None if either did not change or was not read.

    Args:
        counter_mj: Readings of the energy counter, mJ.
        power_mw: Readings of power, mW: each is of the time before it.
        period_ms: The counter's update period; None: unknown.
    """
    changes = counter_mj.changes()
    restarts = sum(later < earlier for earlier, later in itertools.pairwise(counter_mj.values))
    if len(changes) < 2 or not power_mw.values:
        return None
    first, last = changes[0], changes[-1]
    span_ns = last.t_ns - first.t_ns
    grown_mj = sum(
        max(0, later.value - earlier.value) for earlier, later in itertools.pairwise(changes)
    )
    # A reading that appears at an update describes the time before it.
    shift_ns = (period_ms or 0.0) * 1e6
    integrated_mj = _integral(power_mw, first.t_ns + shift_ns, last.t_ns + shift_ns) / 1e9
    if integrated_mj <= 0:
        return None
    steps_s = span_ns / 1e9 / max(1, len(changes) - 1)
    ends_s = 2 * (max(steps_s, (period_ms or 0) / 1000) / math.sqrt(12))
    mean_mw = integrated_mj / (span_ns / 1e9)
    scatter_mw = math.sqrt(sum((v - mean_mw) ** 2 for v in power_mw.values) / len(power_mw.values))
    stamp_s = (first.width_ns + last.width_ns) / 2e9
    doubt = (stamp_s + ends_s * min(1.0, scatter_mw / mean_mw)) / (span_ns / 1e9)
    ratio = grown_mj / integrated_mj
    return CounterEnergy(
        counter_j=grown_mj / 1000,
        integrated_j=integrated_mj / 1000,
        span_s=span_ns / 1e9,
        ratio=ratio,
        ratio_uncertainty=ratio * doubt,
        restarts=restarts,
    )


def _integral(series: ReadingSeries, begin_ns: float, end_ns: float) -> float:
    """Integrates a step function: each reading holds since the one before it."""
    total = 0.0
    times, values = series.t_ns, series.values
    for number in range(1, len(times)):
        low, high = max(begin_ns, times[number - 1]), min(end_ns, times[number])
        if high > low:
            total += values[number] * (high - low)
    if times[-1] < end_ns:
        total += values[-1] * (end_ns - max(begin_ns, times[-1]))
    if times[0] > begin_ns:
        total += values[0] * (min(end_ns, times[0]) - begin_ns)
    return total


def find_resolution(values: Sequence[int]) -> int | None:
    """Returns the common divisor of all differences; None if too few values differ to tell."""
    distinct = sorted(set(values))
    differences = {later - earlier for earlier, later in itertools.pairwise(distinct)}
    pairs = {abs(later - earlier) for earlier, later in itertools.pairwise(values)} - {0}
    # Distinct differences needed to determine a resolution.
    if len(pairs | differences) < 6:
        return None
    return math.gcd(*differences)


@dataclass(frozen=True)
class WindowError:
    """Differences of counter readings at both ends of bursts of one length, against the plateau.

    Attributes:
        burst_ms: Mean length.
        bursts: How many.
        mean_error_percent: Mean of the absolute errors.
        bias_percent: Mean of the errors.
        truth_uncertainty_percent: Two standard deviations of the plateau.
    """

    burst_ms: float
    bursts: int
    mean_error_percent: float
    bias_percent: float
    truth_uncertainty_percent: float


def window_errors(
    counter_mj: ReadingSeries, bursts: Sequence[tuple[int, int]], plateau: VisibleWindow
) -> list[WindowError]:
    """Returns the errors of energies that are read from the counter at both ends of known bursts,
    by length of burst, longest first. The truth is the plateau of power under load times the
    burst's length.

    Args:
        counter_mj: Readings of the energy counter, mJ.
        bursts: Start and end of each burst (ns).
        plateau: The power under load, from the power readings.
    """
    groups: list[list[tuple[float, float]]] = []
    for begin_ns, end_ns in sorted(bursts, key=lambda burst: burst[0] - burst[1]):
        first = bisect.bisect_right(counter_mj.t_ns, begin_ns) - 1
        last = bisect.bisect_left(counter_mj.t_ns, end_ns)
        if first < 0 or last >= len(counter_mj.t_ns):
            continue
        length_s = (end_ns - begin_ns) / 1e9
        energy_j = (counter_mj.values[last] - counter_mj.values[first]) / 1000
        error = 100 * (energy_j / (plateau.high_w * length_s) - 1)
        # Bursts whose lengths differ by less than this factor are grouped.
        if not groups or length_s * 1.25 < groups[-1][0][0]:
            groups.append([])
        groups[-1].append((length_s, error))
    doubt = 200 * plateau.unexplained_w / math.sqrt(plateau.updates) / plateau.high_w
    return [
        WindowError(
            burst_ms=1000 * sum(length_s for length_s, _ in group) / len(group),
            bursts=len(group),
            mean_error_percent=sum(abs(error) for _, error in group) / len(group),
            bias_percent=sum(error for _, error in group) / len(group),
            truth_uncertainty_percent=doubt,
        )
        for group in groups
    ]

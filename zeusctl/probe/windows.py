"""The error of energies that are read from the counter at both ends of a known burst of load. The
truth is the plateau of power under load times the burst's length.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeusctl.probe.series import Series
from zeusctl.probe.visible import VisibleWindow

ALIKE = 1.25
"""Bursts whose lengths differ by less than this factor are grouped."""


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
    counter_mj: Series, bursts: Sequence[tuple[int, int]], plateau: VisibleWindow
) -> list[WindowError]:
    """Returns the errors by length of burst, longest first.

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
        if not groups or length_s * ALIKE < groups[-1][0][0]:
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

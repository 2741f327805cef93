"""Readings of sensors that exist only as formulas, polled as a busy machine polls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from zeus_common.units import MS
from zeusd.energy.probed.series import ReadingSeries


def polls(
    chance: random.Random,
    seconds: float,
    every_ms: float = 1.0,
    stalls: float = 0.005,
    longest_ms: float = 15.0,
) -> list[int]:
    """Times of readings (ns): late by up to a half, and now and then by up to the longest stall."""
    found, t_ns = [], float(chance.randrange(10**9, 10**12))
    end_ns = t_ns + seconds * 1e9
    while t_ns < end_ns:
        found.append(int(t_ns))
        t_ns += every_ms * MS * chance.uniform(1.0, 1.5)
        if chance.random() < stalls:
            t_ns += chance.uniform(1, longest_ms) * MS
    return found


def ticks(
    chance: random.Random, times: Sequence[int], period_ms: float, phase_ms: float, jitter_ms: float
) -> list[float]:
    """Times of updates (ns) before and within the readings."""
    begin, number = times[0], -20
    found: list[float] = []
    while not found or found[-1] < times[-1]:
        found.append(begin + (phase_ms + number * period_ms + chance.gauss(0, jitter_ms)) * MS)
        number += 1
    return sorted(found)


def read(times: Sequence[int], updates: Sequence[float], values: Sequence[int]) -> ReadingSeries:
    """The readings at `times` of a sensor that has `values` from its updates on."""
    series, number = ReadingSeries(), 0
    for t_ns in times:
        while number + 1 < len(updates) and updates[number + 1] <= t_ns:
            number += 1
        series.add(t_ns, values[number])
    return series


def boxcar(
    power_w: Callable[[float], float], t_ns: float, window_ms: float, steps: int = 60
) -> float:
    """Mean power over the window that ends at an instant."""
    begin = t_ns - window_ms * MS
    width = window_ms * MS / steps
    return sum(power_w(begin + (n + 0.5) * width) for n in range(steps)) / steps

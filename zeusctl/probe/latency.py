"""How long calls take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """How long one call took, over `calls` calls; microseconds."""

    p50_us: float
    p99_us: float
    max_us: float
    calls: int


def summarize(durations_ns: Sequence[int]) -> Latency | None:
    """Median, 99th percentile (the nearest rank) and maximum; None: there were no calls."""
    if not durations_ns:
        return None
    ordered = sorted(durations_ns)

    def rank(share: float) -> float:
        return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] / 1000

    return Latency(rank(0.5), rank(0.99), ordered[-1] / 1000, len(ordered))

"""Token buckets for rate limits. Pure arithmetic over the caller's clock."""

from __future__ import annotations

from collections.abc import Hashable

MAX_BUCKETS = 4096
"""Beyond this number, full buckets are dropped, so that unused ones take no memory."""


class RateLimiter:
    """One token bucket for each key, such as a uid.

    Args:
        per_second: Tokens added per second.
        burst: Tokens of a full bucket.
    """

    def __init__(self, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = max(1.0, burst)
        self._buckets: dict[Hashable, tuple[float, int]] = {}

    def take(self, key: Hashable, now_ns: int) -> bool:
        """Takes one token; False if the bucket is empty."""
        level = self._level(key, now_ns)
        if level < 1.0:
            return False
        self._buckets[key] = (level - 1.0, now_ns)
        if len(self._buckets) > MAX_BUCKETS:
            self._drop_full(now_ns)
        return True

    def _level(self, key: Hashable, now_ns: int) -> float:
        level, then_ns = self._buckets.get(key, (self.burst, now_ns))
        return min(self.burst, level + (now_ns - then_ns) * 1e-9 * self.per_second)

    def _drop_full(self, now_ns: int) -> None:
        self._buckets = {
            key: bucket
            for key, bucket in self._buckets.items()
            if self._level(key, now_ns) < self.burst
        }

"""Adapts the margin between predictions and an objective to the requests' latencies; pure."""

from __future__ import annotations

NEAR = 0.9
"""A request above this share of its objective is a near miss."""

LOWEST, HIGHEST, FIRST = 0.5, 1.0, 0.7
"""Range of the margin."""

RISE, NEAR_FALL, MISS_FALL = 3e-4, 0.015, 0.06
"""Changes of the margin by a request, a near miss and a miss. So the margin is stable with one near
miss in 50 requests, or one miss in 200: misses often occur in clusters."""


class Margin:
    """The share of one objective that a prediction may use.

    Args:
        objective_s: The objective, s.
    """

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self.value = FIRST

    def finished(self, seen_s: float, ours: float) -> None:
        """One request.

        Args:
            seen_s: Its latency, s.
            ours: Share of the time before in which the clock was below the highest: no margin can
                avoid misses at the highest clock.
        """
        if seen_s > NEAR * self._objective_s:
            fall = MISS_FALL if seen_s > self._objective_s else NEAR_FALL
            self.value = max(LOWEST, self.value - fall * ours)
        else:
            self.value = min(HIGHEST, self.value + RISE)


class Lost:
    """Whether the objectives cannot be met at any clock: a large share of requests misses them."""

    ENTER, LEAVE = 0.3, 0.15
    MEMORY = 40.0

    def __init__(self) -> None:
        self.share = 0.0
        self.now = False

    def finished(self, violated: bool) -> None:
        """One request."""
        self.share += (violated - self.share) / self.MEMORY
        self.now = self.share > (self.LEAVE if self.now else self.ENTER)

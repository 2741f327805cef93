"""How near to an objective predictions may come, by how near requests came; pure."""

from __future__ import annotations

NEAR = 0.9
"""A request above this share of its objective is a near miss."""

LOWEST, HIGHEST, FIRST = 0.5, 1.0, 0.7
"""Of the margin."""

RISE, NEAR_FALL, MISS_FALL = 3e-4, 0.015, 0.06
"""What a request adds to the margin, and what a near miss and a miss take off. So one near miss in
50 requests holds the margin where it is, or one miss in 200: misses often come in clusters."""


class Margin:
    """The share of one objective that a prediction may use up.

    Args:
        objective_s: The objective, s.
    """

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self.value = FIRST

    def finished(self, seen_s: float, ours: float) -> None:
        """One request.

        Args:
            seen_s: What it saw, s.
            ours: Share of the time before at which the clock was below the highest: what happens
                at the highest clock no margin could have avoided.
        """
        if seen_s > NEAR * self._objective_s:
            fall = MISS_FALL if seen_s > self._objective_s else NEAR_FALL
            self.value = max(LOWEST, self.value - fall * ours)
        else:
            self.value = min(HIGHEST, self.value + RISE)


class Lost:
    """Whether the objectives are lost at any clock: a large share of requests misses them."""

    ENTER, LEAVE = 0.3, 0.15
    MEMORY = 40.0

    def __init__(self) -> None:
        self.share = 0.0
        self.now = False

    def finished(self, violated: bool) -> None:
        """One request."""
        self.share += (violated - self.share) / self.MEMORY
        self.now = self.share > (self.LEAVE if self.now else self.ENTER)

"""How near to an objective predictions may come, by how near requests came; pure."""

from __future__ import annotations

NEAR = 0.9
"""A request above this share of its objective is a near miss."""

AIM = 0.006
"""Share of requests that may come near."""

LOWEST, HIGHEST, FIRST = 0.5, 1.0, 0.7
"""Of the margin."""

GAIN = 0.03
"""What one near miss takes off."""


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
            self.value = max(LOWEST, self.value - GAIN * ours)
        else:
            self.value = min(HIGHEST, self.value + GAIN * AIM)


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

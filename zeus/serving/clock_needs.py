"""Clock floor and power that an instance's objectives needed recently; pure.

A power budget's allocator must not go below the power (`zeus_fleet.policies.Job.needs_mw`).
"""

from __future__ import annotations

import math

KEPT_S = 300.0
"""Length of the interval whose highest values count; at most twice this."""


class Needs:
    """The highest wanted clock, and the highest power of a GPU, over some minutes."""

    def __init__(self) -> None:
        self._began_s = -math.inf
        self._now = self._before = (0.0, 0.0)

    def seen(self, now_s: float, clock_mhz: float, watts: float) -> None:
        """Adds the clock that the policy wants, and the power of the GPU that draws most; NaN: not
        known.
        """
        if not self._began_s <= now_s < self._began_s + KEPT_S:
            self._began_s, self._before, self._now = now_s, self._now, (0.0, 0.0)
        clock, power = self._now
        self._now = max(clock, clock_mhz), watts if watts > power else power

    @property
    def clock_mhz(self) -> float:
        """The lowest clock that would have met the objectives all the time; 0: not known yet."""
        return max(self._before[0], self._now[0])

    @property
    def power_w(self) -> float:
        """Highest power of one GPU, W; NaN: not known."""
        return max(self._before[1], self._now[1]) or math.nan

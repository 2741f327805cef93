"""Where a lower clock stops being worth its time; pure.

Under an open load slower steps make larger batches, so joules per token at a fixed batch is the
wrong measure. The energy counted here is that of the time: busy at a clock's power, idle else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeus.serving.clock_power import PowerFit

WORTH = 0.25
"""Share of a percent of energy that a percent of longer steps must buy."""

STAY = 0.6
"""A clock in use is kept while it buys this share of what it had to buy: no change for nothing."""

GENERIC = (0.2, 0.15, 0.25, 0.4)
"""A generic power curve: all the time, while busy, for what steps read (longer steps read less a
second), and what the highest clock adds."""

FLAT, VOLTS = 0.55, 0.70
"""Share of the highest clock below which the voltage is flat, and its share there."""


def clock_power(r: float) -> float:
    """Power that follows the clock, as a share of that at the highest: r V2."""
    above = max(0.0, r - FLAT) / (1.0 - FLAT)
    volts = VOLTS + (1.0 - VOLTS) * min(1.0, above)
    return r * volts * volts


def longer_busy(busy: float, longer: float) -> float:
    """Share of time in which steps run, when they are so much longer than with a share `busy`.

    Requests that come by chance find the engine idle with the probability exp(-n), n of them being
    there on average; n grows with the time of steps. So batches grow, and not only busy time.
    """
    idle = 1.0 - min(max(busy, 0.0), 1.0)
    return 1.0 - math.exp(longer * math.log(idle)) if idle > 0.0 else 1.0


class Floor:
    """The lowest level worth its time.

    Args:
        ratios: Each level's share of the highest clock, from 1 down.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self._powers = [clock_power(r) for r in ratios]
        self.power = PowerFit(GENERIC)

    def level(
        self, stretch: Sequence[float], known: Sequence[bool], busy: float, worth: float = WORTH
    ) -> int:
        """The lowest level that pays, or the first below it whose stretch is not known.

        Args:
            stretch: Of each level.
            known: Whether it was seen.
            busy: Share of time in which steps would run at the highest clock.
            worth: See `WORTH`.
        """
        level = 0
        before = self._energy(0, stretch[0], busy)
        for lower in range(1, len(self._powers)):
            if not known[lower]:
                return lower
            energy = self._energy(lower, stretch[lower], busy)
            longer = stretch[lower] / stretch[lower - 1] - 1.0
            if 1.0 - energy / before < worth * longer:
                break
            level, before = lower, energy
        return level

    def saving(self, level: int, stretch: Sequence[float], busy: float) -> float:
        """Share of energy that a level saves against the highest clock."""
        return 1.0 - self._energy(level, stretch[level], busy) / self._energy(0, 1.0, busy)

    def _energy(self, level: int, stretch: float, busy: float) -> float:
        share = longer_busy(busy, stretch)
        idle, base, memory, clock = self.power.parts
        busy_power = base + memory / stretch + clock * self._powers[level]
        return max(1e-12, idle + share * busy_power)  # an idle engine, and a fit without idle power

"""Finds the clock below which saved energy is not worth the longer steps; pure.

Under an open load, slower steps make larger batches, so joules per token at a fixed batch is the
wrong measure. This module uses the energy over time: a clock's power while busy, else idle power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeus.serving.clock_power import PowerFit

WORTH = 0.25
"""Percentage of energy that steps longer by 1 % must save."""

STAY = 0.6
"""Hysteresis: a clock in use is kept while it saves this share of the required energy."""

GENERIC = (0.2, 0.15, 0.25, 0.4)
"""A generic power curve: constant, while busy, for the memory that steps read (longer steps read
less per second), and for the highest clock."""

FLAT, VOLTS = 0.55, 0.70
"""Share of the highest clock below which the voltage is constant, and its share there."""


def clock_power(r: float) -> float:
    """Clock-dependent power, as a share of that at the highest clock: r V2."""
    above = max(0.0, r - FLAT) / (1.0 - FLAT)
    volts = VOLTS + (1.0 - VOLTS) * min(1.0, above)
    return r * volts * volts


def longer_busy(busy: float, longer: float) -> float:
    """Share of time in which steps run if they are longer by this factor than with a share `busy`.

    Randomly arriving requests find the engine idle with probability exp(-n), if on average n are
    present; n grows with the time of steps. So batches grow, not only busy time.
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
        """The lowest level that is worth it, or the first one below whose stretch is not known.

        Args:
            stretch: Stretch of each level.
            known: Whether each stretch was measured.
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
        """Share of energy that a level saves compared with the highest clock."""
        return 1.0 - self._energy(level, stretch[level], busy) / self._energy(0, 1.0, busy)

    def _energy(self, level: int, stretch: float, busy: float) -> float:
        share = longer_busy(busy, stretch)
        idle, base, memory, clock = self.power.parts
        busy_power = base + memory / stretch + clock * self._powers[level]
        return max(1e-12, idle + share * busy_power)  # an idle engine, and a fit without idle power

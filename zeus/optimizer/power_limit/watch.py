"""Whether training has changed since its setting was chosen."""

from __future__ import annotations

import math

from zeus.optimizer.power_limit.estimates import STEP_NOISE, LimitEstimate
from zeus_common.text import percent

FIRST_STEPS = 40
"""Steps from the choice to the first check, ..."""
CHECK_STEPS = 200
"""... and between checks; twice as many after each new search."""
WINDOW_STEPS = 20
"""Steps that a check measures."""
CHANGED = 0.1
"""A change of time or power by this share, twice in a row, means that training has changed."""


class Watch:
    """Schedules and evaluates checks. A check measures some steps at the choice.

    Args:
        chosen: The estimate of the choice.
        power: Whether power is compared, too.
        before: That of the search before; checks are fewer now.

    Attributes:
        next: The step in which the next check begins.
    """

    def __init__(self, chosen: LimitEstimate, power: bool, before: Watch | None) -> None:
        self.chosen = chosen
        self.next = 0
        self._power = power
        self._every: int = CHECK_STEPS if before is None else 2 * before._every
        self._off = False

    def changed(self, energy_j: float, seconds: float, step: int) -> str | None:
        """Describes what a check shows to have changed, in a step; None: nothing, or it may be
        chance.
        """
        if energy_j <= 0 or seconds <= 0:
            return None
        self.next = step + self._every
        noise = STEP_NOISE**2 / WINDOW_STEPS
        time = math.log(seconds / WINDOW_STEPS / self.chosen.time_s)
        bound = max(math.log(1 + CHANGED), 4 * math.sqrt(self.chosen.time_error**2 + noise))
        off = abs(time) > bound
        what = f"a step takes {percent(math.exp(time) - 1, '+.0')} against what was measured"
        if self._power and not off:
            expected_w = self.chosen.energy_j / self.chosen.time_s
            power = math.log(energy_j / seconds / expected_w)
            off = abs(power) > math.log(1 + CHANGED)
            what = f"power is {percent(math.exp(power) - 1, '+.0')} against what was measured"
        if off:
            self.next = step
        twice, self._off = off and self._off, off
        return what if twice else None

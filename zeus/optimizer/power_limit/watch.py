"""Whether training is still what was measured when its power limit was chosen."""

from __future__ import annotations

import math

from zeus.monitor import Measurement
from zeus.optimizer.power_limit.estimates import STEP_NOISE, Estimate

CHECK_STEPS = 200
"""Steps from the choice to the first check, and then from check to check, ..."""
FIRST_STEPS = 20
"""... but so many where the choice came from a file; twice as many after each new search."""
WINDOW_STEPS = 20
"""Steps that a check measures."""
CHANGED = 0.1
"""Time or power off by this share, twice in a row, is not what was measured any more."""


class Watch:
    """Plans checks and judges them. A check measures some steps at the chosen limit.

    Args:
        chosen: What the choice costs.
        before: The watch over the choice before this one, if there was one.
        loaded: Whether the choice came from a file.
        power: Whether power can be compared: it is of the same GPUs.
    """

    def __init__(self, chosen: Estimate, before: Watch | None, loaded: bool, power: bool) -> None:
        self.steps = 0
        self.measurement: Measurement | None = None
        self.what = ""
        self._chosen = chosen
        self._power = power
        self._every: int = CHECK_STEPS if before is None else 2 * before._every
        self._next = FIRST_STEPS if loaded else self._every
        self._opened: int | None = None
        self._off = False

    @property
    def limit_mw(self) -> int:
        """The chosen limit."""
        return self._chosen.power_limit_mw

    def step(self) -> None:
        """A step begins."""
        self.steps += 1

    @property
    def due_to_begin(self) -> bool:
        """Whether a check's window is to be opened."""
        return self._opened is None and self.measurement is None and self.steps >= self._next

    @property
    def due_to_end(self) -> bool:
        """Whether it is to be closed."""
        return self._opened is not None and self.steps - self._opened >= WINDOW_STEPS

    def began(self) -> None:
        """The window was opened."""
        self._opened = self.steps

    def ended(self, measurement: Measurement) -> None:
        """The window was closed; its energy is not read yet."""
        self.measurement, self._opened = measurement, None

    def dropped(self) -> None:
        """The window is worth nothing."""
        self.measurement = self._opened = None

    def changed(self, energy_j: float) -> bool:
        """Judges the check that was measured, now that its energy is known."""
        measurement = self.measurement
        self.dropped()
        if measurement is None or energy_j <= 0 or measurement.time <= 0:
            return False
        noise = STEP_NOISE**2 / WINDOW_STEPS
        time = math.log(measurement.time / WINDOW_STEPS / self._chosen.time_s)
        bound = max(math.log(1 + CHANGED), 4 * math.sqrt(self._chosen.time_error**2 + noise))
        off = abs(time) > bound
        self.what = f"a step takes {math.exp(time) - 1:+.0%} against what was measured"
        if self._power and not off:
            expected_w = self._chosen.energy_j / self._chosen.time_s
            power = math.log(energy_j / measurement.time / expected_w)
            off = abs(power) > math.log(1 + CHANGED)
            self.what = f"power is {math.exp(power) - 1:+.0%} against what was measured"
        self._next = self.steps + (0 if off else self._every)
        twice, self._off = off and self._off, off
        return twice

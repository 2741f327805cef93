"""Whether training is still what was measured when its power limit was chosen."""

from __future__ import annotations

import math
from enum import Enum

from zeus.optimizer.power_limit.estimates import STEP_NOISE, Estimate

VERIFY_STEPS = 60
"""Steps from the choice until what it depends on is measured once more."""
CHECK_STEPS = 200
"""Steps from the choice to the first check, and then from check to check, ..."""
FIRST_STEPS = 20
"""... but so many to either where the choice came from a file; twice as many after each new
search."""
WINDOW_STEPS = 20
"""Steps that a check measures."""
CHANGED = 0.1
"""Time or power off by this share, twice in a row, is not what was measured any more."""


class _Check(Enum):
    NONE = "none is under way"
    MEASURING = "its window is open"
    WAITING = "its window is closed, and its energy not read yet"


class Watch:
    """Plans checks and judges them. A check measures some steps at the chosen limit.

    Args:
        chosen: What the choice costs.
        every: Steps from check to check; None: `CHECK_STEPS`.
        loaded: Whether the choice came from a file.
        power: Whether power can be compared: it is of the same GPUs.

    Attributes:
        steps: Steps since the choice.
        loaded: As given.
        what: What has changed, once something has.
    """

    def __init__(self, chosen: Estimate, every: int | None, loaded: bool, power: bool) -> None:
        self.steps = 0
        self.loaded = loaded
        self.what = ""
        self._chosen = chosen
        self._power = power
        self._every = CHECK_STEPS if every is None else every
        self._next = FIRST_STEPS if loaded else self._every
        self._check = _Check.NONE
        self._opened = 0
        self._off = False

    @property
    def limit_mw(self) -> int:
        """The chosen limit."""
        return self._chosen.power_limit_mw

    def next_every(self, anew: bool) -> int:
        """From check to check, after another search or after none."""
        return 2 * self._every if anew else self._every

    def step(self) -> None:
        """A step begins."""
        self.steps += 1

    @property
    def due_to_verify(self) -> bool:
        """Whether what the choice depends on is to be measured once more."""
        return self.steps >= (FIRST_STEPS if self.loaded else VERIFY_STEPS)

    @property
    def due_to_begin(self) -> bool:
        """Whether a check's window is to be opened."""
        return self._check is _Check.NONE and self.steps >= self._next

    @property
    def due_to_end(self) -> bool:
        """Whether it is to be closed."""
        return self.measuring and self.steps - self._opened >= WINDOW_STEPS

    @property
    def measuring(self) -> bool:
        """Whether a check's window is open."""
        return self._check is _Check.MEASURING

    @property
    def waiting(self) -> bool:
        """Whether a check's energy is still to be read."""
        return self._check is _Check.WAITING

    def began(self) -> None:
        """The window was opened."""
        self._check, self._opened = _Check.MEASURING, self.steps

    def ended(self) -> None:
        """The window was closed; its energy is not read yet."""
        self._check = _Check.WAITING

    def dropped(self) -> None:
        """The window is worth nothing."""
        self._check = _Check.NONE

    def changed(self, energy_j: float, seconds: float) -> bool:
        """Judges the check that was measured.

        Args:
            energy_j: Energy of its steps.
            seconds: Their time.
        """
        self.dropped()
        if energy_j <= 0 or seconds <= 0:
            return False
        noise = STEP_NOISE**2 / WINDOW_STEPS
        time = math.log(seconds / WINDOW_STEPS / self._chosen.time_s)
        bound = max(math.log(1 + CHANGED), 4 * math.sqrt(self._chosen.time_error**2 + noise))
        off = abs(time) > bound
        self.what = f"a step takes {math.exp(time) - 1:+.0%} against what was measured"
        if self._power and not off:
            expected_w = self._chosen.energy_j / self._chosen.time_s
            power = math.log(energy_j / seconds / expected_w)
            off = abs(power) > math.log(1 + CHANGED)
            self.what = f"power is {math.exp(power) - 1:+.0%} against what was measured"
        self._next = self.steps + (0 if off else self._every)
        twice, self._off = off and self._off, off
        return twice

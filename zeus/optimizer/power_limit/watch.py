"""Whether training has changed since its setting was chosen, and whether zeusd answers."""

from __future__ import annotations

import math

from zeus.optimizer.power_limit.estimates import STEP_NOISE, LimitEstimate
from zeus.optimizer.power_limit.settings import Setting

VERIFY_STEPS = 60
"""Steps from the choice until its basis is measured again."""
CHECK_STEPS = 200
"""Steps from the choice to the first check, and between checks, ..."""
FIRST_STEPS = 20
"""... but this many if the choice came from a file; twice as many after each new search."""
WINDOW_STEPS = 20
"""Steps that a check measures."""
CHANGED = 0.1
"""A change of time or power by this share, twice in a row, means that training has changed."""


class Watch:
    """Schedules and evaluates checks. A check measures some steps at the choice.

    Attributes:
        steps: Steps since the choice.
        next: When the next check begins.
        opened: When the last one began.
        verified: Whether the basis of the choice was measured again.
    """

    def __init__(self, chosen: LimitEstimate, loaded: bool, power: bool) -> None:
        self.chosen = chosen
        self.steps = self.opened = 0
        self.next = FIRST_STEPS if loaded else CHECK_STEPS
        self.verified = False
        self._loaded = loaded
        self._power = power
        self._every = CHECK_STEPS
        self._off = False

    def follow(self, before: Watch, again: bool) -> None:
        """Continues another watch; after a new search, with fewer checks."""
        self._every = before._every if again else 2 * before._every
        self.next = FIRST_STEPS if self._loaded else self._every
        self.verified = before.verified

    def must_verify(self, highest: Setting) -> bool:
        """Whether what the choice depends on must be measured again, at this step."""
        if self.verified or self.steps < (FIRST_STEPS if self._loaded else VERIFY_STEPS):
            return False
        self.verified = True
        return self._loaded or self.chosen.setting != highest

    def changed(self, energy_j: float, seconds: float) -> str | None:
        """Describes what a check shows to have changed; None: nothing, or it may be chance."""
        self.next = self.steps + self._every
        if energy_j <= 0 or seconds <= 0:
            return None
        noise = STEP_NOISE**2 / WINDOW_STEPS
        time = math.log(seconds / WINDOW_STEPS / self.chosen.time_s)
        bound = max(math.log(1 + CHANGED), 4 * math.sqrt(self.chosen.time_error**2 + noise))
        off = abs(time) > bound
        what = f"a step takes {math.exp(time) - 1:+.0%} against what was measured"
        if self._power and not off:
            expected_w = self.chosen.energy_j / self.chosen.time_s
            power = math.log(energy_j / seconds / expected_w)
            off = abs(power) > math.log(1 + CHANGED)
            what = f"power is {math.exp(power) - 1:+.0%} against what was measured"
        if off:
            self.next = self.steps
        twice, self._off = off and self._off, off
        return what if twice else None


SILENT_S = 3.0
"""A zeusd that does not answer for this long is reported."""


class Silence:
    """Whether zeusd answers, as seen by training steps.

    Attributes:
        since_step: The step at which it stopped.
        reported: Whether the user knows.
    """

    def __init__(self) -> None:
        self.since_step = 0
        self.reported = False
        self._since_s: float | None = None

    @property
    def lasts(self) -> bool:
        """Whether zeusd does not answer."""
        return self._since_s is not None

    def go_on(self, now_s: float, step: int, held: Setting | None, what: str) -> str:
        """It does not answer. Returns what to report, once."""
        if self._since_s is None:
            self._since_s, self.since_step, self.reported = now_s, step, False
        if self.reported or now_s - self._since_s < SILENT_S:
            return ""
        self.reported = True
        setting = "" if held is None else f" at {held}"
        return (
            f"zeusd has not answered for {SILENT_S:g} s: training continues{setting}; the {what} "
            "of power limits resumes when zeusd answers"
        )

    def forget(self) -> None:
        """It answers, or nothing is pending any more."""
        self._since_s = None

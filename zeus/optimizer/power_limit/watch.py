"""Checks whether training has changed since its limit was chosen, and whether zeusd answers."""

from __future__ import annotations

import math
from enum import Enum

from zeus.optimizer.power_limit.actions import (
    Actions,
    CloseWindow,
    Collect,
    DropWindow,
    Forget,
    ForLeader,
    Listen,
    OpenWindow,
    Say,
)
from zeus.optimizer.power_limit.estimates import STEP_NOISE, LimitEstimate
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.profile import watts

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


class _Check(Enum):
    NONE = "none is under way"
    MEASURING = "its window is open"
    WAITING = "its window is closed, and its energy not read yet"


class Watch:
    """Schedules and evaluates checks. A check measures some steps at the chosen limit."""

    def __init__(self, chosen: LimitEstimate, loaded: bool, power: bool) -> None:
        self.steps = 0
        self._chosen = chosen
        self._loaded = loaded
        self._power = power
        self._every = CHECK_STEPS
        self._next = FIRST_STEPS if loaded else CHECK_STEPS
        self._verified = False  # whether the basis of the choice was measured again
        self._check = _Check.NONE
        self._opened = 0
        self._off = False

    def follow(self, before: Watch, again: bool) -> None:
        """Continues another watch."""
        self._every = 2 * before._every if again else before._every
        self._next = FIRST_STEPS if self._loaded else self._every
        self._verified = before._verified

    @property
    def limit_mw(self) -> int:
        """The chosen limit."""
        return self._chosen.power_limit_mw

    def step(self) -> None:
        """A step begins."""
        self.steps += 1

    def look(self, highest_mw: int) -> Actions:
        """Whether the choice is to be verified, or a check to begin or to end, as of this step."""
        if not self._verified and self.steps >= (FIRST_STEPS if self._loaded else VERIFY_STEPS):
            self._verified = True
            highest = self.limit_mw == highest_mw and self._chosen.profile is None
            depends = self._loaded or not highest
            if self._check is not _Check.MEASURING and depends:
                return [ForLeader(Leader.check), Listen()]
        if self._check is _Check.NONE and self.steps >= self._next:
            self._check, self._opened = _Check.MEASURING, self.steps
            return [OpenWindow(self.limit_mw)]
        if self._check is _Check.MEASURING and self.steps - self._opened >= WINDOW_STEPS:
            self._check = _Check.WAITING
            return [CloseWindow(self.limit_mw, None)]
        return [Collect()] if self._check is _Check.WAITING else []

    def drop(self) -> Actions:
        """Discards the check in progress, if any."""
        before, self._check = self._check, _Check.NONE
        return [] if before is _Check.NONE else [DropWindow(self.limit_mw), Forget()]

    def measured(self, energy_j: float, seconds: float) -> Actions:
        """Handles the result of a check: restarts the search if training has changed."""
        what = self._changed(energy_j, seconds)
        if what is None:
            return []
        self._verified = False
        return [
            Say(f"training has changed ({what}): power limits are measured again"),
            ForLeader(Leader.again),
            Listen(),
        ]

    def _changed(self, energy_j: float, seconds: float) -> str | None:
        """Describes what has changed; None: nothing, or it may be chance."""
        self._check = _Check.NONE
        if energy_j <= 0 or seconds <= 0:
            return None
        noise = STEP_NOISE**2 / WINDOW_STEPS
        time = math.log(seconds / WINDOW_STEPS / self._chosen.time_s)
        bound = max(math.log(1 + CHANGED), 4 * math.sqrt(self._chosen.time_error**2 + noise))
        off = abs(time) > bound
        what = f"a step takes {math.exp(time) - 1:+.0%} against what was measured"
        if self._power and not off:
            expected_w = self._chosen.energy_j / self._chosen.time_s
            power = math.log(energy_j / seconds / expected_w)
            off = abs(power) > math.log(1 + CHANGED)
            what = f"power is {math.exp(power) - 1:+.0%} against what was measured"
        self._next = self.steps + (0 if off else self._every)
        twice, self._off = off and self._off, off
        return what if twice else None


SILENT_S = 3.0
"""A zeusd that does not answer for this long is reported."""


class Silence:
    """Whether zeusd answers, as seen by training steps."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._since_step = 0
        self._reported = False

    @property
    def lasts(self) -> bool:
        """Whether zeusd does not answer."""
        return self._since_s is not None

    def begin(self, now_s: float, step: int) -> None:
        """It stopped answering."""
        self._since_s, self._since_step, self._reported = now_s, step, False

    def go_on(self, now_s: float, limit_mw: int, what: str) -> Actions:
        """It still does not answer."""
        if self._reported or self._since_s is None or now_s - self._since_s < SILENT_S:
            return []
        self._reported = True
        limit = f" at {watts(limit_mw)} W" if limit_mw else ""
        text = f"zeusd has not answered for {SILENT_S:g} s: training continues{limit}; the {what} "
        return [Say(f"{text}of power limits resumes when zeusd answers", warn=True)]

    def end(self, step: int) -> Actions:
        """It answers, perhaps again."""
        if self._since_s is None:
            return []
        self._since_s = None
        said: Actions = [Say("zeusd answers again")] if self._reported else []
        steps = step - self._since_step
        return [*said, ForLeader(lambda leader, *_: leader.waited(steps))]

    def forget(self) -> None:
        """Nothing is pending any more."""
        self._since_s = None

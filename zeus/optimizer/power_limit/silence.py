"""Tracks a zeusd that does not answer, and reports it."""

from __future__ import annotations

from zeus.optimizer.power_limit.actions import Actions, Say, Waited
from zeus.optimizer.power_limit.profile import watts

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
        """It still does not answer.

        Args:
            now_s: Monotonic seconds.
            limit_mw: The limit that was set last; 0: none.
            what: The pending work.
        """
        if self._reported or self._since_s is None or now_s - self._since_s < SILENT_S:
            return []
        self._reported = True
        limit = f" at {watts(limit_mw)} W, as last set" if limit_mw else ""
        text = f"zeusd has not answered for {SILENT_S:g} s: training continues{limit}, and the "
        return [Say(f"{text}{what} of power limits when it answers again", warn=True)]

    def end(self, step: int) -> Actions:
        """It answers, perhaps again."""
        if self._since_s is None:
            return []
        self._since_s = None
        said: Actions = [Say("zeusd answers again")] if self._reported else []
        return [*said, Waited(step - self._since_step)]

    def forget(self) -> None:
        """Nothing is pending any more."""
        self._since_s = None

"""Stretches of steps between epochs, evaluations and checkpoints."""

from __future__ import annotations

STARVED = 3
"""After this many consecutive stretches without a measurement, warm-ups are shortened."""


class Stretches:
    """Counts the steps since training was interrupted.

    Attributes:
        longest_warmup: Most steps of a warm-up.
    """

    def __init__(self, warmup_steps: int, profile_steps: int, adaptive: bool) -> None:
        self.longest_warmup = warmup_steps
        self._needed = warmup_steps + profile_steps + 1  # to measure a limit in one piece
        self._said = adaptive
        self._steps = 0
        self._starved: list[int] = []  # stretches that ended in a warm-up, one after another

    @property
    def short(self) -> bool:
        """Whether this stretch is too short to measure a limit in one piece."""
        return self._steps < self._needed

    def begin(self) -> None:
        """A stretch begins."""
        self._steps = 0

    def step(self) -> None:
        """A step begins."""
        self._steps += 1

    def measured(self) -> None:
        """Something was measured in this stretch."""
        self._starved.clear()

    def cut(self, warming_up: bool) -> str:
        """The stretch ends. Returns a message about it, once; else an empty one."""
        steps, said = self._steps, ""
        if warming_up:
            self._starved.append(steps)
        if len(self._starved) >= STARVED:
            # Nothing was measured in any: leave at least half of the longest for measuring.
            self.longest_warmup = min(self.longest_warmup, (max(self._starved) - 1) // 2)
            self._starved.clear()
        if self.short and not self._said:
            self._said = True
            said = (
                f"A stretch of {steps} steps between epochs, evaluations and checkpoints is "
                f"shorter than the {self._needed} that one power limit needs; each limit is "
                "measured over several. Lower warmup_steps or profile_steps to finish sooner."
            )
        self._steps = 0
        return said

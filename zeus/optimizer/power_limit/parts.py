"""The parts in which one process measures a trial: several if interruptions split it; and the
stretches of steps between epochs, evaluations and checkpoints, into which they must fit.
"""

from __future__ import annotations

from zeus.optimizer.power_limit.actions import Part
from zeus.optimizer.power_limit.messages import Piece, Try


class Parts:
    """Counts the steps of a trial.

    Attributes:
        trial: The command; None: none.
    """

    def __init__(self) -> None:
        self.trial: Try | None = None
        self.target = 0
        self._index = 0
        self._left = 0  # steps of the next part: fewer, once an interruption has split one

    @property
    def steps(self) -> int | None:
        """Measured steps of the whole trial; None: there is none."""
        return None if self.trial is None else self.trial.steps

    def begin(self, trial: Try) -> None:
        """Another trial is commanded."""
        self.trial, self._index, self._left = trial, 0, trial.steps

    def open(self) -> int:
        """A part begins. Returns how many steps it has."""
        self.target = self._left
        return self.target

    def close(self, steps: int) -> Part | None:
        """A part ends after some steps. Returns None without a trial that it could belong to."""
        if self.trial is None:
            return None
        part = Part(self.trial, self._index, steps)
        self._left = self.trial.steps if steps >= self._left else self._left - steps
        self._index += 1
        return part


def report(
    part: Part, joules: float, error_j: float, seconds: float
) -> tuple[Piece, dict[str, float]]:
    """Returns the measurement of a part: for the leader, and as figures by name."""
    message = Piece(
        trial=part.trial.trial,
        index=part.index,
        steps=part.steps,
        energy_j=joules,
        energy_error_j=error_j,
        time_s=seconds,
    )
    figures = {
        "power_limit_w": part.trial.power_limit_mw / 1000,
        "step_time_s": seconds / part.steps,
        "step_energy_j": joules / part.steps,
        "power_w": joules / seconds,
    }
    return message, figures


STARVED = 3
"""After this many consecutive stretches without a measurement, warm-ups are shortened."""


class Stretches:
    """Counts the steps since training was interrupted."""

    def __init__(self, warmup_steps: int, profile_steps: int, adaptive: bool) -> None:
        self._warmup_steps = warmup_steps
        self._profile_steps = profile_steps
        self._said = adaptive
        self._steps = 0
        self._starved: list[int] = []  # stretches that ended in a warm-up, one after another
        self.longest_warmup = warmup_steps

    def begin(self) -> None:
        """A stretch begins."""
        self._steps = 0

    def step(self) -> None:
        """A step begins."""
        self._steps += 1

    def measured(self) -> None:
        """Something was measured in this stretch."""
        self._starved.clear()

    def short(self, trial_steps: int | None) -> bool:
        """Whether this stretch is too short to measure a trial in one piece."""
        return self._steps < self._needed(trial_steps)

    def cut(self, warming_up: bool, trial_steps: int | None) -> str | None:
        """The stretch ends. Returns a message about it, once."""
        said = None
        if self.short(trial_steps):
            if warming_up:
                self._starved.append(self._steps)
            if len(self._starved) >= STARVED:
                # Nothing was measured in any: leave at least half of the longest for measuring.
                most = (max(self._starved) - 1) // 2
                self.longest_warmup = min(self.longest_warmup, most)
                self._starved.clear()
            if not self._said:
                self._said = True
                said = (
                    f"A stretch of {self._steps} steps between epochs, evaluations and checkpoints "
                    f"is shorter than the {self._needed(trial_steps)} that one power limit needs; "
                    "each limit is measured over several. Lower warmup_steps or profile_steps to "
                    "finish sooner."
                )
        self._steps = 0
        return said

    def _needed(self, trial_steps: int | None) -> int:
        """Steps without an interruption that a trial needs to be measured in one piece."""
        measured = self._profile_steps if trial_steps is None else trial_steps
        return self._warmup_steps + measured + 1

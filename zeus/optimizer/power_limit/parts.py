"""The parts in which one process measures a trial: several if interruptions split it."""

from __future__ import annotations

from zeus.optimizer.power_limit.actions import Part
from zeus.optimizer.power_limit.messages import Piece, Try


class Parts:
    """Counts the steps of a trial.

    Attributes:
        trial: The command; None: none.
        target: Steps of the current part.
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
    """Returns the measurement of a part: for the leader, and as figures by name.

    Args:
        part: The part.
        joules: Its energy.
        error_j: Its uncertainty, two standard deviations.
        seconds: Its time.
    """
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

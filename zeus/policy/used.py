"""What a run has used, and what another epoch will take it to: one rule for all who train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Using(Protocol):
    """What a run has used since it began, in all processes that it had."""

    @property
    def time(self) -> float:
        """Time, s."""

    @property
    def energy(self) -> float:
        """Energy, J."""

    @property
    def overhead_time(self) -> float:
        """Of the time what was spent on finding the power limit, s."""

    @property
    def overhead_energy(self) -> float:
        """Of the energy the same, J."""


@dataclass(frozen=True)
class Used:
    """What a run has used, see `Using`.

    Attributes:
        time: Time, s.
        energy: Energy, J.
        overhead_time: Of the time what was spent on finding the power limit, s.
        overhead_energy: Of the energy the same, J.
        limits: Energy and time of a step at each power limit that was measured, once one is chosen.
    """

    time: float = 0.0
    energy: float = 0.0
    overhead_time: float = 0.0
    overhead_energy: float = 0.0
    limits: tuple[tuple[float, float], ...] = ()


def after_another_epoch(used: Using, epochs: int) -> tuple[float, float]:
    """Energy, J, and time, s, after another epoch like those before, without what finding a power
    limit took.

    Args:
        used: What the run has used.
        epochs: In how many epochs.
    """
    epochs = max(1, epochs)
    return (
        used.energy + (used.energy - used.overhead_energy) / epochs,
        used.time + (used.time - used.overhead_time) / epochs,
    )

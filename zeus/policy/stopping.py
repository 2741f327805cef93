"""What a run has used, and whether it trains another epoch: one rule for all who train.

The target is reached; else the epochs are used up; else another epoch would take the run to its
bound. A run that has reached its target is a success whatever it cost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Used:
    """What a run has used since it began, in all processes that it had.

    Attributes:
        time: Time, s.
        energy: Energy, J.
        overhead_time: Of the time what was spent on finding the power limit, s.
        overhead_energy: Of the energy the same, J.
    """

    time: float = 0.0
    energy: float = 0.0
    overhead_time: float = 0.0
    overhead_energy: float = 0.0


def after_another_epoch(used: Used, epochs: int) -> tuple[float, float]:
    """Energy, J, and time, s, after another epoch like those before, without what finding a power
    limit took.
    """
    epochs = max(1, epochs)
    return (
        used.energy + (used.energy - used.overhead_energy) / epochs,
        used.time + (used.time - used.overhead_time) / epochs,
    )


@dataclass(frozen=True)
class Verdict:
    """Whether to go on.

    Attributes:
        next_cost: Where the run is given up for its cost: what another epoch would take it to, J.
    """

    stop: bool
    reached: bool = False
    next_cost: float | None = None

    @property
    def by_cost(self) -> bool:
        """Whether the run is given up for its cost."""
        return self.next_cost is not None


def reaches(metric: float | None, target: float, higher_is_better: bool) -> bool:
    """Whether a metric reaches its target; one that is not known does not."""
    if metric is None:
        return False
    return metric >= target if higher_is_better else metric <= target


def judge(
    *,
    reached: bool,
    epochs: int,
    max_epochs: int,
    next_cost: float | None,
    cost_bound: float | None,
) -> Verdict:
    """The verdict after an epoch.

    Args:
        reached: Whether the target is reached.
        epochs: Epochs that were trained.
        max_epochs: The run is given up after so many.
        next_cost: What another epoch would take the run's cost to, J; None: that is not known, or
            no cost interrupts the run now.
        cost_bound: Cost at which the run is given up, J; None or infinite for never.
    """
    if reached:
        return Verdict(stop=True, reached=True)
    if epochs >= max_epochs:
        return Verdict(stop=True)
    if next_cost is not None and cost_bound is not None and next_cost >= cost_bound:
        return Verdict(stop=True, next_cost=next_cost)
    return Verdict(stop=False)

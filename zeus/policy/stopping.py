"""Whether a run trains another epoch: one rule for all who train.

The target is reached; else the epochs are used up; else another epoch would take the run to its
bound. A run that has reached its target is a success whatever it cost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether to go on.

    Attributes:
        stop: Whether training ends here.
        reached: Whether the target is reached.
        next_cost: Where the run is given up for its cost: what another epoch would take it to, J.
    """

    stop: bool
    reached: bool = False
    next_cost: float | None = None

    @property
    def by_cost(self) -> bool:
        """Whether the run is given up for its cost."""
        return self.next_cost is not None


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

"""What is kept of a recurring job's runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HistoryEntry:
    """One training run.

    Attributes:
        bs: Batch size.
        pl: Power limit, W; None where it was chosen while the run trained.
        energy: Energy, J.
        reached: Whether the target metric was reached. A recurrence ends with such a run.
        time: Time, s.
    """

    bs: int
    pl: int | None
    energy: float
    reached: bool
    time: float

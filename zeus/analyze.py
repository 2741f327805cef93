"""What is kept of a recurring job's runs."""

from __future__ import annotations

from dataclasses import dataclass

from zeus.compat import old_names


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


__getattr__ = old_names(__name__)

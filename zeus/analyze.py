"""The history of a recurring job's runs."""

from __future__ import annotations

from dataclasses import dataclass

from zeus.compat import old_names


@dataclass
class HistoryEntry:
    """One training run.

    Attributes:
        bs: Batch size.
        pl: Power limit, W; None if it was chosen during the run.
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

"""Status of clock control."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ClockStatus:
    """The present status.

    Attributes:
        wanted_mhz: Clock that the policy wants.
        set_mhz: Last clock that was set; the highest: the GPUs are at their restore target.
        effective_mhz: The slowest GPU's sampled clock; NaN: not known.
        working: Whether clocks are being set; in a dry run, whether they would be.
        trouble: Why not, as a sentence; empty: no problem.
        changes: Clocks set so far; in a dry run, those that would have been.
        escapes: Number of times that steps took far longer than predicted.
        ttft_violations, tpot_violations: Requests that missed this objective.
        predicted_tpot_s, predicted_ttft_s: Predictions at the wanted clock.
        seen_tpot_s, seen_ttft_s: Latencies of the last request that ended; NaN: none yet.
        saving: Share of saved energy; see `ClockPolicy.saving`.
        needed_mhz: The clock floor: the highest clock that the objectives needed in the last
            minutes; 0: not known yet.
        needed_w: Highest power of one GPU in this time: a lower power limit may violate the
            objectives. In a dry run, the power at the highest clock. NaN: not known.
    """

    wanted_mhz: int
    set_mhz: int
    effective_mhz: float
    working: bool
    trouble: str
    changes: int
    escapes: int
    ttft_violations: int
    tpot_violations: int
    predicted_tpot_s: float
    predicted_ttft_s: float
    seen_tpot_s: float
    seen_ttft_s: float
    saving: float
    needed_mhz: float = 0.0
    needed_w: float = math.nan

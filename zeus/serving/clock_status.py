"""What clock control says of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ClockStatus:
    """What the control does.

    Attributes:
        wanted_mhz: What the policy wants.
        set_mhz: What was set last; the highest: the GPUs are at their restore target.
        effective_mhz: The slowest GPU's sampled clock; NaN: not known.
        working: Whether clocks are being set; in a dry run, whether they would be.
        trouble: Why not, as a sentence; empty: nothing is wrong.
        changes: Clocks set so far; in a dry run, those that would have been.
        escapes: How often steps took far longer than predicted.
        ttft_violations, tpot_violations: Requests that missed this objective.
        predicted_tpot_s, predicted_ttft_s: At the clock wanted.
        seen_tpot_s, seen_ttft_s: Of the last request that ended; NaN: none yet.
        saving: Share of energy; see `ClockPolicy.saving`.
        needed_mhz: The clock floor: the highest clock that the objectives needed in the last
            minutes; 0: not known yet.
        needed_w: The most that one GPU drew in this time: a power limit below it may cost the
            objectives. In a dry run it is what the highest clock draws. NaN: not known.
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

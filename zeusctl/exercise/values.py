"""The values that an exercise sets a control to, and how the driver rounded them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeusctl.exercise.report import Rounding, Trial

_OFFSETS_MW = (1, 7, 50, 137, 250, 333, 500, 777, 900, 999, 1234, 2718, 4321)
"""Beyond whole watts: off any grid that a driver may have."""


def power_limits(smallest_mw: int, largest_mw: int) -> list[int]:
    """Both ends, the middle, and values off any grid, spread over the range.

    Adjacent values differ after rounding too: zeusd reads twice if a GPU still holds its old value.
    """
    span = largest_mw - smallest_mw
    wanted = [smallest_mw, largest_mw, smallest_mw + span // 2 // 1000 * 1000]
    for number, offset in enumerate(_OFFSETS_MW, 1):
        whole = span * number // (len(_OFFSETS_MW) + 1) // 1000 * 1000
        wanted.append(smallest_mw + whole + offset)
    return [mw for mw in dict.fromkeys(wanted) if smallest_mw <= mw <= largest_mw]


def clock_ranges(clocks: Sequence[int]) -> list[list[int]]:
    """Ranges of clocks: each end, the middle, the lower half, and a clock off the grid.

    Args:
        clocks: Supported clocks, MHz.
    """
    low, middle, high = min(clocks), sorted(clocks)[len(clocks) // 2], max(clocks)
    wanted = [(high, high), (low, low), (middle, middle), (low, middle)]
    if len(clocks) > 1:
        wanted.append((middle + 1, middle + 1))
    return [list(one) for one in dict.fromkeys(wanted)]


def rounding(trials: Sequence[Trial]) -> Rounding | None:
    """Returns how values were rounded; None if too few were accepted to tell."""
    taken = [(one.asked[0], one.applied[0]) for one in trials if one.applied is not None]
    if len(taken) < 4:
        return None
    values = sorted({applied for _, applied in taken})
    step = math.gcd(*(value - values[0] for value in values)) or 1
    off = [applied - asked for asked, applied in taken]
    if not any(off):
        return Rounding(step, "exact")
    if all(-step < one <= 0 for one in off):
        return Rounding(step, "down")
    if all(0 <= one < step for one in off):
        return Rounding(step, "up")
    return Rounding(step, "nearest" if all(2 * abs(one) <= step for one in off) else "other")

"""The choice of a limit from estimates: that of the selector, unless it may cost more energy. A
selector compares estimates as if they were exact. The cautious choice also holds within their
errors: it saves energy compared with the highest limit, and meets the constraint, by more than the
estimates' errors. The first of the selector's preferences that does is chosen; the highest limit
always does.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement
from zeus.optimizer.power_limit.selectors import (
    MaxSlowdownConstraint,
    NotMeasured,
    OptimumSelector,
)
from zeus.optimizer.power_limit.settings import watts

SURE = 2.2
"""A limit's slowdown must be within the constraint and its allowance by this many standard
deviations, ..."""
SAVES = 1.0
"""... and it must save energy by this many."""
ALLOWANCE = 0.02
"""The largest accepted excess of a slowdown over the constraint."""


ALIKE = 0.01
"""What is beside a limit must change energy or time by more than this share, compared with the best
limit alone."""


def measurements(estimates: Sequence[LimitEstimate], steps: int) -> list[PowerLimitMeasurement]:
    """Converts estimates to measurements of this many steps, for selectors and files."""
    return [
        PowerLimitMeasurement(
            power_limit=watts(one.power_limit_mw),
            energy=one.energy_j * steps,
            time=one.time_s * steps,
            **one.named,
        )
        for one in estimates
    ]


def best(
    selector: OptimumSelector, estimates: Sequence[LimitEstimate], steps: int, *, cautious: bool
) -> LimitEstimate:
    """Returns the best estimate.

    Args:
        estimates: The first is of the highest limit alone.
        steps: Number of steps of the selector's measurements.
        cautious: Skip what may cost more energy than the highest limit, or be slower than the
            constraint by more than `ALLOWANCE`.

    Raises:
        ValueError: The selector fails, or chooses what was not measured.
    """
    left = list(estimates)
    while True:
        chosen = _selected(selector, left, steps)
        if not cautious or chosen is left[0] or _holds(selector, chosen, left[0]):
            break
        left.remove(chosen)
    if chosen.beside is None:
        return chosen
    plain = [one for one in estimates if one.beside is None]
    without = best(selector, plain, steps, cautious=cautious)
    return without if _alike(chosen, without) else chosen


def _alike(one: LimitEstimate, other: LimitEstimate) -> bool:
    ratios = one.energy_j / other.energy_j, one.time_s / other.time_s
    return all(abs(ratio - 1) <= ALIKE for ratio in ratios)


def _selected(
    selector: OptimumSelector, estimates: Sequence[LimitEstimate], steps: int
) -> LimitEstimate:
    name, rows = type(selector).__name__, measurements(estimates, steps)
    try:
        row = selector.choose(rows)
    except NotMeasured as error:
        raise ValueError(f"{name} chose {error}, which was not measured") from None
    except Exception as error:  # noqa: BLE001 - a user's selector must not end training either
        raise ValueError(f"{name} could not choose: {error!r}") from None
    if row not in rows:
        raise ValueError(f"{name} chose {row!r}, which was not measured")
    return estimates[rows.index(row)]


def _holds(selector: OptimumSelector, chosen: LimitEstimate, highest: LimitEstimate) -> bool:
    energy = chosen.energy_j / highest.energy_j
    if energy * (1 + SAVES * chosen.energy_ratio_error) > 1:
        return False
    if not isinstance(selector, MaxSlowdownConstraint):
        return True
    time = chosen.time_s / highest.time_s
    return time * (1 + SURE * chosen.time_ratio_error) <= selector.factor + ALLOWANCE

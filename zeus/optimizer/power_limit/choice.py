"""The choice of a limit from estimates: what the selector says, unless it would cost more energy.

A selector compares two estimates as if they were exact. Where they are not, the cautious choice is
one that holds although they are off: it saves energy against the highest limit, and keeps its
constraint, by more than the estimates may be wrong. Of several limits that the selector would
choose one after another, the first such one is taken; the highest always is.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeus.optimizer.power_limit.estimates import Estimate
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement, watts
from zeus.optimizer.power_limit.selectors import (
    MaxSlowdownConstraint,
    NotMeasured,
    OptimumSelector,
)
from zeus_ipc.controls import profile_name

SURE = 2.2
"""So many standard deviations, and a limit's slowdown is within the constraint and its allowance,
..."""
SAVES = 1.0
"""... and so many, and it saves energy."""
ALLOWANCE = 0.02
"""A slowdown that is beyond the constraint by this much is the most that is accepted."""


ALIKE = 0.01
"""A workload power profile that changes neither energy nor time by more than this share, against
the choice without one, is not worth having."""


def measurements(estimates: Sequence[Estimate], steps: int) -> list[PowerLimitMeasurement]:
    """Estimates as selectors and files have them: of so many steps."""
    return [
        PowerLimitMeasurement(
            power_limit=watts(one.power_limit_mw),
            energy=one.energy_j * steps,
            time=one.time_s * steps,
            power_profile=None if one.profile is None else profile_name(one.profile),
        )
        for one in estimates
    ]


def choose(
    selector: OptimumSelector, estimates: Sequence[Estimate], steps: int, *, cautious: bool
) -> int:
    """The limit of the best estimate, mW; see `best`."""
    return best(selector, estimates, steps, cautious=cautious).power_limit_mw


def best(
    selector: OptimumSelector, estimates: Sequence[Estimate], steps: int, *, cautious: bool
) -> Estimate:
    """The best estimate.

    Args:
        selector: Says what is best.
        estimates: Of what was measured, by profile and limit; the first is of the highest limit
            without a profile.
        steps: How many steps the selector's measurements are of.
        cautious: Pass over a limit that may cost more energy than the highest, or be slower than
            the constraint by more than `ALLOWANCE`.

    Raises:
        ValueError: The selector fails, or chooses what was not measured.
    """
    left = list(estimates)
    while True:
        chosen = _selected(selector, left, steps)
        if not cautious or chosen is left[0] or _holds(selector, chosen, left[0]):
            break
        left.remove(chosen)
    if chosen.profile is None:
        return chosen
    plain = [one for one in estimates if one.profile is None]
    without = best(selector, plain, steps, cautious=cautious)
    return without if _alike(chosen, without) else chosen


def _alike(one: Estimate, other: Estimate) -> bool:
    ratios = one.energy_j / other.energy_j, one.time_s / other.time_s
    return all(abs(ratio - 1) <= ALIKE for ratio in ratios)


def _selected(selector: OptimumSelector, estimates: Sequence[Estimate], steps: int) -> Estimate:
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


def _holds(selector: OptimumSelector, chosen: Estimate, highest: Estimate) -> bool:
    energy = chosen.energy_j / highest.energy_j
    if energy * (1 + SAVES * chosen.energy_ratio_error) > 1:
        return False
    if not isinstance(selector, MaxSlowdownConstraint):
        return True
    time = chosen.time_s / highest.time_s
    return time * (1 + SURE * chosen.time_ratio_error) <= selector.factor + ALLOWANCE

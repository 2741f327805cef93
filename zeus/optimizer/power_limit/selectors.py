"""Criteria that choose one of the measured power limits, and the cautious choice by them.

A selector compares estimates as if they were exact. The cautious choice also holds within their
errors: it saves energy compared with the highest limit, and meets the constraint, by more than the
estimates' errors. The first of the selector's preferences that does is chosen; the highest limit
always does.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from zeus.optimizer.power_limit.arguments import check_factor, check_number
from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement
from zeus.optimizer.power_limit.settings import watts
from zeus.utils.metric import zeus_cost
from zeus_ipc.overriding import override

log = logging.getLogger(__name__)

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


class OptimumSelector(ABC):
    """Chooses a power limit. Subclass it for your own criterion."""

    @abstractmethod
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        """Returns the best limit.

        Args:
            measurements: One for each limit, from the highest limit to the lowest.

        Returns:
            The chosen limit, W: that of one of the measurements.
        """

    def choose(self, measurements: list[PowerLimitMeasurement]) -> PowerLimitMeasurement:
        """Returns the best measurement, if more than limits is searched. The default: of those at
        the limit that `select` returns, the one of least energy.

        Args:
            measurements: One for each setting. The first is of the highest limit alone.
        """
        limit = self.select(measurements)
        there = [one for one in measurements if round((one.power_limit - limit) * 1000) == 0]
        if not there:
            raise ValueError(f"it chose {limit:g} W, which was not measured")
        return min(there, key=lambda one: one.energy)

    def costs(self, measurements: Sequence[PowerLimitMeasurement]) -> list[float] | None:
        """Returns the cost of each limit, positive, in any unit: the adaptive search saves the
        steps at limits that will not be chosen. None, the default: unknown, so every limit is
        measured.

        Args:
            measurements: One for each limit, from the highest limit to the lowest.
        """
        return None


class Energy(OptimumSelector):
    """Least energy. In a tie, the highest limit."""

    def costs(self, measurements: Sequence[PowerLimitMeasurement]) -> list[float]:
        """The energy of each, J."""
        return [one.energy for one in measurements]

    @override
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return min(measurements, key=lambda one: one.energy).power_limit


class Time(OptimumSelector):
    """Least time. In a tie, the highest limit."""

    def costs(self, measurements: Sequence[PowerLimitMeasurement]) -> list[float]:
        """The time of each, s."""
        return [one.time for one in measurements]

    @override
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return self.choose(measurements).power_limit

    @override
    def choose(self, measurements: list[PowerLimitMeasurement]) -> PowerLimitMeasurement:
        return min(measurements, key=lambda one: one.time)


class ZeusCost(OptimumSelector):
    """Least energy-time cost, see `zeus.utils.metric.zeus_cost`.

    Args:
        eta_knob: 1 counts energy only, 0 time only.
        world_size: Number of GPUs included in the measured energy. None: 1, or all that train
            together if an optimizer calls it.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, eta_knob: float, world_size: int | None = None) -> None:
        check_number("eta_knob", eta_knob, "a number such as 0.5")
        if not 0 <= eta_knob <= 1:
            raise ValueError("eta_knob must be between 0 and 1, inclusive both sides.")
        if world_size is not None and world_size < 1:
            raise ValueError("world_size must be greater than or equal to 1.")
        self.eta_knob = eta_knob
        self.world_size = 1 if world_size is None else world_size
        self._given = world_size is not None

    def of(self, gpus: int) -> ZeusCost:
        """Returns the same cost for this many GPUs, unless it was created for another number."""
        if self._given and self.world_size != gpus:
            log.warning(
                "ZeusCost was made for world_size=%d, and %d GPUs train; leave world_size out",
                self.world_size,
                gpus,
            )
        return self if self._given else ZeusCost(self.eta_knob, gpus)

    def costs(self, measurements: Sequence[PowerLimitMeasurement]) -> list[float]:
        """The cost of each, J."""
        max_power = max(one.power_limit for one in measurements) * self.world_size
        return [zeus_cost(one.energy, one.time, self.eta_knob, max_power) for one in measurements]

    @override
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return self.choose(measurements).power_limit

    @override
    def choose(self, measurements: list[PowerLimitMeasurement]) -> PowerLimitMeasurement:
        costs = self.costs(measurements)
        return measurements[costs.index(min(costs))]


class MaxSlowdownConstraint(OptimumSelector):
    """The lowest limit at which training takes at most `factor` times as long as at the highest.

    With workload power profiles or clocks: of the lowest limit of each, the one of least energy.

    Args:
        factor: Such as 1.1 for at most 10 % more time.

    Raises:
        ValueError: It is below 1.
    """

    def __init__(self, factor: float) -> None:
        check_factor(factor)
        self.factor = factor

    def costs(self, measurements: Sequence[PowerLimitMeasurement]) -> list[float]:
        """A tenth of the limit relative to the highest, plus the full excess slowdown: one percent
        too slow is as bad as a limit that is a tenth of the range too high.
        """
        fastest = max(measurements, key=lambda one: one.power_limit)
        bound = self.factor * fastest.time
        return [
            1 + one.power_limit / fastest.power_limit / 10 + max(0.0, one.time / bound - 1)
            for one in measurements
        ]

    @override
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return self.choose(measurements).power_limit

    @override
    def choose(self, measurements: list[PowerLimitMeasurement]) -> PowerLimitMeasurement:
        fastest = max(measurements, key=lambda one: one.power_limit)  # the first one in a tie
        allowed = [one for one in measurements if one.time <= self.factor * fastest.time]
        lowest: dict[Any, PowerLimitMeasurement] = {}
        for one in sorted(allowed, key=lambda one: -one.power_limit):
            lowest[tuple(one.named.values())] = one
        return min(lowest.values(), key=lambda one: one.energy)


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

"""Which of the measured power limits is best, in whose eyes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from zeus.optimizer.power_limit.profile import PowerLimitMeasurement
from zeus.utils.metric import zeus_cost


class OptimumSelector(ABC):
    """Chooses a power limit. Subclass it for a criterion of your own."""

    @abstractmethod
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        """The best limit.

        Args:
            measurements: One a limit, from the highest limit to the lowest.

        Returns:
            The chosen limit, W: that of one of the measurements.
        """


class Energy(OptimumSelector):
    """Least energy. Of equals, the highest limit."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        """See `OptimumSelector`."""
        return min(measurements, key=lambda one: one.energy).power_limit


class Time(OptimumSelector):
    """Least time. Of equals, the highest limit."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        """See `OptimumSelector`."""
        return min(measurements, key=lambda one: one.time).power_limit


class ZeusCost(OptimumSelector):
    """Least energy-time cost, see `zeus.utils.metric.zeus_cost`.

    Args:
        eta_knob: 1 counts energy only, 0 time only.
        world_size: How many GPUs the measured energy is of.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, eta_knob: float, world_size: int = 1) -> None:
        if not 0 <= eta_knob <= 1:
            raise ValueError("eta_knob must be between 0 and 1, inclusive both sides.")
        if world_size < 1:
            raise ValueError("world_size must be greater than or equal to 1.")
        self.eta_knob = eta_knob
        self.world_size = world_size

    def costs(self, measurements: Sequence[PowerLimitMeasurement]) -> list[float]:
        """The cost of each, J."""
        max_power = max(one.power_limit for one in measurements) * self.world_size
        return [zeus_cost(one.energy, one.time, self.eta_knob, max_power) for one in measurements]

    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        """See `OptimumSelector`."""
        costs = self.costs(measurements)
        return measurements[costs.index(min(costs))].power_limit


class MaxSlowdownConstraint(OptimumSelector):
    """The lowest limit at which training takes at most `factor` times as long as at the highest.

    Args:
        factor: Such as 1.1 for at most 10 % more time.

    Raises:
        ValueError: It is below 1.
    """

    def __init__(self, factor: float) -> None:
        if factor < 1.0:
            raise ValueError(
                f"max_slowdown_factor must be greater than or equal to 1.0. Got {factor}."
            )
        self.factor = factor

    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        """See `OptimumSelector`."""
        fastest = max(measurements, key=lambda one: one.power_limit)
        allowed = [one for one in measurements if one.time <= self.factor * fastest.time]
        return min(one.power_limit for one in allowed)

"""Finds the best power limit for a training job while it trains."""

from zeus.optimizer.power_limit.optimizer import GlobalPowerLimitOptimizer
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement, ProfileError
from zeus.optimizer.power_limit.selectors import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    Time,
    ZeusCost,
)
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, Warmup

__all__ = [
    "Done",
    "Energy",
    "GlobalPowerLimitOptimizer",
    "MaxSlowdownConstraint",
    "OptimumSelector",
    "PowerLimitMeasurement",
    "ProfileError",
    "Profiling",
    "Ready",
    "Time",
    "Warmup",
    "ZeusCost",
]

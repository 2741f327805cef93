"""Finds the best power limit for a training job while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.optimizer.power_limit.optimizer import GlobalPowerLimitOptimizer
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement, ProfileError
from zeus.optimizer.power_limit.report import Report
from zeus.optimizer.power_limit.selectors import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    Time,
    ZeusCost,
)
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, Warmup
from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.optimizer.power_limit.huggingface import (
        HFGlobalPowerLimitOptimizer as HFGlobalPowerLimitOptimizer,
    )
    from zeus.optimizer.power_limit.lightning_callback import (
        LightningGlobalPowerLimitOptimizer as LightningGlobalPowerLimitOptimizer,
    )

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
    "Report",
    "Time",
    "Warmup",
    "ZeusCost",
]

# They import their framework, so they are imported on demand.
__getattr__ = lazily(
    __name__,
    {
        "HFGlobalPowerLimitOptimizer": "huggingface",
        "LightningGlobalPowerLimitOptimizer": "lightning_callback",
    },
)

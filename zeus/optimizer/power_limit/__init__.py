"""Finds the best power limit for a training job while it trains."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

# They import their framework, so they are imported when they are asked for.
_LAZY = {
    "HFGlobalPowerLimitOptimizer": "huggingface",
    "LightningGlobalPowerLimitOptimizer": "lightning_callback",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)

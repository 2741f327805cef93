"""Optimizers: callbacks that choose how the GPUs run while a job trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeus.optimizer import power_limit
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

if TYPE_CHECKING:
    from zeus.optimizer.power_limit import (
        HFGlobalPowerLimitOptimizer as HFGlobalPowerLimitOptimizer,
    )
    from zeus.optimizer.power_limit import (
        LightningGlobalPowerLimitOptimizer as LightningGlobalPowerLimitOptimizer,
    )

__all__ = ["GlobalPowerLimitOptimizer"]


def __getattr__(name: str) -> Any:
    if name not in ("HFGlobalPowerLimitOptimizer", "LightningGlobalPowerLimitOptimizer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(power_limit, name)

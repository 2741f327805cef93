"""Optimizers: callbacks that choose how the GPUs run while a job trains."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency import (
        PipelineFrequencyOptimizer as PipelineFrequencyOptimizer,
    )
    from zeus.optimizer.power_limit import (
        GlobalPowerLimitOptimizer as GlobalPowerLimitOptimizer,
    )
    from zeus.optimizer.power_limit import (
        HFGlobalPowerLimitOptimizer as HFGlobalPowerLimitOptimizer,
    )
    from zeus.optimizer.power_limit import (
        LightningGlobalPowerLimitOptimizer as LightningGlobalPowerLimitOptimizer,
    )

# Who plans a pipeline, or serves plans, needs nothing of what measures and sets power limits.
_LAZY = {
    "GlobalPowerLimitOptimizer": "power_limit",
    "HFGlobalPowerLimitOptimizer": "power_limit",
    "LightningGlobalPowerLimitOptimizer": "power_limit",
    "PipelineFrequencyOptimizer": "pipeline_frequency",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)

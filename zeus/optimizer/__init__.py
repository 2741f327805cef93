"""Optimizers: callbacks that choose how the GPUs run while a job trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.optimizer.batch_size import BatchSizeOptimizer as BatchSizeOptimizer
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
    from zeus.optimizer.power_limit import OptimumSelector as OptimumSelector

__all__ = ["BatchSizeOptimizer", "GlobalPowerLimitOptimizer", "PipelineFrequencyOptimizer"]

# Planning pipelines and serving plans needs nothing of the power limit optimizer.
__getattr__ = lazily(
    __name__,
    {
        "BatchSizeOptimizer": "batch_size",
        "GlobalPowerLimitOptimizer": "power_limit",
        "HFGlobalPowerLimitOptimizer": "power_limit",
        "LightningGlobalPowerLimitOptimizer": "power_limit",
        "OptimumSelector": "power_limit",
        "PipelineFrequencyOptimizer": "pipeline_frequency",
    },
)

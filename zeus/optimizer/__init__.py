"""Optimizers: callbacks that choose how the GPUs run while a job trains."""

from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

__all__ = ["GlobalPowerLimitOptimizer"]

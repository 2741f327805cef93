"""What chooses batch sizes and power limits of recurring jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.policy.interface import BatchSizeOptimizer, Estimate, PowerLimitOptimizer, Run
from zeus.policy.power import JITPowerLimitOptimizer
from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.policy.gp import GPBatchSizeOptimizer as GPBatchSizeOptimizer
    from zeus.policy.mab import GaussianTS as GaussianTS
    from zeus.policy.make import POLICIES as POLICIES
    from zeus.policy.make import make_policy as make_policy
    from zeus.policy.pruning import GTSBatchSizeOptimizer as GTSBatchSizeOptimizer
    from zeus.policy.pruning import PruningExploreManager as PruningExploreManager
    from zeus.policy.pruning import PruningGTSBatchSizeOptimizer as PruningGTSBatchSizeOptimizer

__all__ = [
    "POLICIES",
    "BatchSizeOptimizer",
    "Estimate",
    "GPBatchSizeOptimizer",
    "GTSBatchSizeOptimizer",
    "GaussianTS",
    "JITPowerLimitOptimizer",
    "PowerLimitOptimizer",
    "PruningExploreManager",
    "PruningGTSBatchSizeOptimizer",
    "Run",
    "make_policy",
]

# These compute with NumPy.
__getattr__ = lazily(
    __name__,
    {
        "GPBatchSizeOptimizer": "gp",
        "GTSBatchSizeOptimizer": "pruning",
        "GaussianTS": "mab",
        "POLICIES": "make",
        "PruningExploreManager": "pruning",
        "PruningGTSBatchSizeOptimizer": "pruning",
        "make_policy": "make",
    },
)

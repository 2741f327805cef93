"""Sets each GPU's clock for every instruction of pipeline-parallel training.

The stages of a pipeline are never equal, so GPUs wait for each other at full clock. A plan slows
down instructions whose GPU would wait anyway.

Source of the idea: J.-W. Chung et al., "Reducing Energy Bloat in Large Model Training", SOSP 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency.frequency_controller import (
        FrequencyController as FrequencyController,
    )
    from zeus.optimizer.pipeline_frequency.optimizer import (
        PipelineFrequencyOptimizer as PipelineFrequencyOptimizer,
    )
    from zeus.optimizer.pipeline_frequency.plans import Frontier as Frontier
    from zeus.optimizer.pipeline_frequency.plans import Plan as Plan

# The planner and the server do not need the client's imports, and vice versa.
__getattr__ = lazily(
    __name__,
    {
        "FrequencyController": "frequency_controller",
        "Frontier": "plans",
        "PipelineFrequencyOptimizer": "optimizer",
        "Plan": "plans",
    },
)

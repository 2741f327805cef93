"""Plans the clocks of a pipeline's instructions: the frontier between time and energy."""

from __future__ import annotations

from zeus.optimizer.pipeline_frequency.planner.planner import Planner
from zeus.optimizer.pipeline_frequency.planner.power import PowerBound
from zeus.optimizer.pipeline_frequency.planner.problem import Changes

__all__ = ["Changes", "Planner", "PowerBound"]

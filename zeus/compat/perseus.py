"""Names of the pipeline frequency optimizer when it was called Perseus."""

from __future__ import annotations

from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer

PerseusOptimizer = PipelineFrequencyOptimizer

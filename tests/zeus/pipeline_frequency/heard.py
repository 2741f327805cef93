"""A listener in the place of the pipeline frequency optimizer."""

from __future__ import annotations

import inspect
from typing import Any

from zeus.callback import Callback
from zeus.optimizer.pipeline_frequency.optimizer import PipelineFrequencyOptimizer


class Heard(Callback):
    """Takes the optimizer's arguments, and records the calls.

    Attributes:
        events: What it was told.
    """

    last: Heard

    def __init__(self, **arguments: Any) -> None:
        if arguments:
            inspect.signature(PipelineFrequencyOptimizer).bind(**arguments)
        self.events: list[str] = []
        Heard.last = self

    def on_step_begin(self) -> None:
        self.events.append("step begins")

    def on_step_end(self) -> None:
        self.events.append("step ends")

    def on_instruction_begin(self, name: str) -> None:
        self.events.append(name)

    def on_instruction_end(self, name: str) -> None:
        assert name in self.events

    def on_pause(self) -> None:
        self.events.append("pause")

    def on_train_end(self) -> None:
        self.events.append("end")

"""Calls callbacks for the instructions of a `torch.distributed.pipelining` schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeus.callback import Callback

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHT = "backward_weight"


def instrument(
    schedule: Any, stages: Any | Sequence[Any], callback: Callback, synchronize: bool = True
) -> None:
    """Calls `callback` at each step and each instruction of a schedule.

    A training step, `schedule.step(...)`, calls `on_step_begin` and `on_step_end`. In between, each
    microbatch's work on a stage is an instruction, `forward` or `backward`. Schedules that split
    the backward (zero bubble) run `backward_input` and `backward_weight`. An instruction begins
    after its inputs were received, and ends before anything is sent.

    Work that is not training is not a step and has no instructions: `schedule.eval(...)`, a step
    under `torch.no_grad()`, another schedule of the same stages. It calls `on_pause`.

    Args:
        stages: This process's stage or stages, as passed to the schedule.
        callback: A `PipelineFrequencyOptimizer`, or a `CallbackSet` with more.
        synchronize: On CUDA, wait before an instruction until the GPU has finished launched work,
            including receives. Otherwise instructions are launched, and clocks set, far ahead of
            the GPU.
    """
    steps = _Steps(schedule, callback)
    for stage in stages if isinstance(stages, Sequence) else [stages]:
        wait = _waiting_for(stage.device) if synchronize else _nothing
        steps.wrap(stage, "forward_one_chunk", wait, lambda arguments: FORWARD)
        steps.wrap(stage, "backward_one_chunk", wait, _kind_of_backward)
        if hasattr(stage, "backward_weight_one_chunk"):
            steps.wrap(stage, "backward_weight_one_chunk", wait, lambda arguments: BACKWARD_WEIGHT)


class _Steps:
    """Detects the training steps of a schedule."""

    def __init__(self, schedule: Any, callback: Callback) -> None:
        self._callback = callback
        self._training = False
        step = schedule.step

        @functools.wraps(step)
        def with_callback(*args: Any, **kwargs: Any) -> Any:
            # `eval` unsets the flag and calls `step`.
            if not getattr(schedule, "_has_backward", True) or not torch.is_grad_enabled():
                callback.on_pause()
                return step(*args, **kwargs)
            callback.on_step_begin()
            self._training = True
            try:
                result = step(*args, **kwargs)
            finally:
                self._training = False
            callback.on_step_end()
            return result

        schedule.step = with_callback

    def wrap(
        self,
        stage: Any,
        method: str,
        wait: Callable[[], None],
        name_of: Callable[[dict[str, Any]], str],
    ) -> None:
        """Wraps a method of a stage as an instruction."""
        run = getattr(stage, method)
        callback = self._callback

        @functools.wraps(run)
        def with_callback(*args: Any, **kwargs: Any) -> Any:
            if not self._training:
                return run(*args, **kwargs)
            name = name_of(kwargs)
            wait()
            callback.on_instruction_begin(name)
            result = run(*args, **kwargs)
            callback.on_instruction_end(name)
            return result

        setattr(stage, method, with_callback)


def _kind_of_backward(arguments: dict[str, Any]) -> str:
    return BACKWARD if arguments.get("full_backward", True) else BACKWARD_INPUT


def _waiting_for(device: torch.device) -> Callable[[], None]:
    if torch.device(device).type != "cuda":
        return _nothing
    return functools.partial(torch.cuda.synchronize, device)


def _nothing() -> None:
    """Does not wait."""

"""Calls callbacks for steps and instructions of `torch.distributed.pipelining` and others."""

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
    steps = PipelineHooks(callback)

    def trains(*args: Any, **kwargs: Any) -> bool:
        # `eval` unsets the flag and calls `step`.
        return bool(getattr(schedule, "_has_backward", True)) and torch.is_grad_enabled()

    schedule.step = steps.step(schedule.step, trains)
    for stage in stages if isinstance(stages, Sequence) else [stages]:
        wait = _waiting_for(stage.device) if synchronize else _nothing
        for method, name in (
            ("forward_one_chunk", FORWARD),
            ("backward_one_chunk", _kind_of_backward),
            ("backward_weight_one_chunk", BACKWARD_WEIGHT),
        ):
            if hasattr(stage, method):
                setattr(stage, method, steps.instruction(getattr(stage, method), name, wait))


class PipelineHooks:
    """Wraps the functions of a framework that are training steps and instructions."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._training = False

    def step(
        self, run: Callable[..., Any], trains: Callable[..., bool] = lambda *args, **kwargs: True
    ) -> Callable[..., Any]:
        """A function that runs a training step.

        Args:
            trains: Whether it is one, by its arguments; otherwise it calls `on_pause`.
        """

        @functools.wraps(run)
        def with_callback(*args: Any, **kwargs: Any) -> Any:
            if not trains(*args, **kwargs):
                self._callback.on_pause()
                return run(*args, **kwargs)
            self._callback.on_step_begin()
            self._training = True
            try:
                result = run(*args, **kwargs)
            finally:
                self._training = False
            self._callback.on_step_end()
            return result

        return with_callback

    def instruction(
        self,
        run: Callable[..., Any],
        name: str | Callable[[dict[str, Any]], str],
        wait: Callable[[], None] | None = None,
    ) -> Callable[..., Any]:
        """A function that is an instruction where a training step calls it.

        Args:
            name: The instruction's name, or a function that gives it for keyword arguments.
            wait: Waits for the GPU; `torch.cuda.synchronize` by default.
        """

        @functools.wraps(run)
        def with_callback(*args: Any, **kwargs: Any) -> Any:
            if not self._training:
                return run(*args, **kwargs)
            (wait or torch.cuda.synchronize)()
            of_call = name if isinstance(name, str) else name(kwargs)
            self._callback.on_instruction_begin(of_call)
            result = run(*args, **kwargs)
            self._callback.on_instruction_end(of_call)
            return result

        return with_callback


def _kind_of_backward(arguments: dict[str, Any]) -> str:
    return BACKWARD if arguments.get("full_backward", True) else BACKWARD_INPUT


def _waiting_for(device: torch.device) -> Callable[[], None]:
    if torch.device(device).type != "cuda":
        return _nothing
    return functools.partial(torch.cuda.synchronize, device)


def _nothing() -> None:
    """Does not wait."""

"""`EnergyCallback` for Hugging Face's `Trainer`, and for TRL's trainers."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from zeus.measure.account import EnergySummary
from zeus.measure.callback import EnergyCallback
from zeus.utils.configured import Configured

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

    INSTALLED = True
else:
    try:
        from transformers import TrainerCallback

        INSTALLED = True
    except ImportError:
        TrainerCallback = object
        INSTALLED = False


class HFEnergyCallback(Configured, TrainerCallback):
    """Measures training and sets nothing; takes the arguments of `EnergyCallback`.

        callback = HFEnergyCallback()
        trainer = Trainer(..., callbacks=[callback])
        callback.attach(trainer)  # figures go where the loss goes

    A step is an optimizer step; it excludes evaluations and checkpoints.

    Raises:
        ImportError: transformers is not installed.
        ValueError: As `EnergyCallback`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not INSTALLED:
            raise ImportError(
                "HFEnergyCallback needs transformers, which is not installed: "
                "pip install 'zeusd[hf]'"
            )
        kwargs.setdefault("log", self._log)
        self._callback = EnergyCallback(*args, **kwargs)
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._ended = True
        self._train: _Call | None = None
        atexit.register(_end_at_exit, weakref.ref(self))

    @property
    def summary(self) -> EnergySummary | None:
        """Summary of the last training; None before its end. After Ctrl-C or an error in `train`,
        it is of the time until the last step.
        """
        self._end_interrupted()
        return self._callback.summary

    def attach(self, trainer: Trainer) -> None:
        """Adds this to a trainer's callbacks, unless it is there, and logs with the trainer's
        `log`. So figures go where the loss goes: the trainer's history, TensorBoard, Weights &
        Biases, MLflow. The process for which `is_world_process_zero()` is true logs.
        """
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        # Weak: a trainer holds the model, which must be freed with it.
        self._trainer = weakref.ref(trainer)

    def on_train_begin(self, *event: Any, **objects: Any) -> None:
        """Training begins."""
        self._ended = False
        self._train = _Call()
        self._callback.on_train_begin()

    def on_epoch_begin(self, *event: Any, **objects: Any) -> None:
        """An epoch begins."""
        self._callback.on_epoch_begin()

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """An optimizer step begins."""
        self._callback.on_step_begin()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """An optimizer step has ended."""
        due = control.should_log  # logging clears it
        self._callback.on_step_end()
        control.should_log = due

    def on_epoch_end(self, *event: Any, **objects: Any) -> None:
        """An epoch has ended."""
        self._callback.on_epoch_end()

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """Called after the trainer's own summary was logged: then the loggers are closed."""
        if "train_runtime" in (logs or {}) and not self._ended:
            self._ended = True
            self._callback.on_train_end()

    def on_train_end(self, *event: Any, **objects: Any) -> None:
        """Training has ended."""
        if not self._ended:
            self._ended = True
            self._callback.on_train_end()

    def _end_interrupted(self) -> None:
        """Ends the summary if `train()` was left by an error, which the trainer does not report."""
        if not self._ended and self._train is not None and not self._train.runs:
            self._ended = True
            self._callback.on_interrupted()

    def _log(self, figures: dict[str, float], step: int) -> None:
        trainer = self._trainer()
        if trainer is not None and trainer.is_world_process_zero():
            trainer.log(dict(figures))


class _Call:
    """The call of the trainer that has begun training."""

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_back is not None and _passes_on(frame):
            frame = frame.f_back
        self._thread = threading.get_ident()
        # Not the frame itself, which holds the model.
        self._id, self._code = id(frame), None if frame is None else frame.f_code

    @property
    def runs(self) -> bool:
        """Whether it has not ended, by return or exception."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if id(frame) == self._id and frame.f_code is self._code:
                return True
            frame = frame.f_back
        return False


def _passes_on(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return module == __name__ or module.endswith(".trainer_callback")


def _end_at_exit(callback: weakref.ref[HFEnergyCallback]) -> None:
    alive = callback()
    if alive is not None:
        alive._end_interrupted()

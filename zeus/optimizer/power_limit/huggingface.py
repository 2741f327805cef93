"""The power limit optimizer as a callback of Hugging Face's `Trainer`, and of TRL's trainers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from zeus.optimizer.power_limit.driven import Driven
from zeus.utils.guard import guarded

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    INSTALLED = True
else:
    try:
        from transformers import TrainerCallback

        INSTALLED = True
    except ImportError:
        TrainerCallback = object
        INSTALLED = False


class HFGlobalPowerLimitOptimizer(Driven, TrainerCallback):
    """`GlobalPowerLimitOptimizer` for `Trainer(callbacks=[...])`; takes the same arguments.

    A step is an optimizer step, with all batches that it accumulates. Evaluation and checkpoints
    are excluded from measurements, and run at the highest limit while the search continues. The
    limits are restored when training ends. `Trainer` does not notify callbacks when training fails:
    use this as a context manager if the process continues, as in a notebook.

    Raises:
        ImportError: transformers is not installed.
        ValueError: As `GlobalPowerLimitOptimizer`.
    """

    _needs = ("transformers", "hf", INSTALLED)
    _trainer: weakref.ref[Trainer] | None = None

    def attach(self, trainer: Trainer) -> None:
        """Adds this to a trainer's callbacks, unless it is there, and logs figures with its `log`.
        So they go where the loss goes: the trainer's history, TensorBoard, Weights & Biases. One
        process logs, the one for which `is_world_process_zero()` is true.

        Args:
            trainer: A `transformers.Trainer`, before it trains.
        """
        if not any(one is self for one in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        # Weak: a trainer holds the model, which must be freed with it.
        self._trainer = weakref.ref(trainer)
        self._logs = True
        self._collect_metrics()

    # ------------------------------- events: arguments, state and control of training, and objects

    @guarded
    def on_train_begin(self, *event: Any, **objects: Any) -> None:
        """Training begins, the first time or again."""
        self._begin_training()

    @guarded
    def on_epoch_begin(self, *event: Any, **objects: Any) -> None:
        """An epoch begins."""
        self.optimizer.on_epoch_begin()

    @guarded
    def on_step_begin(self, *event: Any, **objects: Any) -> None:
        """An optimizer step begins."""
        self._begin_step()
        self._send(event[2])

    @guarded
    def on_step_end(self, *event: Any, **objects: Any) -> None:
        """An optimizer step has ended; the control's flags say what may follow."""
        self._end_step()
        control = event[2]
        if control.should_evaluate or control.should_save:
            self.optimizer.on_pause()

    @guarded
    def on_prediction_step(self, *event: Any, **objects: Any) -> None:
        """A batch was evaluated, perhaps unexpectedly by a later callback; or something else than
        training was done.
        """
        self._drop_window()

    on_evaluate = on_prediction_step
    on_predict = on_prediction_step
    on_save = on_prediction_step

    @guarded
    def on_epoch_end(self, *event: Any, **objects: Any) -> None:
        """An epoch has ended; the evaluation after it has not begun."""
        self._end_epoch()
        self._send(event[2])

    @guarded
    def on_log(self, *event: Any, **objects: Any) -> None:
        """Something was logged. If it is the summary of training, this is the last chance to log:
        the logging callbacks close in `on_train_end`, before ours is called.
        """
        _, state, control, *_ = event
        over = control.should_training_stop or state.global_step >= state.max_steps
        if over and "train_runtime" in (objects.get("logs") or {}) and self._trainer is not None:
            self._end_training()
            self._send(control)

    @guarded
    def on_train_end(self, *event: Any, **objects: Any) -> None:
        """Training has ended: restore the limits."""
        self._end_training()

    def _send(self, control: Any) -> None:
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None and self._figures:
            # Logging clears the flag by which the trainer knows that its own figures are due.
            due = control.should_log
            self._log(trainer.log if trainer.is_world_process_zero() else None)
            control.should_log = due

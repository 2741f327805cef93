"""The power limit optimizer as a callback of Lightning's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeus.optimizer.power_limit.driven import Driven
from zeus.utils.guard import guarded
from zeus.utils.lightning import INSTALLED, Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LightningGlobalPowerLimitOptimizer(Driven, Callback):
    """`GlobalPowerLimitOptimizer` for `Trainer(callbacks=[...])`; takes the same arguments.

    A step is an optimizer step, with all batches that it accumulates; with manual optimization, it
    is a batch. Validation and checkpoints are excluded from measurements, and run at the highest
    limit while the search continues. Figures go to the trainer's loggers. The limits are restored
    when `fit` ends, even by an error.

    Raises:
        ImportError: Lightning is not installed.
        ValueError: As `GlobalPowerLimitOptimizer`.
    """

    _needs = ("lightning", "lightning", INSTALLED)
    _step_began_at = 0
    _saved: list[Any]

    # ---------------------------------------------------------------------------------- events

    @guarded
    def on_train_start(self, trainer: Trainer, *event: Any, **objects: Any) -> None:
        """Training begins, the first time or again; the sanity check is over."""
        self._collect_metrics()
        self._begin_training()
        self._saved = _saved(trainer)

    @guarded
    def on_train_epoch_start(self, *event: Any, **objects: Any) -> None:
        """An epoch begins."""
        self.optimizer.on_epoch_begin()

    @guarded
    def on_train_batch_start(self, trainer: Trainer, *event: Any, **objects: Any) -> None:
        """A batch begins, and a step unless one is in progress."""
        saved = _saved(trainer)
        if saved != self._saved:  # a weights-only checkpoint does not call callbacks
            self._saved = saved
            self._drop_window()
        if not self._in_step:
            self._step_began_at = trainer.global_step
            self._begin_step()
            self._send(trainer)

    @guarded
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *event: Any, **objects: Any
    ) -> None:
        """A batch has ended, and a step if the weights have changed."""
        if pl_module.automatic_optimization and trainer.global_step == self._step_began_at:
            return
        self._end_step()
        # Predicts what follows, because Lightning reports it only after its workers have started or
        # the state has been gathered.
        if trainer.is_last_batch:
            self._end_epoch()
        elif _validates_now(trainer) or _saves_now(trainer):
            self.optimizer.on_pause()

    @guarded
    def on_validation_start(self, *event: Any, **objects: Any) -> None:
        """Validation begins; if a window is open, unexpectedly or within a step."""
        self._drop_window()

    on_save_checkpoint = on_validation_start

    @guarded
    def on_validation_end(self, trainer: Trainer, *event: Any, **objects: Any) -> None:
        """The model was validated."""
        if not trainer.sanity_checking:
            self._drop_window()

    @guarded
    def on_train_epoch_end(self, trainer: Trainer, *event: Any, **objects: Any) -> None:
        """An epoch has ended."""
        self._end_epoch()
        self._send(trainer)

    @guarded
    def on_train_end(self, trainer: Trainer, *event: Any, **objects: Any) -> None:
        """Training has ended: restore the limits."""
        self._end_training()
        self._send(trainer)

    @guarded
    def on_exception(self, *event: Any, **objects: Any) -> None:
        """Training has failed or was interrupted: restore the limits."""
        self.close()

    @guarded
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A stage has ended: restore the limits."""
        if stage == "fit":
            self._end_training()

    def _send(self, trainer: Trainer) -> None:
        if not self._figures:
            return
        # The step number that Lightning and its callbacks log with.
        loop = trainer.fit_loop.epoch_loop
        step = getattr(loop, "_batches_that_stepped", trainer.global_step)

        def send(figures: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

        self._log(send if trainer.is_global_zero else None)


def _validates_now(trainer: Trainer) -> bool:
    """Whether validation comes after this batch, if this Lightning can be asked."""
    try:
        loop = trainer.fit_loop
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))
    except (AttributeError, TypeError):
        return False


def _saves_now(trainer: Trainer) -> bool:
    """Whether a checkpoint follows this step, if that is known."""
    steps = [getattr(one, "_every_n_train_steps", 0) for one in trainer.checkpoint_callbacks]
    return any(every and trainer.global_step % every == 0 for every in steps)


def _saved(trainer: Trainer) -> list[Any]:
    """What changes when a checkpoint is written."""
    names = ("_last_global_step_saved", "best_model_path", "last_model_path")
    return [getattr(one, name, None) for one in trainer.checkpoint_callbacks for name in names]

"""`EnergyCallback` for Lightning's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeus.measure.account import EnergySummary
from zeus.measure.callback import EnergyCallback
from zeus.utils.configured import Configured
from zeus.utils.lightning import INSTALLED, Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LightningEnergyCallback(Configured, Callback):
    """Measures `fit` and sets nothing; takes the arguments of `EnergyCallback`.

    Figures go to the trainer's loggers. A step is a batch; it excludes validation and checkpoints.

    Raises:
        ImportError: Lightning is not installed.
        ValueError: As `EnergyCallback`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not INSTALLED:
            raise ImportError(
                "LightningEnergyCallback needs lightning, which is not installed: "
                "pip install 'zeusd[lightning]'"
            )
        kwargs.setdefault("log", self._log)
        self._callback = EnergyCallback(*args, **kwargs)
        self._trainer: Trainer | None = None

    @property
    def summary(self) -> EnergySummary | None:
        """Summary of the last training; None before its end."""
        return self._callback.summary

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training begins."""
        self._trainer = trainer
        self._callback.on_train_begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch begins."""
        self._callback.on_epoch_begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch begins."""
        self._callback.on_step_begin()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """A batch has ended."""
        self._callback.on_step_end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch has ended."""
        self._callback.on_epoch_end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training has ended."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Training has failed or was interrupted."""
        self._end()

    def _end(self) -> None:
        self._callback.on_train_end()
        self._trainer = None  # it holds the model

    def _log(self, figures: dict[str, float], step: int) -> None:
        trainer = self._trainer
        if trainer is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

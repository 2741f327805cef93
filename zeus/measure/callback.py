"""`EnergyCallback`: measures a hand-written training loop, and sets nothing."""

from __future__ import annotations

import logging
import sys
from typing import Any

from zeus.callback import Callback
from zeus.measure.account import EnergyAccount, EnergySummary
from zeus.measure.logs import Once, as_log
from zeus.monitor import ZeusMonitor
from zeus.monitor.carbon import CarbonIntensityProvider
from zeus.monitor.price import ElectricityPriceProvider
from zeus.utils.configured import Configured
from zeus.utils.guard import guarded
from zeus.utils.warn import warn

logger = logging.getLogger(__name__)


class EnergyCallback(Configured, Callback):
    """Measures training and sets nothing: J/step, J/epoch and W, and a summary at its end.

    Call it as a callback, or let `Callback.steps` do it. A failure to measure never ends training;
    it causes one warning.

    Args:
        monitor: The GPUs; None: all that this process sees.
        log: Receives the figures, see `zeus.measure.logs.as_log`; None: nothing is logged.
        log_every: Steps between figures: of the steps whose energy has become known since the last
            ones, after the sensors' next update.
        price: Cost of a kWh, or an `ElectricityPriceProvider`; None: no cost.
        currency: Currency of the price.
        carbon_intensity: gCO2eq/kWh, or a `CarbonIntensityProvider`; None: emissions are not
            counted.
        currency: Currency of the price.
        sync_execution: Wait for the GPUs at both ends of each step: figures of single steps are
            exact, but training may be slower. Sums are correct without it.
        print_summary: Print the summary to standard error.

    Raises:
        ValueError: `log_every` is not positive, or a price or intensity is neither a number nor a
            provider.

    Attributes:
        summary: Summary of the last training; None before its end.
    """

    def __init__(
        self,
        monitor: ZeusMonitor | None = None,
        *,
        log: Any = None,
        log_every: int = 10,
        price: float | ElectricityPriceProvider | None = None,
        currency: str = "USD",
        carbon_intensity: float | CarbonIntensityProvider | None = None,
        sync_execution: bool = False,
        print_summary: bool = True,
    ) -> None:
        if not log_every >= 1:
            raise ValueError(f"log_every must be 1 step or more, not {log_every}")
        self.monitor = ZeusMonitor() if monitor is None else monitor
        self.summary: EnergySummary | None = None
        self._account = EnergyAccount(
            self.monitor, price, currency, carbon_intensity, sync_execution
        )
        self._log = None if log is None else Once(as_log(log))
        self._log_every = log_every
        self._prints = print_summary
        self._training = False
        self._warned = False

    @guarded
    def on_train_begin(self) -> None:
        """Training begins."""
        self._training = True
        self.summary = None
        self._account.begin_training()

    @guarded
    def on_epoch_begin(self) -> None:
        """An epoch begins; starts training if it has not begun."""
        if not self._training:
            self.on_train_begin()
        self._account.begin_epoch()

    @guarded
    def on_step_begin(self) -> None:
        """A step begins; starts training if it has not begun."""
        if not self._training:
            self.on_train_begin()
        self._account.begin_step()

    @guarded
    def on_step_end(self) -> None:
        """A step has ended."""
        self._account.end_step()
        if self._log is not None and self._account.steps % self._log_every == 0:
            self._log(self._account.figures(), self._account.steps)

    @guarded
    def on_epoch_end(self) -> None:
        """An epoch has ended."""
        self._account.end_epoch()

    @guarded
    def on_train_end(self) -> None:
        """Training has ended."""
        self._end()

    @guarded
    def on_interrupted(self) -> None:
        """Training ended some time ago, when its last step began or ended."""
        self._end(interrupted=True)

    def _end(self, interrupted: bool = False) -> None:
        if not self._training:
            return
        self._training = False
        if not interrupted:
            self._account.end_epoch()
        figures, self.summary = self._account.end_training(interrupted)
        if self._log is not None:
            self._log({**figures, **self.summary.figures()}, self._account.steps, end=True)
        if self._prints:
            print(f"zeus: {self.summary}", file=sys.stderr)

    def _failed(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn(f"Energy is not measured, and training continues: {error}")
        logger.debug("measuring failed", exc_info=error)

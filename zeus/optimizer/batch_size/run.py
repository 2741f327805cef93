"""A run with its batch size, from the first epoch to its end: counts, measures, reports, stops.

Epochs are counted by their events, if there are any; otherwise each evaluation ends one. An epoch
without an evaluation is reported without a metric, so that a run with rare evaluations stays within
its bounds. Nothing here raises.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeus.optimizer.batch_size.common import (
    CreatedJob,
    NewTrial,
    Reason,
    ReportResponse,
    TrainingResult,
)
from zeus.optimizer.batch_size.endings import Endings, reason_of
from zeus.optimizer.batch_size.link import Link
from zeus.optimizer.batch_size.meter import RunMeter
from zeus.optimizer.batch_size.trials import JobRecord, Trial, reported
from zeus.policy.recurrence import Used
from zeus.utils.guard import guarded

if TYPE_CHECKING:
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

log = logging.getLogger(__name__)

EXIT_S = 5.0
"""How long the end of a run waits for the store, ..."""
SIGNAL_S = 2.0
"""... and how long after a signal, whose sender may not wait long."""

_MEANS: dict[Reason, str] = {
    "cancelled": "that says nothing about batch size {}",
    "failed": "that counts as a crash of batch size {}",
    "oom": "batch size {} and larger ones will not be tried again",
}


class ActiveRun:
    """One run.

    Attributes:
        finished: Whether it is over: its target is reached, or it is stopped early.
        converged: Whether its target is reached.
        message: Why it is over.
        epoch: Number of reported epochs.
    """

    def __init__(
        self,
        spec: CreatedJob,
        trial: NewTrial,
        monitor: ZeusMonitor,
        power_limits: Callable[[], GlobalPowerLimitOptimizer | None],
        link: Link | None,
        goes_on: bool,
    ) -> None:
        self._spec = spec
        self._trial = trial
        before = Used(trial.time, trial.energy, trial.overhead_time, trial.overhead_energy)
        self._meter = RunMeter(monitor, power_limits, spec.max_power, log.warning, before)
        self._link = link
        self._goes_on = goes_on
        self.finished = self.converged = self.over = self.training = False
        self.message = ""
        self.epoch = self._begun = self._ended = trial.current_epoch
        self._epochs_reported = False
        self._warned = False
        self._endings = Endings(self._process_ends)

    @guarded
    def begin(self) -> None:
        """Training begins."""
        if not self.training and not self.over:
            self.training = True
            self._meter.begin()

    @guarded
    def epoch_begins(self) -> None:
        """An epoch begins."""
        self._report_unevaluated()
        self._epochs_reported = True
        self._begun = self._ended + 1

    @guarded
    def epoch_ends(self) -> None:
        """An epoch has ended."""
        self._epochs_reported = True
        self._begun = self._ended = max(self._begun, self._ended + 1)

    @guarded
    def evaluated(self, metric: Any) -> None:
        """An epoch's evaluation has ended, with this metric."""
        epoch = self._begun if self._epochs_reported else self.epoch + 1
        if not self.over:
            self._report(epoch, self._number(metric))
        elif not self.finished:  # measuring failed: a loop until it is finished still ends
            self.epoch = epoch
            self.finished = epoch >= self._spec.max_epochs

    @guarded
    def end(self, error: BaseException | None) -> None:
        """Training has ended, perhaps by an error."""
        if self.over:
            return
        if error is None:
            self._report_unevaluated()
        if not self.over:
            reason = "cancelled" if self._endings.signalled else reason_of(error)
            self._end(reason, EXIT_S)

    # ----------------------------------------------------------------------------------- reports

    def _report_unevaluated(self) -> None:
        if self.training and not self.over and self._ended > self.epoch:
            self._report(self._ended, None)

    def _report(self, epoch: int, metric: float | None) -> None:
        self.epoch = max(1, epoch)
        result = self._result(self._meter.end(), metric)
        answer = None
        if self._meter.known and self._link is not None:
            answer = self._link.report(result)
        if answer is None:
            answer = self._judge(result)
        if answer.stop_train:
            self._finish(answer)
        else:
            log.debug("epoch %d: %s", self.epoch, answer)
            self._meter.begin()

    def _result(self, used: Used, metric: float | None) -> TrainingResult:
        return TrainingResult(
            job_id=self._spec.job_id,
            batch_size=self._trial.batch_size,
            trial_number=self._trial.trial_number,
            key=self._trial.key,
            metric=metric,
            current_epoch=self.epoch,
            searching=self._meter.searching,
            **asdict(used),
        )

    def _judge(self, result: TrainingResult) -> ReportResponse:
        """Decides by the store's rules. No unknown cost ends a run."""
        asked = self._trial
        bound = asked.cost_bound if self._meter.known else None
        trial = Trial(asked.trial_number, asked.batch_size, 0.0, 0.0, cost_bound=bound)
        return reported(JobRecord(self._spec, 0, 0.0), trial, result, 0.0, 1)[1]

    def _finish(self, answer: ReportResponse) -> None:
        self.finished, self.converged, self.message = True, answer.converged, answer.message
        log.log(
            logging.INFO if answer.converged else logging.WARNING,
            "training with batch size %d is over after %d epochs: %s",
            self._trial.batch_size,
            self.epoch,
            answer.message,
        )
        if self._meter.known:
            self._close(None, EXIT_S)
        else:
            log.warning("not all of its energy is known, so the run does not count")
            self._close("cancelled", EXIT_S)

    def _number(self, metric: Any) -> float | None:
        try:
            number = float(metric)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
        if not self._warned:
            self._warned = True
            log.warning("the metric %r is not a finite number: no target is reached", metric)
        return None

    # -------------------------------------------------------------------------------------- ends

    @guarded
    def _process_ends(self, reason: Reason) -> None:
        if not self.over:
            self._end(reason, SIGNAL_S if self._endings.signalled else EXIT_S)

    def _end(self, reason: Reason, wait_s: float) -> None:
        self._meter.drop()
        stays = self._goes_on and reason == "cancelled"
        means = "a run of the same run_id goes on from there" if stays else _MEANS[reason]
        if self._link is not None:
            log.warning(
                "the run ended (%s) after %d epochs, before its target or max_epochs %d: %s",
                reason,
                self.epoch,
                self._spec.max_epochs,
                means.format(self._trial.batch_size),
            )
        self._close(None if stays else reason, wait_s)

    def _close(self, reason: Reason | None, wait_s: float) -> None:
        self.over = True
        self._endings.stop()
        if self._link is not None:
            self._link.end(reason, wait_s)

    def _failed(self, error: Exception) -> None:
        log.info("the batch size optimizer failed", exc_info=True)
        if not self.over:
            log.warning(
                "the batch size optimizer failed (%s: %s); training continues, and this run is not "
                "reported any more. Please report this",
                type(error).__name__,
                error,
            )
            self._close("cancelled", EXIT_S)

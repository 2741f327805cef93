"""One training run on its GPUs: its windows, its cost, its files.

`ZeusDataLoader` reports its iterators' events to a session. A `GlobalPowerLimitOptimizer` finds the
power limit. No failure here, of a sensor, a limit or a file, ends training: it causes one warning,
and training continues at the highest limit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.batch_size.meter import RunMeter
from zeus.optimizer.power_limit import (
    Done,
    GlobalPowerLimitOptimizer,
    OptimumSelector,
    PowerLimitMeasurement,
    ZeusCost,
)
from zeus.policy.recurrence import Used, Verdict, after_another_epoch, judge
from zeus.run import files
from zeus.run.files import TrainResult
from zeus.run.power_json import PowerJson, milliwatts
from zeus.run.settings import Settings
from zeus.utils.guard import guarded
from zeus.utils.metric import zeus_cost
from zeus.utils.warn import warn
from zeus_ipc.overriding import override

log = logging.getLogger(__name__)

STEP_W = 25
"""Difference between adjacent power limits."""

_EVAL = "__ZeusDataLoader_eval"


class RunSession:
    """Measurements and decisions of `ZeusDataLoader`, in the process that makes them.

    Args:
        batch_size: Batch size of all processes together; files are named after it.
        max_epochs: The run is stopped after this many epochs.

    Raises:
        ValueError: The GPUs do not exist, or the folder cannot be created.
        ZeusGPUInitError: The GPUs cannot be reached.
        ZeusBaseGPUError: A GPU has no energy sensor or power limit.

    Attributes:
        optimizer: Finds the power limit; None until the first epoch of training begins.
        max_power: The highest limits of all GPUs together, W.
    """

    def __init__(
        self, settings: Settings, batch_size: int, max_epochs: int, gpu_indices: Sequence[int]
    ) -> None:
        self._settings = settings
        self._batch_size = batch_size
        try:
            Path(settings.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the folder {settings.log_dir} for the run's files cannot be made "
                f"({error.strerror}); set ZEUS_LOG_DIR to another"
            ) from None
        self._monitor = ZeusMonitor(gpu_indices=list(gpu_indices), cpu_indices=[], strict=True)
        gpus = [self._monitor.gpus[index] for index in gpu_indices]
        highest_mw = [gpu.get_power_management_limit_constraints()[1] for gpu in gpus]
        self.max_power = sum(highest_mw) / 1000
        self.epochs, self.used = 0, Used()
        self.optimizer: GlobalPowerLimitOptimizer | None = None
        self._max_epochs = max_epochs
        self._meter = RunMeter(
            self._monitor,
            lambda: self.optimizer,
            self.max_power,
            lambda sentence: warn(f"{sentence[0].upper()}{sentence[1:]}."),
        )
        self._over = False
        self._in_epoch = self._evaluating = False
        self._evaluated: list[tuple[Measurement, int]] = []  # with iterations, in this epoch

    def cost(self, energy: float, time: float) -> float:
        """Returns the cost of energy (J) and time (s) in this run, J."""
        return zeus_cost(energy, time, self._settings.eta_knob, self.max_power)

    # ------------------------------------------------------------------------------------ events

    @guarded
    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._evaluated = []
        self._in_epoch = True
        self._meter.begin()

    def steps(self, batches: Iterable[Any], iterations: int | None) -> Iterator[Any]:
        """Passes an epoch's batches on; limits change, and windows open and close, between them.

        Args:
            iterations: How many they are, if known.
        """
        if self._in_epoch and self.optimizer is None and not self._over:
            self._begin_search(iterations)
        optimizer = self.optimizer if self._in_epoch else None
        yield from batches if optimizer is None else optimizer.steps(batches)

    def evaluation(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Passes the batches of an evaluation on, and measures it."""
        iterations = 0
        self._begin_eval()
        try:
            for batch in batches:
                iterations += 1
                yield batch
        finally:
            self._end_eval(iterations)

    def end_epoch(self, reached: bool) -> Verdict:
        """The epoch has ended. Never raises."""
        self._end_eval(0)
        self._pause()
        self._in_epoch = False
        self.epochs += 1
        self.used = self._meter.end()
        self._keep_profile()
        next_cost = None  # neither the search nor an unknown cost ends a run
        if self._meter.known and not self._meter.searching:
            next_cost = self.cost(*after_another_epoch(self.used, self.epochs))
        return judge(
            reached=reached,
            epochs=self.epochs,
            max_epochs=self._max_epochs,
            next_cost=next_cost,
            cost_bound=self._settings.cost_thresh,
        )

    def end(self, verdict: Verdict) -> TrainResult:
        """Training has ended with this verdict: writes the result."""
        used = self.used
        result = TrainResult(
            energy=used.energy,
            time=used.time,
            cost=self.cost(used.energy, used.time),
            num_epochs=self.epochs,
            reached=verdict.reached,
            overhead=self.cost(used.overhead_energy, used.overhead_time),
            stopped_by_cost=verdict.by_cost,
            next_cost=verdict.next_cost,
            max_power=self.max_power,
        )
        path = files.train_json(self._settings.log_dir, self._settings.job_id, self._batch_size)
        try:
            files.save(path, result)
        except OSError as error:
            warn(f"The run's result cannot be written ({error}).")
        self.close()
        return result

    def _failed(self, error: Exception) -> None:
        log.info("measuring failed", exc_info=True)
        if self.optimizer is not None:
            self.optimizer.give_up(error)
        elif not self._over:
            self._over = True
            warn(f"No power limit is chosen, and training continues at the highest: {error}.")

    def close(self) -> None:
        """Restores the limits. Never raises; zeusd does it too when this process ends."""
        self._over = True
        if self.optimizer is not None:
            self.optimizer.close()
        self._monitor.reset_windows()
        self._in_epoch = self._evaluating = False

    # -------------------------------------------------------------------------------- evaluations

    @guarded
    def _begin_eval(self) -> None:
        if not self._in_epoch or self._evaluating:
            return
        self._evaluating = True
        self._pause()
        self._monitor.begin_window(_EVAL, restart=True)

    @guarded
    def _end_eval(self, iterations: int) -> None:
        if not self._evaluating:
            return
        self._evaluating = False
        ended = self._monitor.end_window(_EVAL)
        if self._optimal is not None and iterations:
            self._evaluated.append((ended, iterations))

    def _pause(self) -> None:
        if self.optimizer is not None:
            self.optimizer.on_pause()

    # ------------------------------------------------------------------------------- power limits

    @guarded
    def _begin_search(self, iterations: int | None) -> None:
        settings, count = self._settings, len(self._monitor.gpu_indices)
        warmup, measure = fitted(*settings.profile_params, iterations)
        self._file = PowerJson(
            files.power_json(settings.log_dir, self._batch_size), settings.job_id, measure
        )
        cost = ZeusCost(settings.eta_knob, count)
        self._cost = cost
        self.optimizer = GlobalPowerLimitOptimizer(
            self._monitor,
            cost if settings.use_optimal_pl else _Highest(),
            wait_steps=0,
            warmup_steps=warmup,
            profile_steps=measure,
            pl_step=STEP_W,
            profile_path=self._file,
            search="exhaustive",
            together=False,
        )
        self.optimizer.on_train_begin()

    @property
    def _optimal(self) -> int | None:
        """The best limit, mW; None: none is chosen."""
        optimizer = self.optimizer
        if optimizer is None or not isinstance(optimizer.state, Done) or not optimizer.state.chosen:
            return None
        return milliwatts(self._cost.choose(optimizer.measurements))

    # ------------------------------------------------------------------------------------- epochs

    @guarded
    def _keep_profile(self) -> None:
        """Writes the profile once a limit is chosen and an epoch, possibly with an evaluation, has
        ended.
        """
        optimizer, optimal = self.optimizer, self._optimal
        if optimizer is None or optimal is None or self._file.finished:
            return
        windows = [one for one in self._evaluated if _has_energy(one[0])]
        seconds = sum(one.time for one, _ in windows)
        evaluation = None
        if seconds > 0:
            watts = sum(one.total_energy for one, _ in windows) / seconds
            throughput = sum(iterations for _, iterations in windows) / seconds
            evaluation = optimizer.current_power_limit, watts, throughput
        self._file.finish(optimal, evaluation)


def _has_energy(window: Measurement) -> bool:
    try:
        return window.total_energy > 0
    except ZeusBaseError:
        return False


class _Highest(OptimumSelector):
    """Returns the highest limit, for a run that only observes."""

    @override
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return measurements[0].power_limit


def fitted(warmup: int, measure: int, iterations: int | None) -> tuple[int, int]:
    """Returns the iterations to warm up and to measure, fewer if an epoch is too short for them.

    Both shrink by the same factor, and one iteration of each is kept.
    """
    if iterations is None or warmup + measure < iterations:
        return warmup, measure
    factor = max(0, iterations - 1) / (warmup + measure)
    return max(min(warmup, 1), int(warmup * factor)), max(1, int(measure * factor))

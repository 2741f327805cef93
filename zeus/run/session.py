"""One training run on its GPUs: its windows, its cost, its files.

`ZeusDataLoader` tells a session what its iterators do. A `GlobalPowerLimitOptimizer` finds the
power limit. Nothing that fails here, a sensor, a limit, a file, ends training: a warning says it
once, and training continues at the highest limit.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus import _node
from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.power_limit import (
    Done,
    GlobalPowerLimitOptimizer,
    OptimumSelector,
    PowerLimitMeasurement,
    ZeusCost,
)
from zeus.policy.stopping import LearningCurve, Verdict
from zeus.run import files
from zeus.run.accounting import Account, Epoch, Reading, Spent
from zeus.run.files import TrainResult
from zeus.run.power_json import PowerJson, milliwatts
from zeus.run.settings import Settings
from zeus.utils.guard import guarded
from zeus_ipc.overriding import override

log = logging.getLogger(__name__)

STEP_W = 25
"""Difference of one power limit to the next."""

_EPOCH, _TRAIN, _EVAL = (f"__ZeusDataLoader_{name}" for name in ("epoch", "train", "eval"))


Metrics = tuple[Sequence[float | None], bool]


@dataclass(frozen=True)
class _Measured:
    """A window that has ended, and the iterations in it."""

    measurement: Measurement
    iterations: int


class Session:
    """What `ZeusDataLoader` measures and decides, in the process that does so.

    Args:
        settings: How the run trains.
        batch_size: Batch size of all processes together; files are named after it.
        max_epochs: The run is given up after so many epochs.
        gpu_indices: The GPUs that it trains on.

    Raises:
        ValueError: The GPUs are not there or take no common limit, or the folder cannot be made.
        ZeusGPUInitError: The GPUs cannot be reached.
        ZeusBaseGPUError: A GPU has no energy or no power limit to read.

    Attributes:
        account: What was spent.
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
        ranges = [gpu.get_power_management_limit_constraints() for gpu in gpus]
        low, high = max(low for low, _ in ranges), min(high for _, high in ranges)
        if low > high:
            raise ValueError("there is no power limit that all GPUs of this job take")
        self.max_power = sum(high for _, high in ranges) / 1000
        self.account = Account(settings.eta_knob, self.max_power, max_epochs, settings.cost_thresh)
        self.optimizer: GlobalPowerLimitOptimizer | None = None
        self._over = False
        self._told_of_energy = False
        self._training = self._evaluating = False
        self._in_epoch = False
        self._seen = 0
        self._begin_counts()

    # ------------------------------------------------------------------------------------ events

    @guarded
    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._begin_counts()
        self._in_epoch = True
        self._monitor.begin_window(_EPOCH, restart=True)

    @guarded
    def begin_train(self, iterations: int | None) -> None:
        """The train loader begins to hand batches out.

        Args:
            iterations: How many there will be, as far as the loader knows.
        """
        if not self._in_epoch:
            return
        self._seen, self._training = 0, True
        self._monitor.begin_window(_TRAIN, restart=True)
        if self.optimizer is None and not self._over:
            self._begin_search(iterations)
        if self.optimizer is not None:
            self.optimizer.on_epoch_begin()

    @guarded
    def begin_iteration(self) -> None:
        """An iteration begins: where limits change, and windows open and close."""
        _node.progress()
        if not self._training:
            return
        self._seen += 1
        if self.optimizer is not None:
            self.optimizer.on_step_begin()

    @guarded
    def end_train(self) -> None:
        """The train loader has handed out its last batch of the epoch, and it was used."""
        if not self._training:
            return
        self._training = False
        self._trained.append(_Measured(self._monitor.end_window(_TRAIN), self._seen))
        if self.optimizer is not None:
            self.optimizer.on_epoch_end()

    @guarded
    def begin_eval(self) -> None:
        """An evaluation begins."""
        if not self._in_epoch or self._evaluating:
            return
        self._evaluating = True
        if self.optimizer is not None:
            self.optimizer.on_pause()
        self._monitor.begin_window(_EVAL, restart=True)

    @guarded
    def end_eval(self, iterations: int) -> None:
        """The evaluation has ended, after so many iterations."""
        if not self._evaluating:
            return
        self._evaluating = False
        ended = self._monitor.end_window(_EVAL)
        if self._optimal is not None and iterations:
            self._evaluated.append(_Measured(ended, iterations))

    def end_epoch(self, reached: bool, metrics: Metrics | None = None) -> Verdict:
        """The epoch has ended. Never raises.

        Args:
            reached: Whether the target is reached.
            metrics: One an epoch until now, None where there is none; and whether a larger one is
                better. None: not known.
        """
        self.end_train()
        self.end_eval(0)
        self._in_epoch = False
        self.account.epochs.append(self._epoch())
        self._keep_profile()
        rerun_cost = self._settings.rerun_cost
        curve = None
        if metrics is not None and rerun_cost is not None:
            target = self._settings.target_metric
            curve = LearningCurve(metrics[0], target, metrics[1], rerun_cost)
        return self.account.judge(reached, self._searching, self._reading, curve)

    def end(self, verdict: Verdict) -> TrainResult:
        """Training has ended as the verdict says: its result is written."""
        result = self.account.result(verdict, self._reading)
        path = files.train_json(self._settings.log_dir, self._settings.job_id, self._batch_size)
        try:
            files.save(path, result)
        except OSError as error:
            warnings.warn(f"The run's result cannot be written ({error}).", stacklevel=3)
        self.close()
        return result

    def _failed(self, error: Exception) -> None:
        log.info("measuring failed", exc_info=True)
        if self.optimizer is not None:
            self.optimizer.give_up(error)
        elif not self._over:
            self._over = True
            warnings.warn(
                f"No power limit is chosen, and training continues at the highest: {error}.",
                stacklevel=4,
            )

    def close(self) -> None:
        """Restores the limits. Never raises; zeusd does it too when this process ends."""
        self._over = True
        if self.optimizer is not None:
            self.optimizer.close()
        self._monitor.reset_windows()
        self._in_epoch = self._training = self._evaluating = False

    # ------------------------------------------------------------------------------- power limits

    @property
    def _searching(self) -> bool:
        """Whether limits are still to be measured."""
        if self.optimizer is None:
            return not self._over
        return not isinstance(self.optimizer.state, Done)

    def _begin_search(self, iterations: int | None) -> None:
        settings, count = self._settings, len(self._monitor.gpu_indices)
        warmup, measure = fitted(settings.warmup_iters, settings.measure_iters, iterations)
        self._measure = measure
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
        self._settled = not self._searching

    @property
    def _optimal(self) -> int | None:
        """The best limit, mW; None: none is chosen."""
        optimizer = self.optimizer
        if optimizer is None or not isinstance(optimizer.state, Done) or not optimizer.state.chosen:
            return None
        return milliwatts(self._cost.choose(optimizer.measurements))

    @property
    def _readings(self) -> dict[int, Reading]:
        """What is known of each limit, mW."""
        known = [] if self.optimizer is None else self.optimizer.measurements
        return {
            milliwatts(one): Reading(one.energy / one.time, self._measure / one.time)
            for one in known
        }

    @property
    def _reading(self) -> Reading | None:
        """What training does at the limit in force, else at the best that is known by now."""
        if self.optimizer is None or self.optimizer.disabled:
            return None
        readings = self._readings
        if self._searching and readings:
            return readings[milliwatts(self._cost.choose(self.optimizer.measurements))]
        return readings.get(self.optimizer.current_power_limit)

    # ------------------------------------------------------------------------------------- epochs

    def _begin_counts(self) -> None:
        self._began = time.monotonic()
        self._settled = not self._searching
        self._trained: list[_Measured] = []
        self._evaluated: list[_Measured] = []

    def _epoch(self) -> Epoch:
        """What the epoch took."""
        iterations = sum(one.iterations for one in self._trained)
        try:
            total = self._spent(self._monitor.end_window(_EPOCH))
            train = sum((self._spent(one.measurement) for one in self._trained), Spent())
        except Exception as error:
            log.info("an epoch was not measured", exc_info=True)
            total = self._estimated(time.monotonic() - self._began, str(error))
            train = total
        return Epoch(total, train, iterations, self._settled)

    @guarded
    def _keep_profile(self) -> None:
        """Once there is a choice, and an epoch has ended that may have an evaluation in it."""
        optimizer, optimal = self.optimizer, self._optimal
        if optimizer is None or optimal is None or self._file.finished:
            return
        windows = [one for one in self._evaluated if self._spent(one.measurement).energy > 0]
        seconds = sum(one.measurement.time for one in windows)
        evaluation = None
        if seconds > 0:
            joules = sum(self._spent(one.measurement).energy for one in windows)
            iterations = sum(one.iterations for one in windows)
            reading = Reading(joules / seconds, iterations / seconds)
            evaluation = optimizer.current_power_limit, reading
        self._file.finish(optimal, evaluation)

    def _spent(self, measurement: Measurement) -> Spent:
        try:
            return Spent(measurement.total_energy, measurement.time)
        except ZeusBaseError as error:
            return self._estimated(measurement.time, error.message)

    def _estimated(self, seconds: float, reason: str) -> Spent:
        """Energy of a time whose energy is not known: at the mean power until then."""
        known = self.account.spent
        power = known.energy / known.time if known.time > 0 else self.max_power
        if not self._told_of_energy:
            self._told_of_energy = True
            warnings.warn(
                f"Energy could not be measured, and {power:.0f} W are assumed for that time: "
                f"{reason}.",
                stacklevel=5,
            )
        return Spent(power * seconds, seconds)


class _Highest(OptimumSelector):
    """The highest limit, of a run that only observes."""

    @override
    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return measurements[0].power_limit


def fitted(warmup: int, measure: int, iterations: int | None) -> tuple[int, int]:
    """Iterations to warm up and to measure, fewer where an epoch is too short for them.

    Both shrink by the same factor, and one iteration of each is kept.

    Args:
        warmup: Iterations that are not measured after a change of the limit.
        measure: Iterations that are measured.
        iterations: Those of an epoch; None: not known.
    """
    if iterations is None or warmup + measure < iterations:
        return warmup, measure
    factor = max(0, iterations - 1) / (warmup + measure)
    return max(min(warmup, 1), int(warmup * factor)), max(1, int(measure * factor))

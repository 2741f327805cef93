"""One training run on its GPUs: its windows, its power limits, its files.

`ZeusDataLoader` tells a session what its iterators do. Nothing that fails here, a sensor, a limit,
a file, ends training: it is told once, in a warning, and training continues at the highest limit.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus import _node
from zeus.exceptions import ZeusBaseError, ZeusGPUInvalidArgError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.power_limit.held import HeldLimits
from zeus.optimizer.power_limit.planner import scan
from zeus.policy.stopping import Verdict
from zeus.run import files
from zeus.run.accounting import Account, Epoch, Spent
from zeus.run.files import TrainResult
from zeus.run.kept import KeptProfile
from zeus.run.profiling import Action, Close, Drop, Hold, Open, Profiler, Reading, best_limit
from zeus.run.settings import Settings
from zeus.utils.guard import guarded

log = logging.getLogger(__name__)

STEP_MW = 25_000
"""Difference of one power limit to the next."""

_EPOCH, _TRAIN, _EVAL, _LIMIT = (
    f"__ZeusDataLoader_{name}" for name in ("epoch", "train", "eval", "limit")
)


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
        profiler: Which limits are measured.
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
        self._limits = HeldLimits(self._monitor.gpus, gpu_indices)
        path = files.power_json(settings.log_dir, batch_size)
        names = [gpu.get_name() for gpu in gpus]
        self._kept = KeptProfile(path, settings.job_id, names, low, high)
        self.profiler = Profiler(
            scan(low, high, STEP_MW),
            settings.warmup_iters,
            settings.measure_iters,
            self._kept.readings,
        )
        self._in_force = 0  # mW; 0: not known, or not ours
        self._optimal: int | None = None
        self._searching = True
        self._stopped = False
        self._told_of_energy = False
        self._waiting: deque[tuple[int, _Measured]] = deque()
        self._iterations: int | None = None
        self._training = self._evaluating = False
        self._in_epoch = False
        self._seen = 0
        self._begin_counts()

    # ------------------------------------------------------------------------------------ events

    @guarded
    def begin(self) -> None:
        """Training begins."""
        if not self._set(self.profiler.limits_mw[0]):
            return
        # A profile that is finished is so whatever limits it has: others may have had a wider step.
        if self._kept.finished or self.profiler.complete:
            self._choose()

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
        # Who leaves the loop early once does so again.
        known = [one for one in (iterations, self._iterations) if one is not None]
        if self._searching and not self.profiler.begin_epoch(min(known, default=None)):
            self._end_search(
                f"an epoch of {min(known)} iterations is too short to measure a power limit in; "
                "training continues at the highest"
            )
            self._settled = True
        self._seen, self._training = 0, True
        self._monitor.begin_window(_TRAIN, restart=True)

    @guarded
    def begin_iteration(self) -> None:
        """An iteration begins: where limits change, and windows open and close."""
        _node.progress()
        if not self._training:
            return
        self._seen += 1
        if self._searching:
            self._do(self.profiler.begin_iteration())
            self._read()

    @guarded
    def end_train(self) -> None:
        """The train loader has handed out its last batch of the epoch, and it was used."""
        if not self._training:
            return
        self._training = False
        self._trained.append(_Measured(self._monitor.end_window(_TRAIN), self._seen))
        self._iterations = self._seen or None
        if self._searching:
            self._do(self.profiler.interrupt())
            self._read()

    @guarded
    def begin_eval(self) -> None:
        """An evaluation begins."""
        if not self._in_epoch or self._evaluating:
            return
        self._evaluating = True
        if self._searching:
            self._do(self.profiler.interrupt())
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

    def end_epoch(self, reached: bool) -> Verdict:
        """The epoch has ended. Never raises.

        Args:
            reached: Whether the target is reached.
        """
        self.end_train()
        self.end_eval(0)
        self._in_epoch = False
        self.account.epochs.append(self._epoch())
        self._keep_profile()
        return self.account.judge(reached, self._searching, self._reading)

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
        self._stop_limits(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Restores the limits. Never raises; zeusd does it too when this process ends."""
        self._end_search(None)
        self._monitor.reset_windows()
        self._in_epoch = self._training = self._evaluating = False
        self._stopped = True
        self._limits.release()

    # ---------------------------------------------------------------------------------- profiling

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            limit = action.power_limit_mw
            if isinstance(action, Hold):
                if not self._set(limit):
                    return
            elif isinstance(action, Open):
                self._monitor.begin_window(_LIMIT, restart=True)
            elif isinstance(action, Drop):
                self._monitor.end_window(_LIMIT, cancel=True)
            elif isinstance(action, Close):
                ended = self._monitor.end_window(_LIMIT)
                self._waiting.append((limit, _Measured(ended, action.iterations)))

    def _read(self) -> None:
        """Reads the energies that are there; all, once nothing is left to measure: then chooses."""
        while self._waiting:
            limit, window = self._waiting[0]
            if self.profiler.active and not self._monitor.ripe(window.measurement):
                return
            self._waiting.popleft()
            try:
                reading = _reading(window)
            except ZeusBaseError as error:
                self._stop_limits(f"energy cannot be measured: {error.message}")
                return
            if reading is None:
                self._stop_limits(
                    f"{window.iterations} iterations at {limit / 1000:g} W were measured as 0 J; "
                    "look at the GPU's sensors with `nvidia-smi -q -d POWER`"
                )
                return
            self.profiler.measured(limit, reading)
            self._kept.keep(self.profiler.readings)
        if self._searching and self.profiler.complete:
            self._choose()

    def _choose(self) -> None:
        self._optimal = best_limit(self.profiler.readings, self._settings.eta_knob, self.max_power)
        log.info("optimal power limit: %g W", self._optimal / 1000)
        self._searching = False
        highest = self.profiler.limits_mw[0]
        self._set(self._optimal if self._settings.use_optimal_pl else highest)

    def _set(self, power_limit_mw: int) -> bool:
        """Sets the limit on all GPUs, unless it is set. False: it cannot be."""
        if self._stopped:
            return False
        if power_limit_mw == self._in_force:
            return True
        highest = self.profiler.limits_mw[0]
        outcome = self._limits.set(power_limit_mw)
        error = None if outcome is None else outcome.error
        if isinstance(error, ZeusGPUInvalidArgError):
            if power_limit_mw == highest or not self._searching:
                self._stop_limits(f"the power limit cannot be set: {error.message}")
                return False
            log.info("%g W is left out: %s", power_limit_mw / 1000, error.message)
            self.profiler.refused(power_limit_mw)
            self._in_force = 0  # some of several GPUs may have taken it
            self._set(highest)
            return False
        if outcome is None or error is not None:
            reason = "zeusd does not answer" if error is None else error.message
            self._stop_limits(f"the power limit cannot be set: {reason}")
            return False
        self._in_force = power_limit_mw
        return True

    def _stop_limits(self, reason: str) -> None:
        """Limits cannot be set any more: log it, and restore them."""
        if self._stopped:
            return
        self._stopped = True
        self._in_force = 0
        self._optimal = None
        self._end_search(f"{reason}. Training continues at the highest power limit")
        self._limits.release()

    def _end_search(self, reason: str | None) -> None:
        self._searching = False
        self.profiler.give_up()
        self._waiting.clear()
        if _LIMIT in self._monitor.measurement_states:
            self._monitor.end_window(_LIMIT, cancel=True)
        if reason is not None:
            warnings.warn(f"No power limit is chosen: {reason}.", stacklevel=4)

    @property
    def _reading(self) -> Reading | None:
        """What training does at the limit in force, else at the best that is known by now."""
        readings = self.profiler.readings
        if self._in_force in readings and not self._searching:
            return readings[self._in_force]
        if not readings or not self._searching:
            return None
        return readings[best_limit(readings, self._settings.eta_knob, self.max_power)]

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
        if self._optimal is None or self._kept.finished:
            return
        windows = [one for one in self._evaluated if self._spent(one.measurement).energy > 0]
        seconds = sum(one.measurement.time for one in windows)
        evaluation = None
        if seconds > 0:
            joules = sum(self._spent(one.measurement).energy for one in windows)
            iterations = sum(one.iterations for one in windows)
            evaluation = self._in_force, Reading(joules / seconds, iterations / seconds)
        self._kept.finish(self.profiler.readings, self._optimal, evaluation)

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


def _reading(window: _Measured) -> Reading | None:
    """What a window has measured; None: nothing.

    Raises:
        ZeusBaseError: Its energy cannot be known.
    """
    joules, seconds = window.measurement.total_energy, window.measurement.time
    if joules <= 0 or seconds <= 0:
        return None
    return Reading(joules / seconds, window.iterations / seconds)

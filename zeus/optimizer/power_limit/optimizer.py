"""`GlobalPowerLimitOptimizer`: tries each power limit while training goes on, and keeps the best.

From the highest limit down, each is held for `warmup_steps` unmeasured and `profile_steps` measured
steps. Then a selector chooses, the choice is set, and training goes on under it. State changes
happen where steps begin:

    Ready      steps used up           -> Warmup at the next limit
    Warmup     steps used up           -> Profiling at the same limit, window opened
    Profiling  steps used up           -> window closed; Warmup at the next limit, or Done
    Warmup, Profiling   epoch ends, evaluation   -> window dropped; Ready for the same limit
    any        a limit cannot be set, nothing can be measured   -> Done, at the highest limit

Limits are set under leases of the node's daemon, which puts them back when training ends, however
it ends.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

from zeus import _node
from zeus.callback import Callback
from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.power_limit import profile
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement, ProfileError, watts
from zeus.optimizer.power_limit.selectors import OptimumSelector, ZeusCost
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, State, Warmup
from zeus.utils import framework

log = logging.getLogger(__name__)


class GlobalPowerLimitOptimizer(Callback):
    """Finds the best common power limit of the monitor's GPUs, one job, while it trains.

    Call it as a callback: `on_epoch_begin`, `on_step_begin`, `on_step_end`, `on_epoch_end`,
    `on_evaluate`, `on_train_end`. A failure of power limits or measuring never ends training: the
    optimizer says so once, in a warning, and stays at the highest limit.

    Args:
        monitor: Its GPUs are optimized; they must take the same range of limits.
        optimum_selector: Chooses; None: `ZeusCost(eta_knob=0.5)` over all GPUs that train together.
        wait_steps: Steps to wait before the first limit.
        warmup_steps: Unmeasured steps at each limit.
        profile_steps: Measured steps at each limit.
        pl_step: Difference of one limit to the next, W. The lowest limit is always tried.
        profile_path: JSON file of the measurements: read if it fits these GPUs, else written when
            all limits are measured.

    Raises:
        ValueError: An argument is out of range, or the GPUs differ in their ranges.

    Attributes:
        state: `Ready`, `Warmup`, `Profiling` or `Done`.
        measurements: What was measured so far.
        power_limits: The limits to try, mW, descending.
        on_progress: Called with the optimizer after every step it takes notice of, if set.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        optimum_selector: OptimumSelector | None = None,
        wait_steps: int = 1,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        pl_step: int = 25,
        profile_path: str | Path | None = None,
    ) -> None:
        if wait_steps < 0:
            raise ValueError("wait_steps must be non-negative.")
        if warmup_steps < 0:
            raise ValueError("warmup_steps must be non-negative.")
        if profile_steps <= 0:
            raise ValueError("profile_steps must be positive.")
        if pl_step <= 0:
            raise ValueError("pl_step must be positive.")
        self.monitor = monitor
        self.optimum_selector = optimum_selector
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        self.profile_path = None if profile_path is None else Path(profile_path)
        self.on_progress: Callable[[GlobalPowerLimitOptimizer], None] | None = None
        self.measurements: list[PowerLimitMeasurement] = []
        self.disabled = False

        min_mw, max_mw = self._common_range()
        self.power_limits = _scan(min_mw, max_mw, int(pl_step * 1000))
        self.current_power_limit = 0
        self._partial: list[Measurement] = []
        self._ended: list[tuple[int, list[Measurement]]] = []
        self._partial_steps = 0
        self._epoch_steps = 0
        self._warned_short = False
        self._warmup = warmup_steps
        self.state: State = Ready(next_power_limit=max_mw, steps=wait_steps + 1)

        self._make_profile_folder()
        self._turn_persistence_on()
        if self._load_profile(min_mw, max_mw):
            self._choose()
        else:
            self._set_power_limit(max_mw)

    # ------------------------------------------------------------------------------- callbacks

    def on_epoch_begin(self) -> None:
        """An epoch begins."""
        self._epoch_steps = 0

    def on_step_begin(self) -> None:
        """A step begins: where limits change and windows open and close."""
        _node.progress()
        self._epoch_steps += 1
        state = self.state
        if isinstance(state, Done):
            return
        state.steps -= 1
        if state.steps <= 0:
            if isinstance(state, Ready):
                self._begin_warmup(state.next_power_limit)
            elif isinstance(state, Warmup):
                self._begin_profiling(state.current_power_limit)
            else:
                self._end_profiling(state.current_power_limit)
        if self.on_progress is not None:
            self.on_progress(self)

    def on_epoch_end(self) -> None:
        """An epoch has ended: what follows must not be measured."""
        state = self.state
        if isinstance(state, (Warmup, Profiling)):
            short = self._epoch_steps < self.warmup_steps + self.profile_steps + 1
            if short:
                self._adapt_to_short_epochs(state)
            self._interrupt(state, keep=short)

    def on_pause(self) -> None:
        """Something else begins between two steps: the window ends with the last one."""
        state = self.state
        if isinstance(state, (Warmup, Profiling)):
            self._interrupt(state, keep=True)

    def on_evaluate(self, metric: float) -> None:
        """The model was evaluated: the window that was open is worth nothing."""
        state = self.state
        if isinstance(state, (Warmup, Profiling)):
            self._interrupt(state, keep=False)

    def on_train_end(self) -> None:
        """Training has ended: the limits go back."""
        self.close()

    def close(self) -> None:
        """Gives the limits back. Never raises; the daemon does it too when this process ends."""
        if isinstance(self.state, Profiling):
            self._drop_window(self.state.current_power_limit)
        if not isinstance(self.state, Done):
            self.state = Done(optimal_power_limit=self.power_limits[0])
        try:
            self.monitor.gpus.release_all(self.monitor.gpu_indices)
        except ZeusBaseError as error:
            log.info("limits are put back by zeusd when this process ends: %s", error.message)
        self.current_power_limit = 0

    # -------------------------------------------------------------------------------- progress

    @property
    def progress(self) -> tuple[int, int]:
        """Steps done and steps needed to measure all limits."""
        each = self.warmup_steps + self.profile_steps
        done = self._profiled * each
        state = self.state
        if isinstance(state, Warmup):
            done += max(0, self.warmup_steps - state.steps)
        elif isinstance(state, Profiling):
            done += self.warmup_steps + self.profile_steps - state.steps
        total = len(self.power_limits) * each
        return (total if isinstance(state, Done) else min(done, total)), total

    # ------------------------------------------------------------------------------- internals

    def _begin_warmup(self, power_limit_mw: int) -> None:
        if not self._set_power_limit(power_limit_mw):
            return
        if self._warmup:
            self.state = Warmup(current_power_limit=power_limit_mw, steps=self._warmup)
        else:
            self._begin_profiling(power_limit_mw)

    def _begin_profiling(self, power_limit_mw: int) -> None:
        try:
            self.monitor.begin_window(_window(power_limit_mw), restart=True)
        except ZeusBaseError as error:
            self._give_up(f"energy cannot be measured: {error.message}")
            return
        steps = self.profile_steps - self._partial_steps
        self.state = Profiling(current_power_limit=power_limit_mw, steps=steps)

    def _end_profiling(self, power_limit_mw: int) -> None:
        measurement = self._close_window(power_limit_mw)
        if measurement is None:
            return
        self._ended.append((power_limit_mw, [*self._partial, measurement]))
        self._partial, self._partial_steps = [], 0
        last = self._profiled == len(self.power_limits)
        # A window's energy is there a tick after its end: read now it would hold training up.
        if not self._read_energies(leave=0 if last else 1):
            return
        if not last:
            self._begin_warmup(self.power_limits[self._profiled])
            return
        self._choose()
        self._save_profile()

    @property
    def _profiled(self) -> int:
        """How many limits have been profiled, their energy read or not."""
        return len(self.measurements) + len(self._ended)

    def _read_energies(self, leave: int) -> bool:
        """Reads the energy of limits that were profiled, but for the newest `leave`.

        Returns False if it cannot be, and we gave up.
        """
        while len(self._ended) > leave:
            power_limit_mw, parts = self._ended.pop(0)
            try:
                own = sum(part.total_energy for part in parts), sum(part.time for part in parts)
                joules, seconds = _reduce(*own)
            except ZeusBaseError as error:
                self._give_up(f"energy cannot be measured: {error.message}")
                return False
            except RuntimeError as error:
                self._give_up(f"the other processes did not answer: {error}")
                return False
            if joules <= 0:
                self._give_up(
                    f"{self.profile_steps} steps at {watts(power_limit_mw)} W were measured as "
                    "0 J; look at the GPU's sensors with `nvidia-smi -q -d POWER`"
                )
                return False
            self.measurements.append(
                PowerLimitMeasurement(
                    power_limit=watts(power_limit_mw), energy=joules, time=seconds
                )
            )
        return True

    def _interrupt(self, state: Warmup | Profiling, keep: bool) -> None:
        """Ends what is under way, and goes on at the highest limit until the next step."""
        next_mw = state.current_power_limit
        if isinstance(state, Profiling):
            # The window covers the step it was opened at and those that began since.
            steps = self.profile_steps - self._partial_steps - state.steps + 1
            if self._partial_steps + steps >= self.profile_steps:
                self._end_profiling(next_mw)
                if not isinstance(self.state, (Warmup, Profiling)):
                    return
                if isinstance(self.state, Profiling):
                    self._drop_window(self.state.current_power_limit)
                next_mw = self.state.current_power_limit
            elif keep:
                measurement = self._close_window(next_mw)
                if measurement is None:
                    return
                self._partial.append(measurement)
                self._partial_steps += steps
            else:
                self._drop_window(next_mw)
        if self._set_power_limit(self.power_limits[0]):
            self.state = Ready(next_power_limit=next_mw, steps=1)

    def _adapt_to_short_epochs(self, state: Warmup | Profiling) -> None:
        """An epoch has fewer steps than a limit needs: measures it in parts, over several."""
        if isinstance(state, Warmup):
            # Leave at least half of the epoch to measure in.
            self._warmup = min(self._warmup, max(0, (self._epoch_steps - 1) // 2))
        if not self._warned_short:
            self._warned_short = True
            warnings.warn(
                f"An epoch of {self._epoch_steps} steps is shorter than the "
                f"{self.warmup_steps + self.profile_steps + 1} that one power limit needs; each "
                "limit is measured over several epochs. Lower warmup_steps or profile_steps to "
                "finish sooner.",
                stacklevel=3,
            )

    def _close_window(self, power_limit_mw: int) -> Measurement | None:
        try:
            return self.monitor.end_window(_window(power_limit_mw))
        except ZeusBaseError as error:
            self._drop_window(power_limit_mw)
            self._give_up(f"energy cannot be measured: {error.message}")
            return None
        except ValueError as error:  # someone reset the monitor's windows
            self._give_up(str(error))
            return None

    def _drop_window(self, power_limit_mw: int) -> None:
        if _window(power_limit_mw) in self.monitor.measurement_states:
            self.monitor.end_window(_window(power_limit_mw), cancel=True)

    def _choose(self) -> None:
        selector = self.optimum_selector
        if selector is None:
            gpus = len(self.monitor.gpu_indices) * framework.world_size()
            selector = ZeusCost(eta_knob=0.5, world_size=gpus)
        try:
            optimal_mw = round(selector.select(list(self.measurements)) * 1000)
        except Exception as error:  # noqa: BLE001 - a user's selector must not end training either
            self._give_up(f"{type(selector).__name__} could not choose: {error!r}")
            return
        log.info("optimal power limit: %g W", optimal_mw / 1000)
        self.state = Done(optimal_power_limit=optimal_mw)
        self._set_power_limit(optimal_mw)

    def _set_power_limit(self, power_limit_mw: int) -> bool:
        """Sets the limit on all GPUs unless it is set. False: it cannot be, and we gave up."""
        if self.disabled:
            return False
        if power_limit_mw == self.current_power_limit:
            return True
        try:
            self.monitor.gpus.set_power_management_limits(self.monitor.gpu_indices, power_limit_mw)
        except ZeusBaseError as error:
            self._give_up(f"the power limit cannot be set: {error.message}")
            return False
        self.current_power_limit = power_limit_mw
        return True

    def _give_up(self, reason: str) -> None:
        if self.disabled:
            return
        self.disabled = True
        if isinstance(self.state, Profiling):
            self._drop_window(self.state.current_power_limit)
        self.state = Done(optimal_power_limit=self.power_limits[0])
        warnings.warn(
            "The power limit optimizer stopped, and training goes on at the highest limit: "
            f"{reason}",
            stacklevel=2,
        )
        self.close()

    def _common_range(self) -> tuple[int, int]:
        """The range of limits that all GPUs take, mW."""
        ranges = {
            self.monitor.gpus[index].get_power_management_limit_constraints()
            for index in self.monitor.gpu_indices
        }
        if len(ranges) != 1:
            raise ValueError("Power limits ranges are not uniform across GPUs.")
        return ranges.pop()

    def _turn_persistence_on(self) -> None:
        """Keeps limits from being lost when no process uses the GPU; useful, not needed."""
        for index in self.monitor.gpu_indices:
            gpu = self.monitor.gpus[index]
            try:
                if not gpu.get_persistence_mode():
                    gpu.set_persistence_mode(True)
            except ZeusBaseError as error:
                log.debug("persistence mode stays off: %s", error.message)

    # --------------------------------------------------------------------------------- profile

    def _make_profile_folder(self) -> None:
        if self.profile_path is not None:
            self.profile_path.parent.mkdir(parents=True, exist_ok=True)

    def _load_profile(self, min_mw: int, max_mw: int) -> bool:
        """Reads the profile of rank 0, which all then use, or none does."""
        loaded: list[PowerLimitMeasurement] | None = None
        if self.profile_path is not None and framework.rank() == 0 and self.profile_path.exists():
            try:
                loaded = profile.load(self.profile_path, min_mw, max_mw)
            except ProfileError as error:
                warnings.warn(f"{error}. It is measured anew and replaced.", stacklevel=3)
        shared: list[list[PowerLimitMeasurement] | None] = framework.gather(loaded)
        if shared[0] is None:
            return False
        self.measurements = shared[0]
        return True

    def _save_profile(self) -> None:
        if self.profile_path is None or framework.rank() != 0:
            return
        try:
            profile.save(self.profile_path, self.measurements)
        except OSError as error:
            warnings.warn(
                f"The power limit profile could not be written to {self.profile_path}: {error}.",
                stacklevel=3,
            )


def _scan(min_mw: int, max_mw: int, step_mw: int) -> list[int]:
    limits = list(range(max_mw, min_mw - 1, -step_mw))
    if limits[-1] != min_mw:
        limits.append(min_mw)
    return limits


def _window(power_limit_mw: int) -> str:
    return f"__GlobalPowerLimitOptimizer_{watts(power_limit_mw)}"


def _reduce(joules: float, seconds: float) -> tuple[float, float]:
    """Energy of all processes together, and the time of the slowest."""
    parts = framework.gather((joules, seconds))
    return sum(part[0] for part in parts), max(part[1] for part in parts)

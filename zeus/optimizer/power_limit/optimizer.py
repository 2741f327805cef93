"""`GlobalPowerLimitOptimizer`: tries power limits while training continues, and keeps the best.

It reports training's events to a `SearchProcess`, which acts on the node by `NodeEffects`. Settings
are set under leases of the node's daemon, which restores them when training ends or crashes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from zeus import _node
from zeus.callback import Callback
from zeus.exceptions import ZeusArgumentError, ZeusBaseError, ZeusGPUNotSupportedError
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import arguments, others
from zeus.optimizer.power_limit.core import SearchProcess
from zeus.optimizer.power_limit.effects import STEP_WAIT_S, NodeEffects
from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.messages import RankHello
from zeus.optimizer.power_limit.planner import LimitPlanner, scan
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement, ProfileFile
from zeus.optimizer.power_limit.report import Report
from zeus.optimizer.power_limit.search import SearchName
from zeus.optimizer.power_limit.selectors import OptimumSelector, measurements
from zeus.optimizer.power_limit.states import Done, State
from zeus.utils import framework
from zeus.utils.configured import Configured
from zeus.utils.guard import guarded
from zeus.utils.warn import warn
from zeus_ipc.circuit import WAIT_S, bounded
from zeus_ipc.overriding import override

log = logging.getLogger(__name__)

LEFT_SHARE = 0.1
"""A step that ends within this share of the last one's time was left at its beginning."""


class GlobalPowerLimitOptimizer(Configured, Callback):
    """Finds the best common power limit of the monitor's GPUs, one job, while it trains.

    Call it as a callback: `on_epoch_begin`, `on_step_begin`, `on_step_end`, `on_epoch_end`,
    `on_pause`, `on_evaluate`, `on_train_end`; or let `Callback.steps` do it. If processes train
    together with torch.distributed, each creates its own, with a monitor of its own GPUs; energies
    are added, the slowest process determines the time, and all hold the same limit. A failure of
    power limits or measurement never ends training: the optimizer warns once, and stays at the
    highest limit.

    Args:
        monitor: Its GPUs are optimized; they must accept the same range of limits.
        optimum_selector: Chooses; None: `ZeusCost(eta_knob=0.5)` over all GPUs that train together.
        wait_steps: Steps to wait before the first limit.
        warmup_steps: Unmeasured steps after a change of the limit; the adaptive search takes fewer
            if they last longer than clocks and power need to settle.
        profile_steps: Measured steps at each limit; at most, for the adaptive search.
        pl_step: Difference between limits, W. The lowest limit is always one of them.
        profile_path: JSON file of the measurements: used if it fits these GPUs and this selector,
            else written when the choice is made. Until then `<profile_path>.partial` is kept, and
            resumed by the next run. With several processes, only rank 0's is used. A `ProfileFile`
            has its own format.
        search: `adaptive` measures only what helps the choice, and measures again when training
            changes; `exhaustive` every limit once, from the highest down.
        search_profiles: Search workload power profiles beside limits (Blackwell): all that the GPUs
            offer, or those named. A candidate is then a pair of a limit and a profile.
        search_clocks: Search bounds of the graphics clock beside limits: True for 90 to 50 % of the
            highest, or those given, MHz. Where no limit lowers a job's power, a clock may. Not yet
            measured on a real GPU.
        together: Search together with the other processes of torch.distributed. Use False if the
            monitor of one process has the GPUs of all, and only that process has an optimizer.

    Raises:
        ValueError: An argument is out of range, or the GPUs differ in their ranges, or do not offer
            the profiles or clocks.

    Attributes:
        state: `Ready`, `Warmup`, `Profiling` or `Done`; `Done.chosen` is false if the search was
            given up.
        disabled: Whether the search was given up.
        current_power_limit: The limit that is set, mW; 0: none is, or one is being set.
        current_power_profile: The workload power profile that is set with it; None: none.
        current_clock: The highest graphics clock that is set with it, MHz; None: any.
        estimates: The estimates behind the choice.
        power_limits: The limits that may be tried, mW, descending.
        on_progress: Called with the optimizer after every step that it handles, if set.
        on_metrics: Called with figures by name, when there are new ones, if set.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        optimum_selector: OptimumSelector | None = None,
        wait_steps: int = 1,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        pl_step: int = 25,
        profile_path: str | Path | ProfileFile | None = None,
        search: SearchName = "adaptive",
        search_profiles: bool | Sequence[str] = False,
        search_clocks: bool | Sequence[int] = False,
        together: bool = True,
    ) -> None:
        arguments.check_monitor(monitor)
        arguments.check_selector(optimum_selector)
        arguments.check_steps(wait_steps, warmup_steps, profile_steps)
        arguments.check_pl_step(pl_step)
        if search not in ("adaptive", "exhaustive"):
            raise ZeusArgumentError(f"search must be adaptive or exhaustive, not {search!r}.")
        self.monitor = monitor
        self.optimum_selector = optimum_selector
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        file = profile_path
        if file is not None and not isinstance(file, ProfileFile):
            file = ProfileFile(Path(file))
            arguments.check_profile_path(file.path)
        self.profile_path = None if file is None else file.path
        self.search = search
        self.on_progress: Callable[[GlobalPowerLimitOptimizer], None] | None = None

        alone = not together or framework.alone()
        indices = monitor.gpus.with_power_limit(monitor.gpu_indices, alone)
        self._gpus = [monitor.gpus[index] for index in indices]
        beside = [
            *arguments.to_search("power_profile", self._gpus, search_profiles),
            *arguments.to_search("graphics_clock", self._gpus, search_clocks),
        ]
        if indices and (self.profile_path is None or not self.profile_path.exists()):
            others.borrow(monitor.gpus, indices)
        min_mw, max_mw, unsupported = self._common_range(together)
        step_mw = int(pl_step * 1000)
        self._planner = LimitPlanner(
            *(search, optimum_selector, warmup_steps, profile_steps, step_mw),
            *(file, beside),
        )
        self._planner.limits_mw = [] if unsupported else scan(min_mw, max_mw, step_mw)
        names = [gpu.get_name() for gpu in self._gpus]
        hello = RankHello(gpus=names, min_mw=min_mw, max_mw=max_mw, beside=beside)
        self._effects = NodeEffects(monitor, indices, self._planner, max_mw, together)
        steps = wait_steps, warmup_steps, profile_steps
        self._core = SearchProcess(self._effects, hello, *steps, search == "adaptive")
        self._warned_ended = False
        self._inside = False  # training has begun, and not ended
        self._taken = False  # its GPUs, since training began
        self._effects.take()
        self._in_step, self._began_s, self._work_s = False, 0.0, 0.0  # of the last whole step

        if unsupported:
            self._core.give_up(unsupported)
            return
        self._turn_persistence_on()
        if self._planner.read_for_rank() and alone:
            self._core.join()
            self._core.listen()
        self._core.begin()

    # ------------------------------------------------------------------------------- callbacks

    @override
    @guarded
    def on_train_begin(self) -> None:
        """Training begins. If one has ended before, sets its choice again or searches again."""
        core = self._core
        self._inside, self._taken = True, False
        self._take()
        if core.over and not core.disabled and core.chosen is None:
            self._planner.read_for_rank()
        core.begin_training()

    @override
    @guarded
    def on_epoch_begin(self) -> None:
        """An epoch begins."""
        self._core.begin_epoch()

    @override
    @guarded
    def on_step_begin(self) -> None:
        """A step begins: limits change, and windows open and close, here."""
        _node.progress()
        core = self._core
        self._take()
        self._began_s, self._in_step = time.monotonic(), True
        self._effects.may_wait(STEP_WAIT_S)
        watched = isinstance(core.state, Done)
        core.begin_step(self._began_s, _node.answers(), _node.leases_lost())
        if core.over:
            if not core.disabled and not self._warned_ended:
                self._warned_ended = True
                warn(
                    "A step began after the power limit optimizer had ended (on_train_end, close, "
                    "or the end of its with block): limits are restored and nothing is measured. "
                    "Call on_train_begin to train again, or end it later."
                )
        elif self.on_progress is not None and not watched:
            self.on_progress(self)

    @override
    def on_step_end(self) -> None:
        """A step has ended."""
        self._work_s, self._in_step = time.monotonic() - self._began_s, False

    @override
    @guarded
    def on_epoch_end(self) -> None:
        """An epoch has ended: the following work must not be measured. A step that was left at its
        beginning, as by `break`, does not count.
        """
        passed_s = time.monotonic() - self._began_s
        left = self._in_step and passed_s < LEFT_SHARE * self._work_s
        self._core.pause(not left)

    on_pause = on_epoch_end
    """Something else begins, such as an evaluation: the same as the end of an epoch."""

    @override
    @guarded
    def on_evaluate(self, metric: float) -> None:
        """The model was evaluated: discards the open window."""
        self._core.evaluated()

    @override
    def on_train_end(self) -> None:
        """Training has ended: restore the limits."""
        core = self._core
        unseen = self._inside and not (core.step or core.disabled or core.chosen)
        if unseen and sys.exc_info()[0] is None:
            warn(
                "Training has ended, and the power limit optimizer saw no step of it: iterate over "
                "plo.steps(loader), or call on_step_begin and on_step_end in each step."
            )
        self.close()

    def close(self) -> None:
        """Restores the limits. Never raises; the daemon also does it when this process ends."""
        self._inside = False
        self._effects.may_wait(WAIT_S)
        self._core.close()

    def give_up(self, error: Exception) -> None:
        """Ends the search because of an error, such as a hook's: reports it, and restores the
        limits. Never raises.
        """
        log.info("the power limit optimizer failed", exc_info=error)
        try:
            self._core.give_up(f"{type(error).__name__}: {error}")
            self.close()
        except Exception:  # training continues
            log.warning("limits are restored when this process ends", exc_info=True)

    # --------------------------------------------------------------------------------- results

    @property
    def state(self) -> State:
        """The state of the search; `Done.chosen` is false if it was given up."""
        return self._core.state

    @property
    def power_limits(self) -> list[int]:
        """The limits that may be tried, mW, descending."""
        return self._planner.limits_mw

    @property
    def on_metrics(self) -> Callable[[dict[str, float]], None] | None:
        """Called with figures by name, when there are new ones, if set."""
        return self._effects.show

    @on_metrics.setter
    def on_metrics(self, hook: Callable[[dict[str, float]], None] | None) -> None:
        self._effects.show = hook

    @property
    def disabled(self) -> bool:
        """Whether the search was given up."""
        return self._core.disabled

    @property
    def current_power_limit(self) -> int:
        """The limit that is set, mW; 0: none is, or one is being set."""
        current = self._core.current
        return 0 if current is None else current.power_limit_mw

    @property
    def current_power_profile(self) -> str | None:
        """The workload power profile that is set with it; None: none."""
        current = self._core.current
        return None if current is None else current.named["power_profile"]

    @property
    def current_clock(self) -> int | None:
        """The highest graphics clock that is set with it, MHz; None: any."""
        current = self._core.current
        return None if current is None else current.of("graphics_clock")

    @property
    def estimates(self) -> list[LimitEstimate]:
        """The estimates behind the choice."""
        return [] if self._core.chosen is None else self._core.chosen.estimates

    @property
    def measurements(self) -> list[PowerLimitMeasurement]:
        """The measured cost of each limit that was tried, for `profile_steps` steps, descending.
        Rank 0 always knows it, the others once there is a choice.
        """
        return measurements(self._known(), self.profile_steps)

    @property
    def progress(self) -> tuple[int, int]:
        """Steps that the search has taken, and its maximum."""
        total = self._planner.expected_steps
        taken = self._core.searched
        return (total if isinstance(self.state, Done) else min(taken, total)), total

    def report(self, path: str | Path | None = None) -> Report:
        """Returns the result so far; `print` it.

        Args:
            path: Also draw it to this file, see `Report.draw`. A failure to draw causes a warning.
        """
        core, state = self._core, self.state
        known = tuple(self._known())
        chosen, reason = None, state.reason if isinstance(state, Done) else ""
        if core.chosen is not None and not core.disabled:
            chosen, reason = core.chosen.chosen, core.chosen.reason
        force = [
            None if one is None else one.power_limit_mw / 1000
            for one in (core.current, core.awaited)
        ]
        report = Report(known, chosen, core.searched, reason, *force)
        if path is not None:
            try:
                report.draw(path)
            except (ImportError, OSError, ValueError) as error:
                warn(f"The report is not drawn: {error}.")
        return report

    def _known(self) -> list[LimitEstimate]:
        leader = self._effects.leader
        if self.estimates or leader is None or leader.search is None:
            return self.estimates
        return leader.search.estimates()

    # --------------------------------------------------------------------------------- internals

    def _failed(self, error: Exception) -> None:
        self.give_up(error)

    def _take(self) -> None:
        """Takes the GPUs once in each training; gives up if another optimizer has them since."""
        if self._core.disabled or (self._core.over and not self._inside):
            return
        if not self._taken:
            self._taken = True
            if self._effects.take():
                self._core.current = None
        elif self._effects.lost:
            self._core.give_up(
                "another power limit optimizer of this process has its GPUs since; close one "
                "before you create or train the next"
            )

    def _common_range(self, together: bool) -> tuple[int, int, str]:
        """The range of limits that all GPUs accept, mW, even if other processes set them, or why
        there is none. With several processes the ranges may differ, even if one process has all
        GPUs.
        """
        if not self.monitor.gpu_indices:
            return 0, 0, "the monitor has no GPU; check `zeusctl status` and CUDA_VISIBLE_DEVICES"
        gpus = self._gpus or self.monitor.gpus.owners_of_limits(self.monitor.gpu_indices)
        try:
            ranges = {gpu.get_power_management_limit_constraints() for gpu in gpus}
        except ZeusGPUNotSupportedError as error:
            return 0, 0, error.message
        low, high = max(low for low, _ in ranges), min(high for _, high in ranges)
        if low > high or (together and len(ranges) != 1):
            raise ValueError("Power limits ranges are not uniform across GPUs.")
        return low, high, ""

    def _turn_persistence_on(self) -> None:
        """Turns persistence mode on, so that limits survive while no process uses the GPU;
        optional.
        """
        for gpu in self._gpus:
            try:
                with bounded():
                    if not gpu.get_persistence_mode():
                        gpu.set_persistence_mode(True)
            except ZeusBaseError as error:
                log.debug("persistence mode stays off: %s", error.message)

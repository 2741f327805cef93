"""`GlobalPowerLimitOptimizer`: tries power limits while training goes on, and keeps the best.

A search says which limit to hold and for how many steps (`search`), a leader makes one decision of
what all processes measured (`leader`, `link`); this class is one process: it counts steps, sets
limits, opens and closes windows. State changes happen where steps begin:

    Ready      steps used up, a trial is commanded   -> Warmup at its limit
    Warmup     steps used up             -> Profiling at the same limit, window opened
    Profiling  steps used up             -> window closed, and a new one opened
    Warmup, Profiling   another trial    -> Warmup at its limit
    Warmup, Profiling   epoch ends, pause, evaluation   -> Ready for the same trial
    any        the choice is made        -> Done, at the chosen limit
    any        a limit cannot be set, nothing can be measured, a process is silent
                                         -> Done, at the highest limit

Limits are set under leases of the node's daemon, which puts them back when training ends, however
it ends.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeus import _node
from zeus.callback import Callback
from zeus.exceptions import (
    ZeusBaseError,
    ZeusGPUInvalidArgError,
    ZeusGPULeaseExpiredError,
    ZeusGPUNoPermissionError,
)
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.power_limit import arguments
from zeus.optimizer.power_limit.estimates import Estimate
from zeus.optimizer.power_limit.leader import (
    Choose,
    Command,
    Hello,
    Leader,
    Message,
    Party,
    Piece,
    Stop,
    Trouble,
    Try,
)
from zeus.optimizer.power_limit.letting_go import LettingGo
from zeus.optimizer.power_limit.link import Link, LinkError, connect
from zeus.optimizer.power_limit.planner import Planner, measurements, scan
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement, watts
from zeus.optimizer.power_limit.report import Report
from zeus.optimizer.power_limit.search import (
    Search,
    SearchName,
    expected_steps,
)
from zeus.optimizer.power_limit.selectors import OptimumSelector
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, State, Warmup
from zeus.optimizer.power_limit.watch import Watch
from zeus.utils import framework
from zeus.utils.guard import guarded

log = logging.getLogger(__name__)

LISTEN_STEPS = 20
"""After the choice, commands are looked for this often."""
STARVED = 3
"""So many stretches without a measurement, one after another, and warm-ups are cut."""
PATIENCE_STEPS = 3
"""A command that is for a later step is obeyed after this many steps at the latest."""


@dataclass
class _Told:
    """A piece whose energy is still to be read."""

    trial: Try
    index: int
    steps: int
    measurement: Measurement


class GlobalPowerLimitOptimizer(Callback):
    """Finds the best common power limit of the monitor's GPUs, one job, while it trains.

    Call it as a callback: `on_epoch_begin`, `on_step_begin`, `on_step_end`, `on_epoch_end`,
    `on_pause`, `on_evaluate`, `on_train_end`; or let `Callback.steps` do it. Where processes train
    together by torch.distributed, each makes its own, with a monitor of its own GPUs; energies are
    added, the slowest counts, and all hold the same limit. A failure of power limits or measuring
    never ends training: the optimizer says so once, in a warning, and stays at the highest limit.

    Args:
        monitor: Its GPUs are optimized; they must take the same range of limits.
        optimum_selector: Chooses; None: `ZeusCost(eta_knob=0.5)` over all GPUs that train together.
        wait_steps: Steps to wait before the first limit.
        warmup_steps: Unmeasured steps after a change of the limit; the adaptive search takes fewer
            where they last longer than clocks and power need to follow.
        profile_steps: Measured steps at each limit; at most, for the adaptive search.
        pl_step: Difference of one limit to the next, W. The lowest limit is always one of them.
        profile_path: JSON file of the measurements: used if it fits these GPUs and this selector,
            else written when the choice is made. Until then `<profile_path>.partial` is kept, and
            gone on from by the next run. With several processes only rank 0's counts.
        search: `adaptive` measures only what helps the choice, and measures anew when training
            changes; `exhaustive` every limit once, from the highest down.

    Raises:
        ValueError: An argument is out of range, or the GPUs differ in their ranges.

    Attributes:
        state: `Ready`, `Warmup`, `Profiling` or `Done`.
        estimates: What the choice was made of, or on rank 0 is known until now.
        power_limits: The limits that may be tried, mW, descending.
        on_progress: Called with the optimizer after every step it takes notice of, if set.
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
        profile_path: str | Path | None = None,
        search: SearchName = "adaptive",
    ) -> None:
        arguments.check_monitor(monitor)
        arguments.check_selector(optimum_selector, OptimumSelector)
        arguments.check_steps(wait_steps, warmup_steps, profile_steps)
        arguments.check_pl_step(pl_step)
        if search not in ("adaptive", "exhaustive"):
            raise ValueError(f"search must be adaptive or exhaustive, not {search!r}.")
        self.monitor = monitor
        self.optimum_selector = optimum_selector
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        self.profile_path = None if profile_path is None else Path(profile_path)
        arguments.check_profile_path(self.profile_path)
        self.search = search
        self.on_progress: Callable[[GlobalPowerLimitOptimizer], None] | None = None
        self.on_metrics: Callable[[dict[str, float]], None] | None = None
        self.disabled = False
        self._reason = ""  # why it is
        self.estimates: list[Estimate] = []

        min_mw, max_mw = self._common_range()
        self._highest = max_mw
        step_mw = int(pl_step * 1000)
        self._limits = LettingGo(monitor.gpus, monitor.gpu_indices)
        self._planner = Planner(
            search, optimum_selector, warmup_steps, profile_steps, step_mw, self.profile_path
        )
        self.power_limits = scan(min_mw, max_mw, step_mw)
        self.current_power_limit = 0
        self.state: State = Ready(next_power_limit=max_mw, steps=wait_steps + 1)

        self._over = False
        self._warned_ended = False
        self._joined = False
        self._world = 0
        self._link: Link | None = None
        self._trial: Try | None = None
        self._index = 0  # of the piece that is measured, ...
        self._target = 0  # ... how many steps it has, ...
        self._left = 0  # ... or will have: fewer, once an interruption has cut one
        self._told: deque[_Told] = deque()
        self._command: Command | None = None
        self._heard_at = 0
        self._step = 0
        self._stretch = 0  # steps since the epoch began, or since something else did
        self._searched = 0
        self._cap = warmup_steps
        self._starved: list[int] = []  # stretches that ended in a warm-up, one after another
        self._warned_short = False
        self._watch: Watch | None = None
        self._chosen: Choose | None = None

        self._turn_persistence_on()
        if self._read_profile() and framework.alone():
            self._join()
            self._obey()
        if isinstance(self.state, Ready):
            self._set_power_limit(self._highest)

    # ------------------------------------------------------------------------------- callbacks

    @guarded
    def on_train_begin(self) -> None:
        """Training begins. After one that has ended: its choice is set again, or searched anew."""
        if not self._over:
            return
        if self.disabled:
            # Those that search anew are told so.
            self._joined = self._joined and self._chosen is not None
            return
        self._limits.keep()
        self._over = False
        if self._chosen is not None:
            self._choose(self._chosen)
            return
        self._world, self._joined = 0, False
        self.state = Ready(next_power_limit=self._highest, steps=1)
        self._read_profile()
        self._set_power_limit(self._highest)

    @guarded
    def on_epoch_begin(self) -> None:
        """An epoch begins."""
        self._stretch = 0

    @guarded
    def on_step_begin(self) -> None:
        """A step begins: where limits change and windows open and close."""
        _node.progress()
        self._step += 1
        self._stretch += 1
        if not self._joined and (self.disabled or not self._over):
            self._joined = True
            self._join()
        if self._over:
            if not self.disabled and not self._warned_ended:
                self._warned_ended = True
                arguments.warn_of_step_after_end()
            return
        if isinstance(self.state, Done):
            self._look_after()
            return
        self._advance()
        if self.on_progress is not None:
            self.on_progress(self)

    @guarded
    def on_epoch_end(self) -> None:
        """An epoch has ended: what follows must not be measured."""
        state = self.state
        if isinstance(state, (Warmup, Profiling)):
            self._interrupt(state, keep=self._keeps_parts)
        self._drop_check()

    @guarded
    def on_pause(self) -> None:
        """Something else begins between two steps: the window ends with the last one."""
        state = self.state
        if isinstance(state, (Warmup, Profiling)):
            self._interrupt(state, keep=self._keeps_parts)
        self._drop_check()

    @guarded
    def on_evaluate(self, metric: float) -> None:
        """The model was evaluated: the window that was open is worth nothing."""
        state = self.state
        if isinstance(state, (Warmup, Profiling)):
            self._interrupt(state, keep=False)
        self._drop_check()

    def on_train_end(self) -> None:
        """Training has ended: the limits go back."""
        self.close()

    def close(self) -> None:
        """Gives the limits back. Never raises; the daemon does it too when this process ends."""
        self._drop_check()
        if isinstance(self.state, Profiling):
            self._drop_window(self.state.current_power_limit)
        if not isinstance(self.state, Done):
            self.state = Done(optimal_power_limit=self._highest)
            self._leave("its training has ended")
        self._over = True
        self._limits.now()
        self.current_power_limit = 0

    # --------------------------------------------------------------------------------- results

    @property
    def measurements(self) -> list[PowerLimitMeasurement]:
        """What each limit costs for `profile_steps` steps, descending: of those that were tried,
        as far as this process knows. Rank 0 knows it at any time, the others once all have chosen.
        """
        return measurements(self._known(), self.profile_steps)

    @property
    def progress(self) -> tuple[int, int]:
        """Steps the search has taken, and takes at most."""
        total = expected_steps(
            self.search, len(self.power_limits), self.warmup_steps, self.profile_steps
        )
        return (total if isinstance(self.state, Done) else min(self._searched, total)), total

    def report(self, path: str | Path | None = None) -> Report:
        """What was found, or is known until now; `print` it.

        Args:
            path: Draws it there as well, see `Report.draw`. What cannot be drawn or written costs a
                warning.
        """
        known = tuple(self._known())
        chosen = None
        if self._chosen is not None and not self.disabled:
            limit = self._chosen.power_limit_mw
            chosen = next((one for one in known if one.power_limit_mw == limit), None)
        report = Report(known, chosen, self._searched)
        if path is not None:
            try:
                report.draw(path)
            except (ImportError, OSError, ValueError) as error:
                warnings.warn(f"The report is not drawn: {error}.", stacklevel=2)
        return report

    def _known(self) -> list[Estimate]:
        leader = None if self._link is None else self._link.leader
        if self.estimates or leader is None or leader.search is None:
            return self.estimates
        return leader.search.estimates(leader.position)

    # ------------------------------------------------------------------------- steps of a trial

    def _advance(self) -> None:
        state = self.state
        if isinstance(state, Done):
            return
        state.steps -= 1
        due = state.steps <= 0
        if isinstance(state, (Warmup, Profiling)):
            self._searched += 1
        if due and isinstance(state, Profiling):
            self._end_piece(state.current_power_limit, self._target)
        self._deliver()
        if self._over or self._obey() or self._over or not due:
            return
        if isinstance(state, Ready):
            if self._trial is None:
                state.steps = 1  # the leader has not decided yet
            else:
                self._begin_trial(self._trial)
        elif self._trial is not None:
            self._begin_piece(self._trial)

    def _begin_trial(self, trial: Try) -> None:
        self._trial = trial
        if not self._set_power_limit(trial.power_limit_mw):
            return
        steps = min(trial.warmup_steps, self._cap)
        if steps:
            self.state = Warmup(current_power_limit=trial.power_limit_mw, steps=steps)
        else:
            self._begin_piece(trial)

    def _begin_piece(self, trial: Try) -> None:
        limit = trial.power_limit_mw
        if self._open_window(limit):
            self._target = self._left
            self.state = Profiling(current_power_limit=limit, steps=self._target)

    def _end_piece(self, limit: int, steps: int) -> None:
        """Closes the window of some steps of the trial, and has their energy read later."""
        trial = self._trial
        self._starved.clear()
        measurement = self._close_window(limit)
        if measurement is None or trial is None or self._link is None:
            return
        self._told.append(_Told(trial, self._index, steps, measurement))
        self._left = trial.steps if steps >= self._left else self._left - steps
        index, self._index = self._index, self._index + 1
        if self._link.leader is not None:
            self._link.leader.ran(trial, index, steps)

    def _interrupt(self, state: Warmup | Profiling, keep: bool) -> None:
        """Ends what is under way, and goes on at the highest limit until the next step."""
        if self._stretch < self._needed:
            self._adapt_to_short_stretches(state)
        self._stretch = 0
        if isinstance(state, Profiling):
            # The window covers the step it was opened at and those that began since.
            steps = self._target - state.steps + 1
            whole = steps >= self._target and self.search == "adaptive"
            if keep or whole:
                self._end_piece(state.current_power_limit, steps)
            else:
                self._drop_window(state.current_power_limit)
        if not self._over and self._set_power_limit(self._highest):
            self.state = Ready(next_power_limit=state.current_power_limit, steps=1)

    @property
    def _keeps_parts(self) -> bool:
        """Whether what an interruption leaves of a window counts; else the limit is retried."""
        return self.search == "adaptive" or self._stretch < self._needed

    @property
    def _needed(self) -> int:
        """Steps without an interruption that a trial needs to be measured in one piece."""
        steps = self.profile_steps if self._trial is None else self._trial.steps
        return self.warmup_steps + steps + 1

    def _adapt_to_short_stretches(self, state: Warmup | Profiling) -> None:
        """Epochs have fewer steps than a limit needs: measures it in parts, over several."""
        if isinstance(state, Warmup):
            self._starved.append(self._stretch)
        if len(self._starved) >= STARVED:
            # Nothing was measured in any of them: leaves at least half of the longest to measure.
            self._cap = min(self._cap, (max(self._starved) - 1) // 2)
            self._starved.clear()
        if not self._warned_short and self.search == "exhaustive":
            self._warned_short = True
            warnings.warn(
                f"A stretch of {self._stretch} steps between epochs, evaluations and checkpoints "
                f"is shorter than the {self._needed} that one power limit needs; each limit is "
                "measured over several. Lower warmup_steps or profile_steps to finish sooner.",
                stacklevel=4,
            )

    # -------------------------------------------------------------------- the leader, both ways

    def _join(self) -> None:
        """Says hello to the leader. Once more if others have come since the constructor's time."""
        world = framework.world_size()
        if world == self._world and not self.disabled:
            return
        if self._world and not self.disabled:
            self._read_profile()  # it was another party's
            if isinstance(self.state, Done):
                self.state = Ready(next_power_limit=self._highest, steps=1)
        self._world = world
        self._trial = self._command = None
        self._told.clear()
        leader = Leader(world, self._begin_search, self._planner.choose, self._planner.save)
        try:
            self._link = connect(leader, world)
        except LinkError as error:
            self._give_up(str(error))
            return
        if self.disabled:
            self._leave(self._reason)
            return
        self._tell(
            Hello(
                gpus=[self.monitor.gpus[i].get_name() for i in self.monitor.gpu_indices],
                min_mw=self.power_limits[-1],
                max_mw=self.power_limits[0],
            )
        )

    def _read_profile(self) -> bool:
        """Only the leader's profile counts."""
        return framework.rank() == 0 and self._planner.read_profile()

    def _begin_search(self, party: Party) -> Search:
        search = self._planner.begin(party)
        self.power_limits = self._planner.limits_mw
        return search

    def _tell(self, message: Message) -> None:
        if self._link is None:
            return
        try:
            self._link.tell(message)
        except LinkError as error:
            self._give_up(str(error))

    def _deliver(self) -> None:
        """Reads the energies that are there, and tells the leader."""
        leader = None if self._link is None else self._link.leader
        while self._told and not self._over:
            # All has been run, and nobody else has a part in it: then the last tick is waited for.
            last = self._world == 1 and leader is not None and leader.waits
            if not last and not self.monitor.ripe(self._told[0].measurement):
                return
            told = self._told.popleft()
            limit = told.trial.power_limit_mw
            try:
                joules, error_j = told.measurement.total_energy, told.measurement.uncertainty
            except ZeusBaseError as error:
                self._give_up(f"energy cannot be measured: {error.message}")
                return
            if joules <= 0:
                self._give_up(
                    f"{told.steps} steps at {watts(limit)} W were measured as 0 J; look at the "
                    "GPU's sensors with `nvidia-smi -q -d POWER`"
                )
                return
            seconds = told.measurement.time
            self._tell(
                Piece(
                    trial=told.trial.trial,
                    index=told.index,
                    steps=told.steps,
                    energy_j=joules,
                    energy_error_j=error_j,
                    time_s=seconds,
                )
            )
            self._show(
                power_limit_w=limit / 1000,
                step_time_s=seconds / told.steps,
                step_energy_j=joules / told.steps,
                power_w=joules / seconds,
            )

    def _obey(self) -> bool:
        """Does what the leader commands. Returns whether that ended what was under way."""
        if self._link is None:
            return False
        try:
            for heard in self._link.hear(time.monotonic(), self._step):
                self._command, self._heard_at = heard, self._step
        except LinkError as error:
            if isinstance(self.state, Done):  # the choice stays, and nothing else will come
                log.info("training is not checked any more: %s", error)
                self._link = self._watch = None
                return False
            self._give_up(str(error))
            return True
        command = self._command
        if command is None or not self._is_time(command):
            return False
        self._command = None
        if isinstance(command, Stop):
            self._stop(command.reason)
            return True
        state = self.state
        if isinstance(state, Profiling):
            self._cut(state)
        if isinstance(command, Choose):
            self._choose(command)
            return True
        if isinstance(state, Done):  # training has changed: what was known is of before
            self.estimates, self._chosen = [], None
        self._trial, self._index, self._left = command, 0, command.steps
        if isinstance(state, Ready):
            state.next_power_limit = command.power_limit_mw
            return False
        self._begin_trial(command)
        return True

    def _cut(self, state: Profiling) -> None:
        """Another command ends a piece: alone, its whole steps count; in company, whose pieces
        would end elsewhere, they do not.
        """
        limit = state.current_power_limit
        if _window(limit) not in self.monitor.measurement_states:
            return
        steps = self._target - state.steps
        if self._world == 1 and steps > 0:
            self._end_piece(limit, steps)
        else:
            self._drop_window(limit)

    def _is_time(self, command: Command) -> bool:
        if isinstance(command, Stop) or self._world == 1:
            return True
        waited = self._step - self._heard_at
        return self._step >= command.from_step or waited >= PATIENCE_STEPS

    def _choose(self, command: Choose) -> None:
        self._chosen = command
        self._told.clear()
        self.estimates = command.estimates
        chosen = next(one for one in self.estimates if one.power_limit_mw == command.power_limit_mw)
        log.info("optimal power limit: %g W", chosen.power_limit_mw / 1000)
        self.state = Done(optimal_power_limit=chosen.power_limit_mw)
        if not self._set_power_limit(chosen.power_limit_mw):
            return
        first = self.estimates[0]
        self._show(
            chosen_power_limit_w=chosen.power_limit_mw / 1000,
            energy_saving=1 - chosen.energy_j / first.energy_j,
            slowdown=chosen.time_s / first.time_s - 1,
        )
        if self.search == "adaptive":
            before = self._watch
            self._watch = Watch(chosen, before, loaded=self._searched == 0, power=self._world == 1)

    def _look_after(self) -> None:
        """After the choice: obeys, and looks whether training is still what was measured."""
        watch = self._watch
        if watch is None:
            return
        watch.step()
        if self._world > 1 and watch.steps % LISTEN_STEPS == 0 and self._obey():
            return
        leader = None if self._link is None else self._link.leader
        if leader is None:
            return
        if watch.due_to_begin:
            if self._open_window(watch.limit_mw):
                watch.began()
        elif watch.due_to_end:
            measurement = self._close_window(watch.limit_mw)
            if measurement is not None:
                watch.ended(measurement)
        elif watch.measurement is not None and self.monitor.ripe(watch.measurement):
            try:
                energy_j = watch.measurement.total_energy
            except ZeusBaseError as error:
                log.info("training is not checked this time: %s", error.message)
                watch.dropped()
                return
            if watch.changed(energy_j):
                log.info("training has changed (%s): power limits are measured anew", watch.what)
                leader.again(time.monotonic(), self._step)
                self._obey()

    def _drop_check(self) -> None:
        if self._watch is not None:
            self._drop_window(self._watch.limit_mw)
            self._watch.dropped()

    # -------------------------------------------------------------------------- limits, windows

    def _open_window(self, limit: int) -> bool:
        try:
            self.monitor.begin_window(_window(limit), restart=True)
        except ZeusBaseError as error:
            self._give_up(f"energy cannot be measured: {error.message}")
            return False
        return True

    def _close_window(self, limit: int) -> Measurement | None:
        try:
            return self.monitor.end_window(_window(limit))
        except ZeusBaseError as error:
            self._drop_window(limit)
            self._give_up(f"energy cannot be measured: {error.message}")
        except ValueError as error:  # someone reset the monitor's windows
            self._give_up(str(error))
        return None

    def _drop_window(self, limit: int) -> None:
        if _window(limit) in self.monitor.measurement_states:
            self.monitor.end_window(_window(limit), cancel=True)

    def _set_power_limit(self, power_limit_mw: int) -> bool:
        """Sets the limit on all GPUs unless it is set. False: it cannot be, and all is changed."""
        if self._over:
            return False
        if power_limit_mw == self.current_power_limit:
            return True
        try:
            self._write_power_limit(power_limit_mw)
        except ZeusGPUInvalidArgError as error:
            if power_limit_mw == self._highest or isinstance(self.state, Done):
                self._give_up(f"the power limit cannot be set: {error.message}")
            else:
                self._refuse(power_limit_mw, error.message)
            return False
        except ZeusGPUNoPermissionError as error:
            # A site may let only those set limits who compute on the GPU. The model may be put
            # there between now and the first step, which tries again.
            if self._step:
                self._give_up(f"the power limit cannot be set: {error.message}")
            return False
        except ZeusBaseError as error:
            self._give_up(f"the power limit cannot be set: {error.message}")
            return False
        self.current_power_limit = power_limit_mw
        return True

    def _write_power_limit(self, power_limit_mw: int) -> None:
        """Sets the limit. A lease that was lost, as by a program that stood still, is acquired."""
        gpus, indices = self.monitor.gpus, self.monitor.gpu_indices
        try:
            gpus.set_power_management_limits(indices, power_limit_mw)
        except ZeusGPULeaseExpiredError as error:
            log.warning("acquiring the power limit again: %s", error.message)
            gpus.acquire_power_limits(indices)
            gpus.set_power_management_limits(indices, power_limit_mw)

    def _refuse(self, power_limit_mw: int, reason: str) -> None:
        """The GPUs do not take this limit: the search leaves it out."""
        self._trial = None
        # Some of several GPUs may have taken it.
        self.current_power_limit = 0
        if self._set_power_limit(self._highest):
            self.state = Ready(next_power_limit=self._highest, steps=1)
            self._tell(Trouble(reason=reason, power_limit_mw=power_limit_mw))

    def _failed(self, error: Exception) -> None:
        log.info("the power limit optimizer failed", exc_info=True)
        self._give_up(f"{type(error).__name__}: {error}")
        self.close()

    def _give_up(self, reason: str) -> None:
        """Nothing can be done here any more: says so, and tells the others."""
        if self.disabled or self._over:
            return
        self.disabled, self._reason = True, reason
        searching = not isinstance(self.state, Done)
        if isinstance(self.state, Profiling):
            self._drop_window(self.state.current_power_limit)
        self.state = Done(optimal_power_limit=self._highest)
        warnings.warn(
            "The power limit optimizer stopped, and training goes on at the highest limit: "
            f"{reason}",
            stacklevel=2,
        )
        if searching:
            self._leave(reason)
        self.close()

    def _stop(self, reason: str) -> None:
        """The leader stops all. It says why; the others would only repeat it."""
        if framework.rank() == 0:
            self._link = None
            self._give_up(reason)
            return
        log.warning("the power limit optimizer stopped: %s", reason)
        self.disabled, self._reason = True, reason
        self._link = None
        self.close()

    def _leave(self, reason: str) -> None:
        """Others that search with this process must not wait for it."""
        link, self._link = self._link, None
        if link is None or self._world == 1:
            return
        try:
            link.tell(Trouble(reason=reason))
            link.hear(time.monotonic(), self._step)  # the leader's answer, for the others
        except LinkError as error:
            log.info("the other processes will miss this one: %s", error)

    def _show(self, **figures: float) -> None:
        if self.on_metrics is not None:
            self.on_metrics({f"zeus/{name}": value for name, value in figures.items()})

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


def _window(power_limit_mw: int) -> str:
    return f"__GlobalPowerLimitOptimizer_{watts(power_limit_mw)}"

"""One process of a search: what it does when a step begins, and with what comes of it.

A search says which setting to hold and for how many steps (`search`), a leader makes one decision
of what all processes measured (`leader`); this is one process. States change where steps begin:

    Ready      steps used up, a trial is commanded   -> Warmup at its setting
    Warmup     steps used up             -> Profiling at the same setting, window opened
    Profiling  steps used up             -> window closed, and a new one opened
    Warmup, Profiling   another trial    -> Warmup at its setting
    Warmup, Profiling   epoch ends, pause, evaluation   -> Ready for the same trial
    Warmup, Profiling   zeusd does not answer, or a lease is lost   -> Ready for the same trial
    any        the choice is made        -> Done, at the choice
    any        a setting cannot be set, nothing can be measured, a process is silent
                                         -> Done, given up

No clock, no device, no other process: all of them are behind `Effects`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol

from zeus.exceptions import ZeusBaseError, ZeusGPUInvalidArgError, ZeusGPUNoPermissionError
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import (
    Choose,
    Command,
    Message,
    Piece,
    RankHello,
    Stop,
    Trouble,
    Try,
)
from zeus.optimizer.power_limit.parts import Part, Parts, Stretches
from zeus.optimizer.power_limit.ranks import Ranks
from zeus.optimizer.power_limit.settings import Setting
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, State, Warmup
from zeus.optimizer.power_limit.watch import WINDOW_STEPS, Silence, Watch
from zeus.utils.framework import RanksUnreachable

LISTEN_STEPS = 20
"""Interval, in steps, at which commands are read after the choice."""
PATIENCE_STEPS = 3
"""A command for a later step is obeyed after at most this many steps."""


class Effects(Protocol):
    """What a process does outside itself. Nothing waits long."""

    def meet(self, known_world: int) -> Ranks | None:
        """Finds the processes that train together. None: they are as many as known.

        Raises:
            RanksUnreachable: There is no way to reach them.
        """

    def begin_step(self) -> None:
        """A step begins: it may wait as long as any."""

    def set(self, setting: Setting) -> bool:
        """Sets it on all GPUs. Returns False while that takes longer than a step may wait.

        Raises:
            ZeusBaseError: It cannot be set.
        """

    def is_set(self) -> bool:
        """Whether it is set by now, once. Raises as `set`."""

    def restore(self, *, at_end: bool) -> None:
        """Restores all GPUs. `at_end`: training has ended, and may wait a moment for it."""

    def measure(self, limit_mw: int, what: Literal["open", "close", "drop"]) -> Any:
        """`open`, `close` or `drop` a window of steps at a limit. A closed one can be `read`.

        Raises:
            ZeusBaseError: Why energy cannot be measured.
        """

    def read(self, window: Any) -> tuple[float, float, float] | None:
        """Energy, its uncertainty (J) and time (s) of a closed window; None: not known yet.

        Raises:
            ZeusBaseError: Why they will not be known; without a cause, the next ones will be.
        """

    def report(self, text: str, *, warn: bool = False) -> None:
        """Tells the user."""

    def note(self, figures: dict[str, float]) -> None:
        """Shows figures, by name."""

    def end(self, reason: str, *, warn: bool) -> None:
        """Tells the user why the search was given up, and which limit is in force."""


class SearchProcess:
    """One process of a search.

    Attributes:
        current: The setting in force; None: none, or it may not be.
        chosen: The choice; None: there is none.
        world: Number of processes that train together; 0: unknown yet.
        ranks: The way to the leader; None: none, or no longer.
        disabled: Whether the search was given up.
        over: Whether training has ended.
        searched: Steps of the search.
    """

    def __init__(
        self,
        effects: Effects,
        hello: RankHello,
        wait_steps: int,
        warmup_steps: int,
        profile_steps: int,
        adaptive: bool,
    ) -> None:
        self._effects = effects
        self._hello = hello
        self._highest = Setting(hello.max_mw)
        self._adaptive = adaptive
        self.state: State = self._ready(self._highest, wait_steps + 1)
        self.current: Setting | None = None
        self.chosen: Choose | None = None
        self.ranks: Ranks | None = None
        self.disabled = self.over = False
        self.reason = ""
        self.world = 0
        self.step = 0
        self.searched = 0
        self._now_s = 0.0
        self._leads = True
        self._joined = False
        self._parts = Parts()
        self._command: Command | None = None
        self._heard_at = self._opened_at = 0
        self._due = self._obeyed = False
        self._stretches = Stretches(warmup_steps, profile_steps, adaptive)
        self._watch: Watch | None = None
        self._open: int | None = None  # limit of the open window, mW
        self._unread: deque[tuple[Part | None, Any]] = deque()
        self._wanted = self._highest  # the setting that is being set, ...
        self._then: Callable[[], None] | None = None  # ... and what follows once it is
        self._waiting = False  # for zeusd to answer whether it is
        self._silence = Silence()
        self._leases_lost: int | None = None

    # ----------------------------------------------------------------------- training's events

    def begin(self) -> None:
        """The optimizer was created: sets the highest limit, so that steps do not wait for it."""
        if isinstance(self.state, Ready):
            self._set(self._highest)

    def begin_training(self) -> None:
        """Training begins. If one has ended before, sets its choice again or searches again."""
        if not self.over:
            return
        if self.disabled:
            # Those that search again are notified.
            self._joined = self._joined and self.chosen is not None
            return
        self.over = False
        if self.chosen is not None:
            self._choose(self.chosen)
            return
        self.world, self._joined = 0, False
        self.state = self._ready(self._highest)
        self._set(self._highest)

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._stretches.begin()

    def begin_step(self, now_s: float, answers: bool = True, leases_lost: int = 0) -> None:
        """A step begins, at a monotonic time, s. Measured steps are counted, windows end, commands
        are heard; then starts what is next, unless a command has changed it.
        """
        self._now_s = now_s
        self.step += 1
        self._effects.begin_step()
        self._stretches.step()
        self._due = self._obeyed = False
        if not self._joined and (self.disabled or not self.over):
            self._joined = True
            self.join()
        if self.over:
            return
        before, self._leases_lost = self._leases_lost, leases_lost
        if not answers or self._waiting:
            self._silent(answers)
        elif self._silence.lasts or before not in (None, leases_lost):
            self._hold_again()
        if not (self.over or self._silence.lasts):
            self._advance()
        if not (self.over or self._obeyed or self._silence.lasts or self._then is not None):
            self._proceed()

    def pause(self, trained: bool) -> None:
        """Training is interrupted, or an epoch has ended: the window ends here."""
        # The window covers the step it was opened at and those that began since.
        left = self.state.steps - trained if isinstance(self.state, Profiling) else 0
        keep = self._adaptive or self._stretches.short
        self._interrupted(self._parts.target - left if keep else 0)

    def evaluated(self) -> None:
        """The model was evaluated: discards the open window."""
        self._interrupted(0)

    def close(self, reason: str = "training ended before it finished", at_end: bool = True) -> None:
        """Training has ended: restore the limits."""
        self.over = True
        self._drop_all()
        if not isinstance(self.state, Done):
            self._leave(reason)
            if self.chosen is not None and not self.disabled:
                self.state = _done(self.chosen)
            else:
                self.state = self._without_choice(reason)
        self.current = None
        self._then, self._waiting = None, False
        self._silence.forget()
        self._effects.restore(at_end=at_end)

    def give_up(self, reason: str, *, leave: bool = True, warn: bool = True) -> None:
        """Nothing more can be done here: restores the limits, and notifies the others."""
        if self.disabled or self.over:
            return
        self.disabled, self.reason = True, reason
        if not isinstance(self.state, Done) or not leave:
            self._leave(reason if leave else None)
        self.state = self._without_choice(reason)
        self.close(at_end=False)
        self._effects.end(reason, warn=warn)

    # ---------------------------------------------------------------------------- the others

    def join(self) -> None:
        """Finds the processes that train together, and says hello."""
        try:
            ranks = self._effects.meet(0 if self.disabled else self.world)
        except RanksUnreachable as error:
            self._cut_off(str(error))
            return
        if ranks is None:
            return
        if self.world and not self.disabled and isinstance(self.state, Done):
            self.state = self._ready(self._highest)
        self.world, self.ranks = ranks.world, ranks
        self._parts.trial = self._command = None  # earlier commands no longer apply
        self._unread.clear()
        self._leads = ranks.leader is not None
        if self.disabled:
            self._leave(self.reason)
        else:
            self._tell(self._hello)

    def listen(self) -> None:
        """Reads the leader's commands, and obeys the last one when it is time."""
        if self.ranks is None or self.over:
            return
        try:
            commands = self.ranks.hear(self._now_s, self.step)
        except RanksUnreachable as error:
            self._cut_off(str(error))
            return
        for command in commands:
            self._command, self._heard_at = command, self.step
        new = self._command
        if new is not None and self._is_time(new):
            self._command, self._obeyed = None, True
            self._obey(new)

    def _obey(self, new: Command) -> None:
        if isinstance(new, Stop):
            # Only the leader reports why; the others would repeat it.
            self.give_up(new.reason, leave=False, warn=self._leads)
            return
        if isinstance(self.state, Profiling):
            self._cut(self.state)
        if self.over:
            return
        if isinstance(new, Choose):
            self._unread.clear()
            self._choose(new)
            return
        if isinstance(self.state, Done):
            self._drop_all()
            if not new.check:  # training has changed: earlier measurements no longer apply
                self.chosen = None
        self._parts.begin(new)
        if isinstance(self.state, Ready):
            self.state.next_power_limit = new.setting.power_limit_mw
            self._obeyed = False
        else:
            self._begin_trial(new)

    def _is_time(self, command: Command) -> bool:
        if isinstance(command, Stop) or self.world == 1:
            return True
        waited = self.step - self._heard_at
        return self.step >= command.from_step or waited >= PATIENCE_STEPS

    def _tell(self, message: Message) -> None:
        if self.ranks is None:
            return
        try:
            self.ranks.tell(message)
        except RanksUnreachable as error:
            self._cut_off(str(error))

    def _leave(self, reason: str | None) -> None:
        """Leaves the leader: no one must wait for this process; None: they know."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None and reason is not None and self.world > 1:
            ranks.leave(reason, self._now_s, self.step)

    def _cut_off(self, reason: str) -> None:
        """The leader cannot be reached."""
        if isinstance(self.state, Done) and not self.disabled and not self.over:
            self._watch = self.ranks = None  # the choice stays, and nothing else follows
            self._effects.report(f"training is not checked any more: {reason}")
        else:
            self.give_up(reason)

    @property
    def _leader(self) -> Leader | None:
        """The leader, if it is in this process."""
        return None if self.ranks is None else self.ranks.leader

    # ------------------------------------------------------------------- the steps of a trial

    def _advance(self) -> None:
        state = self.state
        if isinstance(state, Done):
            if self._watch is not None:
                self._watch.steps += 1
                if self.world > 1 and self._watch.steps % LISTEN_STEPS == 0:
                    self.listen()
            return
        if self._opened_at == self.step:  # its setting was set late: the window has just begun
            self._collect()
            self.listen()
            return
        state.steps -= 1
        self._due = state.steps <= 0
        if isinstance(state, (Warmup, Profiling)):
            self.searched += 1
        if self._due and isinstance(state, Profiling):
            self._end_part(self._parts.target)
        self._collect()
        self.listen()

    def _proceed(self) -> None:
        state, trial = self.state, self._parts.trial
        if isinstance(state, Done):
            if self._leads and self._watch is not None:
                self._check(self._watch)
        elif self._due and isinstance(state, Ready):
            if trial is None:
                state.steps = 1  # the leader has not decided yet
            else:
                self._begin_trial(trial)
        elif self._due and trial is not None:
            self._begin_part(trial)

    def _begin_trial(self, trial: Try) -> None:
        def begin() -> None:
            steps = min(trial.warmup_steps, self._stretches.longest_warmup)
            if steps:
                limit = trial.setting.power_limit_mw
                self.state = Warmup(current_power_limit=limit, steps=steps)
            else:
                self._begin_part(trial)

        if trial.setting != self.current:
            self.state = self._ready(trial.setting)
        self._set(trial.setting, begin)

    def _begin_part(self, trial: Try) -> None:
        limit = trial.setting.power_limit_mw
        self.state = Profiling(current_power_limit=limit, steps=self._parts.open())
        self._opened_at = self.step
        self._measure("open", limit)

    def _end_part(self, steps: int) -> None:
        """Closes the window of some steps of the trial."""
        self._stretches.measured()
        part = self._parts.close(steps)
        if part is None:
            self._drop()
        elif self._close(part) and self._leader is not None:
            self._leader.ran(part.trial, part.index, part.steps)

    def _cut(self, state: Profiling) -> None:
        """Another command ends a part: with a single process, its complete steps count; with
        several, whose parts would end at other steps, they do not.
        """
        steps = self._parts.target - state.steps
        if self.world == 1 and 0 < steps < self._parts.target:
            self._end_part(steps)
        else:
            self._drop()

    def _interrupted(self, steps: int) -> None:
        """Ends the trial, and continues at the highest limit until the next step. The open window
        counts as this many steps; 0: it is discarded, and the setting tried again.
        """
        state = self.state
        if isinstance(state, Done):
            self._drop_all()
        if not isinstance(state, (Warmup, Profiling)):
            return
        if said := self._stretches.cut(isinstance(state, Warmup)):
            self._effects.report(said, warn=True)
        if isinstance(state, Profiling):
            if steps:
                self._end_part(steps)
            else:
                self._drop()
        if not self.over:
            self.state = self._ready(Setting(state.current_power_limit))
            self._set(self._highest)

    # --------------------------------------------------------------------------------- windows

    def _measure(self, what: Literal["open", "close"], limit_mw: int) -> Any:
        """Opens or closes a window. Gives up if that fails."""
        try:
            window = self._effects.measure(limit_mw, what)
        except ZeusBaseError as error:
            self.give_up(f"energy cannot be measured: {error.message}")
            return None
        self._open = limit_mw if what == "open" else None
        return window

    def _close(self, part: Part | None) -> bool:
        """Closes the open window. Returns whether that succeeded."""
        window = None if self._open is None else self._measure("close", self._open)
        if window is None:
            return False
        self._unread.append((part, window))
        return True

    def _drop(self) -> None:
        """Discards the open window, if any."""
        limit, self._open = self._open, None
        if limit is not None:
            self._effects.measure(limit, "drop")

    def _collect(self) -> None:
        """Reads the energies that are available, in order."""
        while self._unread and not self.over:
            part, window = self._unread[0]
            try:
                found = self._effects.read(window)
            except ZeusBaseError as error:
                self._unread.popleft()
                self._unknown(part, error.message, lasting=error.__cause__ is not None)
                continue
            if found is None:
                return
            self._unread.popleft()
            if part is not None:
                self._measured(part, *found)
            elif self._watch is not None:
                self._checked(self._watch, *found)

    def _measured(self, part: Part, joules: float, error_j: float, seconds: float) -> None:
        setting = part.trial.setting
        if joules <= 0 and self._hello.gpus:
            self.give_up(
                f"{part.steps} steps at {setting} were measured as 0 J; look at the GPU's sensors "
                "with `nvidia-smi -q -d POWER`"
            )
            return
        self._tell(
            Piece(
                trial=part.trial.trial,
                index=part.index,
                steps=part.steps,
                energy_j=joules,
                energy_error_j=error_j,
                time_s=seconds,
            )
        )
        self._effects.note(
            {
                "power_limit_w": setting.power_limit_mw / 1000,
                "step_time_s": seconds / part.steps,
                "step_energy_j": joules / part.steps,
                "power_w": joules / seconds,
            }
        )

    def _unknown(self, part: Part | None, reason: str, lasting: bool) -> None:
        """The measurement of a window is unknown."""
        if part is None:
            self._effects.report(f"training is not checked this time: {reason}")
        elif lasting:
            self.give_up(f"energy cannot be measured: {reason}")
        else:
            self._tell(Piece(trial=part.trial.trial, index=part.index, steps=part.steps))

    def _forget(self) -> None:
        """Discards the windows whose energy was not read."""
        unread, self._unread = self._unread, deque()
        for part, _ in unread:
            if part is not None:
                self._unknown(part, "it was interrupted", lasting=False)

    # ------------------------------------------------------------------------ settings, silence

    def _set(self, setting: Setting, then: Callable[[], None] | None = None) -> None:
        """Sets a setting on all GPUs unless it is set, and then continues."""
        if self.over:
            return
        if setting == self.current and not self._waiting:
            if then is not None:
                then()
            return
        self._wanted, self._then = setting, then or _nothing
        self._settle(lambda: self._effects.set(setting))

    def _settle(self, is_set: Callable[[], bool]) -> None:
        """Continues if the wanted setting is set, and otherwise trains meanwhile."""
        setting = self._wanted
        try:
            self._waiting = not is_set()
        except ZeusBaseError as error:
            self._waiting = False
            if isinstance(error, ZeusGPUInvalidArgError) or setting.beside is not None:
                self._refused(setting, error.message)
            elif self.step or not isinstance(error, ZeusGPUNoPermissionError):
                self._cannot_be_set(error.message)
            else:
                # A site may allow only processes that compute on the GPU to set limits. The model
                # may be moved there before the first step, which tries again.
                self._then = None
            return
        if self._waiting:
            return
        self.current = setting
        self._answered()
        then, self._then = self._then, None
        if then is not None:
            then()

    def _refused(self, setting: Setting, reason: str) -> None:
        """The GPUs do not accept this setting: the search excludes it."""
        if setting == self._highest or isinstance(self.state, Done):
            self._cannot_be_set(reason)
            return
        self._parts.trial = None
        self.current = None  # some of several GPUs may have accepted it
        self.state = self._ready(self._highest)
        trouble = Trouble(reason=reason, setting=setting)
        self._set(self._highest, lambda: self._tell(trouble))

    def _cannot_be_set(self, reason: str) -> None:
        self.give_up(f"the power limit cannot be set: {reason}")

    def _silent(self, answers: bool) -> None:
        """zeusd does not answer, and the current measurement may be at another setting; or one is
        still being set.
        """
        if not answers:
            self._set_aside()
        what = "check" if isinstance(self.state, Done) else "search"
        said = self._silence.go_on(self._now_s, self.step, self.current, what)
        if said:
            self._effects.report(said, warn=True)
        if self._waiting:
            self._settle(self._effects.is_set)

    def _answered(self) -> None:
        """zeusd answers, perhaps again: steps of its silence do not count for the search."""
        if self._silence.lasts:
            if self._silence.reported:
                self._effects.report("zeusd answers again")
            if self._leader is not None:
                self._leader.waited(self.step - self._silence.since_step)
            self._silence.forget()

    def _hold_again(self) -> None:
        """zeusd answers again, or a lease was lost: another setting may be in force."""
        self._set_aside()
        self._answered()
        self.current = None
        chosen = self.chosen if isinstance(self.state, Done) else None
        self._set(self._highest if chosen is None else chosen.setting, self._then)

    def _set_aside(self) -> None:
        """Discards the current measurement; the trial restarts with its warm-up."""
        state = self.state
        self._drop()
        self._forget()
        if isinstance(state, (Warmup, Profiling)):
            self.state = self._ready(Setting(state.current_power_limit))

    # ------------------------------------------------------------------------------ the choice

    def _choose(self, command: Choose) -> None:
        again = self.chosen is not None
        self.chosen, chosen = command, command.chosen
        self.state = _done(command)

        def go_on() -> None:
            if self._adaptive:
                watch = Watch(chosen, loaded=self.searched == 0, power=self.world == 1)
                if self._watch is not None:
                    watch.follow(self._watch, again)
                self._watch = watch
            first = command.estimates[0]
            self._effects.note(
                {
                    "chosen_power_limit_w": chosen.power_limit_mw / 1000,
                    "energy_saving": 1 - chosen.energy_j / first.energy_j,
                    "slowdown": chosen.time_s / first.time_s - 1,
                }
            )

        self._effects.report(f"optimal power limit: {command.setting}")
        self._set(command.setting, go_on)

    def _check(self, watch: Watch) -> None:
        """Whether the choice is to be verified, or a check to begin or to end, as of this step."""
        if self._open is not None:
            if watch.steps - watch.opened >= WINDOW_STEPS:
                self._close(None)
        elif self._unread:
            self._collect()
        elif watch.must_verify(self._highest):
            if self._leader is not None:
                self._leader.check(self._now_s, self.step)
            self.listen()
        elif watch.steps >= watch.next:
            watch.opened = watch.steps
            self._measure("open", watch.chosen.power_limit_mw)

    def _checked(self, watch: Watch, joules: float, error_j: float, seconds: float) -> None:
        """Handles the result of a check: restarts the search if training has changed."""
        what = watch.changed(joules, seconds)
        if what is None:
            return
        watch.verified = False
        self._effects.report(f"training has changed ({what}): power limits are measured again")
        if self._leader is not None:
            self._leader.again(self._now_s, self.step)
        self.listen()

    def _drop_all(self) -> None:
        """Discards the open window, and those that were not read."""
        self._drop()
        self._unread.clear()

    # ------------------------------------------------------------------------------- states

    def _ready(self, setting: Setting, steps: int = 1) -> Ready:
        return Ready(next_power_limit=setting.power_limit_mw, steps=steps)

    def _without_choice(self, reason: str) -> Done:
        highest = self._highest.power_limit_mw
        return Done(optimal_power_limit=highest, chosen=False, reason=reason)


def _done(choice: Choose) -> Done:
    setting = choice.setting
    return Done(
        optimal_power_limit=setting.power_limit_mw,
        optimal_power_profile=setting.power_profile,
        optimal_clock=setting.graphics_clock,
    )


def _nothing() -> None:
    pass

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
from typing import Any, Literal, Protocol

from zeus.exceptions import ZeusBaseError, ZeusGPUInvalidArgError, ZeusGPUNoPermissionError
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import (
    CHECK,
    Choose,
    Command,
    Message,
    Piece,
    RankHello,
    Stop,
    Trouble,
    Try,
)
from zeus.optimizer.power_limit.ranks import Ranks
from zeus.optimizer.power_limit.settings import Setting
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, State, Warmup
from zeus.optimizer.power_limit.stretches import Stretches
from zeus.optimizer.power_limit.watch import FIRST_STEPS, WINDOW_STEPS
from zeus.utils.framework import RanksUnreachable

Reading = tuple[float, float, float, "float | None"]
"""Energy and its uncertainty, J; time, s; time in which power limited a GPU's clocks, s, or None if
that is not counted."""

LISTEN_STEPS = 20
"""Interval, in steps, at which commands are read after the choice."""
SILENT_S = 3.0
"""A zeusd that does not answer for this long is reported."""


class Effects(Protocol):
    """What a process does outside itself. Nothing waits long."""

    def meet(self, known_world: int) -> Ranks | None:
        """Finds the processes that train together. None: they are as many as known.

        Raises:
            RanksUnreachable: There is no way to reach them.
        """

    def set(self, setting: Setting | None) -> bool:
        """Sets it on all GPUs, and returns whether it is set; None: restores them. If that takes
        longer than a step may wait, False: it is still being set, and the next call for the same
        setting only looks.

        Raises:
            ZeusBaseError: It cannot be set.
        """

    def measure(self, limit_mw: int, what: Literal["open", "close", "drop"]) -> Any:
        """`open`, `close` or `drop` a window of steps at a limit. A closed one can be `read`.

        Raises:
            ZeusBaseError: Why energy cannot be measured.
        """

    def read(self, window: Any) -> Reading | None:
        """What a closed window measured; None: not known yet.

        Raises:
            ZeusBaseError: Why they will not be known; without a cause, the next ones will be.
        """

    def report(self, text: str, *, warn: bool = False) -> None:
        """Tells the user."""

    def note(self, figures: dict[str, float]) -> None:
        """Shows figures, by name."""

    def chosen(self, choice: Choose) -> None:
        """Tells the user and the site."""

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
        self._joined = False
        self._trial: Try | None = None
        self._pieces = 0  # of the trial, so far
        self._steps = 0  # of its next piece: fewer, once an interruption has split one
        self._target = 0  # of the piece that is measured
        self._due = False  # whether the steps of the state are used up
        self._stretches = Stretches(warmup_steps, profile_steps, adaptive)
        self._open: int | None = None  # limit of the open window, mW
        self._opened_at = 0  # step
        self._unread: deque[tuple[Piece, Setting, Any]] = deque()
        self._aim = self._highest  # the setting that is to be in force
        self._waiting = False  # until it is
        self._silent_since: tuple[float, int] | None = None  # time and step; None: zeusd answers
        self._silence_reported = False  # the user
        self._leases_lost: int | None = None

    # ----------------------------------------------------------------------- training's events

    def begin(self) -> None:
        """The optimizer was created: sets the highest limit, so that steps do not wait for it."""
        if isinstance(self.state, Ready):
            self._hold(self._highest)

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
        self._hold(self._highest)

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._stretches.begin()

    def begin_step(self, now_s: float, answers: bool = True, leases_lost: int = 0) -> None:
        """A step begins, at a monotonic time, s. Measured steps are counted, windows end, commands
        are heard; then starts what is next. While zeusd does not answer, or a setting is not in
        force yet, training only goes on.
        """
        self._now_s = now_s
        self.step += 1
        self._stretches.step()
        if not self._joined and (self.disabled or not self.over):
            self._joined = True
            self.join()
        if self.over:
            return
        lost = self._leases_lost not in (None, leases_lost)
        self._leases_lost = leases_lost
        back = self._silent_since is not None and not self._waiting
        if not answers or lost or back:
            self._set_aside()
        if answers and (lost or back):
            self.current = None  # another setting may be in force
        if not self._hold(self._aim) or not answers:
            self._silent()
            return
        self._answered()
        self._advance()
        if not self.over:
            self._proceed()

    def pause(self, trained: bool) -> None:
        """Training is interrupted, or an epoch has ended: the window ends here."""
        # The window covers the step it was opened at and those that began since.
        left = self.state.steps - trained if isinstance(self.state, Profiling) else 0
        keep = self._adaptive or self._stretches.short
        self._interrupted(self._target - left if keep else 0)

    def evaluated(self) -> None:
        """The model was evaluated: discards the open window."""
        self._interrupted(0)

    def close(self, reason: str = "training ended before it finished") -> None:
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
        self._waiting, self._silent_since = False, None
        self._effects.set(None)

    def give_up(self, reason: str, *, leave: bool = True, warn: bool = True) -> None:
        """Nothing more can be done here: restores the limits, and notifies the others."""
        if self.disabled or self.over:
            return
        self.disabled, self.reason = True, reason
        if not isinstance(self.state, Done) or not leave:
            self._leave(reason if leave else None)
        self.state = self._without_choice(reason)
        self.close()
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
        self._trial = None  # earlier commands no longer apply
        self._unread.clear()
        if self.disabled:
            self._leave(self.reason)
        else:
            self._tell(self._hello)

    def listen(self) -> None:
        """Reads the leader's commands, and obeys the last one."""
        if self.ranks is None or self.over:
            return
        try:
            commands = self.ranks.hear(self._now_s, self.step)
        except RanksUnreachable as error:
            self._cut_off(str(error))
            return
        if commands:
            self._obey(commands[-1])

    def _obey(self, new: Command) -> None:
        if isinstance(new, Stop):
            # Only the leader reports why; the others would repeat it.
            self.give_up(new.reason, leave=False, warn=self._leader is not None)
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
            self.chosen = None  # training has changed: earlier measurements no longer apply
        self._trial, self._pieces, self._steps = new, 0, new.steps
        if isinstance(self.state, Ready):
            self.state.next_power_limit = new.setting.power_limit_mw
        else:
            self._due = False
            self._begin_trial(new)

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
            self.ranks = None  # the choice stays, and nothing else follows
            self._effects.report(f"training is not checked any more: {reason}")
        else:
            self.give_up(reason)

    @property
    def _leader(self) -> Leader | None:
        """The leader, if it is in this process."""
        return None if self.ranks is None else self.ranks.leader

    # ------------------------------------------------------------------- the steps of a trial

    def _advance(self) -> None:
        """Counts a step, and handles what has arrived."""
        state, self._due = self.state, False
        if isinstance(state, Done):
            if self._adaptive and self.step % LISTEN_STEPS == 0:
                self.listen()
            return
        state.steps -= 1
        self._due = state.steps <= 0
        if isinstance(state, (Warmup, Profiling)):
            self.searched += 1
        if self._due and isinstance(state, Profiling):
            self._end_piece(self._target)
        self._collect()
        self.listen()

    def _proceed(self) -> None:
        """Starts what is next."""
        state, trial = self.state, self._trial
        if isinstance(state, Done):
            self._check()
        elif self._due and isinstance(state, Ready):
            state.steps = 1  # unless the leader has decided
            if trial is not None:
                self._begin_trial(trial)
        elif self._due and trial is not None:
            self._begin_piece(trial)

    def _begin_trial(self, trial: Try) -> None:
        steps = min(trial.warmup_steps, self._stretches.longest_warmup)
        if steps:
            self.state = Warmup(current_power_limit=trial.setting.power_limit_mw, steps=steps)
        elif trial.setting != self.current:
            self.state = self._ready(trial.setting)
        if self._hold(trial.setting) and not steps:
            self._begin_piece(trial)

    def _begin_piece(self, trial: Try) -> None:
        limit = trial.setting.power_limit_mw
        self._target = self._steps
        self.state = Profiling(current_power_limit=limit, steps=self._target)
        self._measure("open", limit)

    def _end_piece(self, steps: int) -> None:
        """Closes the window of some steps of the trial."""
        self._stretches.measured()
        trial = self._trial
        if trial is None:
            self._drop()
            return
        piece = Piece(trial=trial.trial, index=self._pieces, steps=steps)
        self._pieces += 1
        self._steps = trial.steps if steps >= self._steps else self._steps - steps
        if self._close(piece, trial.setting) and self._leader is not None:
            self._leader.ran(trial, piece.index, steps)

    def _cut(self, state: Profiling) -> None:
        """Another command ends a piece: with a single process, its complete steps count; with
        several, whose pieces would end at other steps, they do not.
        """
        steps = self._target - state.steps
        if self.world == 1 and 0 < steps < self._target:
            self._end_piece(steps)
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
                self._end_piece(steps)
            else:
                self._drop()
        if not self.over:
            self.state = self._ready(Setting(state.current_power_limit))
            self._hold(self._highest)

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

    def _close(self, piece: Piece, setting: Setting) -> bool:
        """Closes the open window. Returns whether that succeeded."""
        window = None if self._open is None else self._measure("close", self._open)
        if window is None:
            return False
        self._unread.append((piece, setting, window))
        return True

    def _drop(self) -> None:
        """Discards the open window, if any."""
        limit, self._open = self._open, None
        if limit is not None:
            self._effects.measure(limit, "drop")

    def _collect(self) -> None:
        """Reads the energies that are available, in order."""
        while self._unread and not self.over:
            piece, setting, window = self._unread[0]
            try:
                effect = self._effects.read(window)
            except ZeusBaseError as error:
                self._unread.popleft()
                self._unknown(piece, error.message, lasting=error.__cause__ is not None)
                continue
            if effect is None:
                return
            self._unread.popleft()
            self._measured(piece, setting, *effect)

    def _measured(
        self,
        piece: Piece,
        setting: Setting,
        joules: float,
        error_j: float,
        seconds: float,
        limited_s: float | None,
    ) -> None:
        if joules <= 0 and self._hello.gpus and piece.trial != CHECK:
            self.give_up(
                f"{piece.steps} steps at {setting} were measured as 0 J; look at the GPU's sensors "
                "with `nvidia-smi -q -d POWER`"
            )
            return
        piece.energy_j, piece.energy_error_j = joules, error_j
        piece.time_s, piece.limited_s = seconds, limited_s
        self._tell(piece)
        self._effects.note(
            {
                "power_limit_w": setting.power_limit_mw / 1000,
                "step_time_s": seconds / piece.steps,
                "step_energy_j": joules / piece.steps,
                "power_w": joules / seconds,
            }
        )

    def _unknown(self, piece: Piece, reason: str, lasting: bool) -> None:
        """The measurement of a window is unknown."""
        if lasting and piece.trial != CHECK:
            self.give_up(f"energy cannot be measured: {reason}")
        else:
            self._tell(piece)

    def _forget(self) -> None:
        """Discards the windows whose energy was not read."""
        unread, self._unread = self._unread, deque()
        for piece, _, _ in unread:
            self._tell(piece)

    # ------------------------------------------------------------------------ settings, silence

    @property
    def awaited(self) -> Setting | None:
        """The setting that is being set; None: none."""
        return self._aim if self._waiting else None

    def _hold(self, setting: Setting) -> bool:
        """Sets a setting on all GPUs unless it is in force. Returns whether it is: zeusd may take
        longer than a step may wait, so the next steps look again.
        """
        if self.over:
            return False
        self._aim = setting
        if setting == self.current:
            return True
        try:
            self._waiting = not self._effects.set(setting)
        except ZeusBaseError as error:
            self._waiting = False
            self._refused(setting, error)
            return False
        self.current = None if self._waiting else setting
        return not self._waiting

    def _refused(self, setting: Setting, error: ZeusBaseError) -> None:
        """The GPUs do not accept this setting: the search excludes it, if it can."""
        varies = isinstance(error, ZeusGPUInvalidArgError) or setting.beside is not None
        if not (varies or self.step) and isinstance(error, ZeusGPUNoPermissionError):
            # A site may allow only processes that compute on the GPU to set limits. The model may
            # be moved there before the first step, which tries again.
            return
        if not varies or setting == self._highest or isinstance(self.state, Done):
            self.give_up(f"the power limit cannot be set: {error.message}")
            return
        self._trial = None
        self.current = None  # some of several GPUs may have accepted it
        self.state = self._ready(self._highest)
        self._hold(self._highest)
        self._tell(Trouble(reason=error.message, setting=setting))

    def _silent(self) -> None:
        """zeusd does not answer, or a setting is still being set."""
        if self.over:
            return
        if self._silent_since is None:
            self._silent_since, self._silence_reported = (self._now_s, self.step), False
        if self._silence_reported or self._now_s - self._silent_since[0] < SILENT_S:
            return
        self._silence_reported = True
        held = "" if self.current is None else f" at {self.current}"
        what = "check" if isinstance(self.state, Done) else "search"
        self._effects.report(
            f"zeusd has not answered for {SILENT_S:g} s: training continues{held}; the {what} of "
            "power limits resumes when zeusd answers",
            warn=True,
        )

    def _answered(self) -> None:
        """zeusd answers, perhaps again: steps of its silence do not count for the search."""
        since, self._silent_since = self._silent_since, None
        if since is None:
            return
        if self._silence_reported:
            self._effects.report("zeusd answers again")
        if self._leader is not None:
            self._leader.waited(self.step - since[1])

    def _set_aside(self) -> None:
        """Discards the current measurement; the trial restarts with its warm-up."""
        state = self.state
        self._drop()
        self._forget()
        if isinstance(state, (Warmup, Profiling)):
            self.state = self._ready(Setting(state.current_power_limit))

    # ------------------------------------------------------------------------------ the choice

    def _choose(self, command: Choose) -> None:
        self.chosen, self.state = command, _done(command)
        if self._leader is not None and self._leader.watch is not None:
            self._leader.watch.next = self.step + FIRST_STEPS
        self._hold(command.setting)
        if not self.over:
            self._effects.chosen(command)

    def _check(self) -> None:
        """Measures some steps at the choice when they are due, where the leader is."""
        leader, choice = self._leader, self.chosen
        if leader is None or leader.watch is None or choice is None:
            return
        leader.tick(self._now_s, self.step)
        if self._open is not None:
            if self.step - self._opened_at >= WINDOW_STEPS:
                self._close(Piece(trial=CHECK, index=0, steps=WINDOW_STEPS), choice.setting)
        elif self._unread:
            self._collect()
            self.listen()
        elif self.step >= leader.watch.next:
            self._opened_at = self.step
            self._measure("open", choice.setting.power_limit_mw)

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
        optimal_power_profile=setting.named["power_profile"],
        optimal_clock=setting.of("graphics_clock"),
    )

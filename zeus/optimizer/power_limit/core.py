"""One process of the search: it receives steps and results, and returns actions.

A search says which limit to hold and for how many steps (`search`), a leader makes one decision of
what all processes measured (`leader`); this is one process. State changes happen where steps begin:

    Ready      steps used up, a trial is commanded   -> Warmup at its limit
    Warmup     steps used up             -> Profiling at the same limit, window opened
    Profiling  steps used up             -> window closed, and a new one opened
    Warmup, Profiling   another trial    -> Warmup at its limit
    Warmup, Profiling   epoch ends, pause, evaluation   -> Ready for the same trial
    Warmup, Profiling   zeusd does not answer, or a lease is lost   -> Ready for the same trial
    any        the choice is made        -> Done, at the chosen limit
    any        a limit cannot be set, nothing can be measured, a process is silent
                                         -> Done, given up

Pure: no clock, no device, no other process. The shell (`optimizer`) performs the actions and
reports their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeus.optimizer.power_limit import parts
from zeus.optimizer.power_limit.actions import (
    Actions,
    AskForLimit,
    CloseWindow,
    Collect,
    DropWindow,
    Forget,
    ForLeader,
    GiveUp,
    Join,
    Leave,
    Listen,
    OpenWindow,
    Part,
    ReleaseLimits,
    Say,
    SetLimit,
    Show,
    Tell,
)
from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.messages import Choose, Command, Hello, Missing, Stop, Trouble, Try
from zeus.optimizer.power_limit.parts import Parts, Stretches
from zeus.optimizer.power_limit.profile import watts
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, State, Warmup
from zeus.optimizer.power_limit.watch import Silence, Watch
from zeus_ipc.controls import profile_name

LISTEN_STEPS = 20
"""Interval, in steps, at which commands are read after the choice."""
PATIENCE_STEPS = 3
"""A command for a later step is obeyed after at most this many steps."""


class Core:
    """One process of a search.

    Attributes:
        current_mw: The limit that is set; 0: none, or it may not be in force.
        profile: The workload power profile that is set with it; None: none.
        chosen: The choice; None: there is none.
        world: Number of processes that train together; 0: unknown yet.
    """

    def __init__(
        self, hello: Hello, wait_steps: int, warmup_steps: int, profile_steps: int, adaptive: bool
    ) -> None:
        self._hello = hello
        self._highest = hello.max_mw
        self._adaptive = adaptive
        self.state: State = Ready(next_power_limit=self._highest, steps=wait_steps + 1)
        self.current_mw = 0
        self.profile: int | None = None
        self.chosen: Choose | None = None
        self.disabled = self.over = False
        self.reason = ""
        self.world = 0
        self.step = 0
        self.searched = 0
        self._leads = True
        self._joined = False
        self._parts = Parts()
        self._command: Command | None = None
        self._heard_at = self._opened_at = 0
        self._due = self._obeyed = False
        self._stretches = Stretches(warmup_steps, profile_steps, adaptive)
        self._watch: Watch | None = None
        self._then: Callable[[], Actions] | None = None  # once the limit that is set is set
        self._waiting = False  # for zeusd to answer whether it is
        self._silence = Silence()
        self._leases_lost: int | None = None

    # ----------------------------------------------------------------------- training's events

    def begin(self) -> Actions:
        """The optimizer was created: sets the highest limit, so that steps do not wait for it."""
        return self._set(self._highest) if isinstance(self.state, Ready) else []

    def begin_training(self) -> Actions:
        """Training begins. If one has ended before, sets its choice again or searches again."""
        if not self.over:
            return []
        if self.disabled:
            # Those that search again are notified.
            self._joined = self._joined and self.chosen is not None
            return []
        self.over = False
        if self.chosen is not None:
            return self._choose(self.chosen)
        self.world, self._joined = 0, False
        self.state = Ready(next_power_limit=self._highest, steps=1)
        return self._set(self._highest)

    def begin_epoch(self) -> Actions:
        """An epoch begins."""
        self._stretches.begin()
        return []

    def begin_step(self, now_s: float, answers: bool = True, leases_lost: int = 0) -> Actions:
        """A step begins. `advance` and `proceed` follow."""
        self.step += 1
        self._stretches.step()
        self._due = self._obeyed = False
        actions: Actions = []
        if not self._joined and (self.disabled or not self.over):
            self._joined = True
            actions.append(Join())
        if self.over:
            return actions
        before, self._leases_lost = self._leases_lost, leases_lost
        if not answers or self._waiting:
            actions += self._silent(now_s, answers)
        elif self._silence.lasts or before not in (None, leases_lost):
            actions += self._hold_again()
        return actions

    def advance(self) -> Actions:
        """The step's work begins: measured steps are counted, windows end, commands are heard."""
        state = self.state
        if self.over or self._silence.lasts:
            return []
        if isinstance(state, Done):
            if self._watch is None:
                return []
            self._watch.step()
            return [Listen()] if self.world > 1 and self._watch.steps % LISTEN_STEPS == 0 else []
        if self._opened_at == self.step:  # its limit was set late: the window has just begun
            return [Collect(), Listen()]
        state.steps -= 1
        self._due = state.steps <= 0
        if isinstance(state, (Warmup, Profiling)):
            self.searched += 1
        actions: Actions = []
        if self._due and isinstance(state, Profiling):
            actions = self._end_part(state.current_power_limit, self._parts.target)
        return [*actions, Collect(), Listen()]

    def proceed(self) -> Actions:
        """The step's work ends: starts what is next, unless a command has changed it."""
        if self.over or self._obeyed or self._silence.lasts or self._then is not None:
            return []
        state = self.state
        if isinstance(state, Done):
            watch = self._watch if self._leads else None
            return [] if watch is None else watch.look(self._highest)
        if not self._due:
            return []
        if isinstance(state, Ready):
            if self._parts.trial is not None:
                return self._begin_trial(self._parts.trial)
            state.steps = 1  # the leader has not decided yet
        elif self._parts.trial is not None:
            return self._begin_part(self._parts.trial.power_limit_mw)
        return []

    def pause(self, trained: bool) -> Actions:
        """Training is interrupted, or an epoch has ended: the window ends here."""
        # The window covers the step it was opened at and those that began since.
        left = self.state.steps - trained if isinstance(self.state, Profiling) else 0
        keep = self._adaptive or self._stretches.short(self._parts.steps)
        return self._interrupted(self._parts.target - left if keep else 0)

    def evaluated(self) -> Actions:
        """The model was evaluated: discards the open window."""
        return self._interrupted(0)

    def close(
        self, reason: str = "training ended before it finished", at_end: bool = True
    ) -> Actions:
        """Training has ended: restore the limits."""
        actions = self._drop_check()
        if isinstance(self.state, Profiling):
            actions.append(DropWindow(self.state.current_power_limit))
        if not isinstance(self.state, Done):
            actions.append(Leave(reason))
            if self.chosen is not None and not self.disabled:
                self.state = _done(self.chosen)
            else:
                self.state = Done(optimal_power_limit=self._highest, chosen=False, reason=reason)
        self.over = True
        self.current_mw, self.profile = 0, None
        self._then, self._waiting = None, False
        self._silence.forget()
        return [*actions, ReleaseLimits(at_end)]

    def give_up(self, reason: str, *, leave: bool = True, warn: bool = True) -> Actions:
        """Nothing more can be done here: restores the limits, and notifies the others."""
        if self.disabled or self.over:
            return []
        self.disabled, self.reason = True, reason
        actions: Actions = []
        if isinstance(self.state, Profiling):
            actions.append(DropWindow(self.state.current_power_limit))
        if not isinstance(self.state, Done) or not leave:
            actions.append(Leave(reason if leave else None))
        self.state = Done(optimal_power_limit=self._highest, chosen=False, reason=reason)
        return [*actions, *self.close(at_end=False), GiveUp(reason, warn)]

    # -------------------------------------------------------------------- results of actions

    def joining(self, world: int) -> None:
        """This many processes train together; earlier commands no longer apply."""
        if self.world and not self.disabled and isinstance(self.state, Done):
            self.state = Ready(next_power_limit=self._highest, steps=1)
        self.world = world
        self._parts.trial = self._command = None

    def joined(self, leads: bool) -> Actions:
        """The leader can be reached."""
        self._leads = leads
        return [Leave(self.reason)] if self.disabled else [Tell(self._hello)]

    def cut_off(self, reason: str) -> Actions:
        """The leader cannot be reached."""
        if isinstance(self.state, Done) and not self.disabled and not self.over:
            self._watch = None  # the choice stays, and nothing else follows
            return [Leave(None), Say(f"training is not checked any more: {reason}")]
        return self.give_up(reason)

    def limit_set(self, power_limit_mw: int, profile: int | None = None) -> Actions:
        """The limit is set, and the workload power profile."""
        self.current_mw, self.profile, self._waiting = power_limit_mw, profile, False
        back = self._silence.end(self.step)
        then, self._then = self._then, None
        return back if then is None else [*back, *then()]

    def limit_refused(
        self, power_limit_mw: int, reason: str, profile: int | None = None
    ) -> Actions:
        """The GPUs do not accept this limit or profile: the search excludes it."""
        highest = power_limit_mw == self._highest and profile is None
        if highest or isinstance(self.state, Done):
            return self.limit_failed(reason)
        self._parts.trial = None
        self.current_mw, self._waiting = 0, False  # some of several GPUs may have accepted it
        self.state = Ready(next_power_limit=self._highest, steps=1)
        trouble = Trouble(reason=reason, power_limit_mw=power_limit_mw, profile=profile)
        return self._set(self._highest, then=lambda: [Tell(trouble)])

    def limit_denied(self, reason: str) -> Actions:
        """This process may not set the limit."""
        if self.step:
            return self.limit_failed(reason)
        # A site may allow only processes that compute on the GPU to set limits. The model may be
        # moved there before the first step, which tries again.
        self._then = None
        return []

    def limit_failed(self, reason: str) -> Actions:
        """The limit cannot be set."""
        return self.give_up(f"the power limit cannot be set: {reason}")

    def unanswered(self) -> Actions:
        """The limit is not set yet: training continues meanwhile."""
        self._waiting = True
        return []

    def window_failed(self, reason: str) -> Actions:
        """A window could not be opened or closed."""
        return self.give_up(f"energy cannot be measured: {reason}")

    def measured(self, part: Part | None, joules: float, error_j: float, seconds: float) -> Actions:
        """Handles the measurement of a window."""
        if part is None:
            return [] if self._watch is None else self._watch.measured(joules, seconds)
        limit = part.trial.power_limit_mw
        if joules <= 0 and self._hello.gpus:
            return self.give_up(
                f"{part.steps} steps at {watts(limit)} W were measured as 0 J; look at the GPU's "
                "sensors with `nvidia-smi -q -d POWER`"
            )
        message, figures = parts.report(part, joules, error_j, seconds)
        return [Tell(message), Show(figures), Collect()]

    def unknown(self, part: Part | None, reason: str, lasting: bool) -> Actions:
        """The measurement of a window is unknown."""
        if part is None:
            if self._watch is not None:
                self._watch.drop()
            return [Say(f"training is not checked this time: {reason}")]
        if lasting:
            return self.give_up(f"energy cannot be measured: {reason}")
        return [Tell(Missing(trial=part.trial.trial, index=part.index)), Collect()]

    def heard(self, commands: Sequence[Command]) -> Actions:
        """Handles the leader's commands since the last time."""
        for command in commands:
            self._command, self._heard_at = command, self.step
        new = self._command
        if new is None or not self._is_time(new):
            return []
        self._command = None
        self._obeyed = True
        if isinstance(new, Stop):
            return self._stop(new.reason)
        actions = self._cut(self.state) if isinstance(self.state, Profiling) else []
        if isinstance(new, Choose):
            return [*actions, Forget(), *self._choose(new)]
        was_done = isinstance(self.state, Done)
        if was_done and not new.check:  # training has changed: earlier measurements no longer apply
            self.chosen = None
        self._parts.begin(new)
        if isinstance(self.state, Ready):
            self.state.next_power_limit = new.power_limit_mw
            self._obeyed = False
            return actions
        drop = self._drop_check() if was_done else []
        return [*actions, *drop, *self._begin_trial(new)]

    # ------------------------------------------------------------------- the steps of a trial

    def _begin_trial(self, trial: Try) -> Actions:
        limit = trial.power_limit_mw

        def begin() -> Actions:
            steps = min(trial.warmup_steps, self._stretches.longest_warmup)
            if not steps:
                return self._begin_part(limit)
            self.state = Warmup(current_power_limit=limit, steps=steps)
            return []

        if (limit, trial.profile) != (self.current_mw, self.profile):
            self.state = Ready(next_power_limit=limit, steps=1)
        return self._set(limit, trial.profile, begin)

    def _begin_part(self, limit: int) -> Actions:
        self.state = Profiling(current_power_limit=limit, steps=self._parts.open())
        self._opened_at = self.step
        return [OpenWindow(limit)]

    def _end_part(self, limit: int, steps: int) -> Actions:
        """Closes the window of some steps of the trial."""
        self._stretches.measured()
        part = self._parts.close(steps)
        if part is None:
            return [DropWindow(limit)]
        ran = ForLeader(lambda leader, *_: leader.ran(part.trial, part.index, part.steps))
        return [CloseWindow(limit, part), ran]

    def _cut(self, state: Profiling) -> Actions:
        """Another command ends a part: with a single process, its complete steps count; with
        several, whose parts would end at other steps, they do not.
        """
        steps = self._parts.target - state.steps
        if self.world == 1 and 0 < steps < self._parts.target:
            return self._end_part(state.current_power_limit, steps)
        return [DropWindow(state.current_power_limit)]

    def _interrupted(self, steps: int) -> Actions:
        """Ends the trial, and continues at the highest limit until the next step. The open window
        counts as this many steps; 0: it is discarded, and the limit tried again.
        """
        state, stretch = self.state, self._stretches
        dropped = self._drop_check()
        if not isinstance(state, (Warmup, Profiling)):
            return dropped
        said = stretch.cut(isinstance(state, Warmup), self._parts.steps)
        actions: Actions = [] if said is None else [Say(said, warn=True)]
        if isinstance(state, Profiling):
            if steps:
                actions += self._end_part(state.current_power_limit, steps)
            else:
                actions.append(DropWindow(state.current_power_limit))
        self.state = Ready(next_power_limit=state.current_power_limit, steps=1)
        return [*dropped, *actions, *self._set(self._highest)]

    # ------------------------------------------------------------------------- limits, silence

    def _set(
        self,
        power_limit_mw: int,
        profile: int | None = None,
        then: Callable[[], Actions] | None = None,
    ) -> Actions:
        """Sets limit and profile on all GPUs unless they are set, and then continues."""
        wanted = power_limit_mw, profile
        if wanted == (self.current_mw, self.profile) and not self._waiting:
            return [] if then is None else then()
        self._then = then or _nothing
        return [SetLimit(power_limit_mw, profile)]

    def _silent(self, now_s: float, answers: bool) -> Actions:
        """zeusd does not answer, and the current measurement may be at another limit; or a limit is
        still being set.
        """
        actions = [] if answers else self._set_aside()
        if not self._silence.lasts:
            self._silence.begin(now_s, self.step)
        else:
            what = "check" if isinstance(self.state, Done) else "search"
            actions += self._silence.go_on(now_s, self.current_mw, what)
        return [*actions, AskForLimit()] if self._waiting else actions

    def _hold_again(self) -> Actions:
        """zeusd answers again, or a lease was lost: another limit may be in force."""
        aside = [*self._set_aside(), *self._silence.end(self.step)]
        self.current_mw = 0
        limit, profile = self._highest, None
        if isinstance(self.state, Done) and self.chosen is not None:
            limit, profile = self.chosen.power_limit_mw, self.chosen.profile
        return [*aside, *self._set(limit, profile, self._then)]

    def _set_aside(self) -> Actions:
        """Discards the current measurement; the trial restarts with its warm-up."""
        state = self.state
        actions: Actions = [*self._drop_check(), Forget()]
        if isinstance(state, (Warmup, Profiling)):
            if isinstance(state, Profiling):
                actions.append(DropWindow(state.current_power_limit))
            self.state = Ready(next_power_limit=state.current_power_limit, steps=1)
        return actions

    # ------------------------------------------------------------------------------ the choice

    def _is_time(self, command: Command) -> bool:
        if isinstance(command, Stop) or self.world == 1:
            return True
        waited = self.step - self._heard_at
        return self.step >= command.from_step or waited >= PATIENCE_STEPS

    def _choose(self, command: Choose) -> Actions:
        before = self.chosen
        self.chosen = command
        estimates = command.estimates
        wanted = command.power_limit_mw, command.profile
        chosen = next(one for one in estimates if (one.power_limit_mw, one.profile) == wanted)
        self.state = _done(command)

        def go_on() -> Actions:
            if self._adaptive:
                self._watch_over(chosen, before is None)
            first = estimates[0]
            figures = {
                "chosen_power_limit_w": chosen.power_limit_mw / 1000,
                "energy_saving": 1 - chosen.energy_j / first.energy_j,
                "slowdown": chosen.time_s / first.time_s - 1,
            }
            return [Show(figures)]

        text = f"optimal power limit: {chosen.power_limit_mw / 1000:g} W"
        if chosen.profile is not None:
            text += f", with the workload power profile {profile_name(chosen.profile)}"
        return [Say(text), *self._set(*wanted, go_on)]

    def _watch_over(self, chosen: LimitEstimate, again: bool) -> None:
        before = self._watch
        self._watch = Watch(chosen, loaded=self.searched == 0, power=self.world == 1)
        if before is not None:
            self._watch.follow(before, again)

    def _drop_check(self) -> Actions:
        return [] if self._watch is None else self._watch.drop()

    def _stop(self, reason: str) -> Actions:
        """The leader stops all processes. Only it reports why; the others would repeat it."""
        return self.give_up(reason, leave=False, warn=self._leads)


def _done(choice: Choose) -> Done:
    name = None if choice.profile is None else profile_name(choice.profile)
    return Done(optimal_power_limit=choice.power_limit_mw, optimal_power_profile=name)


def _nothing() -> Actions:
    return []

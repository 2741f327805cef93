"""One decision for all processes that train together. Every process reports its capabilities and
measurements to the leader; the leader, in the process of rank 0, owns the search and the choice,
and sends the same commands to all. A single process is its own leader. No process ever waits for a
reply: until a command arrives, it trains under its present limit, and one that hears nothing for
long returns to the highest limit and reports it. Pure: no clock, no device, no network. Each call
has the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from zeus.optimizer.power_limit.estimates import SettingSample
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
from zeus.optimizer.power_limit.search import LimitTrial, SettingsSearch
from zeus.optimizer.power_limit.settings import Setting
from zeus.optimizer.power_limit.watch import Watch

log = logging.getLogger(__name__)

SILENCE_S = 60.0
"""A process that lags by this long, ..."""
SILENCE_STEPS = 20
"""... and by this many of the leader's steps beyond those of two trials, is excluded."""


@dataclass
class _Shared:
    """A piece, until all processes have reported theirs."""

    trial: Try
    position: float
    steps: int = 0  # in this process; 0: not run yet
    counts: bool = False  # whether the search waits for it
    parts: dict[int, Piece] = field(default_factory=dict)


class Leader:
    """Owns the search.

    Args:
        world: Number of processes that train together.
        begin: Creates the search once all are known; raises ValueError if it cannot.
        save: Called with the search, its position, and whether the choice is made, when it leaves a
            setting, when measurements arrive, and at the choice.
        checks: Whether training is checked after the choice.

    Attributes:
        search: The search; None: not all processes are known yet.
        watch: The checks after a choice.
    """

    def __init__(
        self,
        world: int,
        begin: Callable[[RankHello], SettingsSearch],
        save: Callable[[SettingsSearch, int, bool], None],
        checks: bool = False,
    ) -> None:
        self.world = world
        self.watch: Watch | None = None
        self._checks = checks
        self.search: SettingsSearch | None = None
        self.over = False
        self._begin = begin
        self._save = save
        self._hellos: dict[int, RankHello] = {}
        self._first: tuple[float, int] | None = None  # seconds and step of the first look
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._trial: Try | None = None
        self._trials = 0
        self._heard: dict[int, tuple[float, int]] = {}
        self._commands: list[Command] = []
        self._sampled = False  # whether the trial has a sample
        self._enough = False  # whether the steps run of it have samples
        self._explained: set[str] = set()  # why profiles or clocks that were wanted are left out
        self._new = False  # whether something is known since the last decision
        self._longest = 0  # steps of a trial
        self._step = 0
        self._start_step = 0
        self._now_s = 0.0

    # ------------------------------------------------------------------------------- inputs

    def take(self, rank: int, message: Message) -> None:
        """Handles a process's message."""
        self._heard[rank] = self._now_s, self._step
        if isinstance(message, Piece) and message.trial == CHECK:
            self._check(message)
        elif self.over:
            return
        elif isinstance(message, RankHello):
            self._hellos[rank] = message
            if len(self._hellos) == self.world:
                self._start()
        elif isinstance(message, Trouble):
            self._trouble(rank, message)
        else:
            self._piece(rank, message)

    def ran(self, trial: Try, index: int, steps: int) -> None:
        """This process has measured a piece of a trial; its measurement will follow."""
        if self.search is None or self.over:
            return
        shared = self._share((trial.trial, index), trial)
        shared.position = self.position - steps / 2
        shared.steps = steps
        # Once enough steps were run, all continue until the next command, and no one waits for
        # those pieces.
        shared.counts = self._is_current(trial.trial) and not self._enough
        self._new = True

    def tick(self, now_s: float, step: int) -> None:
        """A step of this process begins."""
        self._now_s, self._step = now_s, step

    def look(self) -> None:
        """Looks for processes that have fallen silent, after all messages are handled."""
        if self.over:
            return
        if self._first is None:
            self._first = self._now_s, self._step
        for rank in range(self.world):
            self._heard.setdefault(rank, self._first)
        silent = [rank for rank in range(self.world) if self._awaits(rank) and self._late(rank)]
        if silent:
            what = "begin" if self.search is None else "report steps"
            self._stop(f"{_ranks(silent)} did not {what}")

    def commands(self) -> list[Command]:
        """Returns the decisions since the last call."""
        if self._new:  # a decision takes milliseconds
            self._decide()
        new, self._commands = self._commands, []
        return new

    def waited(self, steps: int) -> None:
        """This many steps could not be measured: they do not count for the search."""
        self._start_step += steps

    # ----------------------------------------------------------------------------- internals

    @property
    def position(self) -> int:
        """Steps that the search has taken."""
        return self._step - self._start_step

    def _awaits(self, rank: int) -> bool:
        if self.search is None:
            return rank not in self._hellos
        return any(rank not in one.parts for one in self._shared.values())

    def _late(self, rank: int) -> bool:
        since_s, since_step = self._heard[rank]
        # A process that leaves a trial loses its last piece, and reports next in the next trial.
        steps = SILENCE_STEPS + 2 * self._longest
        return self._now_s - since_s > SILENCE_S and self._step - since_step > steps

    def _from(self, rank: int, reason: str) -> str:
        return reason if self.world == 1 else f"rank {rank}: {reason}"

    def _start(self) -> None:
        hellos = [self._hellos[rank] for rank in range(self.world)]
        offered = [hello.beside for hello in hellos if hello.gpus] or [[]]
        participants = RankHello(
            gpus=[gpu for hello in hellos for gpu in hello.gpus],
            min_mw=max(hello.min_mw for hello in hellos),
            max_mw=min(hello.max_mw for hello in hellos),
            beside=[one for one in offered[0] if all(one in others for others in offered)],
        )
        self._shared.clear()
        self._heard = dict.fromkeys(range(self.world), (self._now_s, self._step))
        self._trial, self._start_step = None, self._step
        self._sampled = self._enough = False
        if not participants.gpus:
            self._stop(
                "no process of this job sees the die of each card, or the first partition of each "
                "package, that has the power limit; make it visible"
            )
            return
        if participants.min_mw > participants.max_mw:
            self._stop("there is no power limit that all GPUs of this job take")
            return
        try:
            self.search = self._begin(participants)
        except ValueError as error:
            self._stop(str(error))
            return
        self._start_step -= self.search.position
        self._new = True

    def _check(self, piece: Piece) -> None:
        """Searches again if training has changed since it was measured."""
        if self.watch is None or not self.over:
            return
        what = self.watch.changed(piece.energy_j, piece.time_s, self._step)
        if what is not None:
            log.info("training has changed (%s): power limits are measured again", what)
            self.over = False
            self._start()

    def _piece(self, rank: int, piece: Piece) -> None:
        self._left(rank, piece.trial)
        key = piece.trial, piece.index
        shared = self._shared.get(key)
        if shared is None:
            if self._trial is None or piece.trial < self._trial.trial:
                return  # of a finished trial, whose other parts will not arrive
            shared = self._share(key, self._trial)
        shared.parts[rank] = piece
        if len(shared.parts) < self.world or self.search is None:
            return
        if not all(one.time_s for one in shared.parts.values()):
            self._lose(key)
            return
        del self._shared[key]
        parts = [shared.parts[rank] for rank in range(self.world)]
        steps, trial = shared.steps, shared.trial
        current = self._is_current(piece.trial)
        self._sampled = self._sampled or current
        self.search.add(
            SettingSample(
                trial.setting.power_limit_mw,
                steps,
                sum(part.energy_j / part.steps for part in parts) * steps,
                max(part.time_s / part.steps for part in parts) * steps,
                sum(part.energy_error_j / part.steps for part in parts) * steps,
                shared.position,
                _limited_s(parts, steps),
                beside=trial.setting.beside,
            )
        )
        if not current:
            self._save(self.search, self.position, False)
        self._new = True

    def _share(self, key: tuple[int, int], trial: Try) -> _Shared:
        """A piece is measured by all. The silence of those that nothing was awaited of begins."""
        idle = [rank for rank in range(self.world) if not self._awaits(rank)]
        self._heard.update(dict.fromkeys(idle, (self._now_s, self._step)))
        return self._shared.setdefault(key, _Shared(trial, self.position))

    def _is_current(self, trial: int) -> bool:
        return self._trial is not None and trial == self._trial.trial

    def _left(self, rank: int, trial: int) -> None:
        """A process has moved on to a trial: unreported pieces of earlier ones will not arrive."""
        for key, shared in list(self._shared.items()):
            if key[0] < trial and rank not in shared.parts:
                self._lose(key)

    def _lose(self, key: tuple[int, int]) -> None:
        self._new |= self._shared.pop(key).counts

    def _trouble(self, rank: int, trouble: Trouble) -> None:
        setting, search = trouble.setting, self.search
        if setting is None or search is None or setting == Setting(search.limits_mw[0]):
            self._stop(self._from(rank, trouble.reason))
            return
        if setting.power_limit_mw in search.limits_mw:
            reason = self._from(rank, trouble.reason)
            asked_for = setting.beside is not None and reason not in self._explained
            self._explained.add(reason)
            level = logging.WARNING if asked_for else logging.INFO
            log.log(level, "%s is left out: %s", setting, reason)
            search.without(setting)
        for key, shared in list(self._shared.items()):
            if shared.trial.setting == setting:
                self._lose(key)
        if self._trial is not None and self._trial.setting == setting:
            self._left(rank, self._trial.trial)
            self._trial = None
        self._new = True

    def _decide(self) -> None:
        search = self.search
        if search is None or self.over:
            return
        self._new = False
        current = None if self._trial is None else self._trial.setting
        awaited = [one for one in self._shared.values() if one.counts]
        outstanding = [(one.trial.setting, one.steps) for one in awaited]
        trial = search.next(current, self.position, outstanding)
        self._enough = trial is None or trial.setting != current
        if trial is None:
            if not outstanding:
                self._finish(search)
        elif self.world == 1 or self._trial is None or self._sampled or not self._enough:
            self._try(trial, search)
        # else: every process must have measured a part of a trial before any may leave it

    def _try(self, trial: LimitTrial, search: SettingsSearch) -> None:
        if not self._enough and not trial.warmup_steps:
            return  # unchanged until the next command
        if self._trial is not None:
            self._save(search, self.position, False)
        self._trials += 1
        self._longest = max(self._longest, trial.warmup_steps + trial.steps)
        self._sampled = self._enough = False
        self._trial = Try(
            trial=self._trials,
            setting=trial.setting,
            warmup_steps=trial.warmup_steps,
            steps=trial.steps,
        )
        self._commands.append(self._trial)

    def _finish(self, search: SettingsSearch) -> None:
        estimates = search.estimates()
        try:
            chosen = search.best(estimates)
        except ValueError as error:
            self._stop(str(error))
            return
        self.over = True
        if self._checks:
            self.watch = Watch(chosen, power=self.world == 1, before=self.watch)
        self._save(search, self.position, True)
        choice = Choose(setting=chosen.setting, estimates=estimates, reason=search.reason)
        self._commands.append(choice)

    def _stop(self, reason: str) -> None:
        self.over = True
        self._commands.append(Stop(reason=reason))


def _limited_s(parts: list[Piece], steps: int) -> float | None:
    """The time in which power limited a GPU of the process that it limited most."""
    known = [one.limited_s / one.steps for one in parts if one.limited_s is not None]
    return max(known) * steps if len(known) == len(parts) else None


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

"""The restoring half of one control of one GPU: its target, its values, its restores.

`restore_rule.restore_steps` decides what to compare and write; `lifecycle.TABLE` has the
transitions. This module connects them: each step becomes an effect, each result leads to the next
step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from zeus_ipc.controls import SPECS, Control, ControlValue, describe
from zeusd.core.ceilings import PERSISTED, Ceiling, Ceilings
from zeusd.core.effects import Forget, Note, Put, Read, Reading, Write
from zeusd.core.leasing import Lease
from zeusd.core.lifecycle import OUT_OF_REACH, Event, Lifecycle, Phase, State
from zeusd.core.model import (
    Applied,
    Failure,
    PendingRestore,
    kept_failure,
    observed_key,
    pending_key,
    resting_key,
)
from zeusd.core.outbox import Outbox
from zeusd.core.policy import Target
from zeusd.devices.port import Outcome
from zeusd.restore_rule import (
    ALL,
    OURS,
    Failed,
    Plan,
    Range,
    ReadControl,
    Result,
    Step,
    WriteControl,
    restore_steps,
)

CEILING, SITE_LIMIT = "ceiling", "site limit"
"""Reasons of restores that do not end a lease."""

RETRY_FIRST_NS = 500_000_000
RETRY_MAX_NS = 4_000_000_000
"""Longest pause between attempts to restore."""


@dataclass(slots=True, eq=False)
class Restoration:
    """A restore in progress.

    Attributes:
        reason: Why, for the log.
        overwrite: What it may overwrite, see `restore_rule`.
        required: Whether zeusd changed something that must be restored. Otherwise only an
            administrator requested it, and a failure that changes nothing ends it.
        attempts: Number of failed attempts.
        waiting: Called after the next attempt, whatever its result.
        plan: The input of the present attempt.
        steps: Its steps.
    """

    reason: str
    overwrite: str = OURS
    required: bool = True
    attempts: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)
    plan: Plan | None = None
    steps: Generator[Step, Any, Result] | None = None

    def answer(self) -> None:
        """Ends an attempt."""
        waiting, self.waiting = self.waiting, []
        for then in waiting:
            then()


class Restorable(ABC):
    """The restoring half of a control.

    Args:
        gpu: UUID of the GPU.
        control: Which control.
        site: The site's restore target.
        outbox: Collects effects.
        override: Whether a restore overwrites outside changes.

    Attributes:
        key: Key of its journal entry.
        merges: See `ControlSpec`.
        first: The initial value, if known.
        observed: The restore target if the site configured none.
        ceilings: Upper bounds other than the site's.
        lease: The present lease, or the one whose value is being restored.
        trouble: Why the last attempt to restore it failed; None: it succeeded.
    """

    def __init__(
        self, gpu: str, control: Control, site: Target, outbox: Outbox, override: bool = False
    ) -> None:
        self.gpu = gpu
        self.control = control
        self.spec = SPECS[control]
        self.key = pending_key(gpu, control)
        self.merges = self.spec.merges
        self.life = Lifecycle()
        self.lease: Lease | None = None
        self.first: ControlValue | None = None
        self.observed: ControlValue | None = None if site.pinned else site.value
        self.ceilings = Ceilings()
        self.trouble: Failure | None = None
        self._out = outbox
        self._site = site
        self._override = override
        self._values: tuple[ControlValue, ...] = ()
        self._doubts: tuple[ControlValue, ...] = ()
        self._restoration: Restoration | None = None
        # The value that zeusd left in force, because of ceilings, while nobody holds the control.
        self._resting: ControlValue | None = None
        self._ceilings_moved: list[Callable[[], None]] | None = None

    # ---------------------------------------------------------------------------------- queries

    @property
    def phase(self) -> Phase:
        """Whether it is free, held or being restored."""
        return self.life.phase

    @property
    def value(self) -> ControlValue | None:
        """The value that was written under the present lease; None: nothing was written."""
        return self._values[-1] if self._values else None

    @property
    def retry_at_ns(self) -> int | None:
        """When the next attempt to restore it is due; None: none failed."""
        return self._out.due_ns.get(self)

    @property
    def persisted(self) -> bool:
        """Whether an administrator chose the target (see `requests.Persist`)."""
        return PERSISTED in self.ceilings

    @property
    def pinned(self) -> bool:
        """Whether the target was configured or persisted, so that outside changes do not move
        it."""
        return self._site.pinned or bool(self.ceilings)

    @property
    def target(self) -> ControlValue:
        """The restore target: the site's target, bounded by all ceilings."""
        return self._under(self._site.value) if self.ceilings else self._site.value

    @property
    def reset_value(self) -> ControlValue:
        """The value that a `reset` sets: the target; for workload power profiles, none."""
        return () if self.merges else self.target

    @property
    def bounded(self) -> bool:
        """Whether a value above the ceilings or the site limit is lowered as soon as zeusd sees
        it."""
        return self.spec.ceilings and (bool(self.ceilings) or self._site.enforced)

    @property
    def site_limit_mw(self) -> int | None:
        """The site limit, without ceilings; None: the control has none."""
        return self._site.highest_mw

    def highest(self, without: str = "") -> ControlValue:
        """The highest value that may be set, bounded by all ceilings but the named one."""
        assert self._site.highest_mw is not None
        highest = (self._site.highest_mw,)
        return self._under(highest, without) if self.ceilings else highest

    def _under(self, value: ControlValue, without: str = "") -> ControlValue:
        if self.spec.ceilings:
            return self.ceilings.lowest(value, without)
        persisted = self.ceilings.get(PERSISTED)
        return value if persisted is None or without == PERSISTED else persisted.value

    @property
    def target_source(self) -> str:
        """The origin of the target, see `replies.Back`."""
        for name, ceiling in self.ceilings.items():
            if ceiling.value == self.target:
                return name
        if self._site.pinned:
            return "configured"
        return "observed" if self.spec.readable else "unreadable"

    # ------------------------------------------------------------------------------- the target

    def aim_at(self, target: ControlValue) -> None:
        """Changes the target, after an outside change or if the device does not accept the old
        one."""
        persisted = self.ceilings.get(PERSISTED)
        if persisted is not None and not self.spec.ceilings:
            self.ceilings[PERSISTED] = Ceiling(target, persisted.uid)
            return
        if self._site.pinned:  # until the configuration is read again, or another driver is loaded
            self._site = replace(self._site, value=target)
            return
        highest_mw = target[0] if self.spec.ceilings else None
        self._site = Target(target, False, highest_mw)
        self.observed = target
        self._out.add(Put(observed_key(self.gpu, self.control), {"value": list(target)}))

    def adopt(self, current: ControlValue) -> None:
        """Handles an outside change while nobody holds the control."""
        if current in (self.target, self._resting) or self.pinned:
            return
        if self._override and not self.merges:
            self._note_outside(self.target, current, "overridden")
            return
        self._note_outside(self.target, current, "adopted")
        self.rest(None)  # the value in force is an outside change
        self.aim_at(current)

    def rest(self, value: ControlValue | None) -> None:
        """Records the value that zeusd leaves in force because of ceilings; None: none."""
        if value != self._resting:
            self._resting = value
            key = resting_key(self.gpu, self.control)
            self._out.add(Forget(key) if value is None else Put(key, {"value": list(value)}))

    def recover_rest(self, value: ControlValue | None) -> None:
        """Restores from the journal the value that the last zeusd left in force because of
        ceilings."""
        self._resting = value

    @property
    def in_force(self) -> ControlValue:
        """The value that zeusd has written and not restored, for a control that cannot be read."""
        rests = self.persisted or self._resting == self.target
        return self.value or (self.target if rests else ())

    @property
    def rests_elsewhere(self) -> bool:
        """Whether zeusd left a value in force that is no longer the target."""
        return self._resting is not None and self._resting != self.target

    # ------------------------------------------------------------------------------- the restore

    def _attempt(self) -> None:
        restoration = self._restoration
        assert restoration is not None
        self._out.due_ns.pop(self)
        restoration.plan = Plan(
            target=self.target,
            values=self._values,
            doubts=self._doubts,
            readable=self.spec.readable,
            rounding=self.spec.rounding,
            refused_target=self.spec.refused_target,
            overwrite=self._overwrites(),
            merges=self.merges,
        )
        restoration.steps = restore_steps(restoration.plan)
        self._advance(None)

    def _advance(self, answer: object) -> None:
        restoration = self._restoration
        assert restoration is not None
        assert restoration.steps is not None
        try:
            step = restoration.steps.send(answer)
        except StopIteration as stop:
            self._over(stop.value)
            return
        plan = restoration.plan
        assert plan is not None
        if isinstance(step, WriteControl) and (plan.target, plan.overwrite) != (
            self.target,
            self._overwrites(),
        ):
            self._attempt()  # the site's target or a ceiling has changed since this started
            return
        ticket = self._out.ticket(self._stepped)
        if isinstance(step, ReadControl):
            self.life.on(Event.CHECK)
            self._out.add(Read(ticket, self.gpu, Reading.CONTROL, self.control))
        elif isinstance(step, Range):
            self.life.on(Event.FIT)
            self._out.add(Read(ticket, self.gpu, Reading.LIMITS, self.control))
        else:
            assert isinstance(step, WriteControl)
            self.life.on(Event.RESTORE)
            self._write_step(ticket, step)

    def _write_step(self, ticket: int, step: WriteControl) -> None:
        if not self.merges:  # zeusd's values do not include other programs' choices
            found = () if step.found is None else (step.found,)
            self._values = tuple(dict.fromkeys((*self._values, *found, step.value)))
            self._values = (*(one for one in self._values if one != step.value), step.value)
            self._doubts = (step.value,) if self.spec.readable else ()
        self._out.add(
            Write(
                ticket,
                self.gpu,
                self.control,
                step.value,
                self.key,
                self._pending_restore(),
                before=step.found,
            )
        )

    def _stepped(self, result: object) -> None:
        """Handles a device call of the present attempt that returned."""
        if self.life.state is State.AWAY_BUSY:
            self.life.on(Event.ANSWER)
        elif self.life.state is State.ENDING:
            self._attempt()  # meanwhile the device was out of reach
        elif isinstance(result, Failure):
            self._advance(Failed(result, result.outcome is Outcome.INVALID))
        elif isinstance(result, Applied):
            self._advance(result.value)
        else:
            self._advance(result)
        self._pump()

    def _over(self, result: Result) -> None:
        """Ends the present attempt."""
        restoration = self._restoration
        assert restoration is not None
        assert restoration.plan is not None
        writing = self.life.state in (State.RESTORING, State.FITTING)
        if result.foreign and result.found is not None:
            self._note_foreign(result)
        failure: Failure | None = result.trouble
        if result.kept:
            assert result.holds is not None
            failure = kept_failure(self.control, self.gpu, result.target, result.holds)
        absent = failure is not None and failure.outcome is Outcome.UNSUPPORTED
        idle = absent and restoration.reason == "reset" and not restoration.required
        if result.kind == "restored" or (result.pending and writing and not idle):
            self._note_change("restore", result.found, result.in_force, failure)
        if result.pending:
            assert failure is not None
            self._failed(failure)
            return
        if result.kind == "restored":
            self._doubts = ()
            moved = result.holds is not None and result.holds != restoration.plan.target
            if not self.merges and (moved or result.target != restoration.plan.target):
                self._note_clamped(restoration.plan.target, result.in_force)
        in_force = result.in_force
        if result.kind in ("restored", "already_back"):
            rests = self.bounded or (self.pinned and not self.spec.readable)
            self.rest(in_force if rests else None)
            if restoration.plan.target != self.target:
                self._values = (in_force,)  # the target changed meanwhile: restore again
                restoration.required = True
                self._attempt()
                return
            if in_force != restoration.plan.target and not self.bounded:
                self.aim_at(in_force)
        elif result.kind == "changed_outside":
            if self._overwrites() != restoration.plan.overwrite:
                self._attempt()  # meanwhile an administrator requested the target
                return
            self.rest(None)  # the value in force is now an outside change
            if not self.pinned:
                self.aim_at(in_force)
        self._finish(result.kind)

    def _finish(self, kind: str, trouble: Failure | None = None) -> None:
        restoration = self._restoration
        assert restoration is not None
        assert self.lease is not None
        self._out.add(Forget(self.key))
        if restoration.required and restoration.reason not in (CEILING, SITE_LIMIT):
            self._out.add(
                Note(
                    "lease_ended",
                    {**self._who(self.lease), "reason": restoration.reason, "result": kind},
                )
            )
        self.life.on(Event.DONE)
        self.lease = None
        self._values = self._doubts = ()
        self.trouble = trouble
        self._restoration = None
        if kind == "untouched":
            self._follow_later()
        restoration.answer()

    def _follow_later(self) -> None:
        """Ends a lease that set nothing; a ceiling may have changed during it."""
        if self.rests_elsewhere:
            self._ceilings_moved = self._ceilings_moved or []

    def _failed(self, failure: Failure) -> None:
        restoration = self._restoration
        assert restoration is not None
        refused = failure.outcome is not None or restoration.reason != SITE_LIMIT
        if not restoration.required and failure.unchanged and refused:
            self._finish("failed", failure)
            return
        restoration.required |= not failure.unchanged  # it may be in force
        self.life.on(Event.FAIL)
        self.trouble = failure
        restoration.attempts += 1
        attempt = restoration.attempts
        pause_ns = min(RETRY_FIRST_NS * 2 ** min(attempt - 1, 10), RETRY_MAX_NS)
        self._out.due_ns[self] = self._out.now_ns + pause_ns
        if attempt & (attempt - 1) == 0:  # a lost GPU must not fill the log
            fields = {
                "gpu": self.gpu,
                "control": self.control.value,
                "attempt": attempt,
                "retry_in_s": pause_ns / 1e9,
                "error": failure.message,
            }
            self._out.add(Note("restore_failed", fields, warning=True))
        self._refuse_waiting()
        restoration.answer()

    def retry_now(self) -> None:
        """Retries without waiting for the pause, because the GPU is in reach again."""
        if self.life.state is State.PENDING:
            self._attempt()
            self._pump()

    # --------------------------------------------------------------------------------- internals

    @abstractmethod
    def _pump(self) -> None:
        """Starts the next waiting operation, if possible."""

    @abstractmethod
    def _refuse_waiting(self) -> None:
        """Refuses the waiting operations."""

    @property
    def _out_of_reach(self) -> bool:
        return self.life.state in OUT_OF_REACH

    def _overwrites(self) -> str:
        """What a restore may overwrite, see `restore_rule`; if zeusd wrote the control, the site
        decides."""
        asked = OURS if self._restoration is None else self._restoration.overwrite
        return ALL if asked == OURS and self._override and self._values else asked

    def _pending_restore(self) -> PendingRestore:
        assert self.lease is not None
        restoration = self._restoration
        return PendingRestore(
            gpu=self.gpu,
            control=self.control,
            holder=self.lease.holder,
            uid=self.lease.uid,
            client=self.lease.client,
            since_ns=self.lease.since_ns,
            ttl_ns=self.lease.ttl_ns,
            target=self.target,
            values=self._values,
            doubts=self._doubts,
            overwrite=self._overwrites(),
            ending="" if restoration is None else restoration.reason,
            acquired=self.lease.acquired,
            recoveries=self.lease.recoveries,
            command=self.lease.command,
            job=self.lease.job,
        )

    def _journal(self) -> None:
        """Writes the pending state to the journal, although no device write depends on it."""
        self._out.add(Put(self.key, self._pending_restore()))

    def _who(self, lease: Lease) -> dict[str, object]:
        return {
            "gpu": self.gpu,
            "control": self.control.value,
            "pid": lease.holder.pid,
            "uid": lease.uid,
            "command": lease.command,
            "job": lease.job,
            "lease": lease.name,
        }

    def _note_outside(self, old: ControlValue, new: ControlValue, result: str) -> None:
        fields = {
            "gpu": self.gpu,
            "control": self.control.value,
            "old": describe(self.control, old),
            "new": describe(self.control, new),
            "result": result,
        }
        self._out.add(Note("outside_change", fields, warning=True))

    def _note_foreign(self, result: Result) -> None:
        restoration = self._restoration
        assert restoration is not None
        assert result.found is not None
        if result.kind == "changed_outside":
            if self._values:
                self._note_outside(self._values[-1], result.found, "kept")
        elif self._override and restoration.reason not in ("reset", CEILING) and self._values:
            self._note_outside(self._values[-1], result.found, "overridden")

    def _note_clamped(self, old: ControlValue, new: ControlValue) -> None:
        fields = {
            "gpu": self.gpu,
            "control": self.control.value,
            "old": describe(self.control, old),
            "new": describe(self.control, new),
            "reason": "the device does not take the restore target exactly",
        }
        self._out.add(Note("restore_clamped", fields, warning=True))

    def _note_change(
        self,
        event: str,
        old: ControlValue | None,
        new: ControlValue,
        failure: Failure | None,
        lease: Lease | None = None,
    ) -> None:
        lease = lease or self.lease
        assert lease is not None
        reason = "requested" if self._restoration is None else self._restoration.reason
        fields = {
            **self._who(lease),
            "old": "unknown" if old is None else describe(self.control, old),
            "new": describe(self.control, new),
            "reason": reason,
            "result": "ok" if failure is None else failure.message,
        }
        self._out.add(Note(event, fields, warning=failure is not None))

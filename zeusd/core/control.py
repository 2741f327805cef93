"""One control of one GPU: its lease, its writes, its restores.

Rules, kept here, in `holding`, in `bounds` and in `restore_rule`:

1. A control is free, held by one process, or being restored (`lifecycle.TABLE`).
2. One device call is in flight per control; what waits behind it is bounded, and of several sets
   that nobody waits for, only the newest is kept.
3. Before the first write of a lease the control is read where the device can tell: what it holds
   then is what someone else chose, and becomes the restore target (unless the site chose one).
4. A value is in force because of zeusd only if the journal said so first: every write carries the
   entry that lists the value before and the value asked for. Only a write that was refused is
   forgotten. What the device makes of a write is ours like the value asked for.
5. Every write of a readable control compares first. A value that zeusd did not write was set by
   someone else: it stays (or, by configuration, is overwritten), and is reported.
6. A restore that fails, or that an earlier write may still undo, is tried again for as long as
   zeusd runs; until then nobody gets the lease.
7. A lease lasts as long as its holder says that it is alive. A process that loses it without asking
   is told so by every set until it acquires again: nothing is re-applied behind its back.
8. Nothing is written above the least of the ceilings, restores included; what stands above it when
   a ceiling is lowered is brought down, also under a lease.

What a control does is a generator (`_set`, `_bring_under`, `_restore`): it yields device calls and
receives their results. `_answered` keeps what every call has in common: the state, and the values
that may be in force now.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from zeus_ipc.controls import SPECS, Control, ControlValue, describe
from zeus_ipc.errors import ErrorCode
from zeusd.core.bounds import PERSISTED, Bounds, Ceilings
from zeusd.core.effects import Forget, Put, Read, ReadingMade, Write
from zeusd.core.entries import PENDING, CeilingEntry, Loss, PendingRestore, key_of
from zeusd.core.holding import MAX_WAITING, ZEUSD, HeldLease, LeaseState, Set, SetQueue
from zeusd.core.lifecycle import (
    IN_FLIGHT,
    OUT_OF_REACH,
    READY,
    ControlEvent,
    Lifecycle,
    Phase,
    State,
)
from zeusd.core.model import Failure, Peer, ProcessIdentity, Values, kept_failure
from zeusd.core.outbox import ControlAudit, Then
from zeusd.core.policy import Target
from zeusd.devices.port import CallOutcome
from zeusd.restore_rule import (
    ALL,
    HIGHER,
    OURS,
    Holds,
    ReadControl,
    RestorePlan,
    Result,
    Step,
    Unknown,
    WriteControl,
    WriteRefused,
    WriteResult,
    restore_steps,
)

if TYPE_CHECKING:
    from zeusd.core.node import NodeState

CEILING, SITE_LIMIT = "ceiling", "site limit"
"""Reasons of restores that do not end a lease."""

RETRY_FIRST_NS = 500_000_000

MAX_DOUBTS = 64
"""Most writes under one lease whose effect is unknown."""

LEASE_FIELDS = (
    *("holder", "uid", "client", "since_ns", "ttl_ns"),
    *("acquired", "recoveries", "command", "job"),
)
"""Fields of a lease that its journal entry has, too."""

_HOPELESS = frozenset({CallOutcome.INVALID, CallOutcome.UNSUPPORTED, CallOutcome.DENIED})

Procedure: TypeAlias = Generator[Step, Any, None]


@dataclass(slots=True, eq=False)
class Restoration:
    """A restore in progress.

    Attributes:
        overwrite: What it may overwrite, see `restore_rule`.
        required: Whether zeusd changed something that must be restored. Otherwise only an
            administrator or the site wants it, and a refusal ends it.
        wrote: Whether an attempt has written.
        attempts: Number of failed attempts.
        waiting: Called after the next attempt, whatever its result.
    """

    reason: str
    overwrite: str = OURS
    required: bool = True
    wrote: bool = False
    attempts: int = 0
    waiting: list[Then] = field(default_factory=list)

    def answer(self) -> None:
        """Ends an attempt."""
        waiting, self.waiting = self.waiting, []
        for then in waiting:
            then()


class ControlMachine:
    """A control: its states are `lifecycle.TABLE`'s, its events the methods below.

    Attributes:
        trouble: Why the last attempt to restore it, or to bring it under a ceiling, failed; None:
            it succeeded.
    """

    def __init__(
        self,
        gpu: str,
        control: Control,
        site: Target,
        node: NodeState,
        override: bool = False,
    ) -> None:
        self.gpu = gpu
        self.control = control
        self.spec = SPECS[control]
        self.key = key_of(PENDING, gpu, control)
        self.out = node.out
        self.audit = ControlAudit(gpu, control, node.out)
        self.node = node
        self.life = Lifecycle()
        self.bounds = Bounds(gpu, control, site, self.out, override)
        self.holding = LeaseState(self)
        self.values = Values()
        self.trouble: Failure | None = None
        self._waiting = SetQueue()
        self._steps: Procedure | None = None
        self._restoration: Restoration | None = None
        # Called when the device follows its ceilings; None: it does.
        self._behind: list[Then] | None = None
        self._enforces_later = False
        # Until when a write of the last zeusd may take effect. Also one of the target: it may have
        # given the driver less to round up.
        self._taken_over_ns = 0
        # What it held before the first write of this lease, and when nobody held it.
        self._found: ControlValue | None = None
        self._seen: ControlValue | None = None

    # ---------------------------------------------------------------------------------- queries

    @property
    def phase(self) -> Phase:
        """Whether it is free, held or being restored."""
        return self.life.phase

    @property
    def lease(self) -> HeldLease | None:
        """See `LeaseState.lease`."""
        return self.holding.lease

    @property
    def ceilings(self) -> Ceilings:
        """Upper bounds other than the site's."""
        return self.bounds.ceilings

    @property
    def target(self) -> ControlValue:
        """The restore target."""
        return self.bounds.target

    @property
    def reset_value(self) -> ControlValue:
        """The value that a `reset` sets: the target; for workload power profiles, none."""
        return () if self.spec.merges else self.target

    @property
    def failed_attempts(self) -> int:
        """Attempts to restore it, of which the last has failed; 0: it has not."""
        failed = self.life.state is State.PENDING and not self.settling
        return self._restoration.attempts if failed and self._restoration is not None else 0

    @property
    def settling(self) -> bool:
        """Whether it is restored, unless an earlier write still takes effect."""
        return self.trouble is not None and self.trouble.code == ErrorCode.RESTORE_PENDING

    @property
    def in_force(self) -> ControlValue:
        """The value that zeusd has written and not restored, for a control that cannot be read."""
        rests = self.bounds.persisted or self.bounds.resting == self.target
        return self.values.newest or (self.target if rests else ())

    def seen(self, value: ControlValue) -> None:
        """What the control holds while nobody holds it: someone else may have set it."""
        if self.life.state is not State.FREE:
            return
        before, self._seen = self._seen, value
        if value not in (before, self.target, self.bounds.resting):
            self.audit.outside(before or self.target, value, "noticed")
        if self.bounds.active and value > self.target and value != self.bounds.resting:
            self.ceilings_moved()

    # ------------------------------------------------------------------------- what the site wants

    def configure(self, site: Target, override: bool) -> None:
        """The site's configuration changed. What a holder has set stays, under the new ceilings."""
        before = self.target, self.bounds.active
        self.bounds.configure(site, override)
        if self.lease is not None:
            self.record()
        moved = (self.target, self.bounds.active) != before
        if self.spec.ceilings and moved and (self.bounds.active or self.bounds.rests_elsewhere):
            self.ceilings_moved()
        self.enforce()

    def enforce(self, again: bool = False) -> None:
        """Writes what the site wants in force of a control that cannot be read, such as clocks.

        Nothing is written twice in one boot, unless the GPU may have been reset (`again`). What
        zeusd once left in force, and the site wants no more, is taken back.
        """
        if self.spec.readable:
            return
        self._enforces_later = self.life.state is not State.FREE  # `_pump` does it then
        if self._enforces_later:
            return
        left = self.bounds.resting
        if self.bounds.enforced if left is None else again or left != self.target:
            restoration = Restoration(SITE_LIMIT, ALL, required=left is not None)
            self._restore_unheld(restoration, left)

    def persist(self, ceiling: CeilingEntry) -> None:
        """What the holder has set becomes a ceiling; its lease is to end."""
        self.audit.values("persisted", self.target, ceiling.value, self.lease)
        self.ceilings[PERSISTED] = ceiling

    def ceilings_moved(self, then: Then | None = None) -> None:
        """A ceiling was put, lowered, raised or removed: the device follows. `then` is called when
        it has, or when the first attempt has failed."""
        self._behind = self._behind or []
        self.out.due_ns.drop(self.ceilings_moved)
        waits = [] if then is None else [then]
        if self.life.state is State.PENDING and self._restoration is not None:
            self._restoration.waiting += waits
            self._attempt()
        else:
            self._behind += waits
        self._pump()

    # ----------------------------------------------------------------------------------- events

    def recover(self, restore: PendingRestore, ending: str | None) -> None:
        """Takes over what the journal says was pending when the last zeusd ended. `ending`: why
        the lease ends at once, such as `holder_gone`; None: it goes on."""
        now_ns = self.out.now_ns
        known = {name: getattr(restore, name) for name in LEASE_FIELDS}
        lease = HeldLease(**known, expires_ns=now_ns, heard_ns=now_ns, forgiven=True)
        lease.recoveries += 1
        lease.asked = restore.values[-1] if restore.values else None
        until_ns = now_ns + self._settle_ns
        self.values = Values(restore.values, dict.fromkeys(restore.doubts, until_ns))
        self._taken_over_ns = until_ns if restore.doubts else 0
        ends = restore.ending or ending
        moves = ends or restore.target != self.target
        if restore.values and moves and self.spec.readable and not self.spec.merges:
            # Writing the target of then needed no record of its own, nor did the present one if the
            # disk was full.
            self.values = self.values.doubting((restore.target, self.target), until_ns)
        self.life.on(ControlEvent.TAKE)
        self.holding.begin(lease, now_ns + (restore.ttl_ns >> restore.recoveries))
        if ends:
            self._end(ends, restore.overwrite)
        else:
            self.record()

    def revoke(
        self, reason: str, clause: str, then: Then | None = None, overwrite: str | None = None
    ) -> None:
        """The holder loses its lease without having asked. `reason` is for the log, such as
        `expired`; `clause` is for the holder, such as `its heartbeat stopped for 15 s`."""
        lease = self.holding.current
        if lease is None:
            self.release(reason, then)
            return
        loss = Loss(self.gpu, self.control, lease.holder, clause, lease.uid)
        self.holding.lose(loss)
        self.node.losers.add(lease.holder)
        self.out.add(Put(loss.key, loss))
        self._end(reason, overwrite, then)

    def reset(
        self, peer: Peer, clause: str, then: Then | None = None, written: ControlValue | None = None
    ) -> None:
        """An administrator wants the target in force, also over the settings of others.

        Args:
            written: What zeusd itself wrote without a lease; None: nothing. Then a refusal ends it.
        """
        bounds, waiting = self.bounds, [] if then is None else [then]
        keeps = bounds.pinned or self.spec.merges  # what others have chosen meanwhile stays
        if bounds.initial is not None and not keeps and self.target != bounds.initial:
            bounds.aim_at(bounds.initial)
        if self.phase is Phase.HELD:
            self.revoke("reset", clause, then, ALL)
        elif self._restoration is not None:
            self._restoration.waiting += waiting
            self._restoration.overwrite = ALL
            self.retry_now()
        else:
            written = bounds.resting if written is None else written
            restoration = Restoration("reset", ALL, required=written is not None, waiting=waiting)
            self._restore_unheld(restoration, written, peer)

    def suspend(self) -> None:
        """The device goes out of reach: no call is made until `resume`."""
        self._refuse_waiting()
        self.life.on(ControlEvent.LEAVE)

    def resume(self, current: ControlValue | None) -> None:
        """The device is in reach again. `found` is what the control holds now, if that is known."""
        if self.life.state not in OUT_OF_REACH:
            return
        self.life.on(ControlEvent.BACK)
        if self.life.state is State.FREE:
            if current != self.bounds.resting and self.spec.readable:
                self.bounds.rest(None)  # a reset GPU has forgotten it
            if current is not None:
                self._adopt(current)
            if self.bounds.active or (self.spec.ceilings and self.bounds.rests_elsewhere):
                self._behind = self._behind or []
            self.enforce(again=True)
        self.retry_now()
        self._pump()

    def submit(self, request: Set) -> None:
        """A set or an acquire. `request.done` is called once, now or later."""
        refusal = self.holding.refusal(request.peer, request.value is None)
        if refusal is None and len(self._waiting) >= MAX_WAITING:
            refusal = Failure(
                ErrorCode.OVERLOADED,
                f"{MAX_WAITING} sets already wait for {self.control.value} on {self.gpu}; "
                "send them more slowly",
            )
        if refusal is not None:
            request.done(refusal)
            return
        for superseded in self._waiting.add(request):
            superseded.done(None)
        self._pump()

    def release(self, reason: str, then: Then | None = None) -> None:
        """The lease ends. `then` is called after the first attempt to restore the control."""
        if self.phase is Phase.HELD:
            # What an administrator persists is to be in force also if its write, in flight, fails.
            doubtful = reason == PERSISTED and self.life.state in IN_FLIGHT
            self._end(reason, ALL if doubtful else None, then)
        elif then is not None:
            if self._restoration is None or self.life.state not in IN_FLIGHT:
                then()
            else:
                self._restoration.waiting.append(then)

    def withdraw(self, process: ProcessIdentity, client: str | None = None) -> None:
        """Drops the waiting sets of a process, or of one client object in it."""
        for item in self._waiting.take(process, client):
            item.done(self.holding.gone(item.peer))

    def close(self, why: Failure) -> None:
        """Refuses all waiting sets."""
        for item in self._waiting.take_all():
            item.done(why)

    def retry_now(self) -> None:
        """Retries a restore without waiting for the pause."""
        if self.life.state is State.PENDING:
            self._attempt()
            self._pump()

    # ------------------------------------------------------------------------------ a lease's end

    def _end(self, reason: str, overwrite: str | None = None, then: Then | None = None) -> None:
        """The lease ends, now or when the call in flight has returned."""
        assert self.lease is not None
        holder = self.lease.holder
        self._restoration = Restoration(
            reason, overwrite or OURS, waiting=[] if then is None else [then]
        )
        if self.out.due_ns.drop(self.ceilings_moved) is not None:
            self._behind = self._behind or []  # still to be followed
        self.holding.end()
        in_flight = self.life.state in IN_FLIGHT
        if self.values.values or in_flight or overwrite is not None:
            # A zeusd that is killed before the value is restored must not take the lease for alive.
            self.record()
        withdrawn = self._waiting.take(holder)
        if in_flight:
            self.life.on(ControlEvent.END)
        else:
            self._attempt()
        for item in withdrawn:
            item.done(self.holding.gone(item.peer))
        self._pump()

    def _drop_unused_lease(self) -> None:
        """A lease that a set took for itself is not kept when that set changed nothing."""
        lease = self.holding.current
        if lease is None or self.values.values or lease.acquired:
            return
        self.holding.end()
        self.out.add(Forget(self.key))
        self.life.on(ControlEvent.DROP)
        self.holding.lease = None
        self._follow_later()

    def _follow_later(self) -> None:
        """Ends a lease that set nothing; a ceiling may have changed during it."""
        if self.bounds.rests_elsewhere:
            self._behind = self._behind or []

    def _restore_unheld(
        self, restoration: Restoration, left: ControlValue | None, by: Peer = ZEUSD
    ) -> None:
        """Restores a control that nobody holds. `left` is what zeusd left in force, if it did."""
        now_ns = self.out.now_ns
        self.holding.lease = HeldLease(
            by.process, by.uid, "", now_ns, 0, now_ns, command=by.command
        )
        self.values = self.values.after(self.out.now_ns, *(() if left is None else (left,)))
        self._restoration = restoration
        if left is not None:
            self.record()
        self._attempt()
        self._pump()

    # ----------------------------------------------------------------------------- what waits

    def _refuse_waiting(self) -> None:
        for item in self._waiting.take_all():
            item.done(
                self.holding.refusal(item.peer, item.value is None) or self.holding.gone(item.peer)
            )

    def _pump(self) -> None:
        """Starts what waits, as long as no device call is in flight."""
        while self.life.state in READY:
            if self._behind is not None:
                self._follow_ceilings()
                continue
            if not self._waiting:
                if self.bounds.rests_elsewhere or self._enforces_later:
                    self.enforce()
                return
            item = self._waiting.popleft()
            refusal = self.holding.refusal(item.peer, item.value is None)
            if refusal is None and item.deadline_ns and self.out.now_ns > item.deadline_ns:
                refusal = Failure(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"the set of {self.control.value} on {self.gpu} was not applied: its deadline "
                    "passed while it waited",
                )
            if refusal is not None:
                item.done(refusal)
            else:
                self._serve(item)

    def _serve(self, item: Set) -> None:
        process, now_ns = item.peer.process, self.out.now_ns
        if self.life.state is State.FREE:
            uid, command, job = item.peer.uid, item.peer.command, item.peer.job
            lease = HeldLease(process, uid, item.client, now_ns, item.ttl_ns, now_ns)
            lease.command, lease.job = command, job
            self._found, self.values = None, self.values.after(now_ns)
            self.life.on(ControlEvent.TAKE)
            self.holding.begin(lease, now_ns)
        assert self.lease is not None
        if item.value is None:
            self.lease.ttl_ns = item.ttl_ns
            self.lease.acquired = True
            self.holding.forgive(process)
        self.holding.heartbeat()
        if item.value is None:
            self.record()
            item.done(None)
        else:
            self._start(self._set(item, item.value, self.lease))

    def _follow_ceilings(self) -> None:
        """Rule 8. Idle, and a ceiling moved."""
        waiting, self._behind = self._behind or [], None
        if self.lease is not None:
            self._start(self._bring_under(waiting, self.lease))
            return
        restoration = Restoration(CEILING, HIGHER, waiting=waiting)
        self._restore_unheld(restoration, self.bounds.resting)

    # ------------------------------------------------------------------------------ device calls

    def _start(self, steps: Procedure) -> None:
        self._steps = steps
        self._go_on(None)

    def _go_on(self, answer: object) -> None:
        """Sends an answer to the present procedure, and makes its next call."""
        assert self._steps is not None
        try:
            step = self._steps.send(answer)
        except StopIteration:
            return
        if self.phase is Phase.HELD:
            self.life.on(ControlEvent.CALL)
        before = self.values
        ticket = self.out.ticket(partial(self._answered, step, before))
        if isinstance(step, WriteControl):
            self.values = self._asking(step)
            self.out.add(
                Write(
                    ticket,
                    self.gpu,
                    self.control,
                    step.value,
                    self.pending_restore(),
                    step.expected,
                    step.found,
                    tuple(before.doubts),
                    before.settles_ns(step.value) > self.out.now_ns,
                    step.sure,
                )
            )
        else:
            reading = ReadingMade.CONTROL if isinstance(step, ReadControl) else ReadingMade.LIMITS
            self.out.add(Read(ticket, self.gpu, reading, self.control))

    def _asking(self, step: WriteControl) -> Values:
        """The values that may be in force once this write has begun."""
        before = () if step.found is None else (step.found,)
        if self.phase is not Phase.HELD:
            if self.spec.merges:
                return self.values  # they do not include other programs' choices
        elif not self.values.values:
            before = (self.target if self._found is None else self._found,)
        else:
            before = ()
        return self.values.asking(step.value, *before, doubted=self.spec.readable)

    def _answered(self, step: Step, before: Values, result: object) -> None:
        """A device call returned, perhaps after its lease, or the device's reach, has ended."""
        if isinstance(step, WriteControl):
            if isinstance(result, Failure):
                result = WriteRefused(result)  # it never reached the device
            assert isinstance(result, (WriteRefused, Holds, Unknown))
            self._wrote(step, before, result)
        elif isinstance(result, Failure):
            result = Unknown(result)
        if self.life.state in (State.WORKING, State.AWAY_BUSY):
            self.life.on(ControlEvent.ANSWER)
        self._go_on(result)
        if self.life.state is State.ENDING:
            self._attempt()
        self._pump()

    def _wrote(self, step: WriteControl, before: Values, outcome: WriteResult) -> None:
        """Rule 4: what may be in force after a write."""
        now_ns = self.out.now_ns
        if isinstance(outcome, WriteRefused):
            self.values = before
        elif isinstance(outcome, Unknown):
            until_ns = now_ns + self._settle_ns
            self.values = self.values.unknown(step.value, until_ns, outcome.holds)
        elif self.values is not before:
            holds = outcome.value
            if self.spec.merges:
                # What others had chosen stays theirs when they take it back: a later set that
                # missed it among our values would choose it again.
                holds = self.spec.normal((*holds, *self.target))
            # An earlier write of the same value may be what took effect, and this one may follow.
            again = before.doubts.get(step.value, 0) > now_ns
            late = (*outcome.late, *([holds] if again else ()))
            until_ns = now_ns + self._settle_ns
            self.values = self.values.holding(step.value, holds, now_ns, late, until_ns)

    @property
    def _settles_ns(self) -> int:
        """When no earlier write can spoil a restore any more."""
        return max(self.values.settles_ns(self.target), self._taken_over_ns)

    @property
    def _settle_ns(self) -> int:
        return round(self.node.settings.site.settle_s * 1e9)

    def _failure(self, asked: ControlValue, outcome: WriteResult) -> Failure | None:
        """Why a write is not known to have worked."""
        if isinstance(outcome, Holds):
            return None
        if outcome.trouble is not None:
            failure: Failure = outcome.trouble
            return failure
        holds = outcome.holds if isinstance(outcome, Unknown) else outcome.found
        return kept_failure(self.control, self.gpu, asked, holds or ())

    # ------------------------------------------------------------------------------- procedures

    def _set(self, item: Set, asked: ControlValue, lease: HeldLease) -> Procedure:
        """Rules 3 and 5, under a lease."""
        reads = self.spec.readable
        if reads and self._found is None and not self.values.values:
            current = yield ReadControl()
            if not isinstance(current, Unknown):
                self._adopt(current)
            if self.holding.current is not lease:
                item.done(self.holding.gone(item.peer))
                return
            if isinstance(current, Unknown):
                self._drop_unused_lease()
                item.done(current.trouble)
                return
            self._found = current
        while True:
            if (refusal := self._no_longer_allowed(asked, item.over)) is not None:
                self._drop_unused_lease()
                item.done(refusal)
                return
            lease.asked, lease.over = asked, item.over
            value = self.spec.normal((*asked, *self.target)) if self.spec.merges else asked
            possible = self.values.values or (self.target if self._found is None else self._found,)
            outcome = yield WriteControl(value, expected=possible if reads else (), sure=False)
            current = outcome.found if isinstance(outcome, WriteRefused) else None
            if current is None:
                break
            # What zeusd wrote before is not in force any more.
            kept = (current,) if self.bounds.override else ()
            self.values = self.values.after(self.out.now_ns, *kept)
            if self.bounds.pinned:
                self.audit.outside(possible[-1], current, "noticed")
            if self.holding.current is not lease:
                item.done(self.holding.gone(item.peer))
                return
            self._adopt(current)
            self._found, reads = current, False
        failure = self._failure(value, outcome)
        shown = outcome.value if isinstance(outcome, Holds) else value
        self._note_write("set", possible[-1], shown, failure, lease)
        if isinstance(outcome, Holds) and self.spec.readable:
            self.record(soon=self.values.newest == value)
        elif failure is not None and self.holding.current is lease:
            self._drop_unused_lease()
        item.done(failure or shown)

    def _no_longer_allowed(self, asked: ControlValue, over: str) -> Failure | None:
        """Too many values may be in force already, all of which the journal lists; or a ceiling, or
        what someone else set, is lower by now than when it was asked."""
        if len(self.values.doubts) >= MAX_DOUBTS and asked not in self.values.doubts:
            return Failure(
                ErrorCode.DEVICE_BUSY,
                f"the driver confirmed none of {MAX_DOUBTS} writes of the {self.spec.title} of "
                f"{self.gpu}; release the lease, and see the kernel log",
            )
        if not self.spec.ceilings or asked <= self.bounds.highest(over):
            return None
        highest = describe(self.control, self.bounds.highest(over))
        why = "a ceiling was lowered" if self.ceilings else "someone lowered it outside zeusd"
        return Failure(
            ErrorCode.OUT_OF_RANGE,
            f"the {self.spec.title} of {self.gpu} may be at most {highest} now, because {why}; "
            "choose at most that",
        )

    def _bring_under(self, waiting: list[Then], lease: HeldLease) -> Procedure:
        """Rule 8, under a lease."""
        current = yield ReadControl()
        again_ns = 0
        if self.holding.current is not lease:
            # A restore stays under the ceilings; but it may not be needed.
            self._behind = self._behind or []
        elif isinstance(current, Unknown):
            self.trouble = current.trouble
            again_ns = self.out.now_ns + RETRY_FIRST_NS
        else:
            self.trouble = None
            if not self.values.values:
                self._found = current
            highest = self.bounds.highest(lease.over)
            wanted = min(lease.asked or current, highest)
            if current > highest or (current in self.values.values and current != wanted):
                outcome = yield WriteControl(wanted, current)
                failure = self.trouble = self._failure(wanted, outcome)
                shown = outcome.value if isinstance(outcome, Holds) else wanted
                self._note_write("ceiling", current, shown, failure, lease)
                if failure is not None:
                    again_ns = self.out.now_ns + RETRY_FIRST_NS
                else:
                    self.record(soon=shown == wanted)
            late_ns = [ns for one, ns in self.values.doubts.items() if one > highest]
            again_ns = again_ns or max(late_ns, default=0)
        if again_ns and self.holding.current is lease:
            self.out.due_ns[self.ceilings_moved] = again_ns
        for then in waiting:
            then()

    def _attempt(self) -> None:
        self.out.due_ns.drop(self.retry_now)
        self.life.on(ControlEvent.RESTORE)
        self._start(self._restore())

    def _restore(self) -> Procedure:
        """An attempt to restore the control."""
        restoration = self._restoration
        assert restoration is not None
        while True:
            plan = RestorePlan(
                self.spec,
                self.target,
                self.values.values,
                tuple(self.values.doubts),
                self._settles_ns > self.out.now_ns,
                self.values.confirmed,
                self._overwrites,
            )
            steps, answer = restore_steps(plan), None
            result: Result | None = None
            while result is None:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    result = self._settled(stop.value)
                    break
                wanted = self.target, self._overwrites
                if isinstance(step, WriteControl) and (plan.target, plan.overwrite) != wanted:
                    break  # the site's target or a ceiling has changed since this started
                answer = yield step
                if self.life.state is not State.RESTORING:
                    return
            if result is not None and not self._again(restoration, plan, result):
                return

    def _settled(self, result: Result) -> Result:
        """The result of an attempt; it is not over while another write may still take effect."""
        late = self._settles_ns > self.out.now_ns
        return replace(result, kind="settling") if result.kind == "restored" and late else result

    def _again(self, restoration: Restoration, plan: RestorePlan, result: Result) -> bool:
        """Ends an attempt. Returns whether the target has changed meanwhile."""
        bounds, in_force, kind = self.bounds, result.in_force, result.kind
        if result.pending:
            self._wait(restoration, result)
            return False
        if result.foreign:
            self._note_foreign(restoration, result)
        if kind == "restored":
            self._note_write("restore", result.found, in_force, None)
            if not self.spec.merges and in_force != plan.target:
                self.audit.clamped(plan.target, in_force)
        if kind in ("restored", "already_back"):
            bounds.rest(in_force if self._rests else None)
            if plan.target != self.target:
                self.values = self.values.after(self.out.now_ns, in_force)
                restoration.required = True
                return True
            if in_force != plan.target and not bounds.active:
                bounds.aim_at(in_force)
            kind = "restored" if restoration.wrote else kind
        elif kind == "changed_outside":
            if self._overwrites != plan.overwrite:
                return True  # meanwhile an administrator requested the target
            bounds.rest(None)  # the value in force is now an outside change
            if not bounds.pinned:
                bounds.aim_at(in_force)
        self._finish(restoration, kind)
        return False

    @property
    def _rests(self) -> bool:
        """Whether the restore target is a value that zeusd leaves in force."""
        return self.bounds.active or (self.bounds.pinned and not self.spec.readable)

    def _finish(self, restoration: Restoration, kind: str, trouble: Failure | None = None) -> None:
        assert self.lease is not None
        self.out.add(Forget(self.key))
        if restoration.required and restoration.reason not in (CEILING, SITE_LIMIT):
            reason = restoration.reason
            self.audit.note("lease_ended", self.lease, reason=reason, result=kind)
        self.life.on(ControlEvent.DONE)
        self.holding.lease = None
        self.values = self.values.after(self.out.now_ns)
        self.trouble = trouble
        self._restoration = None
        if kind == "untouched":
            self._follow_later()
        restoration.answer()

    def _wait(self, restoration: Restoration, result: Result) -> None:
        """Rule 6: the attempt failed, or an earlier write may still take effect."""
        restoration.wrote |= result.wrote
        failure = None
        if result.kind == "failed":
            failure = self._failure(result.target, Unknown(result.trouble, result.holds))
        if failure is not None and not restoration.required and result.refused:
            unsupported = failure.outcome is CallOutcome.UNSUPPORTED
            if result.wrote and not (unsupported and restoration.reason == "reset"):
                self._note_write("restore", result.found, result.in_force, failure)
            unwritten = failure.outcome is None and restoration.reason != SITE_LIMIT
            if failure.outcome in _HOPELESS or unwritten:
                self._finish(restoration, "failed", failure)
                return
        elif result.wrote:
            self._note_write("restore", result.found, result.in_force, failure)
        restoration.required |= not result.refused  # it may be in force
        self.life.on(ControlEvent.WAIT)
        if failure is None:
            self._settle()
        else:
            self._failed(restoration, failure)
        restoration.answer()

    def _settle(self) -> None:
        """Looks again when no earlier write can take effect any more; sets wait until then."""
        self.out.due_ns[self.retry_now] = self._settles_ns + 1
        left_s = max(0, self._settles_ns - self.out.now_ns) / 1e9
        self.trouble = Failure(
            ErrorCode.RESTORE_PENDING,
            f"the driver may still apply an earlier write of {self.control.value} to {self.gpu}; "
            f"zeusd looks again in {left_s:.1f} s",
        )
        self.record(soon=True)

    @property
    def only_lowers(self) -> bool:
        """Whether an idle control is brought under a limit: no holder's value is to be restored."""
        restoration = self._restoration
        return restoration is not None and restoration.reason in (CEILING, SITE_LIMIT)

    def _failed(self, restoration: Restoration, failure: Failure) -> None:
        self.trouble = failure
        restoration.attempts += 1
        attempt = restoration.attempts
        # Longest pause between attempts to restore.
        pause_ns = min(RETRY_FIRST_NS * 2 ** min(attempt - 1, 10), 4_000_000_000)
        self.out.due_ns[self.retry_now] = self.out.now_ns + pause_ns
        what = {"attempt": attempt, "retry_in_s": pause_ns / 1e9, "error": failure.message}
        self.audit.note("restore_failed", warning=True, **what)
        self._refuse_waiting()

    # --------------------------------------------------------------------------------- internals

    def _adopt(self, current: ControlValue) -> None:
        """Handles an outside change that a lease begins with."""
        bounds = self.bounds
        if current in (self.target, bounds.resting) or bounds.pinned:
            return
        if bounds.override and not self.spec.merges:
            self.audit.outside(self.target, current, "overridden")
            return
        self.audit.outside(self.target, current, "adopted")
        bounds.rest(None)  # the value in force is an outside change
        bounds.aim_at(current)

    @property
    def _overwrites(self) -> str:
        """What a restore may overwrite, see `restore_rule`. If zeusd wrote the control, the site
        decides; and rule 8 holds, also of a GPU that was reset meanwhile."""
        asked = OURS if self._restoration is None else self._restoration.overwrite
        if asked != OURS or not self.values.values:
            return asked
        return ALL if self.bounds.override else HIGHER if self.bounds.active else OURS

    def pending_restore(self) -> PendingRestore:
        """The journal's entry for the present state."""
        lease, restoration = self.lease, self._restoration
        assert lease is not None
        return PendingRestore(
            **{name: getattr(lease, name) for name in LEASE_FIELDS},
            gpu=self.gpu,
            control=self.control,
            target=self.target,
            values=self.values.values,
            doubts=tuple(self.values.doubts),
            overwrite=self._overwrites,
            ending="" if restoration is None else restoration.reason,
        )

    def record(self, soon: bool = False) -> None:
        """Writes the state to the journal, although no device write depends on it."""
        self.out.add(Put(self.key, self.pending_restore(), soon))

    def _note_write(
        self,
        event: str,
        old: ControlValue | None,
        new: ControlValue,
        failure: Failure | None,
        lease: HeldLease | None = None,
    ) -> None:
        reason = "requested" if self._restoration is None else self._restoration.reason
        self.audit.write(event, old, new, failure, lease or self.lease, reason)

    def _note_foreign(self, restoration: Restoration, result: Result) -> None:
        assert result.found is not None
        newest = self.values.newest
        if newest is None:
            return
        if result.kind == "changed_outside":
            self.audit.outside(newest, result.found, "kept")
        elif self.bounds.override and restoration.reason not in ("reset", CEILING):
            self.audit.outside(newest, result.found, "overridden")

"""One control of one GPU: its lease, its writes, its losses.

Rules, kept here and in `restorable`:

1. A control is free, held by one process, or being restored (`lifecycle.TABLE`).
2. One device call is in flight per control; what waits behind it is bounded, and of several sets
   that nobody waits for, only the newest is kept.
3. Before the first write of a lease the control is read where the device can tell: what it holds
   then is what someone else chose, and becomes the restore target (unless the site chose one).
4. A value is in force because of zeusd only if the journal said so first: every write carries the
   entry that lists the value before and the value asked for. What the device makes of it is read
   back, and is ours like the value asked for.
5. Every write of a readable control compares first. A value that zeusd did not write was set by
   someone else: it stays (or, by configuration, is overwritten), and is reported.
6. A restore that fails is retried for as long as zeusd runs; until then nobody gets the lease.
7. A lease lasts as long as its holder says that it is alive. A process that loses it without asking
   is told so by every set until it acquires again: nothing is re-applied behind its back.
8. Nothing is written above the least of the ceilings, restores included; what stands above it when
   a ceiling is lowered is brought down, also under a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zeus_ipc.controls import Control, ControlValue, describe
from zeus_ipc.errors import ErrorCode
from zeusd.core.ceilings import PERSISTED, Ceiling
from zeusd.core.effects import Forget, Note, Put, Read, Reading, Write
from zeusd.core.leased import Leased, SharedState
from zeusd.core.leasing import MAX_WAITING, ZEUSD, Done, Lease, Set, SetQueue
from zeusd.core.lifecycle import IN_FLIGHT, READY, Event, Phase, State
from zeusd.core.model import (
    Applied,
    Changed,
    Failure,
    Loss,
    Peer,
    PendingRestore,
    Process,
    kept_failure,
)
from zeusd.core.outbox import Outbox
from zeusd.core.policy import Target
from zeusd.core.restorable import CEILING, RETRY_FIRST_NS, SITE_LIMIT, Restoration
from zeusd.restore_rule import ALL, HIGHER, took_effect


class ControlMachine(Leased):
    """A control: its states are `lifecycle.TABLE`'s, its events the methods below.

    Args:
        gpu: UUID of the GPU.
        control: Which control.
        site: What the site wants it restored to.
        outbox: Where effects go.
        node: What it shares with the node's other controls.
        override: Whether a restore overwrites what someone else set.
    """

    def __init__(
        self,
        gpu: str,
        control: Control,
        site: Target,
        outbox: Outbox,
        node: SharedState,
        override: bool = False,
    ) -> None:
        super().__init__(gpu, control, site, outbox, node, override)
        self._found: ControlValue | None = None
        self._seen: ControlValue | None = None
        self._brought_down = object()
        self._enforces_later = False
        self._waiting = SetQueue()

    # ---------------------------------------------------------------------------------- queries

    def seen(self, value: ControlValue) -> None:
        """What the control holds while nobody holds it: someone else may have set it."""
        if self.life.state is not State.FREE:
            return
        before, self._seen = self._seen, value
        if value not in (before, self.target, self._resting):
            self._note_outside(before or self.target, value, "noticed")
        if self.bounded and value > self.target and value != self._resting:
            self.ceilings_moved()

    # ------------------------------------------------------------------------- what the site wants

    def configure(self, site: Target, override: bool) -> None:
        """The site's configuration changed. What a holder has set stays, under the new ceilings."""
        before = self.target, self.bounded
        self._site, self._override = site, override
        if not site.pinned:
            self.observed = site.value
        if self.lease is not None:
            self._journal()
        moved = (self.target, self.bounded) != before
        if self.spec.ceilings and moved and (self.bounded or self.rests_elsewhere):
            self.ceilings_moved()
        self.enforce()

    def enforce(self, again: bool = False) -> None:
        """Writes what the site wants in force of a control that cannot be read, such as clocks.

        Nothing is written twice in one boot. What zeusd once left in force, and the site wants no
        more, is taken back.

        Args:
            again: The GPU may have been reset: what zeusd left in force is written once more.
        """
        if self.spec.readable:
            return
        self._enforces_later = self.life.state is not State.FREE  # `_pump` does it then
        if self._enforces_later:
            return
        left = self._resting
        if self._site.enforced if left is None else again or left != self.target:
            lease = self._stand_in(ZEUSD, 0, "zeusd")
            restoration = Restoration(SITE_LIMIT, ALL, required=left is not None)
            self._restore_unheld(lease, restoration, left)

    def persist(self, uid: int) -> None:
        """What the holder has set becomes a ceiling; its lease is to end."""
        assert self.value is not None
        assert self.lease is not None
        old, new = describe(self.control, self.target), describe(self.control, self.value)
        self._out.add(Note("persisted", {**self._who(self.lease), "old": old, "new": new}))
        self.ceilings[PERSISTED] = Ceiling(self.value, uid)

    def ceilings_moved(self, then: Callable[[], None] | None = None) -> None:
        """A ceiling was put, lowered, raised or removed: the device follows.

        Args:
            then: Called when it has, or when the first attempt has failed.
        """
        waiting = self._ceilings_moved or []
        self._ceilings_moved = [*waiting, *([] if then is None else [then])]
        self._out.due_ns.pop(self._brought_down)
        if self.life.state is State.PENDING:
            self._out.due_ns.pop(self)
            self._attempt()
        self._pump()

    # ----------------------------------------------------------------------------------- events

    def recover(self, restore: PendingRestore, ending: str | None) -> None:
        """Takes over what the journal says was pending when the last zeusd ended.

        Args:
            restore: The entry.
            ending: Why the lease ends at once, such as `holder_gone`; None: it goes on.
        """
        now_ns = self._out.now_ns
        self.lease = Lease(
            restore.holder,
            restore.uid,
            restore.client,
            restore.since_ns,
            restore.ttl_ns,
            now_ns,
            restore.acquired,
            command=restore.command,
            job=restore.job,
            asked=restore.values[-1] if restore.values else None,
            heard_ns=now_ns,
            forgiven=True,
            recoveries=restore.recoveries + 1,
        )
        self._values, self._doubts = restore.values, restore.doubts
        moved = restore.target not in (*restore.values, self.target) and not self.merges
        if self.spec.readable and restore.values and moved:
            # The site's target was another then, and writing it needed no record of its own; nor is
            # it known what the driver made of it.
            self._values = (restore.target, *restore.values)
            self._doubts = (restore.target, *restore.doubts)
        self.life.on(Event.RECOVER)
        self._watch(restore.holder)
        self._lasts_until(now_ns + (restore.ttl_ns >> restore.recoveries))
        if restore.ending or ending is not None:
            self._end(restore.ending or str(ending), restore.overwrite)
        else:
            self._journal()

    def revoke(self, reason: str, clause: str, then: Callable[[], None] | None = None) -> None:
        """The holder loses its lease without having asked.

        Args:
            reason: For the log: `expired`, `revoked`.
            clause: For the holder: `its heartbeat stopped for 15 s`.
            then: As for `release`.
        """
        self._revoke(reason, clause, then)

    def reset(
        self,
        peer: Peer,
        clause: str,
        then: Callable[[], None] = lambda: None,
        written: ControlValue | None = None,
    ) -> None:
        """An administrator wants the target in force, also over the settings of others.

        Args:
            peer: The administrator.
            clause: For the holder, as for `revoke`.
            then: Called after the first attempt; `phase` and `trouble` tell its outcome.
            written: What zeusd itself wrote without a lease; None: nothing. Then a failure that
                changes nothing ends it.
        """
        merges = self.merges  # what others have chosen meanwhile stays
        if self.first is not None and not (self.pinned or merges) and self.target != self.first:
            self.aim_at(self.first)
        if self.phase is Phase.HELD:
            self._revoke("reset", clause, then, ALL)
        elif self._restoration is not None:
            self._restoration.waiting.append(then)
            self._restoration.overwrite = ALL
            if self.life.state is State.PENDING:
                self._attempt()
            self._pump()
        else:
            lease = self._stand_in(peer.process, peer.uid, peer.command)
            written = self._resting if written is None else written
            restoration = Restoration("reset", ALL, required=written is not None, waiting=[then])
            self._restore_unheld(lease, restoration, written)

    def suspend(self) -> None:
        """The device goes out of reach: no call is made until `resume`."""
        self._refuse_waiting()
        self._out.due_ns.pop(self)
        self.life.on(Event.LEAVE)

    def resume(self, found: ControlValue | None) -> None:
        """The device is in reach again. `found` is what the control holds now, if that is known."""
        if not self._out_of_reach:
            return
        self.life.on(Event.BACK)
        if self.life.state is State.FREE:
            if found != self._resting and self.spec.readable:
                self.rest(None)  # a reset GPU has forgotten it
            if found is not None:
                self.adopt(found)
            if self.bounded or (self.spec.ceilings and self.rests_elsewhere):
                self._ceilings_moved = self._ceilings_moved or []
            self.enforce(again=True)
        elif self.life.state is State.PENDING:
            self._attempt()
        self._pump()

    def process_gone(self, process: Process) -> None:
        """A process died: its lease ends, and nobody has to be told of a loss."""
        if self.held_by(process):
            self.release("holder_gone")
        self.withdraw(process)
        self.forgive(process)

    def submit(self, request: Set) -> None:
        """A set or an acquire. `request.done` is called once, now or later."""
        refusal = self._refusal(request.peer, request.value is None)
        if refusal is None and len(self._waiting) >= MAX_WAITING:
            refusal = Failure(
                ErrorCode.OVERLOADED,
                f"{MAX_WAITING} sets already wait for {self.control.value} on {self.gpu}; "
                "send them more slowly",
            )
        if refusal is not None:
            request.done(refusal)
            return
        if self.life.state in READY and not self._waiting and self._ceilings_moved is None:
            self._serve(request)
        else:
            for superseded in self._waiting.add(request):
                superseded.done(None)
        self._pump()

    def release(self, reason: str, then: Callable[[], None] | None = None) -> None:
        """The lease ends. `then` is called after the first attempt to restore the control."""
        if self.phase is Phase.HELD:
            # What an administrator persists is to be in force also if its write, in flight, fails.
            doubtful = reason == PERSISTED and self.life.state in IN_FLIGHT
            self._end(reason, ALL if doubtful else None, then)
        elif then is not None:
            restoration = self._restoration
            if restoration is None or self.life.state not in IN_FLIGHT:
                then()
            else:
                restoration.waiting.append(then)

    def withdraw(self, process: Process, client: str | None = None) -> None:
        """What this process (or this client object in it) has asked for is not wanted any more."""
        for item in self._waiting.take(process, client):
            item.done(self._given_back(item.peer))

    def close(self, why: Failure) -> None:
        """Nothing that waits has its turn any more."""
        for item in self._waiting.take_all():
            item.done(why)

    def tick(self, now_ns: int) -> None:
        """Time has passed: retries what is due, and ends a lease whose holder is silent."""
        if (due_ns := self.retry_at_ns) is not None and now_ns >= due_ns:
            self.retry_now()
        again_ns = self._out.due_ns.get(self._brought_down)
        if again_ns is not None and now_ns >= again_ns:
            self.ceilings_moved()
        self._expire_if_due(now_ns)

    # ------------------------------------------------------------------------------ a lease's end

    def _revoke(
        self,
        reason: str,
        clause: str,
        then: Callable[[], None] | None,
        overwrite: str | None = None,
    ) -> None:
        if self.phase is not Phase.HELD:
            self.release(reason, then)
            return
        assert self.lease is not None
        process = self.lease.holder
        loss = Loss(self.gpu, self.control, process, clause, self.lease.uid)
        if process not in self._lost:
            self._watch(process)
        self._lost[process] = loss
        self._node.losers.add(process)
        self._out.add(Put(loss.key, loss.to_json()))
        self._end(reason, overwrite, then)

    def _end(
        self,
        reason: str,
        overwrite: str | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """The lease ends, now or when the call in flight has returned."""
        assert self.lease is not None
        holder = self.lease.holder
        restoration = Restoration(reason)
        if overwrite is not None:
            restoration.overwrite = overwrite
        if then is not None:
            restoration.waiting.append(then)
        self._restoration = restoration
        self._out.due_ns.pop(self._expiry)
        if self._out.due_ns.pop(self._brought_down) is not None:
            self._ceilings_moved = self._ceilings_moved or []  # still to be followed
        self._unwatch(holder)
        in_flight = self.life.state in IN_FLIGHT
        if self._values or in_flight or overwrite is not None:
            # A zeusd that is killed before the value is restored must not take the lease for alive.
            self._journal()
        withdrawn = self._waiting.take(holder)
        if in_flight:
            self.life.on(Event.END)
        else:
            self._attempt()
        for item in withdrawn:
            item.done(self._given_back(item.peer))
        self._pump()

    def _give_up_unused_lease(self) -> None:
        """A lease that a set took for itself is not kept when that set changed nothing."""
        if self.phase is not Phase.HELD or self._values or self.lease is None:
            return
        if self.lease.acquired:
            return
        self._unwatch(self.lease.holder)
        self._out.add(Forget(self.key))
        self._out.due_ns.pop(self._expiry)
        self.life.on(Event.DROP)
        self.lease = None
        self._follow_later()

    def _stand_in(self, process: Process, uid: int, command: str) -> Lease:
        now_ns = self._out.now_ns
        return Lease(process, uid, "", now_ns, 0, now_ns, command=command)

    def _restore_unheld(
        self, lease: Lease, restoration: Restoration, left: ControlValue | None
    ) -> None:
        """Restores a control that nobody holds. `left` is what zeusd left in force, if it did."""
        self.lease = lease
        self._values = () if left is None else (left,)
        self._restoration = restoration
        if left is not None:
            self._journal()
        self._attempt()
        self._pump()

    # ----------------------------------------------------------------------------- what waits

    def _refuse_waiting(self) -> None:
        for item in self._waiting.take_all():
            refusal = self._refusal(item.peer, item.value is None)
            item.done(refusal or self._given_back(item.peer))

    def _pump(self) -> None:
        while self.life.state in READY:
            if self._ceilings_moved is not None:
                self._follow_ceilings()
                continue
            if not self._waiting:
                if self.rests_elsewhere or self._enforces_later:
                    self.enforce()
                return
            item = self._waiting.popleft()
            refusal = self._refusal(item.peer, item.value is None)
            if refusal is None and item.deadline_ns and self._out.now_ns > item.deadline_ns:
                refusal = Failure(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"the set of {self.control.value} on {self.gpu} was not applied: its deadline "
                    "passed while it waited",
                )
            if refusal is not None:
                item.done(refusal)
            else:
                self._serve(item)

    # ------------------------------------------------------------------------------------- sets

    def _serve(self, item: Set) -> None:
        process = item.peer.process
        if self.life.state is State.FREE:
            lease = self._stand_in(process, item.peer.uid, item.peer.command)
            lease.client, lease.ttl_ns, lease.job = item.client, item.ttl_ns, item.peer.job
            self.lease = lease
            self._found, self._values, self._doubts = None, (), ()
            self.life.on(Event.TAKE)
            self._watch(process)
        assert self.lease is not None
        if item.value is None:
            self.lease.ttl_ns = item.ttl_ns
            self.lease.acquired = True
            self.forgive(process)
        self.heartbeat()
        if item.value is None:
            self._journal()
            item.done(None)
        elif self.spec.readable and self.life.state is State.TAKEN:
            self._read(partial(self._captured, item))
        elif self._still_allowed(item):
            self._write(item.value, item.done, item)

    def _read(self, then: Callable[[object], None]) -> None:
        self.life.on(Event.READ if self.life.state is State.TAKEN else Event.LOOK)
        ticket = self._out.ticket(then)
        self._out.add(Read(ticket, self.gpu, Reading.CONTROL, self.control))

    def _captured(self, item: Set, result: object) -> None:
        """Rule 3: what is in force before our first write is known."""
        if self.life.state is State.READING:
            self.life.on(Event.UNKNOWN if isinstance(result, Failure) else Event.KNOWN)
            if isinstance(result, Failure):
                self._give_up_unused_lease()
                item.done(result)
            else:
                assert isinstance(result, tuple)
                self._found_value(item, result)
        else:
            if isinstance(result, tuple):
                self.adopt(result)
            item.done(self._given_back(item.peer))
            self._call_over()
        self._pump()

    def _call_over(self) -> None:
        """A call that outlived its lease, or the device's reach, has returned."""
        if self.life.state is State.AWAY_BUSY:
            self.life.on(Event.ANSWER)
        elif self.life.state is State.ENDING:
            self._attempt()

    def _found_value(self, item: Set, current: ControlValue) -> None:
        """What is in force is known: goes on with the set, if it may still be made."""
        self._found = current
        self.adopt(current)
        if self._still_allowed(item):
            assert item.value is not None
            self._write(item.value, item.done, item)

    def _still_allowed(self, item: Set) -> bool:
        """A ceiling, or what someone else set, may be lower by now than when it was asked."""
        if not self.spec.ceilings or item.value is None or item.value <= self.highest(item.over):
            return True
        highest = describe(self.control, self.highest(item.over))
        why = "a ceiling was lowered" if self.ceilings else "someone lowered it outside zeusd"
        self._give_up_unused_lease()
        item.done(
            Failure(
                ErrorCode.OUT_OF_RANGE,
                f"the {self.spec.title} of {self.gpu} may be at most {highest} by now, because "
                f"{why}; choose at most that",
            )
        )
        return False

    def _write(self, value: ControlValue, done: Done, item: Set | None = None) -> None:
        """Writes a value for the holder; without `item`, because a ceiling asks for it."""
        lease = self.lease
        assert lease is not None
        if item is not None:
            lease.asked, lease.over = value, item.over
        if self.merges:
            value = self.spec.normal((*value, *self.target))
        before, doubts = self._values, self._doubts
        possible = before or (self.target if self._found is None else self._found,)
        self._values = (*[one for one in possible if one != value], value)
        if self.spec.readable:
            unconfirmed = (*[one for one in doubts if one != value], value)
            self._doubts = unconfirmed

        def written(result: object) -> None:
            held = self.life.state is State.WRITING
            if held:
                self.life.on(Event.WRITTEN)
            answer = self._written(result, value, possible, lease, item is None)
            if isinstance(result, Failure) and result.unchanged:
                self._values, self._doubts = before, doubts
            if isinstance(result, Changed) and item is not None and held:
                item.compare = False
                self._found_value(item, result.value)
            else:
                if isinstance(answer, Failure) and held:
                    self._give_up_unused_lease()
                gone = isinstance(result, Changed)
                done(self._given_back(item.peer) if gone and item is not None else answer)
            if not held:
                self._call_over()
            self._pump()

        self.life.on(Event.WRITE)
        ticket = self._out.ticket(written)
        compare = item is not None and item.compare and self.spec.readable
        expected = possible if compare else ()
        self._out.add(
            Write(
                ticket,
                self.gpu,
                self.control,
                value,
                self.key,
                self._pending_restore(),
                expected,
                doubts=doubts,
            )
        )

    def _written(
        self,
        result: object,
        asked: ControlValue,
        possible: tuple[ControlValue, ...],
        lease: Lease,
        by_ceiling: bool,
    ) -> Failure | Applied | None:
        """What the device made of a write: our values and the log follow. Returns the answer."""
        old = possible[-1]
        if isinstance(result, Changed):
            # Whatever zeusd wrote before is not in force any more.
            self._values = (result.value,) if self._override else ()
            self._doubts = ()
            if self.pinned:
                self._note_outside(old, result.value, "noticed")
            return None
        failure = result if isinstance(result, Failure) else None
        holds = shown = asked
        if isinstance(result, Applied):
            holds = shown = result.value
            if self.merges:
                # What others had chosen stays theirs when they take it back: a later set that
                # missed it among our values would choose it again.
                holds = self.spec.normal((*holds, *self.target))
            self._values, self._doubts = (holds,), ()
            took = holds == asked or took_effect(asked, holds, None, self.spec.rounding)
            if not took and holds in possible:
                failure = kept_failure(self.control, self.gpu, asked, holds)
                # It may follow yet: what was asked stays listed.
                self._values = tuple(dict.fromkeys((*possible, asked, holds)))
                self._values = (*(one for one in self._values if one != holds), holds)
                self._doubts = (asked,)
            if holds != asked:
                self._journal()
        self._note_change("ceiling" if by_ceiling else "set", old, shown, failure, lease)
        return failure or Applied(shown)

    # --------------------------------------------------------------------------------- ceilings

    def _follow_ceilings(self) -> None:
        """Rule 8. Idle, and a ceiling moved."""
        waiting, self._ceilings_moved = self._ceilings_moved or [], None
        if self.phase is Phase.HELD:
            self._read(partial(self._bring_under, waiting))
            return
        lease = self._stand_in(ZEUSD, 0, "zeusd")
        self._restore_unheld(lease, Restoration(CEILING, HIGHER, waiting=waiting), self._resting)

    def _bring_under(self, waiting: list[Callable[[], None]], result: object) -> None:
        """What the control holds under its lease is known."""

        def over(answer: Failure | Applied | None = None) -> None:
            if isinstance(answer, Failure) and self.phase is Phase.HELD:
                self._out.due_ns[self._brought_down] = self._out.now_ns + RETRY_FIRST_NS
            for then in waiting:
                then()

        if self.life.state not in (State.READING, State.LOOKING):
            # The lease has ended. A restore stays under the ceilings; but it may not be needed.
            self._ceilings_moved = self._ceilings_moved or []
            self._call_over()
            over()
        elif isinstance(result, Failure):
            self.life.on(Event.UNKNOWN)
            over(result)
        else:
            assert isinstance(result, tuple)
            self.life.on(Event.KNOWN)
            assert self.lease is not None
            if not self._values:
                self._found = result
            highest = self.highest(self.lease.over)
            wanted = min(self.lease.asked or result, highest)
            ours = result in self._values
            if result > highest or (ours and result != wanted):
                self._write(wanted, over)
            else:
                over()
        self._pump()

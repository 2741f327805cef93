"""One control of one GPU: its lease, its writes, and its way back.

Rules, kept by this file alone:

1. A control is FREE, HELD by one process, or RESTORING after its holder let go.
2. One device call is in flight per control; what waits behind it is bounded, and of several sets
   that nobody waits for, only the newest is kept.
3. Before the first write of a lease the control is read where NVML can tell: what it holds then,
   unless zeusd owes it something, is what someone outside chose, and becomes the restore target
   (unless the site configured one).
4. A value may only be in force because zeusd wrote it if the journal says so first: every write
   carries the entry that lists the value before and the value after.
5. Every write of a readable control compares first. A value that zeusd did not write was set by
   someone else meanwhile: it stays (or, by configuration, is overwritten), and is reported.
6. A restore that fails is retried with backoff for as long as zeusd runs; until then the control
   is leased to nobody. A target that the device no longer takes becomes the nearest it does.
7. A lease lasts as long as its holder says it is alive. Who lost one without asking, by silence or
   by an administrator, is told so by every set until it acquires anew: nothing is re-applied
   behind its back.

    state       event                        next        device
    FREE        set, acquire                 HELD        read (readable, first time), write
    HELD        set by the holder            HELD        compare and write
    HELD        set, acquire by another      HELD        -       answer lease_held
    HELD        release, holder gone         RESTORING   read, write the target
    HELD        TTL over, revoked            RESTORING   the same, and the holder has a loss
    any         set by who has a loss        -           -       answer lease_expired
    HELD        first set fails, unchanged   FREE        -       the lease was only for that set
    RESTORING   done, or changed outside     FREE        -
    RESTORING   device call failed           RESTORING   again after a pause
    any         put back by an administrator RESTORING   read, write the target whatever is found
    any         suspended                    -           no device call until it is resumed
    RESTORING   set, acquire                 RESTORING   -       wait for the first attempt, else
                                                                 answer restore_pending
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from zeus_ipc.errors import ErrorCode
from zeus_ipc.messages import Control
from zeusd.core.effects import Forget, Note, Put, Read, Reading, Unwatch, Watch, Write
from zeusd.core.model import (
    READABLE,
    UNLOCKED,
    Changed,
    ControlValue,
    Debt,
    Failure,
    Loss,
    Peer,
    Process,
    baseline_key,
    debt_key,
    describe,
)
from zeusd.core.outbox import Outbox
from zeusd.devices.port import Return

MAX_WAITING = 32
"""Sets that may wait for one control."""

RETRY_FIRST_NS = 500_000_000
RETRY_MAX_NS = 60_000_000_000

Done = Callable[[Failure | None], None]


class Phase(Enum):
    """Where a control is in its life."""

    FREE = "free"
    HELD = "held"
    RESTORING = "restoring"


@dataclass(slots=True)
class Lease:
    """Who may write this control, and until when if it says nothing more."""

    holder: Process
    uid: int
    client: str
    since_ns: int
    ttl_ns: int
    expires_ns: int
    acquired: bool = False
    """Whether it was asked for by itself, and so outlives a set that failed."""
    forgiven: bool = False
    """Whether it was lengthened since the last heartbeat because zeusd itself stood still."""
    command: str = ""
    job: str = ""
    """See `model.Peer`."""

    @property
    def name(self) -> str:
        """Tells this lease from others in logs."""
        return f"{self.holder.pid}-{self.since_ns}"


@dataclass(slots=True, eq=False)
class Set:
    """A set that waits for its turn. `value` None takes the lease and writes nothing."""

    peer: Peer
    client: str
    value: ControlValue | None
    deadline_ns: int
    ttl_ns: int
    block: bool
    done: Done
    compare: bool = True


class ControlMachine:
    """The state machine above for one control.

    Args:
        gpu: UUID of the GPU.
        control: Which control.
        target: What it goes back to.
        pinned: Whether the site configured the target, so that outside changes do not move it.
        outbox: Where effects go.
        override: Whether a restore overwrites what someone else set.

    Attributes:
        first: What it held when zeusd first saw it in this boot, if that is known.
        persisted: Whether an administrator chose the target (see `messages.Persist`).
        trouble: Why the last attempt to put it back failed; None: it did not.
    """

    def __init__(
        self,
        gpu: str,
        control: Control,
        target: ControlValue,
        pinned: bool,
        outbox: Outbox,
        override: bool = False,
    ) -> None:
        self.gpu = gpu
        self.control = control
        self.target = target
        self.observed: ControlValue | None = None if pinned else target
        self.pinned = pinned
        self.phase = Phase.FREE
        self.lease: Lease | None = None
        self._out = outbox
        self._override = override
        self._values: tuple[ControlValue, ...] = ()
        self._captured = False
        self._found: ControlValue | None = None
        self._lost: dict[Process, Loss] = {}
        self._expiry = object()
        self._closed: Failure | None = None
        self._waiting: deque[Set] = deque()
        self._busy = False
        self._attempts = 0
        self._reason = ""
        self._released: list[Callable[[], None]] = []
        self.first: ControlValue | None = None
        self.persisted = False
        self.trouble: Failure | None = None
        self._suspended = False
        self._forced = False
        # Whether what is being put back was leased; else an administrator only wishes it so.
        self._owed = True

    # ---------------------------------------------------------------------------------- queries

    @property
    def value(self) -> ControlValue | None:
        """What zeusd last wrote under the present lease; None if nothing."""
        return self._values[-1] if self._values else None

    @property
    def retry_at_ns(self) -> int | None:
        """When the next attempt to put it back is due; None if none failed."""
        return self._out.due_ns.get(self)

    @property
    def target_source(self) -> str:
        """Where the target is from, see `messages.Back`."""
        if self.persisted:
            return "persisted"
        if self.pinned:
            return "configured"
        return "observed" if self.control in READABLE else "unreadable"

    def held_by(self, process: Process) -> bool:
        """Whether this process holds the lease."""
        return self.phase is Phase.HELD and self.lease is not None and self.lease.holder == process

    def lost_by(self, process: Process) -> bool:
        """Whether this process lost a lease here and has not acquired it anew."""
        return process in self._lost

    # ----------------------------------------------------------------------------------- events

    def configure(self, target: ControlValue, pinned: bool, override: bool) -> None:
        """The site has new wishes. What a holder has set stays until it sets again."""
        self.target, self.pinned, self._override = target, pinned, override
        if not pinned:
            self.observed = target
        if self.lease is not None:
            self._out.add(Put(debt_key(self.gpu, self.control), self._debt().to_json()))

    def persist(self) -> None:
        """What the holder has set becomes the target, and its lease ends."""
        assert self.value is not None
        assert self.lease is not None
        self._out.add(
            Note(
                "persisted",
                {
                    **self._who(self.lease),
                    "old": describe(self.control, self.target),
                    "new": describe(self.control, self.value),
                },
            )
        )
        self.pin(self.value)

    def pin(self, value: ControlValue) -> None:
        """An administrator chose this target."""
        self.target, self.pinned, self.persisted = value, True, True

    def unpin(self, target: ControlValue, pinned: bool) -> None:
        """The site's own target again."""
        self.target, self.pinned, self.persisted = target, pinned, False

    def recover(self, debt: Debt, ending: str | None) -> None:
        """Takes up what the journal says was owed when the last zeusd ended.

        Args:
            debt: The entry.
            ending: Why the lease ends at once, such as `holder_gone`; None: it goes on.
        """
        if not self.pinned:
            self.target = self.observed = debt.target
        self.lease = Lease(
            debt.holder,
            debt.uid,
            debt.client,
            debt.since_ns,
            debt.ttl_ns,
            self._out.now_ns,
            debt.acquired,
            command=debt.command,
            job=debt.job,
        )
        self._values = debt.values
        self._captured = True
        self.phase = Phase.HELD
        self._out.add(Watch(debt.holder))
        self.extend(debt.ttl_ns)
        if debt.ending or ending is not None:
            self.release(debt.ending or str(ending))

    def recover_loss(self, loss: Loss) -> None:
        """The journal says that this process, which lives, has lost a lease."""
        if loss.process not in self._lost:
            self._out.add(Watch(loss.process))
        self._lost[loss.process] = loss

    def heartbeat(self) -> None:
        """The holder is alive."""
        assert self.lease is not None
        self.lease.forgiven = False
        self.extend(self.lease.ttl_ns)

    def extend(self, by_ns: int) -> None:
        """Lets the lease last this long from now, if it would end before."""
        if self.phase is Phase.HELD and self.lease is not None:
            until_ns = max(self.lease.expires_ns, self._out.now_ns + by_ns)
            self.lease.expires_ns = self._out.due_ns[self._expiry] = until_ns

    def forgive_stall(self, by_ns: int) -> None:
        """zeusd stood still: the holder's heartbeats may wait to be heard. Once, not for ever."""
        if self.lease is not None and not self.lease.forgiven:
            self.lease.forgiven = True
            self.extend(by_ns)

    def shorten(self, to_ns: int) -> None:
        """Lets the lease end this long from now, if it would last longer."""
        if self.phase is Phase.HELD and self.lease is not None:
            until_ns = min(self.lease.expires_ns, self._out.now_ns + to_ns)
            self.lease.expires_ns = self._out.due_ns[self._expiry] = until_ns

    def revoke(self, reason: str, clause: str, then: Callable[[], None] | None = None) -> None:
        """The holder loses its lease without having asked.

        Args:
            reason: For the log: `expired`, `revoked`.
            clause: For the holder: `its heartbeat stopped for 15 s`.
            then: As for `release`.
        """
        if self.phase is Phase.HELD and self.lease is not None:
            self._lose(self.lease.holder, clause)
        self.release(reason, then)

    def put_back(
        self,
        peer: Peer,
        clause: str,
        then: Callable[[], None] = lambda: None,
        owed: ControlValue | None = None,
    ) -> None:
        """An administrator wants the target in force, whoever set what.

        Args:
            peer: The administrator.
            clause: For the holder, as for `revoke`.
            then: Called after the first attempt; `phase` and `trouble` tell its outcome.
            owed: What zeusd itself wrote, and nobody leases; None: nothing. Then a failure that
                changes nothing is the end of it.
        """
        self._forced = True
        if self.first is not None and not self.pinned and self.target != self.first:
            self._aim_at(self.first)
        if self.phase is Phase.HELD:
            self.revoke("reset", clause, then)
            return
        self._released.append(then)
        if self.phase is Phase.RESTORING:
            self._out.due_ns.pop(self, None)
        else:
            now_ns = self._out.now_ns
            self.lease = Lease(peer.process, peer.uid, "", now_ns, 0, now_ns, command=peer.command)
            self.phase = Phase.RESTORING
            self._values = () if owed is None else (owed,)
            self._reason = "reset"
            self._attempts = 0
            self._owed = owed is not None
            if self._owed:
                self._out.add(Put(debt_key(self.gpu, self.control), self._debt().to_json()))
        self._pump()

    def suspend(self, why: Failure) -> None:
        """The device is out of reach: takes nothing new, and calls nothing."""
        self.close(why)
        self._suspended = True

    def resume(self, found: ControlValue | None) -> None:
        """The device is in reach again. `found` is what the control holds now, if that is known."""
        if not self._suspended:
            return
        self._suspended, self._closed = False, None
        if self.phase is Phase.FREE and found is not None:
            self._adopt(found)
        self._out.due_ns.pop(self, None)
        self._pump()

    def process_gone(self, process: Process) -> None:
        """A process died: its lease ends, and nobody has to be told of a loss."""
        if self.held_by(process):
            self.release("holder_gone")
        self.withdraw(process)
        self.forgive(process)

    def forgive(self, process: Process) -> None:
        """The process knows of its loss, or is no more."""
        loss = self._lost.pop(process, None)
        if loss is not None:
            self._out.add(Forget(loss.key))
            self._out.add(Unwatch(process))

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
        if not request.block:
            self._drop_superseded(request.peer.process)
        self._waiting.append(request)
        self._pump()

    def release(self, reason: str, then: Callable[[], None] | None = None) -> None:
        """The holder lets go. `then` is called after the first attempt to put the value back."""
        if self.phase is Phase.FREE:
            if then is not None:
                then()
            return
        if then is not None:
            self._released.append(then)
        if self.phase is Phase.RESTORING:
            if self.retry_at_ns is not None:
                self._answer_released()
            return
        assert self.lease is not None
        holder = self.lease.holder
        self._out.due_ns.pop(self._expiry, None)
        self.phase = Phase.RESTORING
        self._reason = reason
        self._attempts = 0
        self._out.add(Unwatch(holder))
        if self._values or self._busy or self._forced:
            # A zeusd that is killed before the value is back must not take the lease for alive.
            self._out.add(Put(debt_key(self.gpu, self.control), self._debt().to_json()))
        self.withdraw(holder)
        self._pump()

    def withdraw(self, process: Process, client: str | None = None) -> None:
        """What this process (or this client object in it) has asked for is not wanted any more."""
        mine = [
            item
            for item in self._waiting
            if item.peer.process == process and client in (None, item.client)
        ]
        if mine:
            self._waiting = deque(item for item in self._waiting if item not in mine)
            for item in mine:
                item.done(self._let_go(item.peer))

    def close(self, why: Failure) -> None:
        """Takes nothing new from now on, and nothing of what waits."""
        self._closed = why
        waiting, self._waiting = self._waiting, deque()
        for item in waiting:
            item.done(why)

    def tick(self, now_ns: int) -> None:
        """Time has passed: retries what is due, and ends a lease whose holder is silent."""
        if (due_ns := self.retry_at_ns) is not None and now_ns >= due_ns:
            self.retry_now()
        if self.phase is Phase.HELD and self.lease is not None and now_ns >= self.lease.expires_ns:
            lease = self.lease
            self._out.add(
                Note(
                    "lease_expired",
                    {**self._who(lease), "ttl_s": lease.ttl_ns / 1e9},
                    warning=True,
                )
            )
            self.revoke("expired", f"its heartbeat stopped for {lease.ttl_ns / 1e9:g} s")

    def retry_now(self) -> None:
        """The GPU is back: does not wait for the pause to end."""
        if self._out.due_ns.pop(self, None) is not None:
            self._pump()

    # --------------------------------------------------------------------------------- internals

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

    def _lose(self, process: Process, clause: str) -> None:
        loss = Loss(self.gpu, self.control, process, clause)
        if process not in self._lost:
            self._out.add(Watch(process))
        self._lost[process] = loss
        self._out.add(Put(loss.key, loss.to_json()))

    def _refusal(self, peer: Peer, acquires: bool = False) -> Failure | None:
        if self._closed is not None:
            return self._closed
        loss = self._lost.get(peer.process)
        if loss is not None and not acquires:
            return Failure(
                ErrorCode.LEASE_EXPIRED,
                f"this process lost its lease on {self.control.value} of {self.gpu}, because "
                f"{loss.reason}, and the old value is back; acquire it anew if you still want it",
            )
        if self.phase is Phase.HELD and self.lease is not None:
            if self.lease.holder == peer.process:
                return None
            held_s = max(0, self._out.now_ns - self.lease.since_ns) // 1_000_000_000
            # Which process it is concerns its own user only.
            process = f"process {self.lease.holder.pid} of " if peer.uid == self.lease.uid else ""
            return Failure(
                ErrorCode.LEASE_HELD,
                f"{self.control.value} of {self.gpu} is held by {process}user {self.lease.uid} "
                f"for {held_s} s; wait until it ends, or let it release",
            )
        if self.phase is Phase.RESTORING and self.retry_at_ns is not None:
            return Failure(
                ErrorCode.RESTORE_PENDING,
                f"{self.control.value} of {self.gpu} could not be put back after its last holder "
                f"({self._attempts} attempts); zeusd keeps trying, see its log",
            )
        return None

    def _let_go(self, peer: Peer) -> Failure:
        return self._refusal(peer) or Failure(
            ErrorCode.LEASE_EXPIRED,
            f"the lease on {self.control.value} of {self.gpu} was given back before this set was "
            "applied; set again to take a new one",
        )

    def _drop_superseded(self, process: Process) -> None:
        kept: deque[Set] = deque()
        for item in self._waiting:
            if item.block or item.value is None or item.peer.process != process:
                kept.append(item)
            else:
                item.done(None)
        self._waiting = kept

    def _pump(self) -> None:
        while not self._busy and not self._suspended and self.retry_at_ns is None:
            if self.phase is Phase.RESTORING:
                self._restore()
                continue
            if not self._waiting:
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

    def _serve(self, item: Set) -> None:
        fresh = self.phase is Phase.FREE
        now_ns, process = self._out.now_ns, item.peer.process
        if fresh:
            self.lease = Lease(
                process,
                item.peer.uid,
                item.client,
                now_ns,
                item.ttl_ns,
                now_ns,
                command=item.peer.command,
                job=item.peer.job,
            )
            self.phase = Phase.HELD
            self._captured = False
            self._found = None
            self._values = ()
            self._out.add(Watch(process))
        assert self.lease is not None
        if item.value is None:
            self.lease.ttl_ns = item.ttl_ns
            self.lease.acquired = True
            self.forgive(process)
        self.heartbeat()
        if item.value is None:
            self._out.add(Put(debt_key(self.gpu, self.control), self._debt().to_json()))
            item.done(None)
        elif self.control in READABLE and not self._captured:
            self._capture(item)
        else:
            self._write(item)

    def _capture(self, item: Set) -> None:
        """Rule 3: what is in force before our first write."""
        self._busy = True

        def captured(result: object) -> None:
            self._busy = False
            if isinstance(result, Failure):
                self._give_up_unused_lease()
                item.done(result)
            else:
                assert isinstance(result, tuple)
                self._captured = True
                self._found_value(item, result)
            self._pump()

        ticket = self._out.ticket(captured)
        self._out.add(Read(ticket, self.gpu, Reading.CONTROL, self.control))

    def _found_value(self, item: Set, current: ControlValue) -> None:
        """What is in force is known: goes on with the set, if it is still to be had."""
        self._found = current
        self._adopt(current)
        if self.phase is not Phase.HELD:
            item.done(self._let_go(item.peer))
        elif self._still_wanted(item):
            self._write(item)

    def _still_wanted(self, item: Set) -> bool:
        """After the capture: the site's maximum may have turned out lower than the value."""
        over = (
            not self.pinned
            and self.control is Control.POWER_LIMIT
            and item.value is not None
            and item.value > self.target
        )
        if over:
            self._give_up_unused_lease()
            item.done(
                Failure(
                    ErrorCode.OUT_OF_RANGE,
                    f"someone lowered the power limit of {self.gpu} to "
                    f"{describe(self.control, self.target)} outside zeusd; choose at most that",
                )
            )
        return not over

    def _adopt(self, current: ControlValue) -> None:
        if current == self.target or self.pinned:
            return
        if self._override:
            self._note_outside(self.target, current, "overridden")
            return
        self._note_outside(self.target, current, "adopted")
        self._aim_at(current)

    def _aim_at(self, target: ControlValue) -> None:
        self.target = target
        if not self.pinned:
            self.observed = target
            self._out.add(Put(baseline_key(self.gpu, self.control), {"value": list(target)}))

    def _note_outside(self, old: ControlValue, new: ControlValue, result: str) -> None:
        self._out.add(
            Note(
                "outside_change",
                {
                    "gpu": self.gpu,
                    "control": self.control.value,
                    "old": describe(self.control, old),
                    "new": describe(self.control, new),
                    "result": result,
                },
                warning=True,
            )
        )

    def _write(self, item: Set) -> None:
        value = item.value
        assert value is not None
        assert self.lease is not None
        lease = self.lease
        before = self._values
        possible = before or (self.target if self._found is None else self._found,)
        old = possible[-1]
        self._values = (*(v for v in possible if v != value), value)
        self._busy = True

        def written(result: object) -> None:
            self._busy = False
            if isinstance(result, Changed):
                # Whatever zeusd wrote before is not in force any more.
                self._values = (result.value,) if self._override else ()
                if self.pinned:
                    self._note_outside(old, result.value, "noticed")
                item.compare = False
                self._found_value(item, result.value)
                self._pump()
                return
            failure = result if isinstance(result, Failure) else None
            if failure is None:
                self._values = (value,)
            elif failure.unchanged:
                self._values = before
            self._note_change("set", lease, old, value, failure)
            if failure is not None and not self._values and self.phase is Phase.HELD:
                self._give_up_unused_lease()
            item.done(failure)
            self._pump()

        entry = self._debt().to_json()
        ticket = self._out.ticket(written)
        key = debt_key(self.gpu, self.control)
        expected = possible if item.compare and self.control in READABLE else ()
        self._out.add(Write(ticket, self.gpu, self.control, value, key, entry, expected))

    def _restore(self) -> None:
        """Rule 5. Called when RESTORING, idle and due."""
        if not self._values and not self._forced:
            self._finish_restore("untouched")
        elif self.control not in READABLE:
            self._write_target(None)
        else:
            self._busy = True

            def seen(result: object) -> None:
                self._busy = False
                if self._suspended:
                    return  # all of it again when the device is in reach again
                if isinstance(result, Failure):
                    self._restore_failed(result)
                elif result == self.target:
                    self._finish_restore("already_back")
                elif result not in self._values:
                    assert isinstance(result, tuple)
                    if self._forced:
                        self._values = (*self._values, result)
                        self._write_target(result)
                    elif self._override:
                        self._note_outside(self._values[-1], result, "overridden")
                        self._write_target(result)
                    else:
                        self._note_outside(self._values[-1], result, "kept")
                        if not self.pinned:
                            self._aim_at(result)
                        self._finish_restore("changed_outside")
                else:
                    assert isinstance(result, tuple)
                    self._write_target(result)
                self._pump()

            ticket = self._out.ticket(seen)
            self._out.add(Read(ticket, self.gpu, Reading.CONTROL, self.control))

    def _write_target(self, current: ControlValue | None) -> None:
        assert self.lease is not None
        self._busy = True
        lease, target = self.lease, self.target
        old = current if current is not None else self.value

        def written(result: object) -> None:
            self._busy = False
            failure = result if isinstance(result, Failure) else None
            self._note_change("restore", lease, old, target, failure)
            if failure is None and target == self.target:
                self._finish_restore("restored")
            elif failure is None:
                self._values = (target,)  # a reload moved the target meanwhile: once more
                self._owed = True
            elif failure.nvml_code == Return.INVALID_ARGUMENT:
                self._find_legal_target(current, failure)
            else:
                self._restore_failed(failure)
            self._pump()

        if self.target not in self._values:
            self._values = (*self._values, self.target)
        ticket = self._out.ticket(written)
        key = debt_key(self.gpu, self.control)
        self._out.add(
            Write(ticket, self.gpu, self.control, self.target, key, self._debt().to_json())
        )

    def _find_legal_target(self, current: ControlValue | None, failure: Failure) -> None:
        """The device does not take the target any more, since a driver update for example."""
        if self.control is Control.POWER_LIMIT:
            self._busy = True

            def limits(result: object) -> None:
                self._busy = False
                if isinstance(result, tuple):
                    low, high = result
                    self._clamp((min(max(self.target[0], low), high),), current, failure)
                else:
                    self._restore_failed(failure)
                self._pump()

            self._out.add(Read(self._out.ticket(limits), self.gpu, Reading.LIMITS, self.control))
        elif self.control is Control.PERSISTENCE_MODE:
            self._restore_failed(failure)
        else:
            self._clamp(UNLOCKED, current, failure)

    def _clamp(self, legal: ControlValue, current: ControlValue | None, failure: Failure) -> None:
        if legal == self.target:
            self._restore_failed(failure)
            return
        self._out.add(
            Note(
                "restore_clamped",
                {
                    "gpu": self.gpu,
                    "control": self.control.value,
                    "old": describe(self.control, self.target),
                    "new": describe(self.control, legal),
                    "reason": "the device does not take the restore target any more",
                },
                warning=True,
            )
        )
        self._aim_at(legal)
        self._write_target(current)

    def _restore_failed(self, failure: Failure) -> None:
        if not self._owed and failure.unchanged:
            self._finish_restore("failed", failure)
            return
        self.trouble = failure
        self._attempts += 1
        pause_ns = min(RETRY_FIRST_NS * 2 ** min(self._attempts - 1, 10), RETRY_MAX_NS)
        self._out.due_ns[self] = self._out.now_ns + pause_ns
        self._out.add(
            Note(
                "restore_failed",
                {
                    "gpu": self.gpu,
                    "control": self.control.value,
                    "attempt": self._attempts,
                    "retry_in_s": pause_ns / 1e9,
                    "error": failure.message,
                },
                warning=True,
            )
        )
        self._answer_released()
        waiting, self._waiting = self._waiting, deque()
        for item in waiting:
            refusal = self._refusal(item.peer, item.value is None)
            assert refusal is not None
            item.done(refusal)

    def _finish_restore(self, result: str, trouble: Failure | None = None) -> None:
        assert self.lease is not None
        self._out.add(Forget(debt_key(self.gpu, self.control)))
        if self._owed:
            self._out.add(
                Note(
                    "lease_ended",
                    {**self._who(self.lease), "reason": self._reason, "result": result},
                )
            )
        self.phase = Phase.FREE
        self.lease = None
        self._values = ()
        self.trouble = trouble
        self._forced, self._owed = False, True
        self._answer_released()

    def _give_up_unused_lease(self) -> None:
        """A lease that a set took for itself is not kept when that set changed nothing."""
        if self.phase is not Phase.HELD or self._values or self.lease is None:
            return
        if self.lease.acquired:
            return
        self._out.add(Unwatch(self.lease.holder))
        self._out.add(Forget(debt_key(self.gpu, self.control)))
        self._out.due_ns.pop(self._expiry, None)
        self.phase = Phase.FREE
        self.lease = None

    def _answer_released(self) -> None:
        released, self._released = self._released, []
        for then in released:
            then()

    def _debt(self) -> Debt:
        assert self.lease is not None
        return Debt(
            gpu=self.gpu,
            control=self.control,
            holder=self.lease.holder,
            uid=self.lease.uid,
            client=self.lease.client,
            since_ns=self.lease.since_ns,
            ttl_ns=self.lease.ttl_ns,
            target=self.target,
            values=self._values,
            ending=self._reason if self.phase is Phase.RESTORING else "",
            acquired=self.lease.acquired,
            command=self.lease.command,
            job=self.lease.job,
        )

    def _note_change(
        self,
        event: str,
        lease: Lease,
        old: ControlValue | None,
        new: ControlValue,
        failure: Failure | None,
    ) -> None:
        fields = {
            **self._who(lease),
            "old": "unknown" if old is None else describe(self.control, old),
            "new": describe(self.control, new),
            "reason": self._reason if event == "restore" else "requested",
            "result": "ok" if failure is None else failure.message,
        }
        self._out.add(Note(event, fields, warning=failure is not None))

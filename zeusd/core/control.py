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
5. Going back reads first: a value that zeusd did not write was set by someone else meanwhile, and
   stays. A restore that fails is retried with backoff for as long as zeusd runs; until then the
   control is leased to nobody.

    state       event                        next        device
    FREE        set, acquire                 HELD        read (readable, first time), write
    HELD        set by the holder            HELD        write
    HELD        set, acquire by another      HELD        -       answer lease_held
    HELD        release, holder gone         RESTORING   read, write the target
    HELD        first set fails, unchanged   FREE        -       the lease was only for that set
    RESTORING   done, or changed outside     FREE        -
    RESTORING   device call failed           RESTORING   again after a pause
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
    ControlValue,
    Debt,
    Failure,
    Peer,
    Process,
    baseline_key,
    debt_key,
    describe,
)
from zeusd.core.outbox import Outbox

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
    """Who may write this control."""

    holder: Process
    uid: int
    client: str
    since_ns: int


@dataclass(slots=True)
class Set:
    """A set that waits for its turn. `value` None takes the lease and writes nothing."""

    peer: Peer
    client: str
    value: ControlValue | None
    deadline_ns: int
    block: bool
    done: Done


class ControlMachine:
    """The state machine above for one control.

    Args:
        gpu: UUID of the GPU.
        control: Which control.
        target: What it goes back to.
        pinned: Whether the site configured the target, so that outside changes do not move it.
        outbox: Where effects go.
    """

    def __init__(
        self, gpu: str, control: Control, target: ControlValue, pinned: bool, outbox: Outbox
    ) -> None:
        self.gpu = gpu
        self.control = control
        self.target = target
        self.pinned = pinned
        self.phase = Phase.FREE
        self.lease: Lease | None = None
        self._out = outbox
        self._values: tuple[ControlValue, ...] = ()
        self._captured = False
        self._waiting: deque[Set] = deque()
        self._busy = False
        self._attempts = 0
        self._reason = ""
        self._released: list[Callable[[], None]] = []

    # ---------------------------------------------------------------------------------- queries

    @property
    def value(self) -> ControlValue | None:
        """What zeusd last wrote under the present lease; None if nothing."""
        return self._values[-1] if self._values else None

    @property
    def retry_at_ns(self) -> int | None:
        """When the next attempt to put it back is due; None if none failed."""
        return self._out.due_ns.get(self)

    def held_by(self, process: Process) -> bool:
        """Whether this process holds the lease."""
        return self.phase is Phase.HELD and self.lease is not None and self.lease.holder == process

    # ----------------------------------------------------------------------------------- events

    def recover(self, debt: Debt, holder_alive: bool) -> None:
        """Takes up what the journal says was owed when the last zeusd ended."""
        if not self.pinned:
            self.target = debt.target
        self.lease = Lease(debt.holder, debt.uid, debt.client, debt.since_ns)
        self._values = debt.values
        self._captured = True
        self.phase = Phase.HELD
        self._out.add(Watch(debt.holder))
        if not holder_alive:
            self.release("holder_gone")

    def submit(self, request: Set) -> None:
        """A set or an acquire. `request.done` is called once, now or later."""
        refusal = self._refusal(request.peer)
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
        self.phase = Phase.RESTORING
        self._reason = reason
        self._attempts = 0
        self._out.add(Unwatch(holder))
        mine = [item for item in self._waiting if item.peer.process == holder]
        self._waiting = deque(item for item in self._waiting if item.peer.process != holder)
        for item in mine:
            item.done(self._let_go())
        self._pump()

    def tick(self, now_ns: int) -> None:
        """Time has passed: retries what is due."""
        if (due_ns := self.retry_at_ns) is not None and now_ns >= due_ns:
            self.retry_now()

    def retry_now(self) -> None:
        """The GPU is back: does not wait for the pause to end."""
        if self._out.due_ns.pop(self, None) is not None:
            self._pump()

    # --------------------------------------------------------------------------------- internals

    def _refusal(self, peer: Peer) -> Failure | None:
        if self.phase is Phase.HELD and self.lease is not None:
            if self.lease.holder == peer.process:
                return None
            held_s = max(0, self._out.now_ns - self.lease.since_ns) // 1_000_000_000
            return Failure(
                ErrorCode.LEASE_HELD,
                f"{self.control.value} of {self.gpu} is held by process {self.lease.holder.pid} "
                f"of user {self.lease.uid} for {held_s} s; wait until it ends, or let it release",
            )
        if self.phase is Phase.RESTORING and self.retry_at_ns is not None:
            return Failure(
                ErrorCode.RESTORE_PENDING,
                f"{self.control.value} of {self.gpu} could not be put back after its last holder "
                f"({self._attempts} attempts); zeusd keeps trying, see its log",
            )
        return None

    def _let_go(self) -> Failure:
        return Failure(
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
        while not self._busy and self.retry_at_ns is None:
            if self.phase is Phase.RESTORING:
                self._restore()
                continue
            if not self._waiting:
                return
            item = self._waiting.popleft()
            refusal = self._refusal(item.peer)
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
        if fresh:
            self.lease = Lease(item.peer.process, item.peer.uid, item.client, self._out.now_ns)
            self.phase = Phase.HELD
            self._captured = False
            self._values = ()
            self._out.add(Watch(item.peer.process))
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
                self._adopt(result)
                if self.phase is not Phase.HELD:
                    item.done(self._let_go())
                elif self._still_wanted(item):
                    self._write(item)
            self._pump()

        ticket = self._out.ticket(captured)
        self._out.add(Read(ticket, self.gpu, Reading.CONTROL, self.control))

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
        self._out.add(
            Note(
                "outside_change",
                {
                    "gpu": self.gpu,
                    "control": self.control.value,
                    "old": describe(self.control, self.target),
                    "new": describe(self.control, current),
                    "result": "adopted",
                },
                warning=True,
            )
        )
        self.target = current
        self._out.add(Put(baseline_key(self.gpu, self.control), {"value": list(current)}))

    def _write(self, item: Set) -> None:
        value = item.value
        assert value is not None
        before = self._values
        possible = before or (self.target,)
        old = possible[-1]
        self._values = (*(v for v in possible if v != value), value)
        self._busy = True

        def written(result: object) -> None:
            self._busy = False
            failure = result if isinstance(result, Failure) else None
            if failure is None:
                self._values = (value,)
            elif failure.unchanged:
                self._values = before
            self._note_change("set", item.peer.process.pid, item.peer.uid, old, value, failure)
            if failure is not None and not self._values and self.phase is Phase.HELD:
                self._give_up_unused_lease()
            item.done(failure)
            self._pump()

        entry = self._debt().to_json()
        ticket = self._out.ticket(written)
        key = debt_key(self.gpu, self.control)
        self._out.add(Write(ticket, self.gpu, self.control, value, key, entry))

    def _restore(self) -> None:
        """Rule 5. Called when RESTORING, idle and due."""
        if not self._values:
            self._finish_restore("untouched")
        elif self.control not in READABLE:
            self._write_target(None)
        else:
            self._busy = True

            def seen(result: object) -> None:
                self._busy = False
                if isinstance(result, Failure):
                    self._restore_failed(result)
                elif result == self.target:
                    self._finish_restore("already_back")
                elif result not in self._values:
                    assert isinstance(result, tuple)
                    self._keep_outside_change(result)
                else:
                    assert isinstance(result, tuple)
                    self._write_target(result)
                self._pump()

            ticket = self._out.ticket(seen)
            self._out.add(Read(ticket, self.gpu, Reading.CONTROL, self.control))

    def _write_target(self, current: ControlValue | None) -> None:
        assert self.lease is not None
        self._busy = True
        lease, old = self.lease, current if current is not None else self._values[-1]

        def written(result: object) -> None:
            self._busy = False
            failure = result if isinstance(result, Failure) else None
            self._note_change("restore", lease.holder.pid, lease.uid, old, self.target, failure)
            if failure is None:
                self._finish_restore("restored")
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

    def _keep_outside_change(self, current: ControlValue) -> None:
        self._out.add(
            Note(
                "outside_change",
                {
                    "gpu": self.gpu,
                    "control": self.control.value,
                    "old": describe(self.control, self._values[-1]),
                    "new": describe(self.control, current),
                    "result": "kept",
                },
                warning=True,
            )
        )
        if not self.pinned:
            self.target = current
            self._out.add(Put(baseline_key(self.gpu, self.control), {"value": list(current)}))
        self._finish_restore("changed_outside")

    def _restore_failed(self, failure: Failure) -> None:
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
            refusal = self._refusal(item.peer)
            assert refusal is not None
            item.done(refusal)

    def _finish_restore(self, result: str) -> None:
        assert self.lease is not None
        self._out.add(Forget(debt_key(self.gpu, self.control)))
        self._out.add(
            Note(
                "lease_ended",
                {
                    "gpu": self.gpu,
                    "control": self.control.value,
                    "pid": self.lease.holder.pid,
                    "uid": self.lease.uid,
                    "reason": self._reason,
                    "result": result,
                },
            )
        )
        self.phase = Phase.FREE
        self.lease = None
        self._values = ()
        self._answer_released()

    def _give_up_unused_lease(self) -> None:
        """A lease that a set took for itself is not kept when that set changed nothing."""
        if self.phase is not Phase.HELD or self._values or self.lease is None:
            return
        self._out.add(Unwatch(self.lease.holder))
        self._out.add(Forget(debt_key(self.gpu, self.control)))
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
            target=self.target,
            values=self._values,
        )

    def _note_change(
        self,
        event: str,
        pid: int,
        uid: int,
        old: ControlValue,
        new: ControlValue,
        failure: Failure | None,
    ) -> None:
        fields = {
            "gpu": self.gpu,
            "control": self.control.value,
            "old": describe(self.control, old),
            "new": describe(self.control, new),
            "pid": pid,
            "uid": uid,
            "result": "ok" if failure is None else failure.message,
        }
        if event == "restore":
            fields["reason"] = self._reason
        self._out.add(Note(event, fields, warning=failure is not None))

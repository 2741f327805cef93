"""Leases: holders, heartbeats, expiry, lost leases, and sets that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from zeus_ipc.controls import ControlValue
from zeus_ipc.errors import ErrorCode
from zeusd.core.effects import Forget, Look, Unwatch, WatchProcess
from zeusd.core.entries import Loss
from zeusd.core.lifecycle import Phase
from zeusd.core.model import Failure, Peer, ProcessIdentity, ProcessUsage

if TYPE_CHECKING:
    from zeusd.core.control import ControlMachine

LOOKS = 5
"""Checks of a silent holder within a TTL: as many as there are heartbeats."""

Done: TypeAlias = Callable[["Failure | ControlValue | None"], None]
"""Receives the result of a set: the value in force, None after an acquire, or the failure."""

ZEUSD = Peer(0, ProcessIdentity(0, 0), 0, 0, command="zeusd")
"""Stands for zeusd itself, where no process holds what is being restored."""


@dataclass(slots=True)
class HeldLease:
    """The right of one process to write a control, and its end if there is no heartbeat."""

    holder: ProcessIdentity
    uid: int
    client: str
    since_ns: int
    ttl_ns: int
    expires_ns: int
    acquired: bool = False
    """Whether it was asked for by itself, and so outlives a set that failed."""
    forgiven: bool = False
    """Whether it was extended since the last heartbeat because zeusd itself stood still."""
    command: str = ""
    job: str = ""
    """See `model.Peer`."""
    asked: ControlValue | None = None
    """What the holder asked for last; the control may hold less under a ceiling, or a value that
    the driver made of it."""
    over: str = ""
    """The ceiling that this holder may exceed: an administrator's is replaced next."""
    recoveries: int = 0
    """How often a zeusd that was started again took it over since the last heartbeat. Each time the
    holder has half as long to say something: however often zeusd dies, a hung holder expires."""
    usage: ProcessUsage | None = None
    """The holder's activity at the last check since its last heartbeat; None: not checked."""
    heard_ns: int = 0
    """When the holder last sent a heartbeat."""
    profile: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    """What the holder has published: power limits, mW, and its relative speed at each."""
    measuring: bool = False
    """Whether the holder says that it measures and needs its highest limit."""
    needs_mw: int | None = None
    """The limit below which it says that it misses a latency objective; None: it has none."""

    @property
    def name(self) -> str:
        """Tells this lease from others in logs."""
        return f"{self.holder.pid}-{self.since_ns}"

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a record about it."""
        return {
            "pid": self.holder.pid,
            "uid": self.uid,
            "command": self.command,
            "job": self.job,
            "lease": self.name,
        }


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
    over: str = ""
    """See `HeldLease.over`."""


MAX_WAITING = 32
"""Sets that may wait for one control."""


class SetQueue(deque[Set]):
    """Of several sets that nobody waits for, only the newest is kept."""

    def add(self, item: Set) -> list[Set]:
        """Adds a set. Returns the sets that it supersedes."""
        superseded = [] if item.block else self._take(item.peer.process, unwaited=True)
        self.append(item)
        return superseded

    def take(self, process: ProcessIdentity, client: str | None = None) -> list[Set]:
        """Takes those of a process, or of one client object in it."""
        return self._take(process, client)

    def take_all(self) -> list[Set]:
        """Takes all."""
        sets = [*self]
        self.clear()
        return sets

    def _take(
        self, process: ProcessIdentity, client: str | None = None, unwaited: bool = False
    ) -> list[Set]:
        taken = [
            item
            for item in self
            if item.peer.process == process
            and client in (None, item.client)
            and not (unwaited and (item.block or item.value is None))
        ]
        for item in taken:
            self.remove(item)
        return taken


class LeaseState:
    """The lease of a control, and the losses of those who held it."""

    def __init__(self, control: ControlMachine) -> None:
        self._control = control
        self._out = control.out
        self._node = control.node
        self._lost: dict[ProcessIdentity, Loss] = {}
        self.lease: HeldLease | None = None

    # ---------------------------------------------------------------------------------- queries

    @property
    def current(self) -> HeldLease | None:
        """The lease, if it has not ended."""
        return self.lease if self._control.phase is Phase.HELD else None

    def by(self, process: ProcessIdentity) -> bool:
        """Whether this process holds the lease."""
        lease = self.current
        return lease is not None and lease.holder == process

    def lost_by(self, process: ProcessIdentity) -> bool:
        """Whether this process lost a lease here and has not acquired it again."""
        return process in self._lost

    @property
    def losses(self) -> list[Loss]:
        """Processes that lost a lease here and do not know it yet."""
        return [*self._lost.values()]

    # ----------------------------------------------------------------------------- begin and end

    def begin(self, lease: HeldLease, until_ns: int) -> None:
        """A lease begins, or is taken over from the journal."""
        self.lease = lease
        self._watch(lease.holder)
        self._lasts_until(until_ns)

    def end(self) -> None:
        """The lease ends; it stays known until the control is restored."""
        assert self.lease is not None
        self._out.due_ns.drop(self._check)
        self._unwatch(self.lease.holder)

    def lose(self, loss: Loss) -> None:
        """A process loses its lease and must be told, or was to be told by the last zeusd."""
        if loss.process not in self._lost:
            self._watch(loss.process)
        self._lost[loss.process] = loss

    def forgive(self, process: ProcessIdentity) -> None:
        """Handles a process that knows of its loss, or has exited."""
        loss = self._lost.pop(process, None)
        if loss is not None:
            self._out.add(Forget(loss.key))
            self._unwatch(process)

    def _watch(self, process: ProcessIdentity) -> None:
        self._node.watched.setdefault(process, []).append(self._control)
        self._out.add(WatchProcess(process))

    def _unwatch(self, process: ProcessIdentity) -> None:
        controls = self._node.watched[process]
        controls.remove(self._control)
        if not controls:
            del self._node.watched[process]
        self._out.add(Unwatch(process))

    # ------------------------------------------------------------------------------------- time

    def heartbeat(self) -> None:
        """Handles a heartbeat of the holder."""
        lease, now_ns = self.lease, self._out.now_ns
        assert lease is not None
        lease.forgiven = False
        if lease.recoveries:
            lease.recoveries = 0
            self._control.record()
        lease.heard_ns = now_ns
        lease.usage = None
        self.extend(lease.ttl_ns)

    def reconnected(self) -> None:
        """Handles a new connection of the holder's process: not a heartbeat, but a sign that it
        runs."""
        if (lease := self.current) is not None:
            self._lasts_until(max(lease.expires_ns, lease.heard_ns + lease.ttl_ns))

    def extend(self, by_ns: int) -> None:
        """Extends the lease to at least this time from now."""
        if (lease := self.current) is not None:
            self._lasts_until(max(lease.expires_ns, self._out.now_ns + by_ns))

    def shorten(self, to_ns: int) -> None:
        """Shortens the lease to at most this time from now."""
        if (lease := self.current) is not None:
            until_ns = min(lease.expires_ns, self._out.now_ns + to_ns)
            lease.expires_ns = self._out.due_ns[self._check] = until_ns

    def forgive_stall(self) -> None:
        """Extends the lease after zeusd or its server was stopped: heartbeats may be waiting to be
        read.

        At most once per received heartbeat.
        """
        if self.lease is not None and not self.lease.forgiven:
            self.lease.forgiven = True
            self.extend(self.lease.ttl_ns)

    def _lasts_until(self, until_ns: int) -> None:
        """Sets the lease's end and schedules checks of the holder before it."""
        lease = self.lease
        assert lease is not None
        lease.expires_ns = until_ns
        first_look_ns = until_ns - lease.ttl_ns // LOOKS
        looks = self._node.settings.terms.busy_ttl_ns > lease.ttl_ns and lease.usage is None
        self._out.due_ns[self._check] = first_look_ns if looks else until_ns

    def _check(self) -> None:
        """Checks whether a holder that sent no heartbeat for most of its TTL is computing."""
        if (lease := self.current) is None:
            return
        if self._node.settings.terms.busy_ttl_ns <= lease.ttl_ns:
            self.expire()
            return
        ticket = self._out.ticket(partial(self._looked_at, lease, lease.heard_ns))
        self._out.add(Look(ticket, lease.holder))

    def _looked_at(self, lease: HeldLease, heard_ns: int, result: object) -> None:
        if self.current is not lease or lease.heard_ns != heard_ns:
            return  # meanwhile it ended, or its holder sent a heartbeat
        now_ns = self._out.now_ns
        usage = result if isinstance(result, ProcessUsage) else None
        before, lease.usage = lease.usage, usage
        if now_ns < lease.expires_ns:
            self._out.due_ns[self._check] = lease.expires_ns
            return
        last_ns = heard_ns + self._node.settings.terms.busy_ttl_ns
        # zeusd was late for its first check; compare the next one with it.
        late = before is None and lease.expires_ns >= heard_ns + lease.ttl_ns
        computes = usage is not None and (_computes(before, usage) or (late and not usage.stopped))
        if now_ns >= last_ns or not computes:
            self.expire()
            return
        lease.expires_ns = min(now_ns + lease.ttl_ns // LOOKS, last_ns)
        self._out.due_ns[self._check] = lease.expires_ns

    def expire(self) -> None:
        """Handles a holder that was silent for its TTL."""
        lease = self.lease
        assert lease is not None
        ttl_s = lease.ttl_ns / 1e9
        self._control.audit.note("lease_expired", lease, warning=True, ttl_s=ttl_s)
        self._control.revoke("expired", f"its heartbeat stopped for {ttl_s:g} s")

    # ---------------------------------------------------------------------------------- refusals

    def refusal(self, peer: Peer, acquires: bool = False) -> Failure | None:
        """Why this process may not write now, or not acquire the lease; None: allowed."""
        if self._node.closed is not None:
            return self._node.closed
        gpu, name = self._control.gpu, self._control.control.value
        loss = self._lost.get(peer.process)
        if loss is not None and not acquires:
            return Failure(
                ErrorCode.LEASE_EXPIRED,
                f"this process lost its lease on {name} of {gpu}, because "
                f"{loss.reason}, and zeusd restores the old value; acquire it again to set it",
            )
        if (lease := self.current) is not None:
            if lease.holder == peer.process:
                return None
            held_s = max(0, self._out.now_ns - lease.since_ns) // 1_000_000_000
            # Only the process's own user may see which process it is.
            own, command = peer.uid == lease.uid, lease.command
            named = f" ({command})" if command else ""
            process = f"process {lease.holder.pid}{named} of " if own else ""
            return Failure(
                ErrorCode.LEASE_HELD,
                f"{name} of {gpu} is held by {process}user {lease.uid} "
                f"for {held_s} s; wait for it to end, or ask its owner to release it",
            )
        if attempts := self._control.failed_attempts:
            return Failure(
                ErrorCode.RESTORE_PENDING,
                f"{name} of {gpu} could not be restored after its last holder "
                f"({attempts} attempts); zeusd keeps trying, see its log",
            )
        return None

    def gone(self, peer: Peer) -> Failure:
        """Why a waiting or running set is not made any more."""
        return self.refusal(peer) or Failure(
            ErrorCode.LEASE_EXPIRED,
            f"the lease on {self._control.control.value} of {self._control.gpu} was released "
            "before this set was applied; set again to take a new one",
        )


def _computes(before: ProcessUsage | None, now: ProcessUsage) -> bool:
    """Whether a process used the CPU between two checks and is not stopped."""
    if before is None or now.stopped:
        return False
    passed_ns = max(1, now.t_ns - before.t_ns)
    # A silent holder that used at least this share of one CPU between two checks is computing.
    return now.cpu_ns - before.cpu_ns >= 0.05 * passed_ns

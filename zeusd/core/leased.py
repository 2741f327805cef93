"""The lease of a control: heartbeats, expiry, and processes whose lease was revoked or expired."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeusd.core.effects import Forget, Look, Note, Unwatch, Watch
from zeusd.core.leasing import Lease
from zeusd.core.lifecycle import Phase, State
from zeusd.core.model import Failure, Loss, Peer, Process, ProcessUsage
from zeusd.core.outbox import Outbox
from zeusd.core.policy import Settings, Target
from zeusd.core.restorable import Restorable

LOOKS = 5
"""Checks of a silent holder within a TTL: as many as there are heartbeats."""

BUSY_SHARE = 0.05
"""A silent holder that used at least this share of one CPU between two checks is computing."""

Watched: TypeAlias = dict[Process, list["Leased"]]
"""Controls by watched process: the holder, and processes that lost a lease."""


class SharedState(Protocol):
    """What all controls of a node share.

    Attributes:
        settings: The site's settings, with its lease TTLs.
        closed: Why new leases are refused now; None: they are accepted.
        watched: Lists a control under each process that it watches.
        losers: Processes that lost a lease in the present event.
    """

    settings: Settings
    closed: Failure | None
    watched: Watched
    losers: set[Process]


class Leased(Restorable):
    """The leasing half of a control.

    Args:
        gpu: UUID of the GPU.
        control: The control.
        site: The site's restore target.
        outbox: Collects effects.
        node: What it shares with the node's other controls.
        override: Whether a restore overwrites outside changes.
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
        super().__init__(gpu, control, site, outbox, override)
        self._node = node
        self._lost: dict[Process, Loss] = {}
        self._expiry = object()

    @abstractmethod
    def revoke(self, reason: str, clause: str, then: Callable[[], None] | None = None) -> None:
        """Revokes or expires the holder's lease."""

    def _expire_if_due(self, now_ns: int) -> None:
        """Expires a lease whose holder is silent."""
        due_ns = self._out.due_ns.get(self._expiry)
        if self.phase is Phase.HELD and due_ns is not None and now_ns >= due_ns:
            self._silent()

    def held_by(self, process: Process) -> bool:
        """Whether this process holds the lease."""
        lease = self.lease
        return lease is not None and self.life.phase is Phase.HELD and lease.holder == process

    def lost_by(self, process: Process) -> bool:
        """Whether this process lost a lease here and has not acquired it again."""
        return bool(self._lost) and process in self._lost

    def losses_of(self, uid: int) -> int:
        """Number of this user's processes that lost a lease here and do not know it yet."""
        return sum(loss.uid == uid for loss in self._lost.values())

    def recover_loss(self, loss: Loss) -> None:
        """Restores from the journal that this running process has lost a lease."""
        if loss.process not in self._lost:
            self._watch(loss.process)
        self._lost[loss.process] = loss

    def _watch(self, process: Process) -> None:
        self._node.watched.setdefault(process, []).append(self)
        self._out.add(Watch(process))

    def _unwatch(self, process: Process) -> None:
        controls = self._node.watched[process]
        controls.remove(self)
        if not controls:
            del self._node.watched[process]
        self._out.add(Unwatch(process))

    def heartbeat(self) -> None:
        """Handles a heartbeat of the holder."""
        lease, now_ns = self.lease, self._out.now_ns
        assert lease is not None
        lease.forgiven = False
        if lease.recoveries:
            lease.recoveries = 0
            self._journal()
        lease.heard_ns = now_ns
        lease.usage = None
        if self.life.phase is Phase.HELD:
            self._lasts_until(max(lease.expires_ns, now_ns + lease.ttl_ns))

    def reconnected(self) -> None:
        """Handles a new connection of the holder's process: not a heartbeat, but a sign that it
        runs."""
        if self.phase is Phase.HELD and self.lease is not None:
            self._lasts_until(max(self.lease.expires_ns, self.lease.heard_ns + self.lease.ttl_ns))

    def extend(self, by_ns: int) -> None:
        """Extends the lease to at least this time from now."""
        if self.phase is Phase.HELD and self.lease is not None:
            self._lasts_until(max(self.lease.expires_ns, self._out.now_ns + by_ns))

    def _lasts_until(self, until_ns: int) -> None:
        """Sets the lease's end and schedules checks of the holder before it."""
        lease = self.lease
        assert lease is not None
        lease.expires_ns = until_ns
        first_look_ns = until_ns - lease.ttl_ns // LOOKS
        looks = self._node.settings.terms.busy_ttl_ns > lease.ttl_ns and lease.usage is None
        self._out.due_ns[self._expiry] = first_look_ns if looks else until_ns

    def forgive_stall(self, by_ns: int) -> None:
        """Extends the lease after zeusd or its server was stopped: heartbeats may be waiting to be
        read.

        At most once per received heartbeat.
        """
        if self.lease is not None and not self.lease.forgiven:
            self.lease.forgiven = True
            self.extend(by_ns)

    def shorten(self, to_ns: int) -> None:
        """Shortens the lease to at most this time from now."""
        if self.phase is Phase.HELD and self.lease is not None:
            until_ns = min(self.lease.expires_ns, self._out.now_ns + to_ns)
            self.lease.expires_ns = self._out.due_ns[self._expiry] = until_ns

    def forgive(self, process: Process) -> None:
        """Handles a process that knows of its loss, or has exited."""
        loss = self._lost.pop(process, None)
        if loss is not None:
            self._out.add(Forget(loss.key))
            self._unwatch(process)

    def _silent(self) -> None:
        """Checks whether a holder that sent no heartbeat for most of its TTL is computing."""
        lease = self.lease
        assert lease is not None
        out = self._out
        if self._node.settings.terms.busy_ttl_ns <= lease.ttl_ns:
            self.expire()
            return
        out.due_ns.pop(self._expiry)
        ticket = out.ticket(partial(self._looked_at, lease, lease.heard_ns))
        out.add(Look(ticket, lease.holder))

    def _looked_at(self, lease: Lease, heard_ns: int, result: object) -> None:
        if self.lease is not lease or self.phase is not Phase.HELD or lease.heard_ns != heard_ns:
            return  # meanwhile it ended, or its holder sent a heartbeat
        now_ns = self._out.now_ns
        usage = result if isinstance(result, ProcessUsage) else None
        before, lease.usage = lease.usage, usage
        if now_ns < lease.expires_ns:
            self._out.due_ns[self._expiry] = lease.expires_ns
            return
        last_ns = heard_ns + self._node.settings.terms.busy_ttl_ns
        # zeusd was late for its first check; compare the next one with it.
        late = before is None and lease.expires_ns >= heard_ns + lease.ttl_ns
        computes = usage is not None and (_computes(before, usage) or (late and not usage.stopped))
        if now_ns >= last_ns or not computes:
            self.expire()
            return
        lease.expires_ns = min(now_ns + lease.ttl_ns // LOOKS, last_ns)
        self._out.due_ns[self._expiry] = lease.expires_ns

    def expire(self) -> None:
        """Handles a holder that was silent for its TTL."""
        lease = self.lease
        assert lease is not None
        fields = {**self._who(lease), "ttl_s": lease.ttl_ns / 1e9}
        self._out.add(Note("lease_expired", fields, warning=True))
        self.revoke("expired", f"its heartbeat stopped for {lease.ttl_ns / 1e9:g} s")

    def _refusal(self, peer: Peer, acquires: bool = False) -> Failure | None:
        """Why this process may not write now, or not acquire the lease; None: allowed."""
        if self._node.closed is not None:
            return self._node.closed
        loss = self._lost.get(peer.process)
        if loss is not None and not acquires:
            return Failure(
                ErrorCode.LEASE_EXPIRED,
                f"this process lost its lease on {self.control.value} of {self.gpu}, because "
                f"{loss.reason}, and the old value is back; acquire it again if you still want it",
            )
        if self.phase is Phase.HELD and self.lease is not None:
            if self.lease.holder == peer.process:
                return None
            held_s = max(0, self._out.now_ns - self.lease.since_ns) // 1_000_000_000
            # Only the process's own user may see which process it is.
            own, command = peer.uid == self.lease.uid, self.lease.command
            named = f" ({command})" if command else ""
            process = f"process {self.lease.holder.pid}{named} of " if own else ""
            return Failure(
                ErrorCode.LEASE_HELD,
                f"{self.control.value} of {self.gpu} is held by {process}user {self.lease.uid} "
                f"for {held_s} s; wait until it ends, or let it release",
            )
        if self.life.state is State.PENDING:
            attempts = 0 if self._restoration is None else self._restoration.attempts
            return Failure(
                ErrorCode.RESTORE_PENDING,
                f"{self.control.value} of {self.gpu} could not be restored after its last holder "
                f"({attempts} attempts); zeusd keeps trying, see its log",
            )
        return None

    def _given_back(self, peer: Peer) -> Failure:
        """Why a waiting or running set is not made any more."""
        return self._refusal(peer) or Failure(
            ErrorCode.LEASE_EXPIRED,
            f"the lease on {self.control.value} of {self.gpu} was released before this set was "
            "applied; set again to take a new one",
        )


def _computes(before: ProcessUsage | None, now: ProcessUsage) -> bool:
    """Whether a process used the CPU between two checks and is not stopped."""
    if before is None or now.stopped:
        return False
    passed_ns = max(1, now.t_ns - before.t_ns)
    return now.cpu_ns - before.cpu_ns >= BUSY_SHARE * passed_ns

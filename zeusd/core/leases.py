"""Requests about leases: heartbeats, release, listing, and the profiles that holders publish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import (
    Back,
    EmptyResult,
    HeartbeatResult,
    LeaseInfo,
    LeaseList,
    PublishedProfile,
    Released,
)
from zeus_ipc.requests import Goodbye, Heartbeat, ListLeases, PublishProfile, Release, Whose
from zeusd.core.control import ControlMachine
from zeusd.core.entries import PendingRestore
from zeusd.core.holding import HeldLease
from zeusd.core.lifecycle import Phase
from zeusd.core.limiting import CeilingRequests
from zeusd.core.model import Failure, Peer, Refusal
from zeusd.core.node import MISSING
from zeusd.core.outbox import after_all
from zeusd.core.pending import ClientState, Handler, RequestContext

NOT_HELD = Failure(
    ErrorCode.LEASE_EXPIRED,
    "only the holder of the power limit may publish a profile; acquire power_limit first",
)


def back_of(machine: ControlMachine) -> Back:
    """The restore target of a control, as a reply."""
    return Back(value=list(machine.target), source=machine.bounds.source)


class LeaseRequests:
    """Answers `release`, `goodbye`, `leases` and `heartbeat`."""

    def __init__(self, context: RequestContext, ceilings: CeilingRequests) -> None:
        self._context = context
        self._node, self._out = context.node, context.out
        self._ceilings = ceilings
        self.handlers: dict[type[Any], Handler] = {
            Release: self._release,
            Goodbye: self._goodbye,
            ListLeases: self._list_leases,
            Heartbeat: self._heartbeat,
            PublishProfile: self._publish,
        }

    def _release(self, connection: ClientState, request: Release) -> Failure | None:
        peer, admin = connection.peer, self._context.is_admin(connection.peer)
        if request.whose is Whose.ALL and not admin:
            return Failure(
                ErrorCode.PERMISSION_DENIED,
                f"user {peer.uid} may not end the leases of others; "
                "ask an administrator of this node's GPUs",
            )
        self._context.count_change(peer)
        named = [
            machine
            for machine in self._node.machines()
            if (not request.gpus or machine.gpu in request.gpus)
            and (not request.controls or machine.control in request.controls)
        ]
        for machine in named:
            machine.holding.forgive(peer.process)
            if not machine.holding.by(peer.process):
                machine.withdraw(peer.process)
        if request.job and admin:
            self._ceilings.release_job(request.job, request.gpus, peer)
        held = [machine for machine in named if _is_meant(machine, peer, request)]
        self._end(connection, request.id, held, "released")
        return None

    def _goodbye(self, connection: ClientState, request: Goodbye) -> None:
        process = connection.peer.process
        for machine in self._node.machines():
            if not machine.holding.by(process):
                machine.withdraw(process, request.client)
        machines = [
            machine
            for machine in self._node.held_by(process)
            if machine.lease is not None and machine.lease.client == request.client
        ]
        self._end(connection, request.id, machines, "goodbye")

    def _end(
        self, connection: ClientState, request_id: int, machines: list[ControlMachine], reason: str
    ) -> None:
        count, peer = len(machines), connection.peer
        back = after_all(count, lambda: connection.answer(request_id, Released(released=count)))
        for machine in machines:
            # Effects of one lease's end may have ended the next lease.
            lease = machine.holding.current
            if lease is None or lease.holder == peer.process:
                machine.release(reason, then=back)
                continue
            by = f"the lease of user {lease.uid}"  # the record of its end has the holder
            machine.audit.note("revoked", peer, lease=lease.name, reason=by)
            machine.revoke("revoked", self._who_ended(machine, peer), then=back)

    @staticmethod
    def _who_ended(machine: ControlMachine, peer: Peer) -> str:
        if machine.lease is not None and machine.lease.uid == peer.uid:
            return f"process {peer.process.pid} of the same user ended it"
        return f"an administrator (user {peer.uid}) ended it"

    def _list_leases(self, connection: ClientState, request: ListLeases) -> LeaseList:
        peer, admin = connection.peer, self._context.is_admin(connection.peer)
        machines = [machine for gpu in self._node.gpus.values() for machine in gpu.listed()]
        leases = [
            self._describe_lease(machine, lease, admin or peer.uid == lease.uid)
            for machine in machines
            if (lease := machine.lease) is not None
        ]
        leases += [
            self._describe(restore, admin or peer.uid == restore.uid)
            for restore in self._node.pending.values()
        ]
        return LeaseList(leases=leases)

    def _describe(
        self, restore: PendingRestore, shown: bool, machine: ControlMachine | None = None
    ) -> LeaseInfo:
        """A lease, or a pending restore, perhaps on a GPU that has not been found (no machine).
        Only the holder's user may see which process holds it (`shown`)."""
        if machine is not None:
            restoring, back = machine.phase is Phase.RESTORING, back_of(machine)
            trouble = None if machine.trouble is None else machine.trouble.message
        else:
            restoring, trouble = self._node.restore_due(restore), MISSING
            source = "observed" if restore.target else "unreadable"
            back = Back(value=list(restore.target), source=source)
        failing_ns = self._out.audit_log.failing.get((restore.gpu, restore.control.value))
        return LeaseInfo(
            gpu=restore.gpu,
            control=restore.control,
            pid=restore.holder.pid if shown else None,
            uid=restore.uid,
            since_ns=restore.since_ns,
            value=list(restore.values[-1]) if restore.values else None,
            restoring=restoring,
            back=back,
            ttl_ms=restore.ttl_ns // 1_000_000,
            expires_ns=self._out.now_ns + restore.ttl_ns,
            command=(restore.command or None) if shown else None,
            job=(restore.job or None) if shown else None,
            trouble=trouble if restoring else None,
            pending_ns=failing_ns if restoring else None,
        )

    def _describe_lease(self, machine: ControlMachine, lease: HeldLease, shown: bool) -> LeaseInfo:
        profile = None
        if lease.profile is not None:
            limits, progress = lease.profile
            profile = PublishedProfile(limits_mw=list(limits), progress=list(progress))
        more = {
            "expires_ns": lease.expires_ns,
            "asked": None if lease.asked is None else list(lease.asked),
            "profile": profile,
            "measuring": lease.measuring,
            "needs_mw": lease.needs_mw,
        }
        return self._describe(machine.pending_restore(), shown, machine).model_copy(update=more)

    def _publish(self, connection: ClientState, request: PublishProfile) -> None:
        def publish(uuid: str) -> EmptyResult:
            machine = self._node.machine(uuid, Control.POWER_LIMIT)
            self._context.count_change(connection.peer)
            if machine.lease is None or not machine.holding.by(connection.peer.process):
                raise Refusal(NOT_HELD)
            known = tuple(request.limits_mw), tuple(request.progress)
            machine.lease.profile = known if request.limits_mw else None
            machine.lease.measuring = request.measuring
            machine.lease.needs_mw = request.needs_mw
            return EmptyResult()

        self._context.track(connection, request).each(publish)

    def _heartbeat(self, connection: ClientState, request: Heartbeat) -> HeartbeatResult | None:
        process, held = connection.peer.process, 0
        ttl_ns = self._node.settings.terms.ttl_ns
        lost: list[list[str]] = []
        for machine in self._node.watched.get(process, ()):
            if machine.lease is not None and machine.holding.by(process):
                machine.holding.heartbeat()
                ttl_ns = min(ttl_ns, machine.lease.ttl_ns) if held else machine.lease.ttl_ns
                held += 1
            if machine.holding.lost_by(process):
                lost.append([machine.gpu, machine.control.value])
        if request.losses == len(lost):
            connection.watch = request
            return None
        return HeartbeatResult(leases=held, ttl_ms=ttl_ns // 1_000_000, lost=lost)

    def lost(self, connections: Iterable[ClientState]) -> None:
        """Processes lost leases: answers those of their requests that wait for that."""
        losers, self._node.losers = self._node.losers, set()
        for connection in connections:
            request = connection.watch
            if request is not None and connection.peer.process in losers:
                connection.watch = None
                if (result := self._heartbeat(connection, request)) is not None:
                    connection.answer(request.id, result)


def _is_meant(machine: ControlMachine, peer: Peer, request: Release) -> bool:
    """Whether a release applies to the lease, if any, of this control."""
    lease = machine.holding.current
    if lease is None:
        return False
    if request.whose is Whose.PROCESS and lease.holder != peer.process:
        return False
    if request.whose is Whose.USER and lease.uid != peer.uid:
        return False
    if request.pids and lease.holder.pid not in request.pids:
        return False
    return not request.job or lease.job == request.job

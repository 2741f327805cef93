"""Requests about leases: heartbeats, release, listing, and the profiles that holders publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import (
    Back,
    Done,
    HeartbeatResult,
    LeaseInfo,
    LeaseList,
    PowerProfile,
    Released,
)
from zeus_ipc.requests import Goodbye, Heartbeat, ListLeases, PublishProfile, Release, Whose
from zeusd.core.control import ControlMachine
from zeusd.core.effects import Note
from zeusd.core.entries import PendingRestore
from zeusd.core.leasing import Lease
from zeusd.core.lifecycle import Phase
from zeusd.core.limiting import CeilingRequests
from zeusd.core.model import Failure, Peer
from zeusd.core.node import MISSING, NodeState
from zeusd.core.outbox import Outbox
from zeusd.core.pending import ClientState, PerGpu

NOT_HELD = Failure(
    ErrorCode.LEASE_EXPIRED,
    "this process does not hold the lease of the power limit, with which a profile is published; "
    "acquire power_limit first",
)


def back_of(machine: ControlMachine) -> Back:
    """The restore target of a control, as a reply."""
    return Back(value=list(machine.target), source=machine.bounds.source)


class LeaseRequests:
    """Answers `release`, `goodbye`, `leases` and `heartbeat`."""

    def __init__(
        self,
        node: NodeState,
        outbox: Outbox,
        ceilings: CeilingRequests,
        too_fast: Callable[[Peer], Failure | None],
        track: Callable[..., PerGpu],
    ) -> None:
        self._node = node
        self._out = outbox
        self._ceilings = ceilings
        self._too_fast = too_fast
        self._track = track
        self.handlers: dict[type[Any], Callable[[ClientState, Any], None]] = {
            Release: self._release,
            Goodbye: self._goodbye,
            ListLeases: self._list_leases,
            Heartbeat: self._heartbeat,
            PublishProfile: self._publish,
        }

    def _release(self, connection: ClientState, request: Release) -> None:
        peer = connection.peer
        if request.whose is Whose.ALL and not self._node.settings.access.is_admin(peer):
            failure = Failure(
                ErrorCode.PERMISSION_DENIED,
                f"user {peer.uid} may not end the leases of others; "
                "ask an administrator of this node's GPUs",
            )
            connection.refuse(self._out, request.id, failure)
            return
        too_fast = self._too_fast(peer)
        if too_fast is not None:
            connection.refuse(self._out, request.id, too_fast)
            return
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
        if request.job and self._node.settings.access.is_admin(peer):
            self._ceilings.release_job(request.job, request.gpus, peer)
        held = [machine for machine in named if _is_meant(machine, peer, request)]
        self._end(connection, request.id, held, "released")

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
        missing = len(machines)

        def answer() -> None:
            connection.reply(self._out, request_id, Released(released=len(machines)))

        def back() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                answer()

        if not machines:
            answer()
        peer = connection.peer
        for machine in machines:
            # Effects of one lease's end may have ended the next lease.
            if machine.phase is not Phase.HELD or machine.holding.by(peer.process):
                machine.release(reason, then=back)
            else:
                self._note_revoked(machine, peer)
                machine.revoke("revoked", self._who_ended(machine, peer), then=back)

    def _note_revoked(self, machine: ControlMachine, peer: Peer) -> None:
        """The user who ended a lease, in addition to the holder."""
        lease = machine.lease
        if machine.phase is not Phase.HELD or lease is None:
            return  # the end of another lease also ended this one
        fields = {
            "gpu": machine.gpu,
            "control": machine.control.value,
            "uid": peer.uid,
            "pid": peer.process.pid,
            "command": peer.command,
            "job": peer.job,
            "lease": lease.name,
            "reason": f"the lease of user {lease.uid}",
        }
        self._out.add(Note("revoked", fields))

    @staticmethod
    def _who_ended(machine: ControlMachine, peer: Peer) -> str:
        if machine.lease is not None and machine.lease.uid == peer.uid:
            return f"process {peer.process.pid} of the same user ended it"
        return f"an administrator (user {peer.uid}) ended it"

    def _list_leases(self, connection: ClientState, request: ListLeases) -> None:
        peer = connection.peer
        admin = self._node.settings.access.is_admin(peer)
        leases = [
            _describe_lease(
                machine,
                admin or peer.uid == machine.lease.uid,
                self._out.audit_log.failing.get((machine.gpu, machine.control.value)),
            )
            for gpu in self._node.gpus.values()
            for machine in gpu.listed()
            if machine.lease is not None
        ]
        leases += [
            self._describe_pending(restore, admin or peer.uid == restore.uid)
            for restore in self._node.pending.values()
        ]
        connection.reply(self._out, request.id, LeaseList(leases=leases))

    def _describe_pending(self, restore: PendingRestore, open_to_reader: bool) -> LeaseInfo:
        """A lease, or a pending restore, on a GPU that has not been found."""
        restoring = self._node.restore_due(restore)
        return LeaseInfo(
            gpu=restore.gpu,
            control=restore.control,
            pid=restore.holder.pid if open_to_reader else None,
            uid=restore.uid,
            since_ns=restore.since_ns,
            value=list(restore.values[-1]) if restore.values else None,
            restoring=restoring,
            back=Back(
                value=list(restore.target), source="observed" if restore.target else "unreadable"
            ),
            ttl_ms=restore.ttl_ns // 1_000_000,
            expires_ns=self._out.now_ns + restore.ttl_ns,
            command=(restore.command or None) if open_to_reader else None,
            job=(restore.job or None) if open_to_reader else None,
            trouble=MISSING if restoring else None,
            pending_ns=self._out.audit_log.failing.get((restore.gpu, restore.control.value)),
        )

    def _publish(self, connection: ClientState, request: PublishProfile) -> None:
        pending = self._track(connection, request)
        too_fast = self._too_fast(connection.peer)
        for uuid in pending.gpus():
            machine = self._node.machine(uuid, Control.POWER_LIMIT)
            if isinstance(machine, Failure):
                pending.fail(uuid, machine)
            elif too_fast is not None:
                pending.fail(uuid, too_fast)
            elif machine.lease is None or not machine.holding.by(connection.peer.process):
                pending.fail(uuid, NOT_HELD)
            else:
                known = tuple(request.limits_mw), tuple(request.progress)
                machine.lease.profile = known if request.limits_mw else None
                machine.lease.measuring = request.measuring
                machine.lease.needs_mw = request.needs_mw
                pending.succeed(uuid, Done())

    def _heartbeat(self, connection: ClientState, request: Heartbeat) -> None:
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
            return
        result = HeartbeatResult(leases=held, ttl_ms=ttl_ns // 1_000_000, lost=lost)
        connection.reply(self._out, request.id, result)

    def lost(self, connections: Iterable[ClientState]) -> None:
        """Processes lost leases: answers those of their requests that wait for that."""
        losers, self._node.losers = self._node.losers, set()
        for connection in connections:
            request = connection.watch
            if request is not None and connection.peer.process in losers:
                connection.watch = None
                self._heartbeat(connection, request)


def _is_meant(machine: ControlMachine, peer: Peer, request: Release) -> bool:
    """Whether a release applies to the lease, if any, of this control."""
    lease = machine.lease
    if machine.phase is not Phase.HELD or lease is None:
        return False
    if request.whose is Whose.PROCESS and lease.holder != peer.process:
        return False
    if request.whose is Whose.USER and lease.uid != peer.uid:
        return False
    if request.pids and lease.holder.pid not in request.pids:
        return False
    return not request.job or lease.job == request.job


def _describe_profile(lease: Lease) -> PowerProfile | None:
    if lease.profile is None:
        return None
    limits, progress = lease.profile
    return PowerProfile(limits_mw=list(limits), progress=list(progress))


def _describe_lease(
    machine: ControlMachine, open_to_reader: bool, pending_ns: int | None
) -> LeaseInfo:
    """The lease of a control, as a reply. Only the holder's user may see which process holds it."""
    lease = machine.lease
    assert lease is not None
    restoring = machine.phase is Phase.RESTORING
    return LeaseInfo(
        gpu=machine.gpu,
        control=machine.control,
        pid=lease.holder.pid if open_to_reader else None,
        uid=lease.uid,
        since_ns=lease.since_ns,
        value=None if machine.values.newest is None else list(machine.values.newest),
        asked=None if lease.asked is None else list(lease.asked),
        restoring=restoring,
        back=back_of(machine),
        ttl_ms=lease.ttl_ns // 1_000_000,
        expires_ns=lease.expires_ns,
        command=(lease.command or None) if open_to_reader else None,
        job=(lease.job or None) if open_to_reader else None,
        profile=_describe_profile(lease),
        measuring=lease.measuring,
        needs_mw=lease.needs_mw,
        trouble=machine.trouble.message if restoring and machine.trouble else None,
        pending_ns=pending_ns if restoring else None,
    )

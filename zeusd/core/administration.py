"""Administrators' requests, and everyone's requests for the rules, the audit log and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import (
    AuditRecords,
    Count,
    EmptyResult,
    Metrics,
    NodeInfo,
    Permission,
    Policy,
    Quiesced,
    Restored,
)
from zeus_ipc.requests import (
    GetAudit,
    GetMetrics,
    GetPolicy,
    Persist,
    Quiesce,
    Restore,
    Resume,
    SetCeiling,
)
from zeus_ipc.wire import Message
from zeusd.core.accounting import for_reader, sees_all
from zeusd.core.audit_log import public
from zeusd.core.bounds import PERSISTED
from zeusd.core.control import ControlMachine
from zeusd.core.effects import (
    CloseDriver,
    Forget,
    OpenDriver,
    Put,
    Read,
    ReadingMade,
    RuntimeCounters,
)
from zeusd.core.entries import CEILING, QUIESCED, CeilingEntry, Mark, key_of
from zeusd.core.lifecycle import Phase
from zeusd.core.limiting import CeilingRequests
from zeusd.core.model import Failure, Peer, Refusal, refuse_if
from zeusd.core.node import NodeGpu
from zeusd.core.outbox import after_all
from zeusd.core.pending import ClientState, Handler, Pending, RequestContext
from zeusd.devices.port import CallOutcome

DRIVER_CLOSED = "an administrator made zeusd close the driver"
"""Reason for holders whose leases it revokes."""


class Administration:
    """Answers `restore`, `persist`, `quiesce`, `resume`, `policy`, `audit` and `metrics`."""

    def __init__(
        self,
        context: RequestContext,
        ceilings: CeilingRequests,
        describe_node: Callable[[], NodeInfo],
    ) -> None:
        self._context = context
        self._node, self._out = context.node, context.out
        self._describe_node = describe_node
        self._change: str | None = None
        self._restoring: list[ControlMachine] = []
        self._askers: list[tuple[ClientState, int]] = []
        self.connections: Callable[[], int] = lambda: 0
        admins = context.for_admins
        self.handlers: dict[type[Any], Handler] = {
            Restore: admins("restore what others set", self._restore),
            Persist: admins("persist settings", self._persist),
            SetCeiling: admins("set a ceiling", ceilings.set_ceiling),
            Quiesce: admins("close the driver", self._quiesce),
            Resume: admins("open the driver", self._resume),
            GetPolicy: self._policy,
            GetAudit: self._audit,
            GetMetrics: self._metrics,
        }

    # --------------------------------------------------------------------------------- restoring

    def _restore(self, connection: ClientState, request: Restore) -> Failure | None:
        refuse_if(self._node.quiesced)
        if not (request.gpus or self._node.gpus):
            return Failure(ErrorCode.UNKNOWN_GPU, "this node has no GPUs; see `zeusctl doctor`")
        names = request.gpus or [*self._node.gpus]
        pending = self._context.track(connection, request, names)

        def restore(uuid: str) -> Restored | None:
            gpu = self._node.gpus.get(uuid)
            if request.forget:
                return self._forget(connection.peer, uuid)
            if gpu is None:
                raise Refusal(self._node.unknown(uuid))
            return self._restore_gpu(connection.peer, pending, gpu, request)

        pending.each(restore)
        return None

    def _forget(self, peer: Peer, uuid: str) -> Restored:
        """Drops the restores of a GPU that is not there."""
        gpus = self._node.gpus
        waiting = [restore for restore in self._node.pending.values() if restore.gpu == uuid]
        if not gpus or uuid in gpus or not waiting:
            why = f"{uuid} is on this node; reset it" if uuid in gpus else f"{uuid} has none"
            if not gpus:
                why = "zeusd has found no GPU at all; see `zeusctl doctor`"
            message = f"only pending restores of missing GPUs can be forgotten, and {why}"
            raise Refusal(Failure(ErrorCode.BAD_REQUEST, message))
        for restore in waiting:
            del self._node.pending[uuid, restore.control]
            self._out.add(Forget(restore.key))
            where = {"gpu": uuid, "control": restore.control.value}
            self._out.note("restore_forgotten", True, **where, **peer.fields)
        return Restored(controls={restore.control.value: "forgotten" for restore in waiting})

    def _restore_gpu(
        self, peer: Peer, pending: Pending, gpu: NodeGpu, request: Restore
    ) -> Restored | None:
        uuid, wanted = gpu.info.uuid, {*(request.controls or Control)}
        offered = [machine for machine in gpu.machines.values() if machine.control in wanted]
        kept = [one for one in offered if request.jobs and _of_other_job(one, request.jobs)]
        machines = [machine for machine in offered if machine not in kept]
        outcomes = {machine.control.value: "held" for machine in kept}
        if not offered:
            why = f"{uuid} offers none of these controls; omit this GPU"
            raise Refusal(Failure(ErrorCode.NOT_SUPPORTED, why))

        def over() -> None:
            restored = {machine.control.value: _outcome(machine) for machine in machines}
            pending.put(uuid, Restored(controls=outcomes | restored))

        back = after_all(len(machines), over)
        clause = f"an administrator (user {peer.uid}) reset the GPU"
        for machine in machines:
            persisted = machine.ceilings.pop(PERSISTED, None)
            machine.reset(peer, clause, back, None if persisted is None else persisted.value)
            if persisted is not None:
                # Last: if zeusd is killed before, the journal has either this or the pending
                # restore.
                self._out.add(Forget(_persisted_key(machine)))
        return None

    # ----------------------------------------------------------------------------------- persist

    def _persist(self, connection: ClientState, request: Persist) -> None:
        pending, peer = self._context.track(connection, request), connection.peer

        def persist(uuid: str) -> None:
            controls = dict.fromkeys(request.controls)
            machines = [self._node.machine(uuid, control) for control in controls]
            refuse_if(self._node.closed)
            for machine in machines:
                refuse_if(_unset(machine, peer))
            self._persist_gpu(pending, uuid, machines, peer.uid)

        pending.each(persist)

    def _persist_gpu(
        self, pending: Pending, uuid: str, machines: list[ControlMachine], uid: int
    ) -> None:
        released = after_all(len(machines), lambda: pending.put(uuid, EmptyResult()))

        def recorded(machine: ControlMachine, value: CeilingEntry, failure: object) -> None:
            if failure is None:
                machine.persist(value)
                machine.release("persisted", then=released)
            else:
                pending.put(uuid, failure)

        for machine in machines:
            # Durable before the lease ends: if zeusd is killed in between, the value persists.
            assert machine.values.newest is not None
            value = CeilingEntry(machine.values.newest, uid)
            ticket = self._out.ticket(partial(recorded, machine, value))
            self._out.add(Put(_persisted_key(machine), value, ticket=ticket))

    # --------------------------------------------------------------------------- quiescing

    def _quiesce(self, connection: ClientState, request: Quiesce) -> None:
        if not self._begin(connection, request):
            return
        if self._node.quiesced_ns is not None:
            self._close_driver()  # again: a call that had not returned may have returned by now
            return
        self._node.quiesced_ns = self._out.now_ns
        why = self._node.quiesced
        assert why is not None
        self._out.add(Put(QUIESCED, Mark(self._out.now_ns)))
        self._out.note("quiesced", True, **connection.peer.fields)
        # Time for all restores before the driver is closed anyway.
        self._out.due_ns[self._close_anyway] = self._out.now_ns + 5_000_000_000
        self._restoring = self._node.machines()
        self._node.closed = why
        for machine in self._node.machines():
            machine.close(why)
        for machine in [*self._restoring]:
            machine.revoke("quiesced", DRIVER_CLOSED, then=partial(self._back, machine))
        self._close_if_settled()

    def _back(self, machine: ControlMachine) -> None:
        """Handles a control that was restored, or whose first attempt failed and is not
        repeated."""
        if machine in self._restoring:
            self._suspend(machine)
            self._close_if_settled()

    def _suspend(self, machine: ControlMachine) -> None:
        self._restoring.remove(machine)
        machine.suspend()

    def _close_anyway(self) -> None:
        """The time limit has passed: an unresponsive GPU must not delay the reset."""
        for machine in [*self._restoring]:
            self._suspend(machine)
        self._close_driver()

    def _close_if_settled(self) -> None:
        if not self._restoring and self._out.due_ns.drop(self._close_anyway) is not None:
            self._close_driver()

    def _close_driver(self) -> None:
        self._out.add(CloseDriver(self._out.ticket(self._gone)))

    def _gone(self, still_open: object) -> None:
        assert isinstance(still_open, tuple)
        self._end(self._describe_quiesced(still_open))

    def _describe_quiesced(self, still_open: Iterable[str]) -> Quiesced:
        assert self._node.quiesced_ns is not None
        pending = _named(m for m in self._node.machines() if m.phase is not Phase.FREE)
        return Quiesced(since_ns=self._node.quiesced_ns, open=list(still_open), pending=pending)

    def _resume(self, connection: ClientState, request: Resume) -> NodeInfo | None:
        if self._node.quiesced_ns is None:
            return self._describe_node()
        if self._begin(connection, request):
            self._out.add(OpenDriver(self._out.ticket(partial(self._resumed, connection.peer))))
        return None

    def _resumed(self, peer: Peer, result: object) -> None:
        """Handles the end of the search for GPUs; `Core.gpus_found` has received those present."""
        self._node.quiesced_ns = self._node.closed = None
        self._out.add(Forget(QUIESCED))
        self._out.note("resumed", True, **peer.fields)
        for gpu in self._node.gpus.values():
            for control, machine in gpu.machines.items():
                machine.resume(gpu.facts.values.get(control))
                if machine.bounds.persisted:  # a reset GPU has lost it
                    machine.reset(peer, "an administrator resumed zeusd", written=machine.target)
        self._end(self._describe_node())

    def _begin(self, connection: ClientState, request: Quiesce | Resume) -> bool:
        """Whether to start. A repeated request for an operation in progress waits for it."""
        if self._change not in (None, request.op) or self._node.stopping:
            why = "the driver is being closed or reopened; try again in a few seconds"
            raise Refusal(Failure(ErrorCode.OVERLOADED, why))
        self._askers.append((connection, request.id))
        begins, self._change = self._change is None, request.op
        return begins

    def _end(self, result: Message) -> None:
        self._change = None
        askers, self._askers = self._askers, []
        for connection, request_id in askers:
            connection.answer(request_id, result)

    # -------------------------------------------------------------------------------- reporting

    def _policy(self, connection: ClientState, request: GetPolicy) -> Policy:
        peer = connection.peer
        gpus = {
            uuid: {
                machine.control.value: self._permission(connection, gpu, machine)
                for machine in gpu.listed()
            }
            for uuid, gpu in self._node.gpus.items()
        }
        admin = self._context.is_admin(peer)
        return Policy(uid=peer.uid, admin=admin, on_host=peer.on_host, gpus=gpus)

    def _permission(
        self, connection: ClientState, gpu: NodeGpu, machine: ControlMachine
    ) -> Permission:
        right = connection.right(self._node.settings.access, gpu.info, machine.control)
        if right.refusal is not None:
            return Permission(allowed=False, why=right.refusal.message, ranges=[])
        ranges, bounds = right.ranges, self._node.bounds(machine, right.admin)
        if bounds is not None:
            low, high = bounds
            ranges = [(max(low, span[0]), min(high, span[1])) for span in ranges or [bounds]]
        return Permission(allowed=True, why="", ranges=[list(span) for span in ranges])

    def _audit(self, connection: ClientState, request: GetAudit) -> AuditRecords:
        peer, admin = connection.peer, self._context.is_admin(connection.peer)
        records = [
            record if admin or record.uid == peer.uid else public(record)
            for record in self._out.audit_log.newest(request.after, request.before, request.limit)
        ]
        audit_log = self._out.audit_log
        return AuditRecords(
            records=records, dropped=audit_log.dropped, complete_ns=audit_log.complete_ns
        )

    def _metrics(self, connection: ClientState, request: GetMetrics) -> None:
        ticket = self._out.ticket(partial(self._measured, connection, request.id))
        self._out.add(Read(ticket, "", ReadingMade.METRICS))

    def _measured(self, connection: ClientState, request_id: int, result: object) -> None:
        audit_log, machines = self._out.audit_log, [*self._node.machines()]
        assert isinstance(result, RuntimeCounters)
        peer, ledger = connection.peer, result.ledger
        if ledger is not None and not sees_all(self._node.settings, peer):
            ledger = for_reader(ledger, peer.uid)

        def counts(event: str, *labels: str) -> list[Count]:
            return [
                Count(labels=dict(zip(labels, values, strict=True)), count=count)
                for values, count in audit_log.total(event)
            ]

        metrics = Metrics(
            t_ns=self._out.now_ns,
            started_ns=self._node.started_ns,
            changes=counts("set", "control", "result"),
            restores=counts("lease_ended", "reason", "result"),
            restore_failures=counts("restore_failed", "control"),
            outside_changes=counts("outside_change", "control", "result"),
            refusals=counts("refusal", "code"),
            lease_expiries=sum(count for _, count in audit_log.total("lease_expired")),
            pending=_named(m for m in machines if m.failed_attempts),
            connections=self.connections(),
            calls=result.calls,
            sources=result.sources,
            users=result.users,
            ledger=ledger,
        )
        connection.answer(request_id, metrics)


def _of_other_job(machine: ControlMachine, jobs: Iterable[str]) -> bool:
    """Whether a job with none of these names holds the control."""
    lease = machine.holding.current
    return lease is not None and bool(lease.job) and lease.job not in jobs


def _persisted_key(machine: ControlMachine) -> str:
    return key_of(CEILING, machine.gpu, machine.control, PERSISTED)


def _outcome(machine: ControlMachine) -> str:
    if machine.trouble is None:
        return "ok"
    # No library reports beforehand whether a GPU has it, such as memory clocks on Hopper.
    free, outcome = machine.phase is Phase.FREE, machine.trouble.outcome
    return "not_offered" if free and outcome is CallOutcome.UNSUPPORTED else machine.trouble.message


def _unset(machine: ControlMachine, peer: Peer) -> Failure | None:
    """Why a control has no value to persist."""
    if machine.spec.merges:
        return Failure(
            ErrorCode.NOT_SUPPORTED,
            f"{machine.control.value} of {machine.gpu} cannot be persisted, because other "
            "processes add to it; use `nvidia-smi power-profiles`",
        )
    if machine.holding.by(peer.process) and machine.values.newest is not None:
        return None
    return Failure(
        ErrorCode.BAD_REQUEST,
        f"this process has not set {machine.control.value} of {machine.gpu}; set it before "
        "you persist it",
    )


def _named(machines: Iterable[ControlMachine]) -> list[list[str]]:
    return [[machine.gpu, machine.control.value] for machine in machines]

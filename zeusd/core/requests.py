"""Answers the requests of clients: sets and acquires here, the others in other modules.

`access.Access` and `_check_set` decide who may change what; `control.ControlMachine` leases, writes
and restores controls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zeus_ipc import replies
from zeus_ipc.controls import (
    SPECS,
    Control,
    ControlSpec,
    ControlValue,
    exclusive,
    profile_name,
)
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import GpuInfo, NodeInfo
from zeus_ipc.requests import (
    Acquire,
    Hello,
    Request,
    Reset,
    SetControl,
    SetRequest,
)
from zeus_ipc.wire import PROTOCOL_VERSION
from zeusd.core.access import Access, Right
from zeusd.core.accounting import AccountingRequests
from zeusd.core.administration import Administration
from zeusd.core.bounds import PERSISTED, ceiling_text
from zeusd.core.control import ControlMachine
from zeusd.core.effects import Read, ReadingMade
from zeusd.core.holding import Done, Set
from zeusd.core.leases import LeaseRequests, back_of
from zeusd.core.lifecycle import Phase
from zeusd.core.limiting import CeilingRequests, describe_ceilings
from zeusd.core.model import Failure, Peer, Refusal, refuse_if
from zeusd.core.node import NodeState
from zeusd.core.outbox import after_all
from zeusd.core.pending import (
    ClientState,
    Handler,
    Pending,
    RateLimiter,
    RequestContext,
    error_body,
)

MAX_WAITING_REQUESTS = 64
"""Requests of one connection that may wait for devices."""

LATE = Failure(
    ErrorCode.DEADLINE_EXCEEDED,
    "the request reached zeusd after its deadline and was dropped; try again",
)
TOO_MANY_WAIT = Failure(
    ErrorCode.OVERLOADED,
    f"{MAX_WAITING_REQUESTS} requests of this connection already wait; let some finish first",
)

SHUTTING_DOWN = Failure(
    ErrorCode.SHUTTING_DOWN, "zeusd is stopping and accepts no changes; try again later"
)

AS_ASKED = replies.Applied()


def asked_of(request: SetRequest) -> ControlValue | None:
    """The value that a set asks for; None: the restore target."""
    return None if isinstance(request, Reset) else SPECS[request.control].normal(request.value)


class RequestAnswers:
    """Answers requests, now or when devices have answered."""

    def __init__(
        self, node: NodeState, daemon_version: str, simulated: str | None, stream: str | None
    ) -> None:
        self._node, self._out = node, node.out
        self._daemon_version = daemon_version
        self._simulated = simulated
        self._stream = stream
        self.context = context = RequestContext(node)
        # Refusals of one user that are logged; a flood of them must not become a flood of records.
        self._refusals = RateLimiter(1.0, 10)
        self.ceilings = CeilingRequests(context)
        self.administration = Administration(context, self.ceilings, self.describe_node)
        self.leases = LeaseRequests(context, self.ceilings)
        self.handlers: dict[type[Any], Handler] = {
            Hello: lambda connection, request: self.describe_node(),
            Acquire: self._acquire,
            **self.leases.handlers,
            **self.administration.handlers,
            **AccountingRequests(context).handlers,
            SetControl: self._set,
            Reset: self._set,
        }

    def serve(self, connection: ClientState, request: Request) -> None:
        """Answers a request, now or later."""
        try:
            if request.deadline_ns and self._out.now_ns > request.deadline_ns:
                raise Refusal(LATE)
            if connection.waiting >= MAX_WAITING_REQUESTS:
                raise Refusal(TOO_MANY_WAIT)
            result = self.handlers[type(request)](connection, request)
        except Refusal as refusal:
            result = refusal.failure
            if not getattr(request, "block", True):
                error = error_body(result, request.gpus[0])  # type: ignore[union-attr]  # has block
                connection.deferrals.add(error)
                return
        if result is not None:
            connection.answer(request.id, result)

    # --------------------------------------------------------------------------------- internals

    @property
    def _access(self) -> Access:
        return self._node.settings.access

    def describe_node(self) -> NodeInfo:
        """The daemon and its node, as of now."""
        gpus = sorted((gpu.info for gpu in self._node.gpus.values()), key=lambda info: info.index)
        closed = self._node.quiesced_ns is not None
        return NodeInfo(
            protocol=PROTOCOL_VERSION,
            protocols=[PROTOCOL_VERSION],
            daemon_version=self._daemon_version,
            driver_version=self._node.driver_version,
            lease_ttl_ms=self._node.settings.terms.ttl_ns // 1_000_000,
            simulated=self._simulated,
            gpus=[self._describe_gpu(info) for info in gpus],
            cpus=self._node.cpus,
            stream=self._stream,
            started_ns=self._node.started_ns,
            quiesced_ns=self._node.quiesced_ns,
            findings=[] if closed else [*self._node.settings.findings(gpus)],
            problems=self._node.problems(),
        )

    def _describe_gpu(self, info: GpuInfo) -> GpuInfo:
        """A GPU with what only the core knows of it."""
        gpu = self._node.gpus[info.uuid]
        machines = gpu.listed()
        known: dict[str, Any] = {
            "persisted": [
                machine.control.value for machine in machines if machine.bounds.persisted
            ],
            "ceilings": [
                ceiling
                for machine in machines
                for ceiling in describe_ceilings(machine, self._out.boot_offset_ns)
            ],
        }
        machine = gpu.machines.get(Control.POWER_LIMIT)
        if machine is not None:
            known["power_limit_site_mw"] = machine.bounds.site_limit_mw
            known["power_limit_configured"] = machine.bounds.configured
            known["power_limit_highest_mw"] = machine.bounds.highest()[0]
            known["power_limit_enforced"] = machine.bounds.active
        return info.model_copy(update=known)

    def _set(self, connection: ClientState, request: SetRequest) -> None:
        control, asked = request.control, asked_of(request)
        settings, peer = self._node.settings, connection.peer
        pending = self.context.track(connection, request) if request.block else None
        for uuid in dict.fromkeys(request.gpus):
            done = self._done(connection, pending, uuid, asked)
            try:
                machine = self._node.machine(uuid, control)
                info = self._node.gpus[uuid].facts.info
                right = connection.right(settings.access, info, control)
                self.context.count_change(peer)
                refuse_if(self._check_set(right, machine, asked))
            except Refusal as refusal:
                done(refusal.failure)
                continue
            item = Set(
                peer=peer,
                client=request.client,
                value=machine.reset_value if asked is None else asked,
                deadline_ns=request.deadline_ns,
                ttl_ns=settings.terms.ttl_ns,
                block=request.block,
                done=done,
                over=PERSISTED if right.admin else "",
            )
            self._submit(machine, item, right, asked, request.together)

    def _done(
        self,
        connection: ClientState,
        pending: Pending | None,
        uuid: str,
        asked: ControlValue | None,
    ) -> Done:
        """What takes the result of a set; without `block` (no `pending`) only a failure counts."""
        deferrals = connection.deferrals

        def done(answer: Failure | ControlValue | None) -> None:
            if isinstance(answer, Failure):
                self._out.audit_log.refused(answer.code)
                if pending is None:
                    deferrals.add(error_body(answer, uuid))
                else:
                    pending.put(uuid, answer)
            elif pending is not None:
                as_asked = answer is None or answer == asked
                result = AS_ASKED if as_asked else replies.Applied(applied=list(answer or ()))
                pending.put(uuid, result)

        return done

    def _too_much(self, peer: Peer, machine: ControlMachine) -> Failure | None:
        """Why this user gets no further lease."""
        if machine.holding.lost_by(peer.process):
            return None
        machines, owner_of = self._node.machines(), self._node.owner_of
        owner, leases = owner_of(peer.uid), [machine.holding.current for machine in machines]
        held = sum(lease is not None and owner_of(lease.uid) == owner for lease in leases)
        if held >= self._access.leases_per_user:
            return Failure(
                ErrorCode.OVERLOADED,
                f"user {peer.uid} holds {held} leases already, which is the most that this site "
                "allows; release some first",
            )
        losses = [loss for machine in machines for loss in machine.holding.losses]
        lost = sum(owner_of(loss.uid) == owner for loss in losses)
        if lost >= self._access.losses_per_user:
            return Failure(
                ErrorCode.OVERLOADED,
                f"processes of user {peer.uid} have not acknowledged the loss of {lost} leases; "
                "end these processes, or release the leases in them",
            )
        return None

    def _excluded(self, machine: ControlMachine) -> Failure | None:
        """Why this control is not leased beside others of its GPU."""
        for other in self._node.gpus[machine.gpu].machines.values():
            if other.phase is Phase.HELD and exclusive(machine.control, other.control):
                return Failure(
                    ErrorCode.LEASE_HELD,
                    f"{machine.control.value} of {machine.gpu} would act beside "
                    f"{other.control.value}, which is leased, and no driver documents which of "
                    f"them counts; release {other.control.value} first, or ask for "
                    "both together (zeusctl set --together)",
                )
        return None

    def _submit(
        self,
        machine: ControlMachine,
        item: Set,
        right: Right,
        asked: ControlValue | None = None,
        together: bool = False,
    ) -> None:
        """Hands a set or an acquire to its control, if this user may do that.

        `asked` is the value that the user chose; None: a reset or an acquire.
        """
        peer, refusal = item.peer, right.refuse(asked)
        held = machine.holding.by(peer.process)
        if refusal is None and not held:
            refusal = self._too_much(peer, machine)
            if refusal is None and not together:
                refusal = self._excluded(machine)
        if refusal is not None:
            self._refused(peer, machine, refusal)
            item.done(refusal)
        elif held or not right.must_compute:
            machine.submit(item)
        else:
            ticket = self._out.ticket(partial(self._computes, machine, item))
            self._out.add(Read(ticket, machine.gpu, ReadingMade.COMPUTE_UIDS))

    def _computes(self, machine: ControlMachine, item: Set, result: object) -> None:
        """Which users compute on the GPU has been read, for a site that asks for that."""
        if isinstance(result, Failure):
            item.done(result)
            return
        assert isinstance(result, frozenset)
        if item.peer.uid in result:
            machine.submit(item)
            return
        refusal = Failure(
            ErrorCode.PERMISSION_DENIED,
            f"user {item.peer.uid} may change {machine.control.value} of {machine.gpu} only while "
            "one of the user's processes computes on it; set it after the GPU is in use",
        )
        self._refused(item.peer, machine, refusal)
        item.done(refusal)

    def _refused(self, peer: Peer, machine: ControlMachine, refusal: Failure) -> None:
        if self._refusals.take(self._node.owner_of(peer.uid), self._out.now_ns):
            machine.audit.note("refused", peer, warning=True, result=refusal.message)

    def _check_set(
        self, right: Right, machine: ControlMachine, asked: ControlValue | None
    ) -> Failure | None:
        """Why this set is not possible at all; None: it may be."""
        info = right.gpu
        if self._node.closed is not None or asked is None:
            return self._node.closed
        fault = machine.spec.fault(asked)
        if fault is not None:
            return Failure(ErrorCode.OUT_OF_RANGE, f"{fault}; nothing was changed on {info.uuid}")
        if machine.control is Control.POWER_PROFILE:
            return _unknown_profile(info, asked)
        bounds, spec = self._node.bounds(machine, right.admin), machine.spec
        if bounds is None or not asked:
            return None
        if not spec.ceilings:
            return _no_clock(spec, info, asked, bounds)
        low, high = bounds
        if low <= asked[0] <= high:
            return None
        bound, own = "this GPU accepts no less", PERSISTED if right.admin else ""
        if asked[0] > high:
            bound = "this GPU accepts no more"
            if machine.bounds.site_limit_mw != info.power_limit_max_mw:
                bound = f"the site allows at most {spec.text((high,))}"
            name, ceiling = machine.ceilings.lowest_named(own)
            if ceiling is not None and ceiling.value == (high,):
                now_ns = self._out.now_ns + self._out.boot_offset_ns
                bound = ceiling_text(ceiling, name, spec, now_ns)
        return Failure(
            ErrorCode.OUT_OF_RANGE,
            f"a {spec.title} of {spec.text(asked)} on {info.uuid} is outside "
            f"{spec.span_text(low, high)}: {bound}; "
            + (spec.meant(asked[0], low, high) or "choose a value in between"),
        )

    def _acquire(self, connection: ClientState, request: Acquire) -> None:
        pending = self.context.track(connection, request)
        pending.each(partial(self._acquire_gpu, connection, request, pending))

    def _acquire_gpu(
        self, connection: ClientState, request: Acquire, pending: Pending, uuid: str
    ) -> None:
        """All the controls asked for on one GPU, or none of those not held before."""
        peer = connection.peer
        self.context.count_change(peer)
        machines = [self._node.machine(uuid, one) for one in dict.fromkeys(request.controls)]
        refuse_if(self._node.closed)
        fresh = [machine for machine in machines if not machine.holding.by(peer.process)]
        failed: list[Failure] = []

        def over() -> None:
            if not failed:
                back = {machine.control.value: back_of(machine) for machine in machines}
                pending.put(uuid, replies.Acquired(back=back))
                return
            for machine in fresh:
                if machine.holding.by(peer.process):
                    machine.release("acquire_failed")

        acquired = after_all(len(machines), over)

        def done(failure: Failure | ControlValue | None) -> None:
            if isinstance(failure, Failure):
                failed.append(failure)
                self._out.audit_log.refused(failure.code)
                pending.put(uuid, failure)
            acquired()

        for machine in machines:
            item = Set(
                peer=peer,
                client=request.client,
                value=None,
                deadline_ns=request.deadline_ns,
                ttl_ns=self._node.settings.terms.ttl(request.ttl_ms),
                block=True,
                done=done,
            )
            right = connection.right(self._access, self._node.gpus[uuid].info, machine.control)
            self._submit(machine, item, right, together=request.together)


def _no_clock(
    spec: ControlSpec, info: GpuInfo, asked: ControlValue, bounds: tuple[int, int]
) -> Failure | None:
    """Why a GPU has no clock in this range: drivers silently use the nearest one."""
    low, high = bounds
    if asked[0] <= high and asked[1] >= low:
        return None
    return Failure(
        ErrorCode.OUT_OF_RANGE,
        f"{info.uuid} ({info.name}) has no {spec.title} of {spec.text(asked)}; choose from "
        + (spec.span_text(low, high) if low < high else spec.text(bounds)),
    )


def _unknown_profile(info: GpuInfo, asked: ControlValue) -> Failure | None:
    """Why a GPU does not take these workload power profiles."""
    offered = [profile.profile for profile in info.power_profiles]
    strange = [profile_name(one) for one in asked if one not in offered]
    if not strange:
        return None
    known = ", ".join(profile_name(one) for one in offered)
    return Failure(
        ErrorCode.OUT_OF_RANGE,
        f"{info.name} {info.uuid} has no workload power profile {strange[0]}; it has {known}",
    )

"""What clients ask for: each operation of the protocol, and who may ask it.

Who may change what is decided by `access.Access` and `_check_set`; how a control is leased, written
and restored is `control.ControlMachine`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from zeus_ipc import replies
from zeus_ipc.controls import (
    BY_OPERATION,
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
    SetGpuClocks,
    SetMemoryClocks,
    SetPersistenceMode,
    SetPowerLimit,
    SetRequest,
)
from zeus_ipc.wire import PROTOCOL_VERSION
from zeusd.core.access import Access, Right
from zeusd.core.accounting import AccountingRequests
from zeusd.core.administration import Administration
from zeusd.core.ceilings import PERSISTED, ceiling_text
from zeusd.core.control import ControlMachine
from zeusd.core.deadlines import Deadlines
from zeusd.core.effects import Note, Read, Reading
from zeusd.core.leases import LeaseRequests, back_of
from zeusd.core.leasing import Done, Set
from zeusd.core.lifecycle import Phase
from zeusd.core.limiting import describe_ceilings
from zeusd.core.model import Failure, Peer
from zeusd.core.node import NodeState
from zeusd.core.outbox import Outbox
from zeusd.core.pending import ClientState, Deferrals, PerGpu, error_body

MAX_WAITING_REQUESTS = 64
"""Requests of one connection that may wait for devices."""

LATE = Failure(
    ErrorCode.DEADLINE_EXCEEDED,
    "the request reached zeusd after its deadline and was dropped; ask again",
)
TOO_MANY_WAIT = Failure(
    ErrorCode.OVERLOADED,
    f"{MAX_WAITING_REQUESTS} requests of this connection already wait; let some finish first",
)

REFUSALS_PER_SECOND = 1.0
"""Refusals of one user that are logged; a flood of them must not become a flood of records."""

SHUTTING_DOWN = Failure(
    ErrorCode.SHUTTING_DOWN, "zeusd is stopping and accepts no changes; try again later"
)

AS_ASKED = replies.Applied()

_SETS = (SetControl, SetPowerLimit, SetGpuClocks, SetMemoryClocks, SetPersistenceMode, Reset)


MAX_BUCKETS = 4096
"""Beyond this number, full buckets are dropped, so that unused ones take no memory."""


class RateLimiter:
    """One token bucket for each key, such as a uid."""

    def __init__(self, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = max(1.0, burst)
        self._buckets: dict[Hashable, tuple[float, int]] = {}

    def take(self, key: Hashable, now_ns: int) -> bool:
        """Takes one token; False if the bucket is empty."""
        level = self._level(key, now_ns)
        if level < 1.0:
            return False
        self._buckets[key] = (level - 1.0, now_ns)
        if len(self._buckets) > MAX_BUCKETS:
            self._drop_full(now_ns)
        return True

    def _level(self, key: Hashable, now_ns: int) -> float:
        level, then_ns = self._buckets.get(key, (self.burst, now_ns))
        return min(self.burst, level + (now_ns - then_ns) * 1e-9 * self.per_second)

    def _drop_full(self, now_ns: int) -> None:
        self._buckets = {
            key: bucket
            for key, bucket in self._buckets.items()
            if self._level(key, now_ns) < self.burst
        }


def asked_of(request: SetRequest) -> tuple[Control, ControlValue | None]:
    """Which control a set is about, and the value it asks for; None: the restore target."""
    if isinstance(request, Reset):
        return request.control, None
    if isinstance(request, SetControl):
        return request.control, SPECS[request.control].normal(request.value)
    spec = BY_OPERATION[request.op]
    return spec.control, tuple([int(getattr(request, name)) for name in spec.arguments])


class Requests:
    """Answers requests, now or when devices have answered."""

    def __init__(
        self,
        node: NodeState,
        outbox: Outbox,
        daemon_version: str,
        simulated: str | None,
        stream: str | None,
    ) -> None:
        self._node = node
        self._out = outbox
        self._daemon_version = daemon_version
        self._simulated = simulated
        self._stream = stream
        self.waiting: Deadlines[PerGpu] = Deadlines()
        self._writes = self._write_limiter()
        self._refusals = RateLimiter(REFUSALS_PER_SECOND, 10)
        self.administration = Administration(node, outbox, self._track, self.describe_node)
        accounting = AccountingRequests(node, outbox, self._track, self.administration.for_admins)
        self.leases = LeaseRequests(
            node, outbox, self.administration.ceilings, self._too_fast, self._track
        )
        self.handlers: dict[type[Any], Callable[[ClientState, Any], None]] = {
            Hello: self._hello,
            Acquire: self._acquire,
            **self.leases.handlers,
            **self.administration.handlers,
            **accounting.handlers,
            **dict.fromkeys(_SETS, self._set),
        }

    def reconfigured(self) -> None:
        """The site has new wishes."""
        self._writes = self._write_limiter()

    def expire(self) -> None:
        """Time has passed: answers what has waited until its deadline."""
        for pending in self.waiting.due(self._out.now_ns):
            pending.expire()

    # --------------------------------------------------------------------------------- internals

    @property
    def _access(self) -> Access:
        return self._node.settings.access

    def _write_limiter(self) -> RateLimiter:
        per_second = self._access.writes_per_second
        return RateLimiter(per_second, 2 * per_second)

    def refuse(self, connection: ClientState, request: Request, failure: Failure) -> None:
        """Answers a request with why not."""
        if getattr(request, "block", True):
            connection.refuse(self._out, request.id, failure)
        else:
            connection.deferrals.add(error_body(failure, request.gpus[0]))  # type: ignore[union-attr]  # has block

    def _hello(self, connection: ClientState, request: Hello) -> None:
        connection.reply(self._out, request.id, self.describe_node())

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
            unusable=self._node.unusable,
            findings=[] if closed else [*self._node.settings.findings(gpus)],
            problems=self._node.problems(),
        )

    def _describe_gpu(self, info: GpuInfo) -> GpuInfo:
        """A GPU with what only the core knows of it."""
        gpu = self._node.gpus[info.uuid]
        machines = gpu.listed()
        known: dict[str, Any] = {
            "persisted": [one.control.value for one in machines if one.bounds.persisted],
            "ceilings": [
                ceiling
                for one in machines
                for ceiling in describe_ceilings(one, self._out.boot_offset_ns)
            ],
        }
        machine = gpu.machines.get(Control.POWER_LIMIT)
        if machine is not None:
            known["power_limit_site_mw"] = machine.bounds.site_limit_mw
            known["power_limit_highest_mw"] = self._node.highest_mw(machine)
            known["power_limit_enforced"] = machine.bounds.active
        return info.model_copy(update=known)

    def _track(
        self,
        connection: ClientState,
        request: Any,
        names: Sequence[str] | None = None,
    ) -> PerGpu:
        names = request.gpus if names is None else names
        pending = PerGpu(connection, request.id, names, self._out, self.waiting)
        if request.deadline_ns:
            self.waiting[pending] = request.deadline_ns
        return pending

    def _set(self, connection: ClientState, request: SetRequest) -> None:
        control, asked = asked_of(request)
        settings, peer = self._node.settings, connection.peer
        pending = self._track(connection, request) if request.block else None
        for uuid in dict.fromkeys(request.gpus):
            done: Done
            if pending is None:
                done = partial(self._defer, connection.deferrals, uuid)
            else:
                done = partial(self._answer, pending, uuid, asked)
            machine = self._node.machine(uuid, control)
            if isinstance(machine, Failure):
                done(machine)
                continue
            info = self._node.gpus[uuid].facts.info
            right = connection.right(settings.access, info, control)
            refusal = self._too_fast(peer) or self._check_set(right, machine, asked)
            if refusal is not None:
                done(refusal)
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

    def _answer(
        self,
        pending: PerGpu,
        uuid: str,
        asked: ControlValue | None,
        answer: Failure | ControlValue | None,
    ) -> None:
        """What came of a set with `block`."""
        if isinstance(answer, Failure):
            self._out.audit_log.refused(answer.code)
            pending.fail(uuid, answer)
        elif answer is None or answer == asked:
            pending.succeed(uuid, AS_ASKED)
        else:
            pending.succeed(uuid, replies.Applied(applied=list(answer)))

    def _defer(
        self, deferrals: Deferrals, uuid: str, answer: Failure | ControlValue | None
    ) -> None:
        """What came of a set without `block`."""
        if isinstance(answer, Failure):
            self._out.audit_log.refused(answer.code)
            deferrals.add(error_body(answer, uuid))

    def _too_fast(self, peer: Peer) -> Failure | None:
        """Takes one of the user's changes for this second; why there is none left."""
        if self._writes.take(peer.uid, self._out.now_ns):
            return None
        return Failure(
            ErrorCode.OVERLOADED,
            f"user {peer.uid} sends over {self._access.writes_per_second:g} changes a second; send "
            "them more slowly",
        )

    def _too_much(self, peer: Peer, machine: ControlMachine) -> Failure | None:
        """Why this user gets no further lease."""
        if machine.holding.lost_by(peer.process):
            return None
        machines = [*self._node.machines()]
        leases = [one.holding.current for one in machines]
        held = sum(lease is not None and lease.uid == peer.uid for lease in leases)
        if held >= self._access.leases_per_user:
            return Failure(
                ErrorCode.OVERLOADED,
                f"user {peer.uid} holds {held} leases already, which is the most that this site "
                "allows; release some first",
            )
        lost = sum(one.holding.losses_of(peer.uid) for one in machines)
        if lost >= self._access.losses_per_user:
            return Failure(
                ErrorCode.OVERLOADED,
                f"processes of user {peer.uid} have lost {lost} leases and neither acquired nor "
                "released them since; end these processes, or have them release",
            )
        return None

    def _excluded(self, machine: ControlMachine) -> Failure | None:
        """Why this control is not leased beside others of its GPU."""
        for other in self._node.gpus[machine.gpu].machines.values():
            if other.phase is Phase.HELD and exclusive(machine.control, other.control):
                return Failure(
                    ErrorCode.LEASE_HELD,
                    f"{machine.control.value} of {machine.gpu} changes what {other.control.value} "
                    "does, which is leased, and which of the two counts is undocumented; release "
                    "that first, or ask for both together",
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

        `asked` is the value that the user chose; who resets chooses none.
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
            self._out.add(Read(ticket, machine.gpu, Reading.COMPUTE_UIDS))

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
        if self._refusals.take(peer.uid, self._out.now_ns):
            self._out.add(
                Note(
                    "refused",
                    {
                        "gpu": machine.gpu,
                        "control": machine.control.value,
                        "pid": peer.process.pid,
                        "uid": peer.uid,
                        "command": peer.command,
                        "job": peer.job,
                        "result": refusal.message,
                    },
                    warning=True,
                )
            )

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
        pending = self._track(connection, request)
        for uuid in pending.gpus():
            self._acquire_gpu(connection, request, pending, uuid)

    def _acquire_gpu(
        self, connection: ClientState, request: Acquire, pending: PerGpu, uuid: str
    ) -> None:
        """All the controls asked for on one GPU, or none of those not held before."""
        peer = connection.peer
        machines: list[ControlMachine] = []
        too_fast = self._too_fast(peer)
        if too_fast is not None:
            pending.fail(uuid, too_fast)
            return
        for control in dict.fromkeys(request.controls):
            machine = self._node.machine(uuid, control)
            if isinstance(machine, Failure):
                pending.fail(uuid, machine)
                return
            machines.append(machine)
        if self._node.closed is not None:
            pending.fail(uuid, self._node.closed)
            return
        fresh = [machine for machine in machines if not machine.holding.by(peer.process)]
        missing = len(machines)
        failed = False

        def done(failure: Failure | ControlValue | None) -> None:
            nonlocal missing, failed
            missing -= 1
            if isinstance(failure, Failure):
                failed = True
                self._out.audit_log.refused(failure.code)
                pending.fail(uuid, failure)
            if missing == 0:
                if failed:
                    for machine in fresh:
                        if machine.holding.by(peer.process):
                            machine.release("acquire_failed")
                else:
                    back = {machine.control.value: back_of(machine) for machine in machines}
                    pending.succeed(uuid, replies.Acquired(back=back))

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
    offered = [one.profile for one in info.power_profiles]
    strange = [profile_name(one) for one in asked if one not in offered]
    if not strange:
        return None
    known = ", ".join(profile_name(one) for one in offered)
    return Failure(
        ErrorCode.OUT_OF_RANGE,
        f"{info.name} {info.uuid} has no workload power profile {strange[0]}; it has {known}",
    )

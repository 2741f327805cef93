"""The core: takes events, keeps every rule, answers with effects.

It has no clock, socket, thread or file. The ring calls one method per event, in order and from one
thread, and carries out the effects that it returns, in order. Who may change what is decided in
`_check_set`; how a control is leased, written and put back is `control.ControlMachine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from zeus_ipc.errors import ErrorCode
from zeus_ipc.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Control,
    GetClocks,
    GetEnergy,
    GetPower,
    GetState,
    Goodbye,
    GpuInfo,
    Heartbeat,
    Hello,
    ListLeases,
    ReadRequest,
    Release,
    Request,
    Reset,
    SetGpuClocks,
    SetMemoryClocks,
    SetPersistenceMode,
    SetPowerLimit,
    SetRequest,
)
from zeusd.core.control import ControlMachine, Phase, Set
from zeusd.core.effects import Effect, Note, Put, Read, Reading
from zeusd.core.model import (
    READABLE,
    ControlValue,
    Debt,
    Failure,
    GpuFacts,
    Peer,
    Process,
    baseline_key,
)
from zeusd.core.outbox import Outbox
from zeusd.core.pending import Connection, PerGpu, failure_body
from zeusd.core.policy import SitePolicy

MAX_WAITING_REQUESTS = 64
"""Requests of one connection that may wait for devices."""

_READINGS: dict[type[Any], Reading] = {
    GetState: Reading.STATE,
    GetEnergy: Reading.ENERGY,
    GetPower: Reading.POWER,
    GetClocks: Reading.CLOCKS,
}

_CONTROLS: dict[type[Any], Control] = {
    SetPowerLimit: Control.POWER_LIMIT,
    SetGpuClocks: Control.GPU_CLOCKS,
    SetMemoryClocks: Control.MEMORY_CLOCKS,
    SetPersistenceMode: Control.PERSISTENCE_MODE,
}


class Gpu:
    """A GPU that the core knows, and its controls."""

    def __init__(self, info: GpuInfo, machines: dict[Control, ControlMachine]) -> None:
        self.info = info
        self.machines = machines


class Core:
    """All state about leases and controls of one node.

    Args:
        policy: The site's wishes.
        daemon_version: Told to clients.
        simulated: Socket of the simulated devices, told to clients; None on real ones.
    """

    def __init__(
        self, policy: SitePolicy, *, daemon_version: str, simulated: str | None = None
    ) -> None:
        self._policy = policy
        self._daemon_version = daemon_version
        self._simulated = simulated
        self._driver_version: str | None = None
        self._out = Outbox()
        self._gpus: dict[str, Gpu] = {}
        self._connections: dict[int, Connection] = {}
        self._pending: list[PerGpu] = []
        self._stopping = False
        self._baselines: dict[str, ControlValue] = {}
        self._debts: dict[tuple[str, Control], tuple[Debt, bool]] = {}
        self._handlers: dict[type[Any], Callable[[Connection, Any], None]] = {
            Hello: self._hello,
            Acquire: self._acquire,
            Release: self._release,
            Goodbye: self._goodbye,
            ListLeases: self._list_leases,
            Heartbeat: self._heartbeat,
            **dict.fromkeys(_READINGS, self._read),
            **dict.fromkeys(_CONTROLS, self._set),
            Reset: self._set,
        }

    # ----------------------------------------------------------------------------------- events

    def recover(
        self, baselines: dict[str, ControlValue], debts: Iterable[Debt], alive: set[Process]
    ) -> None:
        """What the journal holds, before any GPU is known. `alive`: holders that still run."""
        self._baselines = dict(baselines)
        for debt in debts:
            self._debts[(debt.gpu, debt.control)] = (debt, debt.holder in alive)

    def gpus_found(
        self, now_ns: int, driver_version: str | None, found: Iterable[GpuFacts]
    ) -> list[Effect]:
        """The driver's GPUs, at start and whenever they were enumerated again."""
        self._out.now_ns = now_ns
        self._driver_version = driver_version
        for facts in found:
            known = self._gpus.get(facts.info.uuid)
            if known is None:
                self._add_gpu(facts)
            else:
                site = known.info.power_limit_site_mw
                known.info = facts.info.model_copy(update={"power_limit_site_mw": site})
                for machine in known.machines.values():
                    machine.retry_now()
        return self._out.take()

    def peer_opened(self, now_ns: int, peer: Peer) -> list[Effect]:
        """A connection, and who the kernel says is at its other end."""
        self._out.now_ns = now_ns
        self._connections[peer.conn] = Connection(peer)
        return self._out.take()

    def peer_closed(self, now_ns: int, conn: int) -> list[Effect]:
        """A connection ended. Leases stay: they belong to the process."""
        self._out.now_ns = now_ns
        self._connections.pop(conn, None)
        return self._out.take()

    def all_peers_closed(self, now_ns: int) -> list[Effect]:
        """The front died, and every connection with it."""
        self._out.now_ns = now_ns
        self._connections.clear()
        return self._out.take()

    def process_gone(self, now_ns: int, process: Process) -> list[Effect]:
        """A process that was watched has died."""
        self._out.now_ns = now_ns
        for machine in self._held_by(process):
            machine.release("holder_gone")
        return self._out.take()

    def request(self, now_ns: int, conn: int, request: Request) -> list[Effect]:
        """A validated request on a connection."""
        self._out.now_ns = now_ns
        connection = self._connections.get(conn)
        if connection is None:
            return []
        if request.deadline_ns and now_ns > request.deadline_ns:
            self._refuse(
                connection,
                request,
                Failure(
                    ErrorCode.DEADLINE_EXCEEDED,
                    "the request reached zeusd after its deadline and was dropped; ask again",
                ),
            )
        elif connection.waiting >= MAX_WAITING_REQUESTS:
            self._refuse(
                connection,
                request,
                Failure(
                    ErrorCode.OVERLOADED,
                    f"{MAX_WAITING_REQUESTS} requests of this connection already wait; "
                    "let some finish first",
                ),
            )
        else:
            self._handlers[type(request)](connection, request)
        return self._out.take()

    def device_done(self, now_ns: int, ticket: int, result: object) -> list[Effect]:
        """A `Read` or `Write` returned: its value, None, or a `Failure`."""
        self._out.now_ns = now_ns
        self._out.finish(ticket, result)
        return self._out.take()

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed."""
        self._out.now_ns = now_ns
        for pending in self._pending:
            if not pending.answered and pending.deadline_ns and now_ns > pending.deadline_ns:
                pending.expire()
        self._pending = [pending for pending in self._pending if not pending.answered]
        for machine in [*self._machines()] if self._out.due_ns else ():
            machine.tick(now_ns)
        return self._out.take()

    def stop(self, now_ns: int) -> list[Effect]:
        """zeusd is being stopped: everything goes back, and nothing new is accepted."""
        self._out.now_ns = now_ns
        self._stopping = True
        for machine in self._machines():
            machine.release("daemon_stops")
        return self._out.take()

    # ---------------------------------------------------------------------------------- queries

    @property
    def settled(self) -> bool:
        """Whether no device call is in flight and no control waits to be put back at once."""
        return self._out.in_flight == 0

    @property
    def owed(self) -> list[tuple[str, Control]]:
        """Controls that are not back: leased, being put back, or waiting for another attempt."""
        return [
            (machine.gpu, machine.control)
            for machine in self._machines()
            if machine.phase is not Phase.FREE
        ]

    def next_deadline_ns(self) -> int | None:
        """When `tick` is next needed; None if time alone changes nothing."""
        due_ns = min(self._out.due_ns.values(), default=None) if self._out.due_ns else None
        for pending in self._pending:
            deadline_ns = pending.deadline_ns
            if deadline_ns and not pending.answered and (due_ns is None or deadline_ns < due_ns):
                due_ns = deadline_ns
        return due_ns

    # ------------------------------------------------------------------------------------- GPUs

    def _add_gpu(self, facts: GpuFacts) -> None:
        uuid = facts.info.uuid
        machines: dict[Control, ControlMachine] = {}
        site_mw: int | None = None
        for control in Control:
            baseline = self._baselines.get(baseline_key(uuid, control))
            target = self._policy.target(control, facts, baseline)
            if target is None:
                continue
            if control in READABLE and baseline is None and not target.pinned:
                self._out.add(Put(baseline_key(uuid, control), {"value": list(target.value)}))
            if control is Control.POWER_LIMIT:
                site_mw = target.highest_mw
            machines[control] = ControlMachine(
                uuid, control, target.value, target.pinned, self._out
            )
        info = facts.info.model_copy(update={"power_limit_site_mw": site_mw})
        self._gpus[uuid] = Gpu(info, machines)
        self._out.add(
            Note("gpu_found", {"gpu": uuid, "gpu_name": info.name, "pci_address": info.pci_address})
        )
        for control, machine in machines.items():
            owed = self._debts.pop((uuid, control), None)
            if owed is not None:
                machine.recover(*owed)

    def _machines(self) -> Iterable[ControlMachine]:
        for gpu in self._gpus.values():
            yield from gpu.machines.values()

    def _held_by(self, process: Process) -> list[ControlMachine]:
        return [machine for machine in self._machines() if machine.held_by(process)]

    def _machine(self, uuid: str, control: Control) -> ControlMachine | Failure:
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return self._unknown(uuid)
        machine = gpu.machines.get(control)
        if machine is None:
            return Failure(
                ErrorCode.NOT_SUPPORTED,
                f"{gpu.info.name} {uuid} does not offer {control.value}; leave it alone",
            )
        return machine

    def _unknown(self, uuid: str) -> Failure:
        known = ", ".join(self._gpus) or "none; is the NVIDIA driver loaded?"
        return Failure(ErrorCode.UNKNOWN_GPU, f"no GPU {uuid} on this node; it has: {known}")

    # --------------------------------------------------------------------------------- requests

    def _refuse(self, connection: Connection, request: Request, failure: Failure) -> None:
        if getattr(request, "block", True):
            connection.reply(self._out, request.id, error=failure_body(failure))
        else:
            connection.defer(failure, request.gpus[0])  # type: ignore[union-attr]  # has block

    def _hello(self, connection: Connection, request: Hello) -> None:
        gpus = sorted((gpu.info for gpu in self._gpus.values()), key=lambda info: info.index)
        connection.reply(
            self._out,
            request.id,
            result={
                "protocol": PROTOCOL_VERSION,
                "protocols": [PROTOCOL_VERSION],
                "daemon_version": self._daemon_version,
                "driver_version": self._driver_version,
                "simulated": self._simulated,
                "gpus": [self._describe_gpu(info) for info in gpus],
            },
        )

    def _describe_gpu(self, info: GpuInfo) -> dict[str, Any]:
        described = info.model_dump(mode="json")
        machine = self._gpus[info.uuid].machines.get(Control.POWER_LIMIT)
        if machine is not None:
            described["power_limit_site_mw"] = self._highest_mw(info, machine)
        return described

    def _track(self, connection: Connection, request: Any) -> PerGpu:
        pending = PerGpu(connection, request.id, request.gpus, request.deadline_ns, self._out)
        if len(self._pending) > 1024 or (self._pending and self._pending[0].answered):
            self._pending = [other for other in self._pending if not other.answered]
        self._pending.append(pending)
        return pending

    def _read(self, connection: Connection, request: ReadRequest) -> None:
        reading = _READINGS[type(request)]
        pending = self._track(connection, request)
        for uuid in pending.gpus():
            if uuid not in self._gpus:
                pending.fail(uuid, self._unknown(uuid))
                continue
            ticket = self._out.ticket(partial(self._read_done, pending, uuid, reading))
            self._out.add(Read(ticket, uuid, reading))

    def _read_done(self, pending: PerGpu, uuid: str, reading: Reading, result: object) -> None:
        if isinstance(result, Failure):
            pending.fail(uuid, result)
            return
        assert isinstance(result, dict)
        if reading is Reading.STATE:
            machines = self._gpus[uuid].machines
            for control, name in (
                (Control.GPU_CLOCKS, "locked_gpu_clocks_mhz"),
                (Control.MEMORY_CLOCKS, "locked_memory_clocks_mhz"),
            ):
                machine = machines.get(control)
                value = None if machine is None else machine.value or machine.target
                result[name] = list(value) if value else None
        pending.succeed(uuid, result)

    def _set(self, connection: Connection, request: SetRequest) -> None:
        done: Callable[[str, Failure | None], None]
        if request.block:
            pending = self._track(connection, request)
            uuids = pending.gpus()

            def done(uuid: str, failure: Failure | None) -> None:
                if failure is None:
                    pending.succeed(uuid, {})
                else:
                    pending.fail(uuid, failure)
        else:
            uuids = list(dict.fromkeys(request.gpus))

            def done(uuid: str, failure: Failure | None) -> None:
                if failure is not None:
                    connection.defer(failure, uuid)

        control = request.control if isinstance(request, Reset) else _CONTROLS[type(request)]
        for uuid in uuids:
            machine = self._machine(uuid, control)
            value: ControlValue | Failure
            if isinstance(machine, Failure):
                done(uuid, machine)
                continue
            if isinstance(request, Reset):
                value = machine.target
            else:
                value = self._check_set(self._gpus[uuid].info, machine, request)
            if isinstance(value, Failure):
                done(uuid, value)
                continue
            machine.submit(
                Set(
                    peer=connection.peer,
                    client=request.client,
                    value=value,
                    deadline_ns=request.deadline_ns,
                    block=request.block,
                    done=partial(done, uuid),
                )
            )

    def _check_set(
        self, info: GpuInfo, machine: ControlMachine, request: SetRequest
    ) -> ControlValue | Failure:
        """Whether this set is allowed at all, and the value it asks for."""
        if self._stopping:
            return self._shutting_down()
        if isinstance(request, SetPowerLimit):
            low, high = info.power_limit_min_mw, self._highest_mw(info, machine)
            if low is not None and high is not None and not low <= request.power_limit_mw <= high:
                return Failure(
                    ErrorCode.OUT_OF_RANGE,
                    f"a power limit of {request.power_limit_mw / 1000:g} W on {info.uuid} is "
                    f"outside {low / 1000:g} to {high / 1000:g} W, which is what this GPU and this "
                    "site allow; choose a value in between",
                )
            return (request.power_limit_mw,)
        if isinstance(request, SetPersistenceMode):
            return (int(request.enabled),)
        assert isinstance(request, (SetGpuClocks, SetMemoryClocks))
        if request.min_mhz > request.max_mhz:
            return Failure(
                ErrorCode.OUT_OF_RANGE,
                f"cannot lock {machine.control.value} of {info.uuid} to {request.min_mhz} to "
                f"{request.max_mhz} MHz: the minimum is above the maximum",
            )
        return (request.min_mhz, request.max_mhz)

    @staticmethod
    def _highest_mw(info: GpuInfo, machine: ControlMachine) -> int | None:
        if machine.pinned:
            return info.power_limit_site_mw
        return machine.target[0]

    def _shutting_down(self) -> Failure:
        return Failure(
            ErrorCode.SHUTTING_DOWN, "zeusd is stopping and accepts no changes; try again later"
        )

    def _acquire(self, connection: Connection, request: Acquire) -> None:
        pending = self._track(connection, request)
        for uuid in pending.gpus():
            self._acquire_gpu(connection, request, pending, uuid)

    def _acquire_gpu(
        self, connection: Connection, request: Acquire, pending: PerGpu, uuid: str
    ) -> None:
        """All the controls asked for on one GPU, or none of those not held before."""
        peer = connection.peer
        machines: list[ControlMachine] = []
        for control in dict.fromkeys(request.controls):
            machine = self._machine(uuid, control)
            if isinstance(machine, Failure):
                pending.fail(uuid, machine)
                return
            machines.append(machine)
        if self._stopping:
            pending.fail(uuid, self._shutting_down())
            return
        fresh = [machine for machine in machines if not machine.held_by(peer.process)]
        missing = len(machines)
        failed = False

        def done(failure: Failure | None) -> None:
            nonlocal missing, failed
            missing -= 1
            if failure is not None:
                failed = True
                pending.fail(uuid, failure)
            if missing == 0:
                if failed:
                    for machine in fresh:
                        if machine.held_by(peer.process):
                            machine.release("acquire_failed")
                else:
                    pending.succeed(uuid, {})

        for machine in machines:
            machine.submit(
                Set(
                    peer=peer,
                    client=request.client,
                    value=None,
                    deadline_ns=request.deadline_ns,
                    block=True,
                    done=done,
                )
            )

    def _release(self, connection: Connection, request: Release) -> None:
        machines = [
            machine
            for machine in self._held_by(connection.peer.process)
            if (not request.gpus or machine.gpu in request.gpus)
            and (not request.controls or machine.control in request.controls)
        ]
        self._let_go(connection, request.id, machines, "released")

    def _goodbye(self, connection: Connection, request: Goodbye) -> None:
        machines = [
            machine
            for machine in self._held_by(connection.peer.process)
            if machine.lease is not None and machine.lease.client == request.client
        ]
        self._let_go(connection, request.id, machines, "goodbye")

    def _let_go(
        self, connection: Connection, request_id: int, machines: list[ControlMachine], reason: str
    ) -> None:
        missing = len(machines)

        def answer() -> None:
            connection.reply(self._out, request_id, result={"released": len(machines)})

        def back() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                answer()

        if not machines:
            answer()
        for machine in machines:
            machine.release(reason, then=back)

    def _list_leases(self, connection: Connection, request: ListLeases) -> None:
        leases = [
            {
                "gpu": machine.gpu,
                "control": machine.control.value,
                "pid": machine.lease.holder.pid,
                "uid": machine.lease.uid,
                "since_ns": machine.lease.since_ns,
                "value": None if machine.value is None else list(machine.value),
                "restoring": machine.phase is Phase.RESTORING,
            }
            for machine in self._machines()
            if machine.lease is not None
        ]
        connection.reply(self._out, request.id, result={"leases": leases})

    def _heartbeat(self, connection: Connection, request: Heartbeat) -> None:
        held = len(self._held_by(connection.peer.process))
        connection.reply(self._out, request.id, result={"leases": held})

"""The core: takes events, keeps every rule, answers with effects.

It has no clock, socket, thread or file. The ring calls one method per event, in order and from one
thread, and carries out the effects that it returns, in order. Who may change what is decided by
`access.Access` and `_check_set`; how a control is leased, written and put back is
`control.ControlMachine`.
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
from zeusd.core.access import Access
from zeusd.core.control import ControlMachine, Phase, Set
from zeusd.core.effects import Effect, Forget, Note, Put, Read, Reading
from zeusd.core.model import (
    DRIVER_KEY,
    READABLE,
    STOPPING_KEY,
    ControlValue,
    Debt,
    Failure,
    GpuFacts,
    Loss,
    Peer,
    Process,
    baseline_key,
)
from zeusd.core.outbox import Outbox
from zeusd.core.pending import Connection, PerGpu, failure_body
from zeusd.core.policy import SECOND_NS, Settings
from zeusd.core.rates import RateLimiter

MAX_WAITING_REQUESTS = 64
"""Requests of one connection that may wait for devices."""

RECONNECT_NS = 5 * SECOND_NS
"""A holder whose last connection ended (it called exec, say) has this long to come back."""

STALL_NS = SECOND_NS
"""An expiry that is noticed this late was missed by zeusd itself, not by the holder."""

REFUSALS_PER_SECOND = 1.0
"""Refusals of one user that are logged; a flood of them must not become a flood of records."""

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

    def __init__(self, facts: GpuFacts, machines: dict[Control, ControlMachine]) -> None:
        self.facts = facts
        self.machines = machines
        self.site_mw: int | None = None

    @property
    def info(self) -> GpuInfo:
        """What does not change about it."""
        return self.facts.info


class Core:
    """All state about leases and controls of one node.

    Args:
        settings: The site's wishes.
        daemon_version: Told to clients.
        simulated: Socket of the simulated devices, told to clients; None on real ones.
    """

    def __init__(
        self, settings: Settings, *, daemon_version: str, simulated: str | None = None
    ) -> None:
        self._settings = settings
        self._daemon_version = daemon_version
        self._simulated = simulated
        self._driver_version: str | None = None
        self._out = Outbox()
        self._gpus: dict[str, Gpu] = {}
        self._connections: dict[int, Connection] = {}
        self._pending: list[PerGpu] = []
        self._stopping = False
        self._baselines: dict[str, ControlValue] = {}
        self._debts: dict[tuple[str, Control], Debt] = {}
        self._losses: list[Loss] = []
        self._alive: set[Process] = set()
        self._driver: str | None = None
        self._was_stopping = False
        self._writes = self._write_limiter()
        self._refusals = RateLimiter(REFUSALS_PER_SECOND, 10)
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
        self,
        baselines: dict[str, ControlValue],
        debts: Iterable[Debt],
        alive: set[Process],
        *,
        losses: Iterable[Loss] = (),
        driver: str | None = None,
        was_stopping: bool = False,
    ) -> None:
        """What the journal holds, before any GPU is known.

        Args:
            baselines: What controls held when zeusd first saw them in this boot, by journal key.
            debts: What is owed.
            alive: Holders, and processes with a loss, that still run.
            losses: Who lost a lease and does not know it yet.
            driver: The loaded driver that all of this is about.
            was_stopping: The last zeusd was putting everything back when it ended.
        """
        self._baselines = dict(baselines)
        self._debts = {(debt.gpu, debt.control): debt for debt in debts}
        self._losses = list(losses)
        self._alive = set(alive)
        self._driver = driver
        self._was_stopping = was_stopping

    def gpus_found(
        self,
        now_ns: int,
        driver_version: str | None,
        found: Iterable[GpuFacts],
        driver: str = "",
        driver_entry: dict[str, Any] | None = None,
    ) -> list[Effect]:
        """The driver's GPUs, at start and whenever they were enumerated again.

        Args:
            now_ns: Time.
            driver_version: For people.
            found: The GPUs.
            driver: Names this very load of the driver: limits do not survive another.
            driver_entry: What else the journal should say about it.
        """
        self._out.now_ns = now_ns
        self._driver_version = driver_version
        self._driver_loaded(driver, driver_entry or {})
        for facts in found:
            known = self._gpus.get(facts.info.uuid)
            if known is None:
                self._add_gpu(facts)
            else:
                known.facts = facts
                for machine in known.machines.values():
                    machine.retry_now()
        if self._was_stopping:
            self._was_stopping = False
            self._out.add(Forget(STOPPING_KEY))
        return self._out.take()

    def reconfigure(self, now_ns: int, settings: Settings) -> list[Effect]:
        """The site has new wishes. Leases stay; what they may be set to follows the new rules."""
        self._out.now_ns = now_ns
        self._settings = settings
        self._writes = self._write_limiter()
        for gpu in self._gpus.values():
            for control, machine in gpu.machines.items():
                target = settings.site.target(control, gpu.facts, machine.observed)
                if target is not None:
                    machine.configure(target.value, target.pinned, self._override)
                    if control is Control.POWER_LIMIT:
                        gpu.site_mw = target.highest_mw
        return self._out.take()

    def peer_opened(self, now_ns: int, peer: Peer) -> list[Effect]:
        """A connection, and who the kernel says is at its other end."""
        self._out.now_ns = now_ns
        self._connections[peer.conn] = Connection(peer)
        for machine in self._held_by(peer.process):
            machine.heartbeat()
        return self._out.take()

    def peer_closed(self, now_ns: int, conn: int) -> list[Effect]:
        """A connection ended. Leases stay: they belong to the process."""
        self._out.now_ns = now_ns
        ended = self._connections.pop(conn, None)
        if ended is not None:
            process = ended.peer.process
            if not any(other.peer.process == process for other in self._connections.values()):
                for machine in self._held_by(process):
                    machine.shorten(RECONNECT_NS)
        return self._out.take()

    def all_peers_closed(self, now_ns: int) -> list[Effect]:
        """The front died, and every connection with it: nobody can be blamed for his silence."""
        self._out.now_ns = now_ns
        self._connections.clear()
        for machine in self._machines():
            if machine.lease is not None:
                machine.extend(machine.lease.ttl_ns)
        return self._out.take()

    def process_gone(self, now_ns: int, process: Process) -> list[Effect]:
        """A process that was watched has died."""
        self._out.now_ns = now_ns
        self._alive.discard(process)
        for machine in self._machines():
            machine.process_gone(process)
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
        if self._out.due_ns:
            self._forgive_own_stall(now_ns)
            for machine in [*self._machines()]:
                machine.tick(now_ns)
        return self._out.take()

    def stop(self, now_ns: int, restore: bool = True) -> list[Effect]:
        """zeusd is being stopped: nothing new is accepted.

        Args:
            now_ns: Time.
            restore: Put everything back. Else all stays, in the journal, for the next zeusd.
        """
        self._out.now_ns = now_ns
        self._stopping = True
        if restore:
            owed = self.owed
            if owed:
                self._out.add(Put(STOPPING_KEY, {}))
            for machine in self._machines():
                machine.revoke("daemon_stops", "zeusd was stopped")
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

    def summary(self) -> tuple[int, int, int]:
        """How many GPUs there are, leases, and controls that could not be put back yet."""
        machines = [*self._machines()]
        held = sum(machine.phase is Phase.HELD for machine in machines)
        pending = sum(machine.retry_at_ns is not None for machine in machines)
        return len(self._gpus), held, pending

    def next_deadline_ns(self) -> int | None:
        """When `tick` is next needed; None if time alone changes nothing."""
        due_ns = min(self._out.due_ns.values(), default=None) if self._out.due_ns else None
        for pending in self._pending:
            deadline_ns = pending.deadline_ns
            if deadline_ns and not pending.answered and (due_ns is None or deadline_ns < due_ns):
                due_ns = deadline_ns
        return due_ns

    # ---------------------------------------------------------------------------------- settings

    @property
    def _access(self) -> Access:
        return self._settings.access

    @property
    def _override(self) -> bool:
        return self._settings.site.outside_change == "override"

    def _write_limiter(self) -> RateLimiter:
        per_second = self._settings.access.writes_per_second
        return RateLimiter(per_second, 2 * per_second)

    def _forgive_own_stall(self, now_ns: int) -> None:
        """If zeusd itself stood still, heartbeats wait in its socket: it hears them first."""
        late_ns = now_ns - min(self._out.due_ns.values())
        if late_ns > STALL_NS:
            self._out.add(Note("stalled", {"seconds": round(late_ns / 1e9, 3)}, warning=True))
            for machine in self._machines():
                machine.forgive_stall(self._settings.terms.ttl_min_ns)

    # ------------------------------------------------------------------------------------- GPUs

    def _driver_loaded(self, driver: str, entry: dict[str, Any]) -> None:
        """What another driver held is gone; nothing of it is put back, and nothing counts."""
        if self._driver is not None and self._driver != driver:
            self._out.add(
                Note("driver_changed", {"old": self._driver, "new": driver}, warning=True)
            )
            for debt in self._debts.values():
                self._out.add(Forget(debt.key))
                if debt.holder in self._alive:
                    loss = Loss(
                        debt.gpu, debt.control, debt.holder, "the GPU's driver was loaded anew"
                    )
                    self._losses.append(loss)
                    self._out.add(Put(loss.key, loss.to_json()))
            for key in self._baselines:
                self._out.add(Forget(key))
            self._debts.clear()
            self._baselines.clear()
        if self._driver != driver:
            self._driver = driver
            self._out.add(Put(DRIVER_KEY, {**entry, "id": driver}))

    def _add_gpu(self, facts: GpuFacts) -> None:
        uuid = facts.info.uuid
        machines: dict[Control, ControlMachine] = {}
        site_mw: int | None = None
        for control in Control:
            baseline = self._baselines.get(baseline_key(uuid, control))
            target = self._settings.site.target(control, facts, baseline)
            if target is None:
                continue
            if control in READABLE and baseline is None and not target.pinned:
                self._out.add(Put(baseline_key(uuid, control), {"value": list(target.value)}))
            if control is Control.POWER_LIMIT:
                site_mw = target.highest_mw
            machines[control] = ControlMachine(
                uuid, control, target.value, target.pinned, self._out, self._override
            )
        gpu = self._gpus[uuid] = Gpu(facts, machines)
        gpu.site_mw = site_mw
        info = facts.info
        self._out.add(
            Note("gpu_found", {"gpu": uuid, "gpu_name": info.name, "pci_address": info.pci_address})
        )
        for loss in [loss for loss in self._losses if loss.gpu == uuid]:
            self._losses.remove(loss)
            if loss.process in self._alive and loss.control in machines:
                machines[loss.control].recover_loss(loss)
            else:
                self._out.add(Forget(loss.key))
        for control, machine in machines.items():
            owed = self._debts.pop((uuid, control), None)
            if owed is not None:
                ending = None if owed.holder in self._alive else "holder_gone"
                machine.recover(owed, "daemon_stops" if self._was_stopping else ending)

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
                "lease_ttl_ms": self._settings.terms.ttl_ns // 1_000_000,
                "simulated": self._simulated,
                "gpus": [self._describe_gpu(info) for info in gpus],
            },
        )

    def _describe_gpu(self, info: GpuInfo) -> dict[str, Any]:
        described = info.model_dump(mode="json")
        machine = self._gpus[info.uuid].machines.get(Control.POWER_LIMIT)
        if machine is not None:
            described["power_limit_site_mw"] = self._highest_mw(machine)
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
        peer = connection.peer
        for uuid in uuids:
            machine = self._machine(uuid, control)
            value: ControlValue | Failure
            if isinstance(machine, Failure):
                done(uuid, machine)
                continue
            if not self._writes.take(peer.uid, self._out.now_ns):
                done(uuid, self._too_many_writes(peer))
                continue
            if isinstance(request, Reset):
                value = machine.target
            else:
                value = self._check_set(self._gpus[uuid].info, machine, request)
            if isinstance(value, Failure):
                done(uuid, value)
                continue
            self._submit(
                machine,
                Set(
                    peer=peer,
                    client=request.client,
                    value=value,
                    deadline_ns=request.deadline_ns,
                    ttl_ns=self._settings.terms.ttl_ns,
                    block=request.block,
                    done=partial(done, uuid),
                ),
                asked=None if isinstance(request, Reset) else value,
            )

    def _too_many_writes(self, peer: Peer) -> Failure:
        return Failure(
            ErrorCode.OVERLOADED,
            f"user {peer.uid} sends over {self._access.writes_per_second:g} sets a second; send "
            "them more slowly",
        )

    def _submit(
        self, machine: ControlMachine, item: Set, asked: ControlValue | None = None
    ) -> None:
        """Hands a set or an acquire to its control, if this user may do that.

        `asked` is the value that the user chose; who resets chooses none.
        """
        peer, info = item.peer, self._gpus[machine.gpu].info
        refusal = self._access.refuse(peer, info, machine.control, asked)
        if refusal is not None:
            self._refused(peer, machine, refusal)
            item.done(refusal)
        elif not self._access.needs_compute_process(peer) or machine.held_by(peer.process):
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
                        "result": refusal.message,
                    },
                    warning=True,
                )
            )

    def _check_set(
        self, info: GpuInfo, machine: ControlMachine, request: SetRequest
    ) -> ControlValue | Failure:
        """Whether this set is allowed at all, and the value it asks for."""
        if self._stopping:
            return self._shutting_down()
        if isinstance(request, SetPowerLimit):
            low, high = info.power_limit_min_mw, self._highest_mw(machine)
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

    def _highest_mw(self, machine: ControlMachine) -> int | None:
        return self._gpus[machine.gpu].site_mw if machine.pinned else machine.target[0]

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
                    back = {machine.control.value: self._back(machine) for machine in machines}
                    pending.succeed(uuid, {"back": back})

        for machine in machines:
            self._submit(
                machine,
                Set(
                    peer=peer,
                    client=request.client,
                    value=None,
                    deadline_ns=request.deadline_ns,
                    ttl_ns=self._settings.terms.ttl(request.ttl_ms),
                    block=True,
                    done=done,
                ),
            )

    @staticmethod
    def _back(machine: ControlMachine) -> dict[str, Any]:
        return {"value": list(machine.target), "source": machine.target_source}

    def _release(self, connection: Connection, request: Release) -> None:
        peer = connection.peer
        if request.force and not self._access.is_admin(peer):
            self._refuse(
                connection,
                request,
                Failure(
                    ErrorCode.PERMISSION_DENIED,
                    f"user {peer.uid} may not end the leases of others; "
                    "ask an administrator of this node's GPUs",
                ),
            )
            return
        named = [
            machine
            for machine in self._machines()
            if (not request.gpus or machine.gpu in request.gpus)
            and (not request.controls or machine.control in request.controls)
        ]
        for machine in named:
            machine.forgive(peer.process)
        held = [
            machine
            for machine in named
            if machine.held_by(peer.process) or (request.force and machine.phase is Phase.HELD)
        ]
        self._let_go(connection, request.id, held, "released")

    def _goodbye(self, connection: Connection, request: Goodbye) -> None:
        process = connection.peer.process
        machines = [
            machine
            for machine in self._held_by(process)
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
        peer = connection.peer
        for machine in machines:
            if machine.held_by(peer.process):
                machine.release(reason, then=back)
            else:
                clause = f"an administrator (user {peer.uid}) ended it"
                machine.revoke("revoked", clause, then=back)

    def _list_leases(self, connection: Connection, request: ListLeases) -> None:
        peer = connection.peer
        admin = self._access.is_admin(peer)
        leases = [
            {
                "gpu": machine.gpu,
                "control": machine.control.value,
                "pid": machine.lease.holder.pid if admin or peer.uid == machine.lease.uid else None,
                "uid": machine.lease.uid,
                "since_ns": machine.lease.since_ns,
                "value": None if machine.value is None else list(machine.value),
                "restoring": machine.phase is Phase.RESTORING,
                "back": self._back(machine),
                "ttl_ms": machine.lease.ttl_ns // 1_000_000,
                "expires_ns": machine.lease.expires_ns,
            }
            for machine in self._machines()
            if machine.lease is not None
        ]
        connection.reply(self._out, request.id, result={"leases": leases})

    def _heartbeat(self, connection: Connection, request: Heartbeat) -> None:
        process = connection.peer.process
        held = self._held_by(process)
        for machine in held:
            machine.heartbeat()
        ttls = [machine.lease.ttl_ns for machine in held if machine.lease is not None]
        connection.reply(
            self._out,
            request.id,
            result={
                "leases": len(held),
                "ttl_ms": min(ttls, default=self._settings.terms.ttl_ns) // 1_000_000,
                "lost": [
                    [machine.gpu, machine.control.value]
                    for machine in self._machines()
                    if machine.lost_by(process)
                ],
            },
        )

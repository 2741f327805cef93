"""The core: takes events, keeps every rule, answers with effects.

It has no clock, socket, thread or file. The runtime calls one method per event, in order and from
one thread, and carries out the effects that it returns, in order. What clients ask for is answered
by `requests.Requests`; how a control is leased, written and restored is `control.ControlMachine`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from zeus_ipc.controls import RESTORE_ORDER, SPECS, Control, ControlValue
from zeus_ipc.replies import CpuInfo, Envelope, ErrorBody
from zeus_ipc.requests import Request
from zeusd.core.administration import DRIVER_CLOSED
from zeusd.core.audit_log import AuditLog
from zeusd.core.ceilings import PERSISTED, Ceiling
from zeusd.core.control import ControlMachine
from zeusd.core.effects import Effect, Forget, Note, Put, Read, Reading
from zeusd.core.lifecycle import Phase
from zeusd.core.model import (
    CEILING_PREFIX,
    DRIVER_KEY,
    STOPPING_KEY,
    Failure,
    GpuFacts,
    Loss,
    Peer,
    PendingRestore,
    Process,
    gpu_key,
    initial_key,
    observed_key,
    pin_key,
    resting_key,
)
from zeusd.core.node import MISSING, Gpu, NodeState
from zeusd.core.outbox import Outbox
from zeusd.core.pending import ClientState, Deferrals
from zeusd.core.policy import SECOND_NS, Settings, Target
from zeusd.core.requests import (
    LATE,
    MAX_WAITING_REQUESTS,
    SHUTTING_DOWN,
    TOO_MANY_WAIT,
    Requests,
)
from zeusd.devices.port import Outcome

RECONNECT_NS = 5 * SECOND_NS
"""A holder whose last connection ended (it called exec, say) has this long to come back."""

STALL_NS = SECOND_NS
"""An expiry that is noticed this late was missed by zeusd itself, not by the holder."""


class Core:
    """All state about leases and controls of one node.

    Args:
        settings: The site's wishes.
        daemon_version: Told to clients.
        simulated: Socket of the simulated devices, told to clients; None on real ones.
        stream: Socket of the samples, told to clients; None: there is none.
        started_ns: When the daemon started, told to clients.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        daemon_version: str,
        simulated: str | None = None,
        stream: str | None = None,
        started_ns: int = 0,
    ) -> None:
        self.node = NodeState(settings)
        self.node.started_ns = started_ns
        self._out = Outbox()
        self._connections: dict[int, ClientState] = {}
        self._deferrals: WeakValueDictionary[tuple[Process, str], Deferrals] = (
            WeakValueDictionary()  # they end with the last connection
        )
        self._values: dict[str, ControlValue] = {}
        self._ceilings: dict[str, Ceiling] = {}
        self._losses: list[Loss] = []
        self._lost_gpus: set[str] = set()
        # Since the last look around: GPUs that answered it, and that did not answer something.
        self._answered: set[str] = set()
        self._mute: set[str] = set()
        self._asked_split: set[str] = set()
        self._driver: str | None = None
        self._was_stopping = False
        self._silent = False
        self._requests = Requests(self.node, self._out, daemon_version, simulated, stream)
        self._requests.administration.connections = lambda: len(self._connections)
        self._ceilings_due = self._requests.administration.ceilings

    # ----------------------------------------------------------------------------------- events

    def recover(
        self,
        values: dict[str, ControlValue],
        pending: Iterable[PendingRestore],
        alive: set[Process],
        *,
        losses: Iterable[Loss] = (),
        driver: str | None = None,
        was_stopping: bool = False,
        quiesced_ns: int | None = None,
        ceilings: dict[str, Ceiling] | None = None,
    ) -> None:
        """What the journal holds, before any GPU is known.

        Args:
            values: Baselines, what controls held when zeusd first saw them in this boot, and what
                administrators persisted, by journal key.
            pending: Restores that are pending, and leases that have set something.
            alive: Holders, and processes with a loss, that still run.
            losses: Who lost a lease and does not know it yet.
            driver: The loaded driver that all of this is about.
            was_stopping: The last zeusd was restoring everything when it ended.
            quiesced_ns: Since when the driver is closed; None: it is not.
            ceilings: Named ceilings, by journal key.
        """
        self._values = dict(values)
        self._ceilings = dict(ceilings or {})
        self.node.quiesced_ns = quiesced_ns
        self.node.closed = self.node.quiesced
        self.node.pending = {(restore.gpu, restore.control): restore for restore in pending}
        self._losses = list(losses)
        self.node.alive = set(alive)
        self._driver = driver
        self._was_stopping = was_stopping

    def gpus_found(
        self,
        now_ns: int,
        driver_version: str | None,
        found: Iterable[GpuFacts],
        driver: str = "",
        driver_entry: dict[str, Any] | None = None,
        unusable: Sequence[str] = (),
    ) -> list[Effect]:
        """The driver's GPUs, at start and whenever they were enumerated again.

        Args:
            now_ns: Time.
            driver_version: For people.
            found: The GPUs.
            driver: Names this very load of the driver: limits do not survive another.
            driver_entry: What else the journal should say about it.
            unusable: A sentence for each other GPU that it lists.
        """
        self._out.now_ns = now_ns
        self.node.unusable = [*unusable]
        self.node.driver_version = driver_version
        self._driver_loaded(driver, driver_entry or {})
        for facts in found:
            uuid = facts.info.uuid
            known = self.node.gpus.get(uuid)
            if known is None:
                known = self.node.gpus[uuid] = Gpu(facts, {})
                if gpu_key(uuid) not in self._values:  # a restart of zeusd is no news
                    fields = {"gpu": uuid, "gpu_name": facts.info.name}
                    address = facts.info.pci_address
                    self._out.add(Note("gpu_found", {**fields, "pci_address": address}))
                    self._out.add(Put(gpu_key(uuid), {"value": []}))
            known.facts = facts
            if uuid in self._lost_gpus:
                self._return_gpu(uuid)
            for machine in [*known.machines.values()]:
                machine.retry_now()
            self._add_controls(known)
        self._requests.administration.ceilings.recovered()
        if self._was_stopping:
            self._was_stopping = False
            for restore in self.node.pending.values():  # of GPUs that have not been found yet
                ending = self.node.pending[restore.gpu, restore.control] = replace(
                    restore, ending="daemon_stops"
                )
                self._out.add(Put(ending.key, ending))
            self._out.add(Forget(STOPPING_KEY))
        self._note_missing()
        return self._effects()

    def _note_missing(self) -> None:
        """One record of each restore that waits for a GPU which is not there."""
        for restore in self.node.pending.values():
            where = restore.gpu, restore.control.value
            if self.node.restore_due(restore) and where not in self._out.audit_log.failing:
                fields = {"gpu": where[0], "control": where[1], "error": MISSING}
                self._out.add(Note("restore_failed", fields, warning=True))

    def machine_slept(self, boot_offset_ns: int) -> None:
        """How far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC: ceilings' deadlines are of it."""
        self._out.boot_offset_ns = boot_offset_ns

    @property
    def jobs(self) -> set[str]:
        """Jobs that have ceilings; `jobs_present` ends them."""
        return self._requests.administration.ceilings.jobs

    def jobs_present(self, now_ns: int, present: set[str]) -> list[Effect]:
        """Which of these jobs have a control group now."""
        self._out.now_ns = now_ns
        self._requests.administration.ceilings.jobs_present(present)
        return self._effects()

    def cpus_found(self, cpus: Iterable[CpuInfo]) -> None:
        """CPU packages whose energy is sampled."""
        self.node.cpus = list(cpus)

    def reconfigure(self, now_ns: int, settings: Settings) -> list[Effect]:
        """The site has new wishes. Leases stay; what they may be set to follows the new rules."""
        self._out.now_ns = now_ns
        self.node.settings = settings
        self._requests.reconfigured()
        for gpu in self.node.gpus.values():
            for control, machine in gpu.machines.items():
                target = settings.site.target(control, gpu.facts, machine.observed)
                if target is not None:
                    machine.configure(target, self._override)
        return self._effects()

    def peer_opened(self, now_ns: int, peer: Peer) -> list[Effect]:
        """A connection, and who the kernel says is at its other end."""
        self._out.now_ns = now_ns
        self._connections[peer.conn] = ClientState(peer)
        for machine in self.node.held_by(peer.process):
            machine.reconnected()
        return self._effects()

    def peer_closed(self, now_ns: int, conn: int) -> list[Effect]:
        """A connection ended. Leases stay: they belong to the process."""
        self._out.now_ns = now_ns
        ended = self._connections.pop(conn, None)
        if ended is not None:
            process = ended.peer.process
            if not any(other.peer.process == process for other in self._connections.values()):
                for machine in self.node.held_by(process):
                    machine.shorten(RECONNECT_NS)
        return self._effects()

    def process_gone(self, now_ns: int, process: Process) -> list[Effect]:
        """A process that was watched has died."""
        self._out.now_ns = now_ns
        self.node.alive.discard(process)
        for machine in self.node.machines():
            machine.process_gone(process)
        self._note_missing()
        return self._effects()

    def client(self, conn: int, client: str) -> None:
        """Which client object of its process uses a connection now."""
        connection = self._connections.get(conn)
        if connection is None or connection.client == client:
            return
        own = None if connection.client else connection.deferrals
        key = connection.peer.process, client
        connection.client = client
        connection.deferrals = self._deferrals.setdefault(key, Deferrals())
        if own is not None and own.last is not None:
            connection.deferrals.add(own.last, own.count)

    def request(self, now_ns: int, conn: int, request: Request) -> list[Effect]:
        """A validated request on a connection."""
        self.client(conn, request.client)
        self._out.now_ns = now_ns
        connection, requests = self._connections.get(conn), self._requests
        if connection is None or self._silent:
            return []
        if request.deadline_ns and now_ns > request.deadline_ns:
            requests.refuse(connection, request, LATE)
        elif connection.waiting >= MAX_WAITING_REQUESTS:
            requests.refuse(connection, request, TOO_MANY_WAIT)
        else:
            requests.handlers[type(request)](connection, request)
        return self._effects()

    def device_done(self, now_ns: int, ticket: int, result: object) -> list[Effect]:
        """A `Read` or `Write` returned: its value, None, or a `Failure`."""
        self._out.now_ns = now_ns
        if isinstance(result, Failure) and result.outcome is Outcome.LOST:
            self._lose_gpu(result)
        self._out.finish(ticket, result)
        return self._effects()

    def _lose_gpu(self, failure: Failure) -> None:
        """A GPU answers no more: one record, until it answers or is found again."""
        self._mute.add(failure.gpu)
        if failure.gpu and failure.gpu not in self._lost_gpus:
            self._lost_gpus.add(failure.gpu)
            fields = {"gpu": failure.gpu, "result": failure.message}
            self._out.add(Note("gpu_lost", fields, warning=True))

    def _return_gpu(self, uuid: str) -> None:
        self._lost_gpus.discard(uuid)
        self._out.add(Note("gpu_returned", {"gpu": uuid}))
        for machine in self.node.gpus[uuid].machines.values():
            machine.enforce(again=True)

    def look_around(self, now_ns: int) -> list[Effect]:
        """Reads what controls that nobody holds hold, to notice what someone else has set."""
        self._out.now_ns = now_ns
        if self.node.closed is None:
            # Not at the first answer: a GPU may answer some calls and not others.
            for uuid in sorted(self._lost_gpus & (self._answered - self._mute)):
                self._return_gpu(uuid)
            self._answered.clear()
            self._mute.clear()
            # MIG may be switched while zeusd runs. A GPU that has not answered is not asked again.
            for uuid in sorted(self.node.gpus.keys() - self._asked_split):
                self._asked_split.add(uuid)
                ticket = self._out.ticket(partial(self._split_seen, uuid))
                self._out.add(Read(ticket, uuid, Reading.SPLIT))
            for machine in self.node.machines():
                if machine.spec.readable and machine.phase is Phase.FREE:
                    ticket = self._out.ticket(partial(self._looked_around, machine))
                    gpu, control = machine.gpu, machine.control
                    self._out.add(Read(ticket, gpu, Reading.CONTROL, control))
        return self._effects()

    def _split_seen(self, uuid: str, split: object) -> None:
        self._asked_split.discard(uuid)
        gpu = self.node.gpus[uuid]
        if isinstance(split, bool) and split != gpu.info.mig_enabled:
            info = gpu.info.model_copy(update={"mig_enabled": split})
            gpu.facts = replace(gpu.facts, info=info)

    def _looked_around(self, machine: ControlMachine, result: object) -> None:
        if isinstance(result, tuple):
            self._answered.add(machine.gpu)
            machine.seen(result)

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed."""
        self._out.now_ns = now_ns
        self._requests.expire()
        self._requests.administration.tick(now_ns)
        self._forgive_own_stall(now_ns)
        if self._out.due_ns:
            for machine in self.node.machines():
                machine.tick(now_ns)
        return self._effects()

    def stop(self, now_ns: int, restore: bool = True) -> list[Effect]:
        """zeusd is being stopped: nothing new is accepted.

        Args:
            now_ns: Time.
            restore: Restore everything. Else all stays, in the journal, for the next zeusd, and
                what is asked meanwhile stays unanswered: clients ask the next one again.
        """
        self._out.now_ns = now_ns
        self.node.stopping = True
        restore = restore and self.node.quiesced_ns is None  # else the GPUs are out of reach
        self._silent = not restore
        if restore:
            if self.unrestored:
                self._out.add(Put(STOPPING_KEY, {}))
            self.node.closed = SHUTTING_DOWN
            self._requests.administration.ceilings.stop()
            for machine in self.node.machines():
                machine.close(SHUTTING_DOWN)
                machine.revoke("daemon_stops", "zeusd was stopped")
                machine.retry_now()  # a stop does not wait out the pause after a failure
        return self._effects()

    # ---------------------------------------------------------------------------------- queries

    @property
    def settled(self) -> bool:
        """Whether no device call is in flight and no control waits to be restored at once."""
        return self._out.in_flight == 0

    @property
    def unrestored(self) -> list[tuple[str, Control]]:
        """Controls that are leased, being restored, waiting for another attempt, or not known yet
        although the journal says that something is to be restored."""
        return [
            *(
                (machine.gpu, machine.control)
                for machine in self.node.machines()
                if machine.phase is not Phase.FREE
            ),
            *self.node.pending,
        ]

    @property
    def audit_log(self) -> AuditLog:
        """The newest records of the audit log."""
        return self._out.audit_log

    @property
    def silent(self) -> bool:
        """Whether requests stay unanswered: the next zeusd is to be asked again."""
        return self._silent

    def defer(self, conn: int, error: ErrorBody) -> None:
        """Counts a failed set that nobody waits for."""
        connection = self._connections.get(conn)
        if connection is not None:
            connection.deferrals.add(error)

    def add_deferred(self, conn: int, body: Envelope) -> None:
        """Adds this connection's failed sets that nobody waited for to a reply."""
        connection = self._connections.get(conn)
        if connection is not None:
            connection.add_deferred(body)

    def user(self, conn: int) -> int:
        """The user on a connection; -1: it has ended."""
        connection = self._connections.get(conn)
        return -1 if connection is None else connection.peer.uid

    def may_know(self, conn: int, uid: int | None) -> bool:
        """Whether who asks on this connection may know processes of this user."""
        connection = self._connections.get(conn)
        if connection is None:
            return False
        peer = connection.peer
        return peer.uid == uid or self.node.settings.access.is_admin(peer)

    @property
    def unclaimed(self) -> bool:
        """Whether the journal speaks of GPUs that have not been found yet."""
        return bool(self.node.pending or self._losses)

    @property
    def restoring(self) -> bool:
        """Whether it was stopped, and some control is still to be restored."""
        left = any(machine.phase is not Phase.FREE for machine in self.node.machines())
        return self.node.stopping and not self._silent and left

    def summary(self) -> tuple[int, int, int]:
        """How many GPUs there are, leases, and controls that could not be restored yet."""
        machines = [*self.node.machines()]
        held = sum(machine.phase is Phase.HELD for machine in machines)
        pending = sum(machine.retry_at_ns is not None for machine in machines)
        return len(self.node.gpus), held, pending

    def next_deadline_ns(self) -> int | None:
        """When `tick` is next needed; None if time alone changes nothing."""
        earliest_ns = self._out.due_ns.earliest_ns()
        for due_ns in (self._requests.waiting.earliest_ns(), self._ceilings_due.next_deadline_ns()):
            if due_ns is not None and (earliest_ns is None or due_ns < earliest_ns):
                earliest_ns = due_ns
        return earliest_ns

    # ---------------------------------------------------------------------------------- settings

    def _effects(self) -> list[Effect]:
        """The effects of the present event."""
        if self.node.losers:
            self._requests.leases.lost(self._connections.values())
        return self._out.take()

    @property
    def _override(self) -> bool:
        return self.node.settings.site.outside_change == "override"

    def _forgive_own_stall(self, now_ns: int) -> None:
        """If zeusd itself stood still, heartbeats wait in its socket: it hears them first."""
        earliest_ns = self._out.due_ns.earliest_ns()
        late_ns = 0 if earliest_ns is None else now_ns - earliest_ns
        if late_ns > STALL_NS:
            self._out.add(Note("stalled", {"seconds": round(late_ns / 1e9, 3)}, warning=True))
            for machine in self.node.machines():
                if machine.lease is not None:
                    machine.forgive_stall(machine.lease.ttl_ns)

    # ------------------------------------------------------------------------------------- GPUs

    def _driver_loaded(self, driver: str, entry: dict[str, Any]) -> None:
        """What another driver held is gone; nothing of it is restored, and nothing counts."""
        if self._driver is not None and self._driver != driver:
            self._out.add(
                Note("driver_changed", {"old": self._driver, "new": driver}, warning=True)
            )
            for restore in self.node.pending.values():
                self._out.add(Forget(restore.key))
                if restore.holder in self.node.alive:
                    loss = Loss(
                        restore.gpu,
                        restore.control,
                        restore.holder,
                        "the GPU's driver was reloaded",
                        restore.uid,
                    )
                    self._losses.append(loss)
                    self._out.add(Put(loss.key, loss.to_json()))
            if not self.node.gpus:
                for key in self._values:
                    self._out.add(Forget(key))
            self.node.pending.clear()
            self._values.clear()
        if self._driver != driver:
            self._driver = driver
            self._out.add(Put(DRIVER_KEY, {**entry, "id": driver}))

    def _add_controls(self, gpu: Gpu) -> None:
        """Controls of a GPU that are not known yet, and what the journal says of them.

        A driver may fail while a GPU is looked at: a control that something is to be restored on
        is tried even where the driver has not said that it is there.
        """
        uuid, facts, values = gpu.info.uuid, gpu.facts, self._values
        added: list[ControlMachine] = []
        for control in RESTORE_ORDER:
            restore = self.node.pending.get((uuid, control))
            offered = control.value in facts.info.controls
            if control in gpu.machines or not (offered or restore):
                continue
            baseline = values.get(observed_key(uuid, control))
            known = baseline
            if known is None and restore is not None and (restore.target or SPECS[control].merges):
                known = restore.target
            target = self.node.settings.site.target(control, facts, known)
            if target is None:
                if restore is None:
                    continue
                highest_mw = restore.target[0] if SPECS[control].ceilings else None
                target = Target(restore.target, False, highest_mw)
            added.append(self._add_control(gpu, control, target, baseline is None))
        for loss in [loss for loss in self._losses if loss.gpu == uuid]:
            if loss.control not in gpu.machines:
                continue
            self._losses.remove(loss)
            if loss.process in self.node.alive:
                gpu.machines[loss.control].recover_loss(loss)
            else:
                self._out.add(Forget(loss.key))
        gpu.machines = {one: gpu.machines[one] for one in RESTORE_ORDER if one in gpu.machines}
        for machine in added:
            self._reconcile(machine)

    def _add_control(
        self, gpu: Gpu, control: Control, target: Target, first_seen: bool
    ) -> ControlMachine:
        uuid, values = gpu.info.uuid, self._values
        machine = gpu.machines[control] = ControlMachine(
            uuid, control, target, self._out, self.node, self._override
        )
        machine.first = values.get(initial_key(uuid, control))
        if machine.spec.readable and first_seen and not target.pinned:
            if machine.first is None:
                machine.first = target.value
            for key in (observed_key(uuid, control), initial_key(uuid, control)):
                self._out.add(Put(key, {"value": list(target.value)}))
        persisted = values.get(pin_key(uuid, control))
        if persisted is not None:
            machine.ceilings[PERSISTED] = Ceiling(persisted, 0)
        prefix = f"{CEILING_PREFIX}{uuid}/{control.value}/"
        for key in [key for key in self._ceilings if key.startswith(prefix)]:
            machine.ceilings[key.removeprefix(prefix)] = self._ceilings.pop(key)
        machine.recover_rest(values.get(resting_key(uuid, control)))
        return machine

    def _reconcile(self, machine: ControlMachine) -> None:
        """Compares the device and what the journal intends, and acts on it."""
        restore = self.node.pending.pop((machine.gpu, machine.control), None)
        if restore is not None:
            ending = None if restore.holder in self.node.alive else "holder_gone"
            machine.recover(restore, "daemon_stops" if self._was_stopping else ending)
            if self.node.quiesced_ns is not None:
                machine.revoke("quiesced", DRIVER_CLOSED)
        if self.node.quiesced_ns is not None:
            machine.suspend()  # found while the driver is closed or opened: `resume` follows
            return
        if machine.bounded or (machine.spec.ceilings and machine.rests_elsewhere):
            machine.ceilings_moved()
        machine.enforce()

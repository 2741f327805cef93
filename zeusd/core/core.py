"""The core: takes events, keeps every rule, answers with effects.

It has no clock, socket, thread or file. The runtime calls one method per event, in order and from
one thread, and carries out the effects that it returns, in order. What clients ask for is answered
by `requests.Requests`; how a control is leased, written and restored is `control.ControlMachine`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from zeus_common.units import SECOND_NS
from zeus_ipc.controls import RESTORE_ORDER, SPECS, Control, ControlValue
from zeus_ipc.requests import Request
from zeusd.core.administration import DRIVER_CLOSED
from zeusd.core.audit_log import AuditLog
from zeusd.core.bounds import PERSISTED
from zeusd.core.control import ControlMachine
from zeusd.core.effects import Effect, Forget, Put, Read, ReadingMade
from zeusd.core.entries import (
    CEILING,
    DRIVER,
    GPU,
    INITIAL,
    OBSERVED,
    QUIESCED,
    RESTING,
    STOPPING,
    CeilingEntry,
    DriverEntry,
    Kept,
    Loss,
    Mark,
    PendingRestore,
    Recorded,
    key_of,
)
from zeusd.core.lifecycle import Phase
from zeusd.core.model import Failure, GpuFacts, Peer, ProcessIdentity
from zeusd.core.node import MISSING, NodeGpu, NodeState
from zeusd.core.pending import ClientState, Deferrals
from zeusd.core.policy import CoreSettings, Target
from zeusd.core.requests import SHUTTING_DOWN, RequestAnswers
from zeusd.devices.port import CallOutcome
from zeusd.restore_rule import Unknown, WriteRefused

RECONNECT_NS = 5 * SECOND_NS
"""Time for a holder to reconnect after its last connection ended, for example by exec."""

STALL_NS = SECOND_NS
"""An expiry that is noticed this late was missed by zeusd itself, not by the holder."""


class Core:
    """All state about leases and controls of one node."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        daemon_version: str,
        simulated: str | None = None,
        stream: str | None = None,
        started_ns: int = 0,
        owner_of: Callable[[int], int] = lambda uid: uid,
    ) -> None:
        self.node = NodeState(settings, owner_of)
        self.node.started_ns = started_ns
        self._out = self.node.out
        self._connections: dict[int, ClientState] = {}
        self._deferrals: WeakValueDictionary[tuple[ProcessIdentity, str], Deferrals] = (
            WeakValueDictionary()  # they end with the last connection
        )
        # What the journal says of GPUs and controls that have not been found yet.
        self._entries: dict[str, Recorded] = {}
        self._losses: list[Loss] = []
        self._lost_gpus: set[str] = set()
        # Since the last look around: GPUs that answered it, and that did not answer something.
        self._answered: set[str] = set()
        self._mute: set[str] = set()
        self._asked_split: set[str] = set()
        self._driver: DriverEntry | None = None
        self._was_stopping = False
        self._silent = False
        self._requests = RequestAnswers(self.node, daemon_version, simulated, stream)
        self._requests.administration.connections = lambda: len(self._connections)
        self._ceilings = self._requests.ceilings

    # ----------------------------------------------------------------------------------- events

    def recover(self, entries: dict[str, Recorded], alive: set[ProcessIdentity]) -> None:
        """What the journal holds, before any GPU is known."""
        node, values = self.node, [*entries.values()]
        self._entries = dict(entries)
        quiesced = entries.get(QUIESCED)
        node.quiesced_ns = quiesced.since_ns if isinstance(quiesced, Mark) else None
        node.closed = node.quiesced
        restores = [value for value in values if isinstance(value, PendingRestore)]
        node.pending = {(restore.gpu, restore.control): restore for restore in restores}
        node.alive = set(alive)
        self._losses = [value for value in values if isinstance(value, Loss)]
        self._driver = next((value for value in values if isinstance(value, DriverEntry)), None)
        self._was_stopping = STOPPING in entries

    def gpus_found(
        self,
        now_ns: int,
        driver_version: str | None,
        gpus: Iterable[GpuFacts],
        driver: str = "",
        reached_by: dict[str, Any] | None = None,
    ) -> list[Effect]:
        """The driver's GPUs, at start and whenever they were enumerated again.

        Args:
            driver: Names this very load of the driver: limits do not survive another.
            reached_by: How the helper reaches it, see `DriverEntry`.
        """
        self._out.now_ns = now_ns
        self.node.driver_version = driver_version
        settle_s = self.node.settings.site.settle_s
        self._driver_loaded(DriverEntry(driver, settle_s, **(reached_by or {})))
        for facts in gpus:
            uuid = facts.info.uuid
            known = self.node.gpus.get(uuid)
            if known is None:
                known = self.node.gpus[uuid] = NodeGpu(facts, {})
                if f"{GPU}/{uuid}" not in self._entries:  # a restart of zeusd is no news
                    address = facts.info.pci_address
                    name = facts.info.name
                    self._out.note("gpu_found", gpu=uuid, gpu_name=name, pci_address=address)
                    self._out.add(Put(f"{GPU}/{uuid}", Mark()))
            known.facts = facts
            if uuid in self._lost_gpus:
                self._return_gpu(uuid)
            for machine in [*known.machines.values()]:
                machine.retry_now()
            self._add_controls(known)
        self._ceilings.recovered()
        if self._was_stopping:
            self._was_stopping = False
            for restore in self.node.pending.values():  # of GPUs that have not been found yet
                ending = self.node.pending[restore.gpu, restore.control] = replace(
                    restore, ending="daemon_stops"
                )
                self._out.add(Put(ending.key, ending))
            self._out.add(Forget(STOPPING))
        self._note_missing()
        return self._effects()

    def _note_missing(self) -> None:
        """One record of each restore that waits for a GPU which is not there."""
        for restore in self.node.pending.values():
            where = restore.gpu, restore.control.value
            if self.node.restore_due(restore) and where not in self._out.audit_log.failing:
                gpu, control = where
                self._out.note("restore_failed", True, gpu=gpu, control=control, error=MISSING)

    def machine_slept(self, boot_offset_ns: int) -> None:
        """How far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC: ceilings' deadlines are of it."""
        self._out.boot_offset_ns = boot_offset_ns

    @property
    def jobs(self) -> set[str]:
        """Jobs that have ceilings; `jobs_present` ends them."""
        return self._ceilings.jobs

    def jobs_present(self, now_ns: int, present: set[str]) -> list[Effect]:
        """Which of these jobs have a control group now."""
        self._out.now_ns = now_ns
        self._ceilings.jobs_present(present)
        return self._effects()

    def reconfigure(self, now_ns: int, settings: CoreSettings) -> list[Effect]:
        """The configuration changed. Leases stay; their ranges follow the new rules."""
        self._out.now_ns = now_ns
        self.node.settings = settings
        self._requests.context.reconfigured()
        for gpu in self.node.gpus.values():
            for control, machine in gpu.machines.items():
                bounds = machine.bounds
                known = bounds.observed or bounds.initial
                target = settings.site.target(control, gpu.facts, known)
                if target is not None:
                    machine.configure(target, self._override)
        return self._effects()

    def peer_opened(self, now_ns: int, peer: Peer) -> list[Effect]:
        """A client connected; the kernel identified the peer."""
        self._out.now_ns = now_ns
        self._connections[peer.conn] = ClientState(peer, self._out)
        for machine in self.node.held_by(peer.process):
            machine.holding.reconnected()
        return self._effects()

    def peer_closed(self, now_ns: int, conn: int) -> list[Effect]:
        """A connection ended. Leases stay: they belong to the process."""
        self._out.now_ns = now_ns
        ended = self._connections.pop(conn, None)
        if ended is not None:
            process = ended.peer.process
            if not any(other.peer.process == process for other in self._connections.values()):
                for machine in self.node.held_by(process):
                    machine.holding.shorten(RECONNECT_NS)
        return self._effects()

    def process_gone(self, now_ns: int, process: ProcessIdentity) -> list[Effect]:
        """A process that was watched has died."""
        self._out.now_ns = now_ns
        self.node.alive.discard(process)
        for machine in self.node.machines():  # sets that wait have no index: there are few
            machine.withdraw(process)
        for machine in self.node.held_by(process):
            machine.release("holder_gone")
        for machine in [*self.node.watched.get(process, ())]:
            machine.holding.forgive(process)
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
        connection = self._connections.get(conn)
        if connection is None or self._silent:
            return []
        self._requests.serve(connection, request)
        return self._effects()

    def device_done(self, now_ns: int, ticket: int, result: object) -> list[Effect]:
        """A `Read` or `Write` returned: its value, outcome, or a `Failure`."""
        self._out.now_ns = now_ns
        trouble = result.trouble if isinstance(result, (WriteRefused, Unknown)) else result
        if isinstance(trouble, Failure) and trouble.outcome is CallOutcome.LOST:
            self._lose_gpu(trouble)
        self._out.finish(ticket, result)
        return self._effects()

    def _lose_gpu(self, failure: Failure) -> None:
        """A GPU answers no more: one record, until it answers or is found again."""
        self._mute.add(failure.gpu)
        if failure.gpu and failure.gpu not in self._lost_gpus:
            self._lost_gpus.add(failure.gpu)
            self._out.note("gpu_lost", True, gpu=failure.gpu, result=failure.message)

    def _return_gpu(self, uuid: str) -> None:
        self._lost_gpus.discard(uuid)
        self._out.note("gpu_returned", gpu=uuid)
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
                self._out.add(Read(ticket, uuid, ReadingMade.SPLIT))
            for machine in self.node.machines():
                if machine.spec.readable and machine.phase is Phase.FREE:
                    ticket = self._out.ticket(partial(self._looked_around, machine))
                    gpu, control = machine.gpu, machine.control
                    self._out.add(Read(ticket, gpu, ReadingMade.CONTROL, control))
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
        self._forgive_own_stall(now_ns)
        self._ceilings.tick()
        self._out.run_due()
        return self._effects()

    def stop(self, now_ns: int, restore: bool = True) -> list[Effect]:
        """zeusd is being stopped: nothing new is accepted. Without `restore` everything stays, in
        the journal, for the next zeusd, and requests stay unanswered: clients ask that one."""
        self._out.now_ns = now_ns
        self.node.stopping = True
        restore = restore and self.node.quiesced_ns is None  # else the GPUs are out of reach
        self._silent = not restore
        if restore:
            if self.unrestored:
                self._out.add(Put(STOPPING, Mark()))
            self.node.closed = SHUTTING_DOWN
            self._ceilings.stop()
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
    def settling(self) -> bool:
        """Whether a restore only waits until no earlier write can take effect any more."""
        return any(machine.settling for machine in self.node.machines())

    @property
    def unrestored(self) -> list[tuple[str, Control]]:
        """Controls that are leased, being restored, waiting for another attempt, or not known yet
        although the journal says that something is to be restored."""
        return [*((machine.gpu, machine.control) for machine in self._left), *self.node.pending]

    @property
    def _left(self) -> list[ControlMachine]:
        machines = self.node.machines()
        return [
            machine
            for machine in machines
            if machine.phase is not Phase.FREE and not machine.only_lowers
        ]

    @property
    def audit_log(self) -> AuditLog:
        """The newest records of the audit log."""
        return self._out.audit_log

    @property
    def silent(self) -> bool:
        """Whether requests stay unanswered: the next zeusd is to be asked again."""
        return self._silent

    def connection(self, conn: int) -> ClientState | None:
        """A connection; None: it has ended."""
        return self._connections.get(conn)

    @property
    def unclaimed(self) -> bool:
        """Whether the journal speaks of GPUs that have not been found yet."""
        return bool(self.node.pending or self._losses)

    @property
    def restoring(self) -> bool:
        """Whether it was stopped, and some control is still to be restored."""
        return self.node.stopping and not self._silent and bool(self._left)

    @property
    def lost(self) -> bool:
        """Whether all controls that are still to be restored are those of lost GPUs."""
        return all(machine.gpu in self._lost_gpus for machine in self._left)

    def summary(self) -> tuple[int, int, int]:
        """How many GPUs there are, leases, and controls that could not be restored yet."""
        machines = [*self.node.machines()]
        held = sum(machine.phase is Phase.HELD for machine in machines)
        pending = sum(machine.failed_attempts > 0 for machine in machines)
        return len(self.node.gpus), held, pending

    def next_deadline_ns(self) -> int | None:
        """When `tick` is next needed; None if time alone changes nothing."""
        due = (self._out.due_ns.earliest_ns(), self._ceilings.next_deadline_ns())
        return min((due_ns for due_ns in due if due_ns is not None), default=None)

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
            self._out.note("stalled", True, seconds=round(late_ns / 1e9, 3))
            for machine in self.node.machines():
                machine.holding.forgive_stall()

    # ------------------------------------------------------------------------------------- GPUs

    def _driver_loaded(self, driver: DriverEntry) -> None:
        """What another driver held is gone; nothing of it is restored, and nothing counts."""
        before, self._driver = self._driver, driver
        if before is not None and before.id != driver.id:
            self._out.note("driver_changed", True, old=before.id, new=driver.id)
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
                    self._out.add(Put(loss.key, loss))
            ceilings = {
                key: entry
                for key, entry in self._entries.items()
                if isinstance(entry, CeilingEntry) and not key.endswith(PERSISTED)
            }
            for key, entry in self._entries.items():
                gone = isinstance(entry, (Kept, CeilingEntry)) or key.startswith(GPU)
                if gone and key not in ceilings and not self.node.gpus:
                    self._out.add(Forget(key))
            self.node.pending.clear()
            self._entries = dict(ceilings)
        if before != driver:
            self._out.add(Put(DRIVER, driver))

    def _add_controls(self, gpu: NodeGpu) -> None:
        """Controls of a GPU that are not known yet, and what the journal says of them.

        A driver may fail while a GPU is looked at: a control that something is to be restored on
        is tried even where the driver has not said that it is there.
        """
        uuid, facts = gpu.info.uuid, gpu.facts
        added: list[ControlMachine] = []
        for control in RESTORE_ORDER:
            restore = self.node.pending.get((uuid, control))
            offered = control.value in facts.info.controls
            if control in gpu.machines or not (offered or restore):
                continue
            known = self._kept(OBSERVED, uuid, control) or self._kept(INITIAL, uuid, control)
            if known is None and restore is not None and (restore.target or SPECS[control].merges):
                known = restore.target
            target = self.node.settings.site.target(control, facts, known)
            if target is None:
                if restore is None:
                    continue
                highest_mw = restore.target[0] if SPECS[control].ceilings else None
                target = Target(restore.target, False, highest_mw)
            added.append(self._add_control(gpu, control, target, known))
        for loss in [loss for loss in self._losses if loss.gpu == uuid]:
            if loss.control not in gpu.machines:
                continue
            self._losses.remove(loss)
            if loss.process in self.node.alive:
                gpu.machines[loss.control].holding.lose(loss)
            else:
                self._out.add(Forget(loss.key))
        gpu.machines = {one: gpu.machines[one] for one in RESTORE_ORDER if one in gpu.machines}
        for machine in added:
            self._reconcile(machine)

    def _add_control(
        self, gpu: NodeGpu, control: Control, target: Target, known: ControlValue | None
    ) -> ControlMachine:
        uuid = gpu.info.uuid
        machine = gpu.machines[control] = ControlMachine(
            uuid, control, target, self.node, self._override
        )
        bounds = machine.bounds
        bounds.initial = self._kept(INITIAL, uuid, control)
        bounds.observed = self._kept(OBSERVED, uuid, control) or bounds.observed
        if bounds.initial is None and machine.spec.readable:
            # Also where the site has chosen a target: it may choose none later.
            bounds.initial = gpu.facts.values.get(control) if known is None else known
            if bounds.initial is not None:
                self._out.add(Put(key_of(INITIAL, uuid, control), Kept(bounds.initial)))
        prefix = key_of(CEILING, uuid, control, "")
        for key, entry in self._entries.items():
            if isinstance(entry, CeilingEntry) and key.startswith(prefix):
                bounds.ceilings[key.removeprefix(prefix)] = entry
        bounds.resting = self._kept(RESTING, uuid, control)
        return machine

    def _kept(self, kind: str, gpu: str, control: Control) -> ControlValue | None:
        """A value of a control in the journal; None: there is none."""
        entry = self._entries.get(key_of(kind, gpu, control))
        return entry.value if isinstance(entry, Kept) else None

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
        bounds = machine.bounds
        if bounds.active or (machine.spec.ceilings and bounds.rests_elsewhere):
            machine.ceilings_moved()
        machine.enforce()

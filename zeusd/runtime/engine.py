"""Core, journal, workers and devices, turning on one reactor: a node without its socket.

`zeusd serve` puts a socket in front of it (`zeusd.main`); a process without a daemon embeds it
(`zeusd.embed`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zeus_ipc import replies
from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Envelope, ErrorBody, NodeProblem, UserLoad
from zeus_ipc.requests import Request
from zeusd.core.accounting import ABSENT
from zeusd.core.core import Core
from zeusd.core.effects import (
    CloseDriver,
    Effect,
    Forget,
    LedgerCall,
    Look,
    Note,
    OpenDriver,
    Put,
    Read,
    ReadingMade,
    Reply,
    RuntimeCounters,
    Unwatch,
    WatchProcess,
    Write,
)
from zeusd.core.entries import PENDING, Loss, PendingRestore, Recorded
from zeusd.core.model import Failure, GpuFacts, Peer, ProcessIdentity
from zeusd.core.policy import CoreSettings
from zeusd.devices.metered import MeteredBackend
from zeusd.devices.port import Backend
from zeusd.logs import AUDIT
from zeusd.nodes import OpenedNode
from zeusd.runtime.accounting import Accounting
from zeusd.runtime.activity import LISTING, Listed
from zeusd.runtime.control_groups import JobGroups
from zeusd.runtime.devices import RETRY_S, DeviceFinder, Found
from zeusd.runtime.driver import DriverThreads
from zeusd.runtime.gpu_locks import GpuLocks, lock_directory
from zeusd.runtime.journal import EntryChange, Journal, orphans
from zeusd.runtime.outside import OutsideWatch
from zeusd.runtime.processes import ProcessWatch, open_process, usage_of
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.reads import Reads
from zeusd.runtime.sampling import CHECK_S, Sampling
from zeusd.runtime.trouble import OpenFailure

_JOURNALED = frozenset({Put, Forget, Write})

log = logging.getLogger(__name__)
audit = logging.getLogger(AUDIT)

GONE_S = 2.0
"""A driver that has answered all calls with errors for so long is not waited for at a stop: a
short failure is over by then."""


class Engine:
    """Carries out the effects of the core, and passes events to it.

    All methods but `close` belong to the reactor's thread.
    """

    def __init__(
        self,
        core: Core,
        reactor: Reactor,
        node: OpenedNode,
        journal: Journal,
        reply: Callable[[int, Envelope], None],
        boot: str,
        orphan_directories: Sequence[str] = (),
        retry_s: float = RETRY_S,
        *,
        sampling: Callable[[Backend, Reactor], Sampling],
        users: Callable[[], list[UserLoad]] = list,
        charge: Callable[[int, int], None] = lambda conn, cpu_ns: None,
        accounting: Callable[[Sampling], Accounting] | None = None,
    ) -> None:
        self.core = core
        self._reactor = reactor
        self._nvml = MeteredBackend(node.nvml)
        self._journal = journal
        self._journal_waits = False
        self._soon: dict[str, Recorded] = {}
        self._locks = GpuLocks(lock_directory(node.simulated))
        self._reply = reply
        self._charge = charge
        self._boot = boot
        self._orphan_directories = orphan_directories
        self._processes = ProcessWatch(reactor, self._process_gone)
        self._job_groups = JobGroups()
        self._recovered: list[ProcessIdentity] = []
        self._journal_trouble = OpenFailure("journal")
        core.node.problems = self._problems
        self._peers: dict[int, ProcessIdentity] = {}
        self._driver_entry = node.driver
        self._users = users
        self.abandoned: list[tuple[str, Control]] = []
        self.sampling = sampling(self._nvml, reactor)
        self.sampling.watch = OutsideWatch(core.node, reactor.post)
        self._accounting = None if accounting is None else accounting(self.sampling)
        self._driver = DriverThreads(
            self._nvml,
            self.sampling,
            self._done_on_thread,
            self._found_on_thread,
            node.driver_id,
            retry_s,
        )
        self._reads = Reads(core, reactor, self.sampling, self._driver.submit, reply, charge)
        self._carry_out: dict[type, Callable[[Any], None]] = {
            Reply: self._reply_to,
            Read: self._call,
            Write: self._driver.submit,
            Put: lambda effect: self._device_done(effect.ticket, None),
            CloseDriver: lambda effect: self._driver.close_driver(effect.ticket),
            OpenDriver: lambda effect: self._driver.open_driver(effect.ticket),
            WatchProcess: lambda effect: self._processes.watch(effect.process),
            Unwatch: lambda effect: self._processes.unwatch(effect.process),
            LedgerCall: self._account,
            Look: lambda effect: self._done_on_thread(effect.ticket, usage_of(effect.process)),
            Note: self._audit,
        }

    @property
    def finder(self) -> DeviceFinder:
        """What looks for GPUs."""
        return self._driver.finder

    @property
    def settle_s(self) -> float:
        """How much longer than its timeout a stop may take."""
        return self.core.node.settings.site.settle_s

    @property
    def first_look_over(self) -> bool:
        """Whether clients may be told which GPUs there are."""
        quiesced = self.core.node.quiesced_ns is not None
        return quiesced or self.finder.first_attempt_over.is_set()

    # -------------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Takes the journal and begins to look for GPUs.

        Raises:
            JournalError: The journal cannot be used.
        """
        replies.prepare()
        entries = self._journal.open()
        self._check_journal()
        for directory in self._orphan_directories:
            for orphan, left in orphans(directory, self._boot):
                taken = {key: entry for key, entry in left.items() if key not in entries}
                entries |= taken
                try:
                    self._journal.commit([EntryChange(key, entry) for key, entry in taken.items()])
                except OSError:
                    orphan.close()  # it stays, for the next zeusd
                    self._check_journal()
                else:
                    orphan.delete()
        self._note_sleep()
        self._recover(entries)
        self.core.node.cpus = self.sampling.cpus
        self.sampling.start()
        if self._accounting is not None:
            self._accounting.start()
            # How often to list the processes of GPUs that nobody holds.
            self._reactor.every(1.0, partial(self._list_processes, self._accounting))
        self._reactor.every(CHECK_S, self._check_sampling)
        # How often to look whether jobs that have ceilings are still there.
        self._reactor.every(2.0, self._check_jobs)
        # How often controls that nobody holds are read, to notice what someone else has set.
        self._reactor.every(10.0, self._look_around)
        if self.core.node.quiesced_ns is None:
            self._driver.start()
        else:
            log.warning(
                "zeusd stays quiesced and does not open the driver until `zeusctl resume`",
                extra={"event": "still_quiesced"},
            )

    def run(self) -> None:
        """Turns the reactor until it is stopped."""
        self._reactor.run(self.core.next_deadline_ns, self._on_time)

    def stop(self, timeout_s: float, then: Callable[[], None], restore: bool = True) -> None:
        """Restores everything, then calls `then`; after `timeout_s` at the latest, or as long after
        that as an earlier write may still take effect. Does not wait for a driver that answers that
        it cannot: its GPU is lost, or all calls have failed for long.

        What could not be restored by then stays in the journal. Without `restore` everything does.
        A stop during the start waits until the GPUs are known.
        """
        give_up_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        settled_ns = give_up_ns + int(self.settle_s * 1e9)
        if self._accounting is not None:
            self._accounting.refuse_all()
        looking = restore and not self.first_look_over

        def begin() -> None:
            self.apply(self.core.stop(time.monotonic_ns(), restore))
            check()

        def check() -> None:
            nonlocal looking
            if looking and self.first_look_over:
                looking = False
                self._reactor.post(begin)
                return
            late = time.monotonic_ns() > (settled_ns if self.core.settling else give_up_ns)
            restoring = self.core.restoring and not self._gone
            if (looking or restoring or not self.core.settled) and not late:
                self._reactor.call_later(0.002, check)
                return
            self.abandoned = self.core.unrestored if restore else []
            for gpu, control in self.abandoned:
                log.error(
                    "stopping although %s of %s could not be restored; the journal keeps it for "
                    "the next zeusd, or run `zeusd restore` when the GPU answers",
                    control.value,
                    gpu,
                    extra={"event": "restore_abandoned", "gpu": gpu, "control": control.value},
                )
            then()

        self._reactor.post(begin)  # after the found GPUs are registered

    def close(self) -> None:
        """Frees threads and files. The reactor must have stopped."""
        if self._accounting is not None:
            self._accounting.stop()
        self.sampling.stop()
        self._driver.stop()
        self._processes.close()
        self._write_soon()
        self._journal.close()
        self._locks.close()

    # ----------------------------------------------------------------------------------- events

    def peer_opened(self, peer: Peer, pidfd: int) -> None:
        """A client connected. Takes over the pidfd."""
        self._processes.attach(peer.process, pidfd)
        self._peers[peer.conn] = peer.process
        self.apply(self.core.peer_opened(time.monotonic_ns(), peer))

    def peer_closed(self, conn: int) -> None:
        """A connection ended."""
        process = self._peers.pop(conn, None)
        self._reads.closed(conn)
        if self._accounting is not None:
            self._accounting.closed(conn)
        self.apply(self.core.peer_closed(time.monotonic_ns(), conn))
        if process is not None:
            self._processes.detach(process)

    def reconfigure(self, settings: CoreSettings) -> None:
        """The configuration changed."""
        self.apply(self.core.reconfigure(time.monotonic_ns(), settings))

    def request(self, conn: int, request: Request) -> None:
        """A client asked for something."""
        if self._reads.serves(request):
            self.core.client(conn, request.client)
            self._reads.request(conn, request)
        else:
            self.apply(self.core.request(time.monotonic_ns(), conn, request))

    def has_exited(self, conn: int) -> bool:
        """Whether the process that opened a connection has exited."""
        process = self._peers.get(conn)
        return process is not None and self._processes.has_exited(process)

    def invalid(self, conn: int, error: ErrorBody) -> None:
        """A request that nobody waits for was not valid."""
        if (connection := self.core.connection(conn)) is not None:
            connection.deferrals.add(error)

    def _problems(self) -> list[NodeProblem]:
        ledger = () if self._accounting is None else (self._accounting.trouble,)
        troubles = (*self._driver.troubles, *self.sampling.troubles, self._journal_trouble, *ledger)
        return [trouble.problem for trouble in troubles if trouble.problem is not None]

    # --------------------------------------------------------------------------------- internals

    @property
    def _gone(self) -> bool:
        """Whether no attempt to restore what is left can succeed."""
        failing_ns = time.monotonic_ns() - self._nvml.steadily_ns
        dead = self._nvml.failing is not None and failing_ns > GONE_S * 1e9
        return dead or self.core.lost

    def apply(self, effects: Sequence[Effect]) -> None:
        """Carries out the effects of one event, in order, after all that it journals."""
        for effect in effects:
            if type(effect) in _JOURNALED:
                effects = self._record(effects)
                break
        for effect in effects:
            self._carry_out[type(effect)](effect)

    def _audit(self, note: Note) -> None:
        level = logging.WARNING if note.warning else logging.INFO
        if audit.isEnabledFor(level):
            fields = {"event": note.event, **note.fields}
            gpu = self.core.node.gpus.get(fields.get("gpu", ""))
            if gpu is not None:
                fields["gpu_index"] = gpu.info.index
            audit.log(level, note.event, extra=fields)

    def _reply_to(self, reply: Reply) -> None:
        self._reply(reply.conn, reply.body)

    def _record(self, effects: Sequence[Effect]) -> Sequence[Effect]:
        """Journals the effects of one event. Returns what is to be done then.

        A write waits for the disk only if a restore from what is durable would not be right; and
        for the file only if one from what the file says would not be, so that a full disk prevents
        no restore.
        """
        rest: list[Effect] = []
        changes: list[EntryChange] = []
        intents: list[tuple[str, Write | Put]] = []  # are dropped if they cannot be written
        states: dict[str, list[Recorded | None]] = {}  # what may be in the file afterwards
        sync = False
        for effect in effects:
            if not isinstance(effect, (Put, Forget, Write)):
                rest.append(effect)
                continue
            key = effect.restore.key if isinstance(effect, Write) else effect.key
            known = states.setdefault(key, self._journal.states(key))
            entry: Recorded | None
            needed = False
            if isinstance(effect, Write):
                entry = effect.restore
                if (taken := self._locks.take(effect.gpu, self._initial(effect.gpu))) is not None:
                    self._done_on_thread(effect.ticket, taken)
                    continue
                rest.append(effect)
                self._reads.written(effect.gpu)
                if all(_covers(one, effect.restore) for one in known):
                    self._put_soon(key, entry)
                    continue
                # A restore goes on without a record of its own, where the disk is full.
                needed = not all(_leads_to(one, effect.restore) for one in known)
                durable = self._journal.durable(key) if len(known) == 1 else known[-1]
                sync |= not _covers(durable, effect.restore)
                entry = effect.restore.following(durable)
            elif isinstance(effect, Put):
                entry, needed = effect.entry, effect.ticket > 0
                if effect.soon:
                    self._put_soon(key, entry)
                    continue
                if needed:
                    rest.append(effect)
                sync = True
            else:
                entry, sync = None, True
            known.append(entry)
            changes.append(EntryChange(key, entry, needed))
            if needed and not isinstance(effect, Forget):
                intents.append((key, effect))
            self._soon.pop(key, None)
        try:
            if changes:
                self._journal.commit(changes, sync)
        except OSError as error:
            self._check_journal()
            for key, intent in intents:
                rest.remove(intent)
                self._done_on_thread(intent.ticket, self._not_recorded(key, error))
        for change in changes:
            if change.entry is None and change.key.startswith(PENDING):
                self._unlock(change.key.split("/")[1])
        return rest

    def _initial(self, gpu: str) -> dict[Control, ControlValue]:
        machines = self.core.node.gpus[gpu].machines
        values = {control: machine.bounds.initial for control, machine in machines.items()}
        return {control: value for control, value in values.items() if value is not None}

    def _unlock(self, gpu: str) -> None:
        """Returns a GPU's lock, if nothing is pending on it any more."""
        if not any(held == gpu for held, _ in self.core.unrestored):
            self._locks.release(gpu)

    def _not_recorded(self, key: str, error: OSError) -> Failure:
        _, gpu, control = key.split("/")[:3]
        return Failure(
            ErrorCode.JOURNAL_FAILED,
            f"{control} of {gpu} was not changed, because the intent could not be written to "
            f"{self._journal.path} ({error.strerror}); free space there",
        )

    def _put_soon(self, key: str, entry: Recorded) -> None:
        if not self._soon:
            # How long an entry may wait for others, if what the journal says already is right, too.
            self._reactor.call_later(0.01, self._write_soon)
        self._soon[key] = entry

    def _write_soon(self) -> None:
        changes = [EntryChange(key, entry) for key, entry in self._soon.items()]
        self._soon.clear()
        with contextlib.suppress(OSError):
            self._journal.commit(changes, sync=False)
        self._check_journal()

    def _check_journal(self) -> None:
        """Notes whether the journal can be written; if not, tries again later."""
        error, path = self._journal.failure, self._journal.path
        if error is None:
            if self._journal_trouble.works():
                log.warning("the journal can be written again", extra={"event": "journal_works"})
            return
        reason = error.strerror
        cause = f"the journal {path} cannot be written ({reason}), so every set is refused"
        if self._journal_trouble.disk_failed(error, path.parent, cause):
            log.error(
                "%s: free space there, or choose another directory with --state-dir",
                cause,
                extra={"event": "journal_failed"},
            )
        if not self._journal_waits:
            self._journal_waits = True
            # Pause between attempts to write to the journal what could not be written.
            self._reactor.call_later(1.0, self._retry_journal)

    def _retry_journal(self) -> None:
        self._journal_waits = False
        self._journal.retry()
        self._check_journal()

    def _call(self, call: Read) -> None:
        if call.reading is ReadingMade.METRICS:
            measured = RuntimeCounters(
                self._nvml.describe(),
                self.sampling.describe(),
                self._users(),
                None if self._accounting is None else self._accounting.describe(),
            )
            self._done_on_thread(call.ticket, measured)
        else:
            self._driver.submit(call)

    def _list_processes(self, accounting: Accounting) -> None:
        """Lists the processes of GPUs that nobody holds, if the ledger wants to know."""
        if self.core.node.quiesced_ns is None:
            for uuid in accounting.unheld:
                self._driver.submit(Read(LISTING, uuid, ReadingMade.PIDS))

    def _account(self, effect: LedgerCall) -> None:
        if self._accounting is None:
            self._done_on_thread(effect.ticket, ABSENT)
        else:
            self._accounting.submit(effect, self._done_on_thread)

    def _check_sampling(self) -> None:
        self._on_time()  # a machine that slept wakes no timer early
        self.sampling.check()
        self._driver.check()

    def _done_on_thread(self, ticket: int, result: object) -> None:
        if ticket == LISTING:
            if isinstance(result, Listed) and self._accounting is not None:
                self._accounting.listed(result)
            return
        self._reactor.post(partial(self._device_done, ticket, result))

    def _device_done(self, ticket: int, result: object) -> None:
        if ticket < 0:
            self._reads.done(ticket, result)
            return
        began_ns = time.thread_time_ns()
        effects = self.core.device_done(time.monotonic_ns(), ticket, result)
        if isinstance(
            result, RuntimeCounters
        ):  # the ledger of thousands of users takes milliseconds
            spent_ns = time.thread_time_ns() - began_ns
            for reply in effects:
                if isinstance(reply, Reply):
                    self._charge(reply.conn, spent_ns)
        self.apply(effects)

    def _process_gone(self, process: ProcessIdentity) -> None:
        self.apply(self.core.process_gone(time.monotonic_ns(), process))

    def _check_jobs(self) -> None:
        """Ceilings of jobs end with the jobs' control groups."""
        jobs = self.core.jobs
        if jobs:
            present = self._job_groups.present(jobs)
            self.apply(self.core.jobs_present(time.monotonic_ns(), present))

    def _look_around(self) -> None:
        with contextlib.suppress(OSError):  # reported as the journal's failure
            self._journal.verify()
        self._check_journal()
        self._locks.verify()
        self.apply(self.core.look_around(time.monotonic_ns()))

    def _note_sleep(self) -> None:
        offset_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        self.core.machine_slept(offset_ns)

    def _on_time(self) -> None:
        self._note_sleep()
        self.apply(self.core.tick(time.monotonic_ns()))

    def _found_on_thread(self, inventory: Found) -> None:
        self._reactor.post(lambda: self._found(inventory))

    def _found(self, inventory: Found) -> None:
        self._driver.attach(inventory)
        self.apply(
            self.core.gpus_found(
                time.monotonic_ns(),
                inventory.driver_version,
                [self._as_before(facts) for facts, _ in inventory.gpus],
                inventory.driver,
                self._driver_entry,
            )
        )
        if not self.core.unclaimed:
            for process in self._recovered:
                self._processes.unwatch(process)
                self._processes.detach(process)
            self._recovered.clear()

    def _as_before(self, facts: GpuFacts) -> GpuFacts:
        """A GPU, as it was before another engine changed it."""
        return replace(facts, values={**facts.values, **self._locks.initial(facts.info.uuid)})

    def _recover(self, entries: dict[str, Recorded]) -> None:
        holders = {entry.holder for entry in entries.values() if isinstance(entry, PendingRestore)}
        losers = {entry.process for entry in entries.values() if isinstance(entry, Loss)}
        for process in holders | losers:
            pidfd = open_process(process)
            if pidfd is not None:
                self._processes.attach(process, pidfd)
                self._processes.watch(process)
                self._recovered.append(process)
        self.core.recover(entries, set(self._recovered))


def _covers(known: Recorded | None, restore: PendingRestore) -> bool:
    return isinstance(known, PendingRestore) and known.covers(restore)


def _leads_to(known: Recorded | None, restore: PendingRestore) -> bool:
    return isinstance(known, PendingRestore) and known.leads_to(restore)

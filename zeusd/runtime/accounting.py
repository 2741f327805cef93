"""Keeps the energy ledger on its own thread, which no write or restore waits for.

Once a minute it settles each GPU's account up to the newest tick of its sensors. The next zeusd
settles what is left when this one ends: histories and allocations outlive it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from zeus_common.units import SECOND_NS
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Deallocated, Forgotten, LedgerState
from zeus_ipc.requests import Allocate, Deallocate, ForgetUser, GetUsage
from zeusd.core.effects import LedgerCall
from zeusd.core.model import Failure
from zeusd.energy.split import Account
from zeusd.ledger.schema import LedgerError, damaged, open_ledger
from zeusd.ledger.store import LedgerStore
from zeusd.runtime.accounts import CHECK_NS, NO_GPUS, Accounts, Clocks, Retention
from zeusd.runtime.activity import Listed
from zeusd.runtime.control_groups import JobGroups
from zeusd.runtime.cpu_use import CpuUse
from zeusd.runtime.sources import Source
from zeusd.runtime.trouble import OpenFailure
from zeusd.runtime.usages import BUSY, Usages

log = logging.getLogger(__name__)

READ_NS = 10_000_000_000
"""Time between readings of the CPUs' use."""

FOLDER = "cpu"
"""File name of the CPUs' ledger, in the directory of the GPUs' ledger."""


class CpuAccounts:
    """The accounts of CPU packages, in a separate ledger, so that sums of GPUs never include their
    energy. Belongs to one thread.

    Attributes:
        accounts: The accounts; each of their methods may raise `sqlite3.Error`.
    """

    def __init__(
        self,
        accounts: Accounts,
        use: CpuUse,
        monotonic_ns: Callable[[], int],
        named: Callable[[Account], Account],
    ) -> None:
        self.accounts = accounts
        self._use = use
        self._monotonic_ns = monotonic_ns
        self._named = named
        self._read_ns: int | None = None

    def work(self) -> None:
        """Does the periodic work; call it every `accounts.CHECK_NS`."""
        if not self.accounts.names:
            return
        now_ns = self._monotonic_ns()
        if self._read_ns is None or now_ns - self._read_ns >= READ_NS:
            used: dict[Account, int] = {}
            for account, amount in self._use.read().items():
                name = self._named(account)
                used[name] = used.get(name, 0) + amount
            if self._read_ns is not None:
                self.accounts.used(used, self._read_ns, now_ns)
            self._read_ns = now_ns
        self.accounts.work()


PATIENCE_NS = SECOND_NS
"""How long a deallocation waits for the tick that covers it."""

SLOW = Failure(
    ErrorCode.LEDGER_FAILED,
    "the energy ledger does not store the newest readings in time; check whether its disk is slow",
)
ENDING = Failure(ErrorCode.SHUTTING_DOWN, "zeusd is stopping; try again when it is back")

Done = Callable[[int, object], None]

Work: TypeAlias = Callable[["Failure | None"], None]
"""Something to do on the ledger's thread; it is called with a failure if there is no ledger."""


class _Ending(NamedTuple):
    """A deallocation that waits for the ticks that cover it."""

    effect: LedgerCall
    t_ns: int
    uuids: list[str]


class Accounting:
    """The service. All methods may be called from any thread, and return at once."""

    def __init__(
        self,
        directory: str,
        boot: str,
        names: Callable[[], Iterable[str]],
        find: Callable[[str], Source | None],
        retention: Retention | None = None,
        ignored_units: Iterable[str] | None = None,
        clocks: Clocks | None = None,
        groups: JobGroups | None = None,
    ) -> None:
        self._directory = directory
        self._boot = boot
        self._names = names
        self._find = find
        self._retention = retention or Retention()
        self._ignored_units = ignored_units
        self._clocks = clocks or Clocks()
        self._groups = groups or JobGroups()
        self._queue: queue.Queue[Work | None] = queue.Queue(256)
        cpus = str(Path(directory, FOLDER))
        self._usages = Usages({"gpu": directory, "cpu": cpus}, self._refresh, self._answer)
        self._open: dict[int, Done] = {}
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._endings: list[_Ending] = []
        self.trouble = OpenFailure("ledger")
        self._dropped = 0
        self._published = -1
        self._refusing = False
        self._whole: set[str] = set()
        self._accounts: Accounts  # these two once the ledger is open
        self._cpus: Accounts
        self._state = LedgerState(totals=[], counted_uj={}, held=[], damaged=[], dropped=0)

    def start(self) -> None:
        """Begins."""
        self._thread.start()
        self._usages.start()

    def stop(self) -> None:
        """Stops the thread. Refuses waiting requests; allows a short time for the last
        settlement."""
        self.refuse_all()
        self._usages.stop()
        try:
            self._queue.put_nowait(None)
        except queue.Full:  # the disk does not respond
            return
        self._thread.join(timeout=1.0)

    def submit(self, effect: LedgerCall, done: Done) -> None:
        """Carries out a request; `done` receives its ticket and a message, or a `Failure`, on any
        thread."""
        with self._guard:
            self._open[effect.ticket] = done
        if self._refusing:
            self._answer(effect, ENDING)
            return
        if isinstance(effect.request, GetUsage):
            refusal = self._usages.submit(effect)
            if refusal is not None:
                self._answer(effect, refusal)
            return
        if not self._put(partial(self._serve, effect, self._clocks.monotonic_ns())):
            self._answer(effect, BUSY)

    def closed(self, conn: int) -> None:
        """A connection ended: drops its queries."""
        self._usages.closed(conn)

    @property
    def unheld(self) -> list[str]:
        """GPUs whose processes must be reported by `listed`: nobody or several hold them."""
        if self._ignored_units is None or self.trouble.problem is not None:
            return []
        whole = self._whole
        names = self._names()
        return [name for name in names if name not in whole and not name.startswith(NO_GPUS)]

    def listed(self, listing: Listed) -> None:
        """Records the list of a GPU's processes."""

        def record(failure: Failure | None) -> None:
            if failure is None:
                self._try(partial(self._accounts.listed, listing))

        self._put(record)

    def refuse_all(self) -> None:
        """Refuses waiting and new requests, because a stop must not wait for a disk."""
        self._refusing = True
        with self._guard:
            waiting, self._open = self._open, {}
        for ticket, done in waiting.items():
            done(ticket, ENDING)

    def describe(self) -> LedgerState:
        """The state of the ledger at the last settlement."""
        return self._state.model_copy(update={"dropped": self._dropped})

    # --------------------------------------------------------------------------------- internals

    def _answer(self, effect: LedgerCall, result: object) -> None:
        with self._guard:
            done = self._open.pop(effect.ticket, None)
        if done is not None:
            done(effect.ticket, result)

    def _put(self, work: Work) -> bool:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._dropped += 1
            return False
        return True

    def _refresh(self) -> Failure | None:
        """Has the newest readings stored; on the thread that reads."""
        done: queue.Queue[Failure | None] = queue.Queue()

        def work(failure: Failure | None) -> None:
            done.put(failure or self._store())

        try:
            self._queue.put(work, timeout=PATIENCE_NS / SECOND_NS)
        except queue.Full:
            return BUSY
        try:
            # How long a query waits until the newest readings are stored.
            return done.get(timeout=5.0)
        except queue.Empty:
            return SLOW

    def _run(self) -> None:
        cpu_directory = str(Path(self._directory, FOLDER))
        while True:
            try:
                connection = open_ledger(self._directory)
                cpu_connection = open_ledger(cpu_directory)
                break
            except LedgerError as error:
                if self.trouble.disk_failed(error.cause, self._directory, str(error)):
                    log.error("%s", error, extra={"event": "ledger_failed"})
                # Time between attempts to open a ledger that could not be.
                if not self._refuse_for(10.0, Failure(ErrorCode.LEDGER_FAILED, str(error))):
                    return
        self._accounts = self._open_accounts(connection, ignored_units=self._ignored_units)
        self._cpus = self._open_accounts(cpu_connection, cpus=True)
        cpu_use = CpuAccounts(self._cpus, CpuUse(), self._clocks.monotonic_ns, self._accounts.named)
        self._try(self._accounts.recover)
        self._try(self._cpus.recover)
        files = [*damaged(self._directory), *damaged(cpu_directory)]
        self._state = self._state.model_copy(update={"damaged": files})
        while True:
            wait_ns = SECOND_NS // 50 if self._endings else CHECK_NS
            with contextlib.suppress(queue.Empty):
                work = self._queue.get(timeout=wait_ns / SECOND_NS)
                if work is None:
                    break
                work(None)
            self._finish_endings()
            self._try(self._accounts.work)
            self._try(cpu_use.work)
            self._publish()
        for one in (self._accounts, self._cpus):
            self._try(one.settle)
            one.close()

    def _refuse_for(self, seconds: float, failure: Failure) -> bool:
        """Refuses what is asked for some time. Returns False if that ends with the service."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                work = self._queue.get(timeout=left_s)
                if work is None:
                    return False
                work(failure)
        return True

    def _open_accounts(
        self,
        connection: sqlite3.Connection,
        cpus: bool = False,
        ignored_units: Iterable[str] | None = None,
    ) -> Accounts:
        return Accounts(
            LedgerStore(connection, self._boot),
            self._names,
            self._find,
            self._clocks,
            self._groups,
            self._retention,
            ignored_units,
            cpus,
        )

    def _serve(self, effect: LedgerCall, t_ns: int, failure: Failure | None) -> None:
        request, accounts = effect.request, self._accounts if failure is None else None
        result: object = failure
        if accounts is not None and isinstance(request, Deallocate):
            result = self._try(partial(accounts.deallocate, request, t_ns))
            if isinstance(result, list):
                self._endings.append(_Ending(effect, t_ns, result))
                return
        elif accounts is not None and isinstance(request, Allocate):
            result = self._try(partial(accounts.allocate, request, t_ns))
        elif accounts is not None and isinstance(request, ForgetUser):
            result = self._try(partial(self._forget, request.uid))
        if accounts is not None:
            self._publish()
        self._answer(effect, result)

    def _forget(self, uid: int) -> Forgotten:
        changed = self._accounts.forget(uid) + self._cpus.forget(uid)
        return Forgotten(accounts=changed)

    def _store(self) -> Failure | None:
        outcome = self._try(self._accounts.refresh) or self._try(self._cpus.refresh)
        return outcome if isinstance(outcome, Failure) else None

    def _finish_endings(self) -> None:
        """Answers deallocations that the sensors' ticks now cover, after settling them."""
        now_ns, accounts = self._clocks.monotonic_ns(), self._accounts
        over = [
            ending
            for ending in self._endings
            if now_ns - ending.t_ns > PATIENCE_NS or accounts.covers(ending.uuids, ending.t_ns)
        ]
        if over:
            self._endings = [ending for ending in self._endings if ending not in over]
            self._try(accounts.settle)
            self._publish()  # before the replies, so that the next request sees it
            for one in over:
                self._answer(one.effect, Deallocated(ended=len(one.uuids)))

    def _publish(self) -> None:
        accounts = self._accounts
        self._state = self._state.model_copy(update={"held": accounts.held})
        self._whole = accounts.whole
        stored = accounts.stored + self._cpus.stored
        if stored == self._published:
            return
        if self.trouble.works():
            log.warning("the energy ledger works again", extra={"event": "ledger_recovered"})
        self._published = stored
        self._try(self._count)

    def _count(self) -> None:
        accounts, cpus = self._accounts, self._cpus
        counters = {
            "totals": accounts.totals(),
            "counted_uj": accounts.counted_uj(),
            "by_gpu": accounts.by_gpu(),
            "workloads": accounts.workloads(),
            "cpu_totals": cpus.totals(),
            "cpu_counted_uj": cpus.counted_uj(),
        }
        self._state = self._state.model_copy(update=counters)

    def _try(self, call: Callable[[], object]) -> object:
        """Returns what a call returns, or a `Failure`. The work is retried later; nothing is lost
        meanwhile."""
        try:
            return call()
        except sqlite3.Error as error:
            failure = Failure(
                ErrorCode.LEDGER_FAILED,
                f"the energy ledger in {self._directory} cannot be used ({error}); free space "
                "there, or see zeusd's log; power limits and leases work without it",
            )
            if self.trouble.disk_failed(error, self._directory, failure.message):
                log.error("%s", failure.message, extra={"event": "ledger_failed"})
            return failure
        except Exception as error:  # the client must get a reply
            log.exception("accounting failed", extra={"event": "bug"})
            return Failure(
                ErrorCode.INTERNAL,
                f"zeusd failed in its energy ledger ({type(error).__name__}); please report it "
                "with zeusd's log",
            )

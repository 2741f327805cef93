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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Deallocated, Forgotten, LedgerState, Problem
from zeus_ipc.requests import Allocate, Deallocate, ForgetUser, GetUsage
from zeusd.core.effects import LedgerCall
from zeusd.core.model import Failure
from zeusd.energy.split import Account
from zeusd.ledger.schema import LedgerError, damaged, open_ledger
from zeusd.ledger.store import Store
from zeusd.runtime.accounts import CHECK_NS, NO_GPUS, SECOND_NS, Accounts, Clocks, Retention
from zeusd.runtime.activity import Listed
from zeusd.runtime.control_groups import JobGroups
from zeusd.runtime.cpu_use import CpuUse
from zeusd.runtime.sources import Source
from zeusd.runtime.trouble import Trouble
from zeusd.runtime.usages import BUSY, Usages

log = logging.getLogger(__name__)

REOPEN_S = 10.0
"""Time between attempts to open a ledger that could not be."""

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


POLL_NS = SECOND_NS // 50
PATIENCE_NS = SECOND_NS
"""How long a deallocation waits for the tick that covers it."""

REFRESH_S = 5.0
"""How long a query waits until the newest readings are stored."""

MAX_QUEUED = 256

SLOW = Failure(
    ErrorCode.LEDGER_FAILED,
    "the energy ledger does not store the newest readings in time; see whether its disk is slow",
)
ENDING = Failure(ErrorCode.SHUTTING_DOWN, "zeusd is stopping; ask again when it runs")

Done = Callable[[int, object], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, and when it arrived."""

    effect: LedgerCall
    t_ns: int


@dataclass(slots=True)
class _Refresh:
    """A query that waits until the newest readings are stored."""

    done: threading.Event = field(default_factory=threading.Event)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Ending:
    """A deallocation that waits for the ticks that cover it."""

    asked: _Asked
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
        self._queue: queue.Queue[_Asked | Listed | _Refresh | None] = queue.Queue(MAX_QUEUED)
        cpus = str(Path(directory, FOLDER))
        self._usages = Usages({"gpu": directory, "cpu": cpus}, self._refresh, self._answer)
        self._open: dict[int, Done] = {}
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._endings: list[_Ending] = []
        self._trouble = Trouble("ledger")
        self._dropped = 0
        self._published = -1
        self._refusing = False
        self._whole: set[str] = set()
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
        """Carries out a request."""
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
        try:
            self._queue.put_nowait(_Asked(effect, self._clocks.monotonic_ns()))
        except queue.Full:
            self._dropped += 1
            self._answer(effect, BUSY)

    def closed(self, conn: int) -> None:
        """A connection ended: nobody waits for what it asked."""
        self._usages.closed(conn)

    @property
    def unheld(self) -> list[str]:
        """GPUs whose processes must be reported by `listed`: nobody or several hold them."""
        if self._ignored_units is None or self._trouble.problem is not None:
            return []
        whole = self._whole
        names = self._names()
        return [name for name in names if name not in whole and not name.startswith(NO_GPUS)]

    def listed(self, found: Listed) -> None:
        """Records the list of a GPU's processes."""
        try:
            self._queue.put_nowait(found)
        except queue.Full:
            self._dropped += 1

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

    @property
    def problem(self) -> Problem | None:
        """Why the ledger cannot be used; None: it can."""
        return self._trouble.problem

    # --------------------------------------------------------------------------------- internals

    def _answer(self, effect: LedgerCall, result: object) -> None:
        with self._guard:
            done = self._open.pop(effect.ticket, None)
        if done is not None:
            done(effect.ticket, result)

    def _refresh(self) -> Failure | None:
        """Has the newest readings stored; on the thread that reads."""
        asked = _Refresh()
        try:
            self._queue.put(asked, timeout=PATIENCE_NS / SECOND_NS)
        except queue.Full:
            return BUSY
        return asked.failure if asked.done.wait(REFRESH_S) else SLOW

    def _run(self) -> None:
        cpu_directory = str(Path(self._directory, FOLDER))
        while True:
            try:
                connection = open_ledger(self._directory)
                cpu_connection = open_ledger(cpu_directory)
                break
            except LedgerError as error:
                if self._trouble.disk_failed(error.cause, self._directory, str(error)):
                    log.error("%s", error, extra={"event": "ledger_failed"})
                if not self._refuse_for(REOPEN_S, Failure(ErrorCode.LEDGER_FAILED, str(error))):
                    return
        accounts = Accounts(
            Store(connection, self._boot),
            self._names,
            self._find,
            self._clocks,
            self._groups,
            self._retention,
            self._ignored_units,
        )
        cpus = self._cpu_accounts(cpu_connection, accounts)
        self._try(accounts.recover)
        self._try(cpus.accounts.recover)
        found = [*damaged(self._directory), *damaged(cpu_directory)]
        self._state = self._state.model_copy(update={"damaged": found})
        while True:
            wait_ns = POLL_NS if self._endings else CHECK_NS
            try:
                next_one = self._queue.get(timeout=wait_ns / SECOND_NS)
            except queue.Empty:
                pass
            else:
                if next_one is None:
                    break
                if isinstance(next_one, Listed):
                    self._try(partial(accounts.listed, next_one))
                elif isinstance(next_one, _Refresh):
                    self._store(accounts, cpus.accounts, next_one)
                else:
                    self._serve(accounts, cpus.accounts, next_one)
            self._finish_endings(accounts, cpus.accounts)
            self._try(accounts.work)
            self._try(cpus.work)
            self._publish(accounts, cpus.accounts)
        for one in (accounts, cpus.accounts):
            self._try(one.settle)
            one.close()

    def _refuse_for(self, seconds: float, failure: Failure) -> bool:
        """Refuses what is asked for some time. Returns False if that ends with the service."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                asked = self._queue.get(timeout=left_s)
                if asked is None:
                    return False
                if isinstance(asked, _Asked):
                    self._answer(asked.effect, failure)
                elif isinstance(asked, _Refresh):
                    asked.failure = failure
                    asked.done.set()
        return True

    def _cpu_accounts(self, connection: sqlite3.Connection, gpus: Accounts) -> CpuAccounts:
        accounts = Accounts(
            Store(connection, self._boot),
            self._names,
            self._find,
            self._clocks,
            self._groups,
            self._retention,
            cpus=True,
        )
        return CpuAccounts(accounts, CpuUse(), self._clocks.monotonic_ns, gpus.named)

    def _serve(self, accounts: Accounts, cpus: Accounts, asked: _Asked) -> None:
        request = asked.effect.request
        try:
            if isinstance(request, Deallocate):
                self._endings.append(_Ending(asked, accounts.deallocate(request, asked.t_ns)))
                return
            result: object
            if isinstance(request, Allocate):
                result = accounts.allocate(request, asked.t_ns)
            else:
                assert isinstance(request, ForgetUser)
                changed = accounts.forget(request.uid).accounts + cpus.forget(request.uid).accounts
                result = Forgotten(accounts=changed)
        except sqlite3.Error as error:
            self._failed(error)
            result = self._failure(error)
        except Exception as error:  # the client must get a reply
            log.exception("accounting failed", extra={"event": "bug"})
            result = Failure(
                ErrorCode.INTERNAL,
                f"zeusd failed in its energy ledger ({type(error).__name__}); please report it "
                "with the daemon's log",
            )
        self._publish(accounts, cpus)
        self._answer(asked.effect, result)

    def _store(self, accounts: Accounts, cpus: Accounts, asked: _Refresh) -> None:
        try:
            accounts.refresh()
            cpus.refresh()
        except sqlite3.Error as error:
            self._failed(error)
            asked.failure = self._failure(error)
        asked.done.set()

    def _finish_endings(self, accounts: Accounts, cpus: Accounts) -> None:
        """Answers deallocations that the sensors' ticks now cover, after settling them."""
        now_ns = self._clocks.monotonic_ns()
        over = [
            one
            for one in self._endings
            if now_ns - one.asked.t_ns > PATIENCE_NS or accounts.covers(one.uuids, one.asked.t_ns)
        ]
        if over:
            self._endings = [one for one in self._endings if one not in over]
            self._try(accounts.settle)
            self._publish(accounts, cpus)  # before the replies, so that the next request sees it
            for one in over:
                self._answer(one.asked.effect, Deallocated(ended=len(one.uuids)))

    def _publish(self, accounts: Accounts, cpus: Accounts) -> None:
        self._state = self._state.model_copy(update={"held": accounts.held})
        self._whole = accounts.whole
        stored = accounts.stored + cpus.stored
        if stored == self._published:
            return
        if self._trouble.works():
            log.warning("the energy ledger works again", extra={"event": "ledger_recovered"})
        self._published = stored
        self._try(lambda: self._count(accounts, cpus))

    def _count(self, accounts: Accounts, cpus: Accounts) -> None:
        counters = {
            "totals": accounts.totals(),
            "counted_uj": accounts.counted_uj(),
            "by_gpu": accounts.by_gpu(),
            "workloads": accounts.workloads(),
            "cpu_totals": cpus.totals(),
            "cpu_counted_uj": cpus.counted_uj(),
        }
        self._state = self._state.model_copy(update=counters)

    def _try(self, call: Callable[[], None]) -> None:
        """Logs a failure. The work is retried later; nothing is lost meanwhile."""
        try:
            call()
        except sqlite3.Error as error:
            self._failed(error)
        except Exception:
            log.exception("accounting failed", extra={"event": "bug"})

    def _failed(self, error: sqlite3.Error) -> None:
        message = self._failure(error).message
        if self._trouble.disk_failed(error, self._directory, message):
            log.error("%s", message, extra={"event": "ledger_failed"})

    def _failure(self, error: sqlite3.Error) -> Failure:
        return Failure(
            ErrorCode.LEDGER_FAILED,
            f"the energy ledger in {self._directory} cannot be used ({error}); free space there, "
            "or see zeusd's log; power limits and leases work without it",
        )

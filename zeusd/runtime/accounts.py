"""All accounts of a node, and their settlement in the ledger. Belongs to one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from zeus_common.units import SECOND_NS
from zeus_ipc.replies import EmptyResult, GpuTotal, Held, LedgerTotal
from zeus_ipc.requests import Allocate, Deallocate
from zeusd.energy.accountant import Accountant, ChargeRow, Fact, FactSpan, Position, Settlement
from zeusd.energy.history import History
from zeusd.energy.split import Account, Claim, Kind, parent_of
from zeusd.ledger.store import LedgerStore
from zeusd.runtime.activity import Listed
from zeusd.runtime.allocations import Allocations
from zeusd.runtime.control_groups import JobGroups
from zeusd.runtime.identities import Identities
from zeusd.runtime.presence import LATE_NS, STALE_NS, Exits, Presence
from zeusd.runtime.readings import idle_uw, observed
from zeusd.runtime.sources import Source
from zeusd.runtime.workloads import Workloads, sum_of, total_of, unused_by_gpu

SETTLE_NS = 60 * SECOND_NS
CHECK_NS = SECOND_NS

MAX_LATE_NS = LATE_NS + STALE_NS
"""Longest delay of a list of processes; after that, none is expected."""

SUSPEND = "suspend"
SUSPEND_NS = SECOND_NS

CPU = "cpu:"
"""Prefix of the names of CPU packages, which have their own ledger."""

NO_GPUS = (CPU, "dram:", "module:")
"""Prefixes of the names of sources that are not GPUs and have no accounts."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the ledger keeps each kind of row, in days.

    Attributes:
        processes: Rows by process; 0: none are kept.
    """

    rows: int = 400
    days: int = 760
    processes: int = 7


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of accounting, ns."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    utc_ns: Callable[[], int] = time.time_ns
    boot_ns: Callable[[], int] = _boot_ns


class Accounts:
    """The accounts.

    Every method may raise `sqlite3.Error`; a later call stores the same data.
    """

    def __init__(
        self,
        store: LedgerStore,
        names: Callable[[], Iterable[str]],
        find: Callable[[str], Source | None],
        clocks: Clocks,
        groups: JobGroups,
        retention: Retention,
        ignored_units: Iterable[str] | None = None,
        cpus: bool = False,
    ) -> None:
        self._store = store
        self._cpus = cpus
        self._known_until_ns: dict[str, int] = {}
        self._names = names
        self._find = find
        self._clocks = clocks
        self._groups = groups
        self._retention = retention
        self._started_ns = clocks.monotonic_ns()
        self._accountants: dict[str, Accountant] = {}
        self._early: dict[str, list[FactSpan]] = {}
        self._idle: dict[str, int] = {}
        self._positions: dict[str, Position] = {}
        self._allocations = Allocations(store, self._add, lambda: clocks.utc_ns() // SECOND_NS)
        self._workloads = Workloads(store.used)
        self._presence = None
        if ignored_units is not None:
            exits = Exits(clocks.monotonic_ns)
            self._presence = Presence(self._add, Identities(), exits, ignored_units, self._asleep)
        self._offset_ns = self._offset()
        self._slept_ns = self._asleep()
        self._checked_ns = self._settled_ns = self._started_ns
        self._groups_ns = self._expired_ns = 0
        self.stored = 0

    def recover(self) -> None:
        """Continues with this boot's data in the ledger."""
        self._positions = self._store.positions()
        stored_ns = self._store.offset_ns()
        if stored_ns is not None:
            self._offset_ns = stored_ns
        self._allocations.recover()

    def close(self) -> None:
        """Closes the ledger."""
        if self._presence is not None:
            self._presence.close()
        self._store.close()

    # ------------------------------------------------------------------------------------- time

    def work(self) -> None:
        """Does the periodic work; call it every `CHECK_NS`."""
        now_ns = self._clocks.monotonic_ns()
        self._note_suspend(now_ns)
        if now_ns - self._groups_ns >= 2 * SECOND_NS:
            self._groups_ns = now_ns
            wanted = self._allocations.control_groups
            if wanted:
                self._allocations.present(self._groups.present(wanted), now_ns)
        if now_ns - self._settled_ns >= SETTLE_NS:
            self.settle()
        if now_ns - self._expired_ns >= 6 * 3600 * SECOND_NS:
            self._expired_ns = now_ns
            utc_s = self._clocks.utc_ns() // SECOND_NS
            kept = self._retention
            self._store.expire(utc_s, kept.rows, kept.days, kept.processes)

    def settle(self) -> None:
        """Charges all energy until the newest ticks, in one transaction."""
        self._settled_ns = self._clocks.monotonic_ns()
        before: dict[str, tuple[Position, list[FactSpan]]] = {}
        offset_ns = self._offset()
        try:
            settlements = dict(self._settlements(before))
            if settlements:
                slept_ns = self._asleep() if self._retention.processes else None
                self._store.settle(settlements, offset_ns, slept_ns)
                self.stored += 1
        except BaseException:
            for uuid, (position, spans) in before.items():
                self._accountants[uuid].position = position
                self._accountants[uuid].spans = spans
            raise
        # A step of the clock affects later buckets only.
        self._offset_ns = offset_ns
        # The positions are stored: nothing below may revert them.
        self._workloads.settled(settlements.values(), self._settled_ns)

    def refresh(self) -> None:
        """Settles unless that was done just now."""
        # A settlement this recent counts as the present.
        if self._clocks.monotonic_ns() - self._settled_ns >= SECOND_NS // 5:
            self.settle()

    def covers(self, uuids: Iterable[str], t_ns: int) -> bool:
        """Whether these GPUs' sensors have a tick after a time."""
        for uuid in uuids:
            source = self._find(uuid)
            if source is not None and self._until_ns(uuid, source) < t_ns:
                return False
        return True

    def listed(self, listing: Listed) -> None:
        """Records the list of a GPU's processes."""
        if self._presence is None:
            return
        if listing.gpu in self._allocations.whole():
            self._presence.stop(listing.gpu, listing.t_ns)
        elif listing.pids is None:
            self._presence.failed(listing.gpu, listing.t_ns)
        else:
            charged = partial(self._allocations.holder, listing.gpu)
            self._presence.listed(
                listing.gpu, listing.t_ns, listing.pids, listing.activity, charged
            )

    def used(self, used: Mapping[Account, int], begin_ns: int, t_ns: int) -> None:
        """Records the use of the CPUs by account between two times, in any unit."""
        for name in self.names:
            self._add(name, FactSpan(Fact.LISTED, begin_ns, t_ns))
            for account, weight in used.items():
                self._add(name, FactSpan(Fact.PRESENT, begin_ns, t_ns, Claim(account)))
                self._add(name, FactSpan(Fact.USED, begin_ns, t_ns, Claim(account, weight)))
            self._known_until_ns[name] = t_ns

    def named(self, account: Account) -> Account:
        """The holder of a GPU with this name in control groups; else the account itself."""
        return self._allocations.named(account)

    # --------------------------------------------------------------------------------- requests

    def allocate(self, request: Allocate, t_ns: int) -> EmptyResult:
        """Charges the energy of GPUs from now on to a job or pod."""
        account = Account(Kind(request.kind), request.name, request.run, request.uid)
        uuids = list(dict.fromkeys(request.gpus))
        if self._presence is not None and not request.weight:
            for uuid in uuids:
                self._presence.stop(uuid, t_ns)
        self._allocations.begin(
            uuids, account, request.weight, request.parts, request.control_group, t_ns
        )
        self.stored += 1
        return EmptyResult()

    def deallocate(self, request: Deallocate, t_ns: int) -> list[str]:
        """Ends an account. Returns the GPUs that were held."""
        return self._allocations.end(
            Kind(request.kind), request.name, request.run, request.gpus, t_ns
        )

    def forget(self, uid: int) -> int:
        """Replaces a user by a random number. Returns the number of rows changed."""
        changed = self._store.forget(uid)
        self.stored += changed > 0  # without a change, nothing was written
        return changed

    def totals(self) -> list[LedgerTotal]:
        """Counters since the ledger began, at the last settlement."""
        totals, estimates = self._store.totals(), self._store.estimates()
        for account in self._allocations.accounts():
            totals.setdefault(
                parent_of(account), ChargeRow()
            )  # a counter must be seen to start at 0
        return [
            total_of(account.kind.value, account.name, account.uid, row, estimates.get(account, {}))
            for account, row in totals.items()
        ]

    def workloads(self) -> list[LedgerTotal]:
        """Counters of jobs and pods that hold a GPU, or held one recently."""
        self._workloads.holding(self._allocations.accounts(), self._clocks.monotonic_ns())
        return [
            total_of(kind.value, name, uid, sum_of(parts.values()), parts)
            for (kind, name, uid), parts in self._workloads.counters()
        ]

    def by_gpu(self) -> dict[str, GpuTotal]:
        """Energy of each GPU that nobody used, since the ledger began."""
        return unused_by_gpu(self._store.unused())

    def counted_uj(self) -> dict[str, int]:
        """Energy that each GPU's counter counted since the ledger began."""
        return self._store.counted()

    @property
    def names(self) -> list[str]:
        """Names of the sampled devices that have accounts here."""
        return [
            name
            for name in self._names()
            if (name.startswith(CPU) if self._cpus else not name.startswith(NO_GPUS))
        ]

    @property
    def whole(self) -> set[str]:
        """GPUs that one job or pod holds as a whole, so that their processes do not matter."""
        return self._allocations.whole()

    @property
    def held(self) -> list[Held]:
        """What jobs and pods hold."""
        return self._allocations.held()

    # --------------------------------------------------------------------------------- internals

    def _settlements(
        self, before: dict[str, tuple[Position, list[FactSpan]]]
    ) -> Iterator[tuple[str, Settlement]]:
        """Settles each GPU's account; `before` receives the accounts' previous positions."""
        for uuid in self.names:
            source = self._find(uuid)
            if source is None:
                continue
            history = source.history
            if history.ticks.end < 2:
                continue
            accountant = self._accountant(uuid, source)
            begin_ns, until_ns = accountant.position.t_ns, self._until_ns(uuid, source)
            if until_ns > begin_ns:
                before[uuid] = (accountant.position, accountant.spans)
                situations = observed(history, begin_ns, until_ns, self._started_ns)
                idle_uw = self._idle_uw(uuid, history)
                energy_uj = source.curve.energy_uj
                settled = accountant.settle(
                    until_ns,
                    energy_uj,
                    self._offset_ns,
                    situations,
                    idle_uw,
                    source.limited_ns,
                )
                yield uuid, settled

    def _until_ns(self, uuid: str, source: Source) -> int:
        """Time until which a GPU's energy can be charged: lists of processes arrive after its
        ticks."""
        ends_ns = source.history.ends_ns
        known_ns = self._known_until_ns.get(uuid)
        if self._presence is not None:
            known_ns = self._presence.known_ns(uuid)
        if known_ns is None or ends_ns - known_ns > MAX_LATE_NS:
            return ends_ns
        return min(ends_ns, known_ns)

    def _idle_uw(self, uuid: str, history: History) -> int:
        """A GPU's last power while nobody used it, for GPUs that several use."""
        idle = None if uuid in self._allocations.whole() else idle_uw(history)
        if idle is not None:
            self._idle[uuid] = idle
        return self._idle.get(uuid, 0)

    def _offset(self) -> int:
        return self._clocks.utc_ns() - self._clocks.monotonic_ns()

    def _asleep(self) -> int:
        return self._clocks.boot_ns() - self._clocks.monotonic_ns()

    def _note_suspend(self, now_ns: int) -> None:
        slept_ns = self._asleep()
        if slept_ns - self._slept_ns > SUSPEND_NS:
            # CLOCK_MONOTONIC was suspended, so the next tick includes the energy of that time.
            for uuid in self._accountants:
                self._add(uuid, FactSpan(Fact.EXCLUDED, self._checked_ns, now_ns, reason=SUSPEND))
            if self._presence is not None:
                self._presence.suspended(self._checked_ns)
        self._slept_ns = slept_ns
        self._checked_ns = now_ns

    def _add(self, uuid: str, span: FactSpan) -> None:
        accountant = self._accountants.get(uuid)
        if accountant is None:
            self._early.setdefault(uuid, []).append(span)
        else:
            accountant.add(span)

    def _accountant(self, uuid: str, source: Source) -> Accountant:
        known = self._accountants.get(uuid)
        if known is None:
            known = Accountant(self._begin(source, self._positions.pop(uuid, None)))
            known.spans = self._early.pop(uuid, [])
            self._accountants[uuid] = known
        return known

    @staticmethod
    def _begin(source: Source, stored: Position | None) -> Position:
        """The stored position, or the oldest tick if there is none or the history is a different
        one."""
        history = source.history
        begins_ns = history.begins_ns
        if stored is not None and begins_ns is not None and begins_ns <= stored.t_ns:
            return stored
        start = history.ticks.start
        return Position(history.t_ns[start], history.energy_uj[start])

"""Energy counters of running jobs and pods, and counters of replies, which count since the ledger
began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zeus_ipc.charging import BOUNDS, ChargeBasis
from zeus_ipc.replies import EstimatedEnergy, GpuTotal, LedgerTotal
from zeusd.energy.accountant import ChargeRow, Settlement
from zeusd.energy.split import Account, Kind
from zeusd.ledger.store import Estimates

_OWN = (Kind.JOB, Kind.POD)

Name = tuple[Kind, str, int]
"""A job or pod, with all its runs, and its user."""


@dataclass(slots=True)
class _Counter:
    parts: Estimates
    seen_ns: int


class Workloads:
    """The counters. They start at the ledger's values, so that a restart of zeusd does not reset
    them.
    """

    def __init__(self, stored: Callable[[Kind, str, int], Estimates]) -> None:
        self._stored = stored
        self._counters: dict[Name, _Counter] = {}

    def settled(self, settlements: Iterable[Settlement], t_ns: int) -> None:
        """Adds stored energy."""
        fresh: set[Name] = set()
        for settlement in settlements:
            for key, row in settlement.rows.items():
                name = _name(key.account)
                if key.account.kind not in _OWN or name in fresh:
                    continue
                known = self._counters.get(name)
                if known is None:
                    fresh.add(name)
                    self._begin(name, t_ns)
                else:
                    known.seen_ns = t_ns
                    known.parts.setdefault(key.method, ChargeRow()).add(row)

    def holding(self, accounts: Iterable[Account], t_ns: int) -> None:
        """Adds counters for present holders, so that each is seen to start at 0."""
        for account in accounts:
            known = self._counters.get(_name(account))
            if known is None:
                self._begin(_name(account), t_ns)
            else:
                known.seen_ns = t_ns
        for name, one in [*self._counters.items()]:
            # How long a job's counter remains after its end.
            if t_ns - one.seen_ns > 300_000_000_000:
                del self._counters[name]

    def counters(self) -> list[tuple[Name, Estimates]]:
        """All counters, by method."""
        return [(name, one.parts) for name, one in self._counters.items()]

    def _begin(self, name: Name, t_ns: int) -> None:
        # Most counters; further jobs are only counted by user and namespace.
        if len(self._counters) < 1000:
            self._counters[name] = _Counter(self._stored(*name), t_ns)


def _name(account: Account) -> Name:
    return account.kind, account.name, account.uid


def total_of(kind: str, name: str, uid: int, row: ChargeRow, parts: Estimates) -> LedgerTotal:
    """The counter of one account."""
    total = LedgerTotal(
        kind=kind,
        name=name,
        uid=uid,
        active_uj=row.active_uj,
        idle_uj=row.idle_uj,
        lower_uj=row.lower_uj,
        upper_uj=row.upper_uj,
    )
    estimates = [
        EstimatedEnergy(
            method=method.value,
            energy_uj=one.active_uj + one.idle_uj,
            lower_uj=one.lower_uj,
            upper_uj=one.upper_uj,
        )
        for method, one in parts.items()
        if BOUNDS[method] is not ChargeBasis.EXACT
    ]
    return total.model_copy(update={"estimates": estimates}) if estimates else total


def sum_of(rows: Iterable[ChargeRow]) -> ChargeRow:
    """The sum of rows."""
    total = ChargeRow()
    for row in rows:
        total.add(row)
    return total


def unused_by_gpu(rows: Iterable[tuple[str, str, str, int, int]]) -> dict[str, GpuTotal]:
    """Energy of each GPU that nobody used."""
    idle: dict[str, int] = {}
    held_idle: dict[str, int] = {}
    unattributed: dict[str, dict[str, int]] = {}
    for uuid, kind, reason, uj, idle_uj in rows:
        reasons = unattributed.setdefault(uuid, {})
        if kind == Kind.IDLE.value:
            idle[uuid] = uj
        elif kind == Kind.UNATTRIBUTED.value:
            reasons[reason] = uj
        else:
            held_idle[uuid] = idle_uj
    return {
        uuid: GpuTotal(
            idle_uj=idle.get(uuid, 0),
            held_idle_uj=held_idle.get(uuid, 0),
            unattributed_uj=reasons,
        )
        for uuid, reasons in unattributed.items()
    }

"""Energy counters of running jobs and pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zeusd.energy.accountant import Row, Settlement
from zeusd.energy.split import Account, Kind
from zeusd.ledger.store import Estimates

KEPT_NS = 300_000_000_000
"""How long a job's counter remains after its end."""

MAX_WORKLOADS = 1000
"""Most counters; further jobs are only counted by user and namespace."""

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

    Args:
        stored: Returns the ledger's rows of an account, given its kind, name and user, by method.
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
                    known.parts.setdefault(key.method, Row()).add_row(row)

    def holding(self, accounts: Iterable[Account], t_ns: int) -> None:
        """Adds counters for present holders, so that each is seen to start at 0."""
        for account in accounts:
            known = self._counters.get(_name(account))
            if known is None:
                self._begin(_name(account), t_ns)
            else:
                known.seen_ns = t_ns
        for name, one in [*self._counters.items()]:
            if t_ns - one.seen_ns > KEPT_NS:
                del self._counters[name]

    def counters(self) -> list[tuple[Name, Estimates]]:
        """All counters, by method."""
        return [(name, one.parts) for name, one in self._counters.items()]

    def _begin(self, name: Name, t_ns: int) -> None:
        if len(self._counters) < MAX_WORKLOADS:
            self._counters[name] = _Counter(self._stored(*name), t_ns)


def _name(account: Account) -> Name:
    return account.kind, account.name, account.uid

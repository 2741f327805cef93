"""Accounts of CPU packages, in a separate ledger, so that sums of GPUs never include their
energy."""

from __future__ import annotations

from collections.abc import Callable

from zeusd.energy.split import Account
from zeusd.runtime.books import Books
from zeusd.runtime.cpu_use import CpuUse

LOOK_NS = 10_000_000_000
FOLDER = "cpu"
"""File name of their ledger, in the directory of the GPUs' ledger."""


class CpuBooks:
    """The accounts of CPU packages. Belongs to one thread.

    Args:
        books: The packages' accounts.
        use: Reads the packages' use by account.
        monotonic_ns: CLOCK_MONOTONIC.
        named: Finds the job or pod that an account stands for, by its GPUs.

    Attributes:
        books: The accounts; each of their methods may raise `sqlite3.Error`.
    """

    def __init__(
        self,
        books: Books,
        use: CpuUse,
        monotonic_ns: Callable[[], int],
        named: Callable[[Account], Account],
    ) -> None:
        self.books = books
        self._use = use
        self._monotonic_ns = monotonic_ns
        self._named = named
        self._looked_ns: int | None = None

    def work(self) -> None:
        """Does the periodic work; call it every `books.CHECK_NS`."""
        if not self.books.names:
            return
        now_ns = self._monotonic_ns()
        if self._looked_ns is None or now_ns - self._looked_ns >= LOOK_NS:
            used: dict[Account, int] = {}
            for account, amount in self._use.read().items():
                name = self._named(account)
                used[name] = used.get(name, 0) + amount
            if self._looked_ns is not None:
                self.books.used(used, self._looked_ns, now_ns)
            self._looked_ns = now_ns
        self.books.work()

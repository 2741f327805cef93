"""Accounts of CPU packages, in a separate ledger, so that sums of GPUs never include their
energy."""

from __future__ import annotations

from collections.abc import Callable

from zeusd.energy.split import Account
from zeusd.runtime.accounts import Accounts
from zeusd.runtime.cpu_use import CpuUse

READ_NS = 10_000_000_000
FOLDER = "cpu"
"""File name of their ledger, in the directory of the GPUs' ledger."""


class CpuAccounts:
    """The accounts of CPU packages. Belongs to one thread.

    Args:
        accounts: The packages' accounts.
        use: Reads the packages' use by account.
        monotonic_ns: CLOCK_MONOTONIC.
        named: Finds the job or pod that an account stands for, by its GPUs.

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

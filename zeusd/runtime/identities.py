"""Finds the account of a process on a GPU from its control groups, else its user, in /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zeusd.energy.split import Account, Kind
from zeusd.identity import has_exited
from zeusd.runtime.control_groups import ControlGroups, WorkloadKind, workload_of
from zeusd.runtime.processes import read_proc

UNKNOWN_NAMESPACE = "unknown"
"""Name of a pod without an allocation: control groups have only its uid."""

SHORT_ID = 12
"""Characters of a container's id that tools usually show."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that was alive when it was read.

    Attributes:
        start_ticks: When it started, in clock ticks of CLOCK_BOOTTIME.
        pidfd: Becomes readable when it ends; the receiver closes it.
    """

    start_ticks: int
    account: Account
    pidfd: int


class Identities:
    """Identifies processes."""

    def __init__(self) -> None:
        self._control_groups = ControlGroups()

    def identify(self, pid: int) -> Identity | None:
        """Identifies a process; None: it has exited, or is not visible."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):
            return None
        start = self._start_ticks(pid)
        account = self._account(pid)
        # The data belong to this process only if it is still alive.
        if start is None or account is None or has_exited(pidfd):
            os.close(pidfd)
            return None
        return Identity(start, account, pidfd)

    @staticmethod
    def _start_ticks(pid: int) -> int | None:
        try:
            return int(read_proc(pid, "stat").rpartition(")")[2].split()[19])
        except (ValueError, IndexError):
            return None

    def _account(self, pid: int) -> Account | None:
        try:
            uid = int(read_proc(pid, "status").partition("\nUid:")[2].split(None, 1)[0])
        except (ValueError, IndexError):
            return None
        workload = workload_of(self._control_groups.of(read_proc(pid, "cgroup")))
        kind = None if workload is None else workload.kind
        if workload is None or kind is WorkloadKind.USER:
            return Account(Kind.USER, uid=uid)
        if kind is WorkloadKind.JOB:
            return Account(Kind.JOB, workload.name, uid=uid)
        if kind is WorkloadKind.POD:
            return Account(Kind.POD, f"{UNKNOWN_NAMESPACE}/{workload.name}")
        if kind is WorkloadKind.CONTAINER:
            return Account(Kind.CONTAINER, workload.name[:SHORT_ID], uid=uid)
        return Account(Kind.SERVICE, workload.name)


def is_ignored(account: Account, units: Iterable[str]) -> bool:
    """Whether an account is a service that is charged only if it is alone."""
    return account.kind is Kind.SERVICE and any(fnmatchcase(account.name, unit) for unit in units)

"""Use of the CPUs: CPU time of the control groups of jobs, pods, containers and users.

CPU time does not determine power: of two programs that compute, one may draw more. So the energy of
a CPU package that more than one used is an estimate, with bounds from nothing to all of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from zeusd.energy.split import Account, Kind
from zeusd.runtime.control_groups import (
    MAX_DEPTH,
    ROOT,
    ProcessWorkload,
    WorkloadKind,
    folders,
    workload_groups,
)
from zeusd.runtime.identities import SHORT_ID, UNKNOWN_NAMESPACE
from zeusd.runtime.presence import UNKNOWN_PROCESS
from zeusd.runtime.processes import owner_of

SYSTEM = Account(Kind.SERVICE, "system")
"""The account of all services of the machine together: there are many, and each uses little."""

_USAGE_V1 = "cpuacct.usage"
_NO_SERVICES = [kind for kind in WorkloadKind if kind is not WorkloadKind.SERVICE]


class CpuUse:
    """Reads the CPU time since the last reading. Belongs to one thread.

    With version 1 of control groups, the hierarchy of the controller cpuacct is used; a job of
    Slurm has a group there with `JobAcctGatherType=jobacct_gather/cgroup` only.
    """

    def __init__(
        self,
        root: str = ROOT,
        owner: int = 0,
        uid_of: Callable[[int], int | None] | None = None,
    ) -> None:
        self._root = root
        self._owner = owner
        self._uid_of = uid_of or owner_of
        self._before: dict[str, int] = {}
        self._accounts: dict[str, Account] = {}

    def read(self) -> dict[Account, int]:
        """CPU time by account since the last call, microseconds; empty at the first call."""
        now: dict[str, int] = {}
        used: dict[Account, int] = {}
        first = not self._before
        for path, folder, workload in self._groups():
            total_us = _usage_us(folder)
            if total_us is None:
                continue
            now[path] = total_us
            # A group that is new, or was recreated under the same name, started at 0.
            before_us = self._before.get(path, 0)
            more_us = total_us - before_us if total_us >= before_us else total_us
            if more_us and not first:
                account = self._account(path, folder, workload) or UNKNOWN_PROCESS
                used[account] = used.get(account, 0) + more_us
        self._before = now
        self._accounts = {path: one for path, one in self._accounts.items() if path in now}
        return used

    def _groups(self) -> Iterator[tuple[str, str, ProcessWorkload]]:
        """The outermost groups of workloads; of a service the jobs in it, as slurmd may be one."""
        root = hierarchy(self._root)
        for group in workload_groups([*WorkloadKind], root, self._owner):
            path, folder, workload = group
            inner = []
            if workload.kind is WorkloadKind.SERVICE:
                inner = [*workload_groups(_NO_SERVICES, folder, self._owner, path)]
            yield from inner or [group]

    def _account(self, path: str, folder: str, workload: ProcessWorkload) -> Account | None:
        known = self._accounts.get(path)
        if known is not None:
            return known
        if workload.kind is WorkloadKind.SERVICE:
            account = SYSTEM
        elif workload.kind is WorkloadKind.USER:
            account = Account(Kind.USER, uid=int(workload.name))
        elif workload.kind is WorkloadKind.POD:
            account = Account(Kind.POD, f"{UNKNOWN_NAMESPACE}/{workload.name}")
        else:
            uid = next(
                (uid for pid in _pids(folder, 0) if (uid := self._uid_of(pid)) is not None), None
            )
            if uid is None:
                return None  # its processes have exited, so its user is not known
            job = workload.kind is WorkloadKind.JOB
            name = workload.name if job else workload.name[:SHORT_ID]
            account = Account(Kind.JOB if job else Kind.CONTAINER, name, uid=uid)
        self._accounts[path] = account
        return account


def hierarchy(root: str) -> str:
    """The one tree whose groups have CPU time: a group may be in several trees, and must not be
    counted twice."""
    trees = sorted(entry.path for entry in folders(root))
    return next((tree for tree in trees if os.path.exists(os.path.join(tree, _USAGE_V1))), root)


def _usage_us(folder: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(folder, _USAGE_V1).read_text()) // 1000
    try:
        for line in Path(folder, "cpu.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "usage_usec":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def _pids(folder: str, depth: int) -> Iterator[int]:
    """Processes of a group and of the groups below it, with the job's before the batch system's."""
    for entry in sorted(folders(folder), key=lambda entry: entry.name == "slurm"):
        if depth < MAX_DEPTH:
            yield from _pids(entry.path, depth + 1)
    try:
        yield from map(int, Path(folder, "cgroup.procs").read_text().split())
    except (OSError, ValueError):
        return

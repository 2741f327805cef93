"""Finds the jobs and pods that have a control group with processes. Without one, a job has ended.

Only groups that root owns are searched, by the same rules as the groups of a process (`core.jobs`),
because users may create groups of any name below their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from zeusd.core.jobs import ControlGroup, WorkloadKind, workload_of

ROOT = "/sys/fs/cgroup"

MAX_DEPTH = 10
"""Most levels above a job's group: a controller's tree, slices, and slurmd's container or the
user's group."""

_USERS = "user.slice"


class JobGroups:
    """Finds the control groups of jobs and pods, and caches their paths."""

    def __init__(self, root: str = ROOT, owner: int = 0) -> None:
        self._root = root
        self._owner = owner
        self._known: dict[str, str] = {}

    def present(self, jobs: Iterable[str]) -> set[str]:
        """The jobs among these that have a control group with a process.

        Version 1 of control groups does not report empty groups; there the group only has to exist.
        """
        wanted = set(jobs)
        self._known = {job: path for job, path in self._known.items() if job in wanted}
        found = {job for job, path in self._known.items() if _is_used(path)}
        missing = wanted - found
        if missing:
            for job, path in self._search(self._root, "", 0):
                if job in missing and _is_used(path):
                    found.add(job)
                    self._known[job] = path
        return found

    def _search(self, folder: str, path: str, depth: int) -> Iterator[tuple[str, str]]:
        """The jobs below a folder. A job's own groups are not searched."""
        for entry in folders(folder):
            if entry.name == _USERS or not trusts(entry, self._owner):
                continue
            below = f"{path}/{entry.name}"
            workload = workload_of([ControlGroup(below)])
            if workload is not None and workload.kind in (WorkloadKind.JOB, WorkloadKind.POD):
                yield workload.name, entry.path
            elif depth < MAX_DEPTH:
                yield from self._search(entry.path, below, depth + 1)


def trusts(entry: os.DirEntry[str], owner: int) -> bool:
    """Whether a user owns a group, and nobody else may write to it."""
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        return found.st_uid == owner and not found.st_mode & 0o022
    return False


def _is_used(group: str) -> bool:
    """Whether a group exists and is not known to be empty.

    slurmstepd removes its job's groups; if it was killed, they stay.
    """
    try:
        events = Path(group, "cgroup.events").read_text()
    except OSError:
        return os.path.isdir(group)
    return "populated 0" not in events.splitlines()


def folders(folder: str) -> list[os.DirEntry[str]]:
    """The groups in a group; empty if it was removed."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # removed concurrently
        return []

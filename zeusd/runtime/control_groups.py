"""Control groups: where a process is, the workload that they name, and the jobs that have some.

/proc/PID/cgroup has the process's path in each hierarchy of control groups. Users may create groups
of any name below groups that they own, so a name counts only if root created it and everything
above it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class WorkloadKind(str, Enum):
    """The kind of a workload."""

    JOB = "job"
    POD = "pod"
    CONTAINER = "container"
    USER = "user"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class ProcessWorkload:
    """The workload of a process.

    Attributes:
        name: A job's id, or its SLUID from Slurm 26.05 on; a pod's uid; a container's id; a user's
            number; a service's unit.
    """

    kind: WorkloadKind
    name: str


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A process's place in one hierarchy.

    Attributes:
        checked: Whether the owners are known. They are not if zeusd runs in its own control group
            namespace: then the path is complete, and starts with `/..` for everything outside.
    """

    path: str
    checked: bool = True


_POD_UID = r"[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}"
_CONTAINER_ID = r"[0-9a-f]{64}"

# A group's name starts with its kind. Of the forms in one row the outermost counts, and an earlier
# row takes precedence: the steps of a job may be below a service or a container of slurmd.
_ROWS = (
    (
        r"(?:[^/]+_)?slurmstepd\.scope/job_(?P<job_v2>[0-9]+)",
        r"(?:[^/]+_)?slurmstepd\.scope/(?P<job_sluid>s[0-9A-HJKMNP-TV-Z]{13})",
        r"slurm(?:_[^/]+)?/uid_[0-9]+/job_(?P<job_v1>[0-9]+)",
        # containerd appends `:cri-containerd:ID` if its cgroup driver differs from kubelet's.
        rf"(?:[^/]+-)?kubepods(?:-[a-z]+)?-pod(?P<pod_systemd>{_POD_UID})\.slice(?::[^/]+)?",
        rf"pod(?P<pod_cgroupfs>{_POD_UID})",
    ),
    (
        rf"(?:docker|libpod)-(?P<container_systemd>{_CONTAINER_ID})\.scope",
        rf"(?:docker/|libpod_parent/libpod-)(?P<container_cgroupfs>{_CONTAINER_ID})",
    ),
    (
        r"user\.slice/user-(?P<user>[0-9]+)\.slice",
        r"system\.slice/(?:[^/]+\.slice/)*(?P<service>[^/]+\.service)",
    ),
)

# If the owners are not known, only these may be above a workload: groups that only root's programs
# create, and that no user owns.
_ROOTS_OWN = (
    r"(?:\.\./)*"
    r"(?:(?:(?:system|machine|kubepods(?:-besteffort|-burstable)?)\.slice"
    r"|kubepods|besteffort|burstable)/)*"
)

_CHECKED = tuple(re.compile(rf"/(?:{'|'.join(row)})(?=/|$)") for row in _ROWS)
_UNCHECKED = tuple(re.compile(rf"^/{_ROOTS_OWN}(?:{'|'.join(row)})(?=/|$)") for row in _ROWS)


def workload_of(groups: Iterable[ControlGroup]) -> ProcessWorkload | None:
    """The workload in the control groups of one process; None: there is none.

    Supports the layouts of Slurm 22.05 to 26.05 with both versions of control groups, of kubelet
    with both cgroup drivers, of Docker, Podman and systemd.
    """
    groups = [*groups]
    for checked, unchecked in zip(_CHECKED, _UNCHECKED, strict=True):
        for group in groups:
            match = (checked if group.checked else unchecked).search(group.path)
            if match is not None:
                assert match.lastgroup is not None
                kind = WorkloadKind(match.lastgroup.partition("_")[0])
                name = match[match.lastgroup]
                # systemd's names of slices keep dashes for their parents.
                return ProcessWorkload(
                    kind, name.replace("_", "-") if kind is WorkloadKind.POD else name
                )
    return None


def job_of(groups: Iterable[ControlGroup]) -> str:
    """The name of a process's job or pod; empty if there is none."""
    workload = workload_of(groups)
    if workload is None or workload.kind not in (WorkloadKind.JOB, WorkloadKind.POD):
        return ""
    return workload.name


MOUNTS = "/proc/self/mountinfo"

_WHOLE = "/"
_OUTSIDE = "/.."


@dataclass(frozen=True, slots=True)
class _Mount:
    """One hierarchy whose whole tree is mounted. `controllers` is empty for version 2."""

    controllers: frozenset[str]
    folder: str


class ControlGroups:
    """The hierarchies of control groups on this machine."""

    def __init__(self, mounts: str | os.PathLike[str] = MOUNTS, owner: int = 0) -> None:
        # Unbuffered: it is read again from the start.
        self._table = open(mounts, "rb", buffering=0)  # noqa: SIM115 - for as long as this is
        # The kernel reports a priority event after each change of the table: proc_pid_mounts(5).
        self._changes = select.poll()
        self._changes.register(self._table, select.POLLPRI)
        self._mounts = [*_read(self._table.readall())]
        self._owner = owner

    def of(self, memberships: str) -> list[ControlGroup]:
        """A process's control group, as far down as the trusted user owns it."""
        return [*self._each(memberships)]

    def _each(self, memberships: str) -> Iterator[ControlGroup]:
        for line in memberships.split("\n"):  # no other character ends a line
            _, _, rest = line.partition(":")
            controllers, separator, path = rest.partition(":")
            if not separator or not path.startswith("/"):
                continue
            folder = None
            if not f"{path}/".startswith(f"{_OUTSIDE}/"):
                folder = self._folder(frozenset(filter(None, controllers.split(","))))
            if folder is None:
                yield ControlGroup(path, checked=False)
            else:
                yield ControlGroup(self._owned(folder, path))

    def _folder(self, controllers: frozenset[str]) -> str | None:
        """Mount point of the whole hierarchy with these controllers; None: not mounted."""
        while True:
            for mount in self._mounts:
                if mount.controllers >= controllers and bool(mount.controllers) == bool(
                    controllers
                ):
                    return mount.folder
            if not self._changes.poll(0):
                return None
            self._table.seek(0)
            self._mounts = [*_read(self._table.readall())]

    def _owned(self, folder: str, path: str) -> str:
        """The path down to the first group that another user owns or that others may write."""
        owned = ""
        if path == "/":
            return path  # no group below
        for name in path.split("/"):  # the first one is empty: the root of the hierarchy
            group = f"{owned}/{name}" if name else ""
            try:
                status = os.lstat(f"{folder}{group}")
            except OSError:
                break  # the group was removed after its last process exited
            if status.st_uid != self._owner or status.st_mode & 0o022:
                break
            owned = group
        return owned or "/"


def _read(table: bytes) -> Iterator[_Mount]:
    """The hierarchies in a table of mounts whose whole tree is visible."""
    for line in os.fsdecode(table).split("\n"):
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(rest) < 3 or rest[0] not in ("cgroup", "cgroup2"):
            continue
        root, folder = fields[3], fields[4]
        if root == _WHOLE:
            controllers = rest[2].split(",") if rest[0] == "cgroup" else []
            plain = folder.encode().decode("unicode_escape") if "\\" in folder else folder
            yield _Mount(frozenset(controllers), plain)


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
        """The jobs among these that have a control group with a process."""
        wanted = set(jobs)
        self._known = {job: path for job, path in self._known.items() if job in wanted}
        present = {job for job, path in self._known.items() if _is_used(path)}
        missing = wanted - present
        if missing:
            jobs = (WorkloadKind.JOB, WorkloadKind.POD)
            for _, group, workload in workload_groups(jobs, self._root, self._owner):
                if workload.name in missing and _is_used(group):
                    present.add(workload.name)
                    self._known[workload.name] = group
        return present


def workload_groups(
    kinds: Collection[WorkloadKind], folder: str, owner: int, path: str = "", depth: int = 0
) -> Iterator[tuple[str, str, ProcessWorkload]]:
    """Path, folder and workload of the outermost groups of workloads of some kinds."""
    for entry in folders(folder):
        if not trusts(entry, owner):
            continue
        below = f"{path}/{entry.name}"
        workload = workload_of([ControlGroup(below)])
        if workload is not None and workload.kind in kinds:
            yield below, entry.path, workload
        elif depth < MAX_DEPTH and (entry.name != _USERS or WorkloadKind.USER in kinds):
            yield from workload_groups(kinds, entry.path, owner, below, depth + 1)


def trusts(entry: os.DirEntry[str], owner: int) -> bool:
    """Whether a user owns a group, and nobody else may write to it."""
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return status.st_uid == owner and not status.st_mode & 0o022
    return False


def _is_used(group: str) -> bool:
    """Whether a group exists and is not known to be empty.

    slurmstepd removes its job's groups; if it was killed, they stay.
    """
    try:
        return "populated 0" not in Path(group, "cgroup.events").read_text().splitlines()
    except OSError:
        return os.path.isdir(group) and _lists_processes(group)


def _lists_processes(group: str) -> bool:
    """The same for version 1, which says only which processes are in each group of a tree."""
    lists = list(Path(group).rglob("cgroup.procs"))
    try:
        return not lists or any(processes.read_text() for processes in lists)
    except OSError:
        return True  # one is being removed: the next look decides


def folders(folder: str) -> list[os.DirEntry[str]]:
    """The groups in a group; empty if it was removed."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # removed concurrently
        return []

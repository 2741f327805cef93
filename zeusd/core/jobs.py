"""Finds a process's workload from the control groups that root created for it.

/proc/PID/cgroup has the process's path in each hierarchy of control groups. Users may create groups
of any name below groups that they own, so a name counts only if root created it and everything
above it. The runtime determines how far down that is (`runtime.control_groups`); this module reads
the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class WorkloadKind(str, Enum):
    """The kind of a workload."""

    JOB = "job"
    POD = "pod"
    CONTAINER = "container"
    USER = "user"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Workload:
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


def workload_of(groups: Iterable[ControlGroup]) -> Workload | None:
    """The workload in the control groups of one process; None: there is none.

    Supports the layouts of Slurm 22.05 to 26.05 with both versions of control groups, of kubelet
    with both cgroup drivers, of Docker, Podman and systemd.
    """
    groups = [*groups]
    for checked, unchecked in zip(_CHECKED, _UNCHECKED, strict=True):
        for group in groups:
            found = (checked if group.checked else unchecked).search(group.path)
            if found is not None:
                assert found.lastgroup is not None
                kind = WorkloadKind(found.lastgroup.partition("_")[0])
                name = found[found.lastgroup]
                # systemd's names of slices keep dashes for their parents.
                return Workload(kind, name.replace("_", "-") if kind is WorkloadKind.POD else name)
    return None


def job_of(groups: Iterable[ControlGroup]) -> str:
    """The name of a process's job or pod; empty if there is none."""
    workload = workload_of(groups)
    if workload is None or workload.kind not in (WorkloadKind.JOB, WorkloadKind.POD):
        return ""
    return workload.name

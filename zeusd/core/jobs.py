"""Which job a process belongs to, as its control group's path says; root alone makes these."""

from __future__ import annotations

import re

_JOB = re.compile(
    r"/job_(?P<slurm>[0-9]+)(?:/|$)"
    r"|pod(?P<pod>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?(?:/|$)"
)


def job_of(cgroup: str) -> str:
    """The job's name; empty if there is none.

    Args:
        cgroup: Paths of the process's control groups, as in /proc/PID/cgroup.

    Returns:
        Slurm's job id (`/.../job_1234/step_0/...`), or the uid of a Kubernetes pod
        (`/kubepods.slice/.../kubepods-burstable-pod1f2e..._....slice/...`).
    """
    found = _JOB.search(cgroup)
    if found is None:
        return ""
    return found["slurm"] or found["pod"].replace("_", "-")

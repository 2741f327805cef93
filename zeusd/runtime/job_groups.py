"""Which jobs have a control group: a job's ceiling ends with it.

Only the places are looked at in which root's own programs make them: a user may make a group of any
name below the user's own.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable

ROOT = "/sys/fs/cgroup"

_SLURM = (
    "system.slice/*slurmstepd.scope/job_{job}",
    "system.slice/slurm*.scope/job_{job}",
    "slurm*/uid_*/job_{job}",
    "*/slurm*/uid_*/job_{job}",
)
_PODS = (
    "kubepods.slice/*pod{slice}.slice",
    "kubepods.slice/*/*pod{slice}.slice",
    "kubepods/pod{job}",
    "kubepods/*/pod{job}",
    "*/kubepods/pod{job}",
    "*/kubepods/*/pod{job}",
)
"""Where Slurm and kubelet make the groups of jobs and pods, with either version of cgroups."""


def jobs_with_groups(jobs: Iterable[str], root: str = ROOT) -> set[str]:
    """Those of these jobs that have a control group now."""
    found = set()
    for job in jobs:
        names = {"job": glob.escape(job), "slice": glob.escape(job.replace("-", "_"))}
        for pattern in (*_SLURM, *_PODS):
            if glob.glob(f"{root}/{pattern.format(**names)}"):
                found.add(job)
                break
    return found

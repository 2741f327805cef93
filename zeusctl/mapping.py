"""The folder in which a batch system maps GPUs to jobs, in dcgm-exporter's format.

It has a file for each GPU, named by its index, with a job's id in each line. The prolog writes it
and the epilog empties it (DCGM_HPC_JOB_MAPPING_DIR).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo

PERIOD_S = 5.0
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Holding:
    """A job that holds a GPU, or a part of it if other jobs do too."""

    gpu: str
    job: str
    weight: int


def holdings(folder: Path, gpus: Sequence[GpuInfo]) -> set[Holding]:
    """Reads the files. Names that are not an index, and lines that are not a job id, are ignored.

    Raises:
        OSError: The folder cannot be read.
    """
    by_name = {str(gpu.index): gpu.uuid for gpu in gpus} | {gpu.uuid: gpu.uuid for gpu in gpus}
    found: set[Holding] = set()
    for path in folder.iterdir():
        uuid = by_name.get(path.name)
        if uuid is not None:
            lines = {line.strip() for line in path.read_text(errors="replace").splitlines()}
            jobs = {line for line in lines if _JOB.fullmatch(line)}
            found |= {Holding(uuid, job, 1 if len(jobs) > 1 else 0) for job in jobs}
    return found


def user_of(job: str) -> int | None:
    """Returns the user of a job, from Slurm; None if Slurm does not say."""
    command = ["squeue", "-h", "-j", job, "-o", "%U"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    uid = said.stdout.strip()
    return int(uid) if uid.isdecimal() else None


class Mapping:
    """Keeps zeusd's allocations in step with the folder.

    Args:
        client: A client of zeusd; its user must be an administrator.
        folder: The folder.
        user: Returns the user of a job.
    """

    def __init__(
        self, client: Client, folder: Path, user: Callable[[str], int | None] = user_of
    ) -> None:
        self._client = client
        self._folder = folder
        self._user = user
        self._held: set[Holding] = set()

    def reconcile(self) -> tuple[int, int]:
        """Applies what has changed. Returns the numbers of new and ended allocations.

        Raises:
            ZeusIpcError: zeusd did not answer, or this user is not an administrator.
            OSError: The folder cannot be read.
        """
        wanted = holdings(self._folder, self._client.node().gpus)
        ended, begun = self._held - wanted, wanted - self._held
        for one in ended:
            self._client.deallocate(one.job, gpus=[one.gpu])
            self._held.discard(one)
        for one in sorted(begun, key=lambda one: (one.gpu, one.job)):
            uid = self._user(one.job)
            self._client.allocate(one.gpu, one.job, uid=uid, weight=one.weight)
            self._held.add(one)
        return len(begun), len(ended)

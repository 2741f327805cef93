"""`zeusctl allocate` and `deallocate`: which job or pod holds a GPU.

A batch system may map GPUs to jobs in a folder, in dcgm-exporter's format: a file for each GPU,
named by its index, with a job's id in each line. The prolog writes it and the epilog empties it
(DCGM_HPC_JOB_MAPPING_DIR).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_common.options import EXISTING_FOLDER, Whole, option
from zeus_common.processes import output_of
from zeus_ipc.errors import ErrorCode
from zeusctl.arguments import UserArgument, gpus_argument, without_effect
from zeusctl.columns import lines as table_of
from zeusctl.entities import ALLOCATION, Allocation
from zeusctl.exits import CommandError
from zeusctl.parts import GpuPart, Holding, ManagedAllocations, number_of
from zeusctl.reports import AllocateReport, AllocationsReport, DeallocateReport
from zeusctl.session import Session, now, verb
from zeusctl.slurm import SlurmJob, job_of
from zeusctl.usage import job_sums, summary_line

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def holdings(folder: Path, gpus: Sequence[GpuInfo]) -> set[Holding]:
    """Reads the files. Names that are not an index, and lines that are not a job id, are ignored;
    so is an index that may be of another GPU, as one was lost since the batch system counted them.

    Raises:
        OSError: The folder cannot be read.
    """
    numbers = {gpu.uuid: number_of(gpu.device_file) for gpu in gpus}
    counted = {*numbers.values()} == {gpu.index for gpu in gpus}
    by_name = {gpu.uuid: gpu.uuid for gpu in gpus} | {
        str(gpu.index): gpu.uuid for gpu in gpus if counted or numbers[gpu.uuid] == gpu.index
    }
    held: set[Holding] = set()
    for path in folder.iterdir():
        uuid = by_name.get(path.name)
        if uuid is not None:
            lines = {line.strip() for line in path.read_text(errors="replace").splitlines()}
            jobs = {line for line in lines if _JOB.fullmatch(line)}
            part = GpuPart(uuid, 1 if len(jobs) > 1 else 0)
            held |= {Holding("job", job, part) for job in jobs}
    return held


def user_of(job: str) -> int | None:
    """Returns the user of a job, from Slurm; None if Slurm does not say."""
    uid = (output_of("squeue", "-h", "-j", job, "-o", "%U") or "").strip()
    return int(uid) if uid.isdecimal() else None


F = Callable[..., Any]

PARTS = Whole(min=1, max=1_000_000)
"""Parts of a GPU, as many as `Allocate` takes."""


def _whose(function: F) -> F:
    """The options that name a job or pod."""
    for add in (
        option("--slurm", "Take everything from the variables of Slurm's Prolog or Epilog.", bool),
        option("--run", "Which run of a restarted job."),
        option("--pod", "A Kubernetes pod.", default="", metavar="NAMESPACE/POD"),
        option("--job", "A batch job.", default="", metavar="ID"),
    ):
        function = add(function)
    return function


@verb()
@gpus_argument(default="")
@_whose
@option("--user uid", "Charge this user: a name or number.", UserArgument())
@option(
    "--weight",
    "Hold a part of each GPU, beside other jobs: its size, such as a number of shards.",
    PARTS,
)
@option(
    "--parts",
    "Number of parts that a GPU consists of, such as 7 slices in MIG mode. Parts that "
    "nobody holds are charged to nobody.  [default: the parts that are held]",
    PARTS,
)
@option(
    "--mapping",
    "Follow the folder that dcgm-exporter reads (DCGM_HPC_JOB_MAPPING_DIR) until Ctrl-C.",
    EXISTING_FOLDER,
)
@option("--control-group", "Name of its control group: SLUID, pod UID.", default="")
def allocate(
    session: Session,
    gpus: str,
    job: str,
    pod: str,
    run: str | None,
    slurm: bool,
    uid: int | None,
    weight: int | None,
    parts: int | None,
    mapping: Path | None,
    control_group: str,
) -> None:
    """Charge the energy of GPUs to a job or pod (administrators).

    The allocation ends with `zeusctl deallocate`, with the job's control group, or when the whole
    GPU is allocated to another job. Use it in the prolog of a batch system:

    \b
    zeusctl allocate --slurm                                     # in Slurm's Prolog
    zeusctl allocate 0,1 --job 1234 --user alice
    zeusctl allocate 3 --pod ml/train-0 --control-group 1f2e3d4c-0000-1111-2222-333344445555
    """
    if mapping is not None:
        others = ("GPUS", "--job", "--pod", "--slurm", "--run", "--user", "--weight", "--parts")
        why = "with --mapping, whose files have the jobs and their GPUs"
        without_effect(why, *others, "--control-group")
        _follow(session, mapping)
        return
    if parts is not None and weight is None:
        raise click.UsageError("--parts is the number of parts that --weight counts; give both")
    if parts is not None and weight is not None and weight > parts:
        raise click.UsageError(f"--weight {weight} is more than the GPU's --parts {parts}")
    if slurm:
        without_effect("with --slurm, as Slurm's variables name the GPUs", "GPUS")
    slurm_job = _slurm_job() if slurm else None
    name, kind = _name(slurm_job, job, pod)
    if slurm_job is not None:
        held = session.slurm_parts()
    elif not gpus:
        raise click.UsageError("name the GPUs, or give --slurm")
    else:
        held = [GpuPart(gpu.uuid) for gpu in session.gpus(gpus)]
    if weight is not None:
        held = [GpuPart(one.gpu, weight, parts or 0) for one in held]
    uid = slurm_job.uid if slurm_job is not None and uid is None else uid
    run = run or (slurm_job.run if slurm_job is not None else "")
    group = control_group or (slurm_job.control_group if slurm_job is not None else "")
    for one in held:
        Holding(kind, name, one, run, group).allocate(session.client, uid)
    index = {gpu.uuid: gpu.index for gpu in session.node.gpus}
    indices = [index[one.gpu] for one in held]
    report = AllocateReport(at=now(), kind=kind, name=name, gpus=indices)
    what = ", ".join(f"GPU {index}" for index in indices) or "no GPU"
    session.answer(report, [f"{kind} {name} holds {what}"])


@verb()
@_whose
@gpus_argument()
def deallocate(
    session: Session, gpus: str, job: str, pod: str, run: str | None, slurm: bool
) -> None:
    """End an allocation (administrators).

    Print what the job or pod has used. It is not an error if nothing is allocated, so you can use
    it in an epilog.

    \b
    zeusctl deallocate --slurm                                   # in Slurm's Epilog
    """
    slurm_job = _slurm_job() if slurm else None
    name, kind = _name(slurm_job, job, pod)
    run = slurm_job.run if slurm_job is not None and run is None else run
    ended = session.client.deallocate(name, kind=kind, run=run, gpus=session.uuids(gpus))
    sums = job_sums(session.client, kind, name, run)
    report = DeallocateReport(at=now(), kind=kind, name=name, ended=ended, energy=sums)
    session.answer(report, lambda: [summary_line(kind, name, ended, sums)])


@verb()
@gpus_argument()
def allocations(session: Session, gpus: str) -> None:
    """List the GPUs that jobs and pods hold.

    Their energy is charged to them, see `zeusctl energy`. Users see their own jobs and pods, and
    which other GPUs are held.
    """
    ledger = session.client.metrics().ledger
    if ledger is None:
        raise CommandError(
            "this zeusd keeps no energy ledger; set a directory under [accounting] in zeusd.toml",
            ErrorCode.NOT_SUPPORTED,
        )
    index = {gpu.uuid: gpu.index for gpu in session.node.gpus}
    chosen = session.uuids(gpus, (one.gpu for one in ledger.held))
    reports = [
        Allocation.of(one, gpu=index.get(one.gpu, -1))
        for one in ledger.held
        if not chosen or one.gpu in chosen
    ]
    reports.sort(key=lambda one: (one.gpu, one.name or ""))
    report = AllocationsReport(at=now(), allocations=reports)
    none = ["no GPU is allocated to a job or pod"]
    session.answer(report, lambda: table_of(ALLOCATION, reports) if reports else none)


def _follow(session: Session, folder: Path) -> None:
    allocations = ManagedAllocations(session.client, user_of)
    while True:
        try:
            wanted = holdings(folder, session.client.node().gpus)
            begun, ended = allocations.keep(wanted)
        except OSError as error:
            raise CommandError(f"{folder} cannot be read ({error.strerror})") from None
        if begun or ended:
            click.echo(f"{len(begun)} allocated, {len(ended)} ended")
        time.sleep(5.0)


def _slurm_job() -> SlurmJob:
    return job_of(os.environ)


def _name(slurm_job: SlurmJob | None, job: str, pod: str) -> tuple[str, str]:
    if sum(map(bool, (slurm_job, job, pod))) != 1:
        raise click.UsageError("give one of --job, --pod and --slurm")
    return (pod, "pod") if pod else (job if slurm_job is None else slurm_job.name, "job")

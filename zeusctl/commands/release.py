"""`zeusctl release`: release leases by holder."""

from __future__ import annotations

import click

from zeusctl.completing import complete_gpus
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import count


@click.command()
@click.option("--pid", "pids", multiple=True, type=click.IntRange(min=1), help="Of this process.")
@click.option("--job", default="", help="Of this job: Slurm's job id or SLUID, or a pod's UID.")
@click.option("--all", "everybody", is_flag=True, help="Release everyone's (administrators).")
@click.option(
    "--gpus",
    default="all",
    shell_complete=complete_gpus,
    help="Only on these GPUs.  [default: all]",
)
@common_options
@pass_session
def release(session: Session, pids: tuple[int, ...], job: str, everybody: bool, gpus: str) -> None:
    """Release leases: your own, or those of a process or job.

    Restore what was changed under them. Without options, release all leases of your processes. It
    is not an error if there is nothing to release, so you can use it in an epilog of a batch
    system:
    \b
    zeusctl release --job "$SLURM_JOB_ID"
    """
    from zeusctl.reports import ReleaseReport

    if session.node.gpus or gpus != "all":
        uuids = [] if gpus == "all" else [gpu.uuid for gpu in session.gpus(gpus)]
        # For an administrator, a process or a job may belong to anyone.
        whose = "all" if everybody or ((pids or job) and session.client.policy().admin) else "user"
        released = session.client.release(uuids, whose=whose, pids=pids, job=job)
    else:
        released = 0
    report = ReleaseReport(at=now(), released=released)
    session.answer(report, [f"{count(released, 'lease')} released"])

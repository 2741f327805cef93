"""`zeusctl release`: gives leases back, by whose they are."""

from __future__ import annotations

import click

from zeusctl.completing import complete_gpus
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import count


@click.command()
@click.option("--pid", "pids", multiple=True, type=click.IntRange(min=1), help="Of this process.")
@click.option("--job", default="", help="Of this job: Slurm's job id or SLUID, or a pod's uid.")
@click.option("--all", "everybody", is_flag=True, help="Administrators: of everybody.")
@click.option(
    "--gpus",
    default="all",
    shell_complete=complete_gpus,
    help="Only of these GPUs.  [default: all]",
)
@common_options
@pass_session
def release(session: Session, pids: tuple[int, ...], job: str, everybody: bool, gpus: str) -> None:
    """Give leases back: your own, a process's, a job's.

    What was changed under them goes back. Without options: all that your processes hold. Nothing to
    release is no error, so it can stand in the epilog of a batch system:

    \b
    zeusctl release --job "$SLURM_JOB_ID"
    """
    from zeusctl.reports import ReleaseReport

    if session.node.gpus or gpus != "all":
        uuids = [] if gpus == "all" else [gpu.uuid for gpu in session.gpus(gpus)]
        # An administrator who names a process or a job means whosever it is.
        whose = "all" if everybody or ((pids or job) and session.client.policy().admin) else "user"
        released = session.client.release(uuids, whose=whose, pids=pids, job=job)
    else:
        released = 0
    report = ReleaseReport(at=now(), released=released)
    session.answer(report, [f"{count(released, 'lease')} released"])

"""`zeusctl reset` and `release`: restore the site limit, or release leases by holder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from zeus_ipc.controls import SPECS
from zeusctl.completing import complete_gpus, gpus_argument
from zeusctl.exits import CommandError, Exit
from zeusctl.session import Session, ceiling_option, common_options, now, pass_session
from zeusctl.text import count, gpus_text, style

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo
    from zeusctl.reports import Lease, Outcome, ResetReport

NOT_OFFERED, HELD = "not_offered", "held"
"""The outcomes for a control that the driver does not offer, or that another job holds."""


@click.command()
@gpus_argument()
@click.option(
    "-c",
    "--control",
    "controls",
    multiple=True,
    type=click.Choice([control.value for control in SPECS]),
    help="Only this control; repeatable.",
)
@ceiling_option("Only remove this ceiling: fleet or job:ID.")
@click.option(
    "--forget",
    is_flag=True,
    help="Give up restoring a GPU that zeusd does not find, named by its UUID (administrators).",
)
@common_options
@pass_session
def reset(
    session: Session, gpus: str, controls: tuple[str, ...], ceiling: str | None, forget: bool
) -> None:
    """Restore the site limit, also where others changed it.

    Reset limits, clocks and persistence mode. For administrators this revokes all leases (their
    holders get an error), and removes settings made with --persist and outside zeusd (nvidia-smi).
    For everyone else it releases the leases of their own processes.

    \b
    zeusctl reset all
    zeusctl reset 3 --control gpu_clocks
    sudo zeusctl reset GPU-3b1e6a70-0f3e-5c2d-9d41-2f7c0a1b4e55 --forget
    """
    from zeusctl.reports import ResetReport

    if forget:
        _forget(session, gpus)
        return
    if gpus in _missing(session):
        raise CommandError(
            f"zeusd does not find {gpus}, and restores it when it is back; if it was removed for "
            f"good: `sudo zeusctl reset {gpus} --forget`",
            Exit.PENDING,
        )
    chosen = session.gpus(gpus)
    if ceiling is not None:
        session.client.set_ceiling([gpu.uuid for gpu in chosen], ceiling, None)
        removed = ResetReport(at=now(), outcomes=[], revoked=[])
        named = count(len(chosen), "GPU")
        session.answer(removed, lambda: [f"removed the ceiling {ceiling} from {named}"])
        return
    if session.client.policy().admin:
        report = _restore(session, chosen, controls, for_slurm=gpus == "slurm")
    else:
        report = _release_own(session, chosen, controls)
    session.answer(report, lambda: _lines(report))
    if not all(outcome.ok for outcome in report.outcomes):
        raise CommandError(
            "not everything is restored; zeusd keeps retrying, see `zeusctl leases`", Exit.PENDING
        )


def _missing(session: Session) -> list[str]:
    """UUIDs of GPUs that zeusd does not find, and has to restore."""
    known = {gpu.uuid for gpu in session.node.gpus}
    return sorted({lease.gpu for lease in session.client.leases()} - known)


def _forget(session: Session, uuid: str) -> None:
    """Drops the pending restores of a GPU that is not there."""
    from zeusctl.reports import Outcome, ResetReport

    missing = _missing(session)
    if uuid not in missing:
        there = f"name one of: {', '.join(missing)}" if missing else "there is none"
        raise CommandError(
            f"--forget is for a GPU that zeusd does not find, by its whole UUID; {there}",
            Exit.UNKNOWN,
            "unknown_gpu",
        )
    ((_, controls),) = session.client.restore(uuid, forget=True).items()
    report = ResetReport(
        at=now(),
        outcomes=[
            Outcome(gpu=-1, uuid=uuid, control=control, ok=True, trouble=result)
            for control, result in controls.items()
        ],
        revoked=[],
    )
    session.answer(report, [f"{', '.join(controls)} of {uuid} will not be restored"])


def _restore(
    session: Session, gpus: Sequence[GpuInfo], controls: Sequence[str], for_slurm: bool
) -> ResetReport:
    from zeusctl.reports import Outcome, ResetReport
    from zeusctl.slurm import slurm_names

    others = _leases(session, gpus, controls)
    results = session.client.restore(
        [gpu.uuid for gpu in gpus], controls, slurm_names() if for_slurm else ()
    )
    index = {gpu.uuid: gpu.index for gpu in gpus}
    outcomes = [
        Outcome(
            gpu=index[uuid],
            uuid=uuid,
            control=control,
            ok=result in ("ok", NOT_OFFERED, HELD),
            trouble=None if result == "ok" else session.readable(result),
        )
        for uuid, by_control in results.items()
        for control, result in by_control.items()
    ]
    revoked = [one for one in others if results[one.uuid].get(one.control) != HELD]
    return ResetReport(at=now(), outcomes=outcomes, revoked=revoked)


def _release_own(session: Session, gpus: Sequence[GpuInfo], controls: Sequence[str]) -> ResetReport:
    from zeusctl.reports import ResetReport

    uid = os.geteuid()
    before = _leases(session, gpus, controls)
    session.client.release([gpu.uuid for gpu in gpus], controls, whose="user")
    left = _leases(session, gpus, controls)
    held = [(lease.uuid, lease.control) for lease in left]
    outcomes = [_outcome(one, (one.uuid, one.control) in held) for one in before if one.uid == uid]
    others = [lease for lease in left if lease.uid != uid]
    if others:
        first = others[0]
        raise CommandError(
            f"{first.control} of GPU {first.gpu} is held by user {first.user}, and only an "
            "administrator may revoke that lease; the leases of your own processes are released",
            Exit.DENIED,
            "permission_denied",
        )
    return ResetReport(at=now(), outcomes=outcomes, revoked=[])


def _outcome(lease: Lease, still_there: bool) -> Outcome:
    from zeusctl.reports import Outcome

    return Outcome(
        gpu=lease.gpu,
        uuid=lease.uuid,
        control=lease.control,
        ok=not still_there,
        trouble="it could not be restored yet" if still_there else None,
    )


def _leases(session: Session, gpus: Sequence[GpuInfo], controls: Sequence[str]) -> list[Lease]:
    from zeusctl.views import lease_reports

    found = lease_reports(session.client, gpus)
    return [lease for lease in found if not controls or lease.control in controls]


def _lines(report: ResetReport) -> list[str]:
    from zeusctl.views import holder

    lines = []
    for lease in report.revoked:
        value = lease.value_text or "nothing"
        lines.append(f"GPU {lease.gpu}: {holder(lease)} lost {lease.control} (had set {value})")
    for outcome in report.outcomes:
        if not outcome.ok:
            text = f"GPU {outcome.gpu}: {outcome.control} is not back: {outcome.trouble}"
            lines.append(style(text, fg="red"))
    absent = [outcome for outcome in report.outcomes if outcome.trouble == NOT_OFFERED]
    for control in dict.fromkeys(outcome.control for outcome in absent):
        without = [outcome.gpu for outcome in absent if outcome.control == control]
        lines.append(f"{control} is not offered by {gpus_text(without)}")
    kept = [outcome for outcome in report.outcomes if outcome.trouble == HELD]
    lines += [f"GPU {one.gpu}: {one.control} stays with the job that holds it" for one in kept]
    back = sum(outcome.ok for outcome in report.outcomes) - len(absent) - len(kept)
    gpus = len({outcome.uuid for outcome in report.outcomes})
    if report.outcomes:
        are = "is" if back == 1 else "are"
        where = f"{count(back, 'control')} of {count(gpus, 'GPU')}"
        lines.append(f"{where} {are} at the restore target again")
    else:
        lines.append("your processes hold no lease there; there was nothing to restore")
    return lines


@click.command()
@click.option("--pid", "pids", multiple=True, type=click.IntRange(min=1), help="Of this process.")
@click.option("--job", help="Of this job: Slurm's job id or SLUID, or a pod's UID.")
@click.option("--all", "everybody", is_flag=True, help="Release everyone's (administrators).")
@click.option(
    "--gpus",
    default="all",
    shell_complete=complete_gpus,
    help="Only on these GPUs.  [default: all]",
)
@common_options
@pass_session
def release(
    session: Session, pids: tuple[int, ...], job: str | None, everybody: bool, gpus: str
) -> None:
    """Release leases: your own, or those of a process or job.

    Restore what was changed under them. Without options, release all leases of your processes. It
    is not an error if there is nothing to release, so you can use it in an epilog of a batch
    system:
    \b
    zeusctl release --job "$SLURM_JOB_ID"
    """
    from zeusctl.reports import ReleaseReport

    if job == "":
        raise click.UsageError("--job is empty; name a job, or omit --job")
    if session.node.gpus or gpus != "all":
        uuids = [] if gpus == "all" else [gpu.uuid for gpu in session.gpus(gpus)]
        # For an administrator, a process or a job may belong to anyone.
        whose = "all" if everybody or ((pids or job) and session.client.policy().admin) else "user"
        released = session.client.release(uuids, whose=whose, pids=pids, job=job or "")
    else:
        released = 0
    report = ReleaseReport(at=now(), released=released)
    session.answer(report, [f"{count(released, 'lease')} released"])

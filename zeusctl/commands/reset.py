"""`zeusctl reset` and `release`: restore the site limit, or release leases by holder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_common.checks import each_of
from zeus_common.options import Whole, option
from zeus_common.text import count, gpus_text, quantity_text, user_name, value_text
from zeus_ipc.controls import SPECS
from zeus_ipc.errors import ErrorCode, SeveralGpusFailed, ZeusIpcError
from zeusctl.arguments import gpus_argument, without_effect
from zeusctl.entities import Lease, Outcome, holder
from zeusctl.exits import CommandError
from zeusctl.reports import ReleaseReport, ResetReport
from zeusctl.session import Session, ceiling_option, now, verb
from zeusctl.slurm import slurm_names
from zeusctl.text import style
from zeusctl.views import lease_reports

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

DONE, NOT_OFFERED, HELD = "ok", "not_offered", "held"
"""The outcomes that are no trouble: a control that the driver does not offer, or that another job
holds, is left."""


@verb()
@gpus_argument(required=True)
@option(
    "-c --control controls",
    "Only this control; repeatable.",
    tuple(control.value for control in SPECS),
    multiple=True,
)
@ceiling_option("Only remove this ceiling: fleet, persisted or job:ID.")
@option(
    "--forget",
    "Give up restoring a GPU that zeusd does not find, named by its UUID (administrators).",
    bool,
)
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
    if forget:
        without_effect("with --forget, which drops all pending restores", "--control", "--ceiling")
        _forget(session, gpus)
        return
    if gpus in _missing(session):
        raise CommandError(
            f"zeusd does not find {gpus}, and restores it when it is back; if it was removed for "
            f"good: `sudo zeusctl reset {gpus} --forget`",
            ErrorCode.RESTORE_PENDING,
        )
    chosen = session.gpus(gpus)
    if ceiling is not None:
        without_effect("with --ceiling, which bounds the power limit", "--control")
        _remove_ceiling(session, chosen, ceiling)
        return
    if session.client.policy().admin:
        report, errors = _restore(session, chosen, controls, for_slurm=gpus == "slurm")
    else:
        report, errors = _release_own(session, chosen, controls), {}
    if report.outcomes or not errors:
        session.answer(report, lambda: _lines(report))
    missing = _missing(session) if gpus == "all" else []
    for uuid in missing:
        click.echo(f"not reset: {uuid}, which zeusd does not find", err=True)
    if errors:
        raise SeveralGpusFailed(errors)
    if missing or not all(outcome.ok for outcome in report.outcomes):
        raise CommandError(
            "not everything is restored; zeusd keeps retrying, see `zeusctl leases`",
            ErrorCode.RESTORE_PENDING,
        )


def _outcome(gpu: int, uuid: str, control: str, result: str) -> Outcome:
    fine = result in (DONE, NOT_OFFERED, HELD, "forgotten")
    trouble = None if result == DONE else result
    return Outcome(gpu=gpu, uuid=uuid, control=control, ok=fine, trouble=trouble)


def _missing(session: Session) -> list[str]:
    """UUIDs of GPUs that zeusd does not find, unlike others, and has to restore."""
    known = {gpu.uuid for gpu in session.node.gpus}
    return sorted({lease.gpu for lease in session.client.leases()} - known) if known else []


def _forget(session: Session, uuid: str) -> None:
    """Drops the pending restores of a GPU that is not there."""
    missing = _missing(session)
    if uuid not in missing:
        there = f"name one of: {', '.join(missing)}" if missing else "there is none"
        raise CommandError(
            f"--forget is for a GPU that zeusd does not find, by its whole UUID; {there}",
            ErrorCode.UNKNOWN_GPU,
        )
    ((_, controls),) = session.client.restore(uuid, forget=True).items()
    report = ResetReport(
        at=now(),
        outcomes=[_outcome(-1, uuid, *one) for one in controls.items()],
        revoked=[],
    )
    session.answer(report, [f"{', '.join(controls)} of {uuid} will not be restored"])


def _remove_ceiling(session: Session, gpus: Sequence[GpuInfo], name: str) -> None:
    having = [gpu for gpu in gpus if any(ceiling.name == name for ceiling in gpu.ceilings)]
    # Also without any: zeusd may forbid it to this user, and says so.
    session.client.set_ceiling([gpu.uuid for gpu in having or gpus], name, None)
    where = gpus_text([gpu.index for gpu in having])
    said = f"removed the ceiling {name} from {where}" if having else f"there is no ceiling {name}"
    session.answer(ResetReport(at=now(), outcomes=[], revoked=[]), [said])


def _restore(
    session: Session, gpus: Sequence[GpuInfo], controls: Sequence[str], for_slurm: bool
) -> tuple[ResetReport, dict[str, ZeusIpcError]]:
    """Restores what GPUs it can; also returns the errors of the others, by UUID."""
    others = _leases(session, gpus, controls)
    jobs = slurm_names() if for_slurm else ()
    results, errors = each_of(
        lambda some: session.client.restore(some, controls, jobs), [gpu.uuid for gpu in gpus]
    )
    index = {gpu.uuid: gpu.index for gpu in gpus}
    outcomes = [
        _outcome(index[uuid], uuid, control, session.readable(result))
        for uuid, by_control in results.items()
        for control, result in by_control.items()
    ]
    revoked = [
        other
        for other in others
        if not other.restoring and results.get(other.uuid, {}).get(other.control, HELD) != HELD
    ]
    return ResetReport(at=now(), outcomes=outcomes, revoked=revoked), errors


def _release_own(session: Session, gpus: Sequence[GpuInfo], controls: Sequence[str]) -> ResetReport:
    """Releases this user's leases.

    Raises:
        CommandError: Something else differs from the restore target, and needs an administrator.
    """
    uid = os.geteuid()
    before = _leases(session, gpus, controls)
    session.client.release([gpu.uuid for gpu in gpus], controls, whose="user")
    left = _leases(session, gpus, controls)
    held = {(lease.uuid, lease.control) for lease in left}
    outcomes = []
    for one in before:
        if one.uid == uid:
            waits = (one.uuid, one.control) in held
            result = "it could not be restored yet" if waits else DONE
            outcomes.append(_outcome(one.gpu, one.uuid, one.control, result))
    for gpu in gpus:
        others = _set_by_others(session, gpu, controls, left)
        if others:
            own = "; the leases of your own processes are released" if outcomes else ""
            raise session.denied(f"GPU {gpu.index}: {others}{own}", "reset others' settings")
    return ResetReport(at=now(), outcomes=outcomes, revoked=[])


def _set_by_others(
    session: Session, gpu: GpuInfo, controls: Sequence[str], leases: Sequence[Lease]
) -> str:
    """What keeps a GPU from its restore target, that is not this user's; empty: nothing."""
    for lease in leases:
        if lease.uuid == gpu.uuid and lease.uid != os.geteuid():
            return f"{lease.control} is held by user {lease.user}"
    for control in gpu.persisted:
        if not controls or control in controls:
            return f"{control} is persistent"
    if not controls or "power_limit" in controls:
        limit = session.client.state(gpu.uuid)[gpu.uuid].power_limit_mw
        if limit is not None and limit != gpu.power_limit_highest_mw:
            text = value_text("power_limit", [limit])
            return f"its power limit of {text} was set by someone else"
    return ""


def _leases(session: Session, gpus: Sequence[GpuInfo], controls: Sequence[str]) -> list[Lease]:
    reports = lease_reports(session.client, gpus)
    return [lease for lease in reports if not controls or lease.control in controls]


def _lines(report: ResetReport) -> list[str]:
    lines = []
    for lease in report.revoked:
        was = "" if lease.value is None else f"; was {quantity_text(lease.control, lease.value)}"
        lines.append(f"GPU {lease.gpu}: revoked {lease.control} from {holder(lease)}{was}")
    for outcome in report.outcomes:
        if not outcome.ok:
            text = f"GPU {outcome.gpu}: {outcome.control} is not restored: {outcome.trouble}"
            lines.append(style(text, fg="red"))
    absent = [outcome for outcome in report.outcomes if outcome.trouble == NOT_OFFERED]
    for control in dict.fromkeys(outcome.control for outcome in absent):
        without = [outcome.gpu for outcome in absent if outcome.control == control]
        lines.append(f"{control} is not offered by {gpus_text(without)}")
    kept = [outcome for outcome in report.outcomes if outcome.trouble == HELD]
    lines += [f"GPU {one.gpu}: {one.control} stays with the job that holds it" for one in kept]
    restored = sum(outcome.ok for outcome in report.outcomes) - len(absent) - len(kept)
    gpus = len({outcome.uuid for outcome in report.outcomes})
    if report.outcomes:
        lines.append(f"reset {count(restored, 'control')} on {count(gpus, 'GPU')}")
    else:
        lines.append("nothing to reset: your processes hold no lease there")
    return lines


@verb()
@gpus_argument()
@option("--pid pids", "Of this process.", Whole(min=1), multiple=True)
@option("--job", "Of this job: Slurm's job id or SLUID, or a pod's UID.")
@option("--all everybody", "Release everyone's (administrators).", bool)
def release(
    session: Session, gpus: str, pids: tuple[int, ...], job: str | None, everybody: bool
) -> None:
    """Release leases: your own, or those of a process or job.

    Restore what was changed under them. Without options, release all leases of your processes. It
    is not an error if there is nothing to release, so you can use it in an epilog of a batch
    system:
    \b
    zeusctl release --job "$SLURM_JOB_ID"
    """
    if job == "":
        raise click.UsageError("--job is empty; name a job, or omit --job")
    if everybody:
        without_effect("with --all, which is everyone's", "--pid", "--job")
    released, admin = 0, False
    if session.node.gpus or gpus != "all":
        uuids = session.uuids(gpus)
        admin = session.client.policy().admin
        # For an administrator, a process or a job may belong to anyone.
        whose = "all" if everybody or ((pids or job) and admin) else "user"
        released = session.client.release(uuids, whose=whose, pids=pids, job=job or "")
    if not released and not admin:
        for pid in pids:
            _must_be_own(session, pid)
    report = ReleaseReport(at=now(), released=released)
    everyones, there = admin or everybody, "" if gpus == "all" else " there"
    session.answer(report, [_released(released, pids, job, everyones) + there * (not released)])


def _must_be_own(session: Session, pid: int) -> None:
    """Checks a process whose leases this user wants to release.

    Raises:
        CommandError: It is another user's.
    """
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return
    if uid != os.geteuid():
        what = f"nothing released: process {pid} belongs to {user_name(uid)}"
        raise session.denied(what, "release others' leases")


def _released(released: int, pids: Sequence[int], job: str | None, all_of_them: bool) -> str:
    if released:
        return f"{count(released, 'lease')} released"
    if not (pids or job):
        who = "nobody holds a lease" if all_of_them else "your processes hold no lease"
        return f"nothing to release: {who}"
    holder = f"process {', '.join(map(str, pids))}" if pids else f"job {job}"
    return f"nothing to release: {holder} holds no lease{'' if all_of_them else ' of yours'}"

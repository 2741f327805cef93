"""`zeusctl audit`: recent changes and who made them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from zeusctl.completing import complete_gpus
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import style, table, user_name, wall_time

if TYPE_CHECKING:
    from zeus_ipc.replies import AuditRecord
    from zeusctl.reports import AuditReport, Event

HEADER = ("WHEN", "WHAT", "GPU", "CONTROL", "FROM", "TO", "WHO", "WHY AND RESULT")
_FOLLOW_S = 0.5
KEPT = 1000
"""Records that zeusd keeps."""


@click.command()
@click.option(
    "-n",
    "--lines",
    "count",
    default=50,
    type=click.IntRange(1, KEPT),
    show_default=True,
    help="Begin with this many of the latest entries.",
)
@click.option(
    "--gpus",
    default="all",
    shell_complete=complete_gpus,
    help="Only for these GPUs.  [default: all]",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new entries until Ctrl-C.")
@common_options
@pass_session
def audit(session: Session, count: int, gpus: str, follow: bool) -> None:
    """Show recent changes and who made them.

    Sets, restores, refusals, and changes made outside zeusd. Many successful sets of one control
    under one lease are one line. zeusd keeps the latest thousand; its log has everything
    (`journalctl -u zeusd`).
    """
    chosen = None if gpus == "all" else {gpu.uuid for gpu in session.gpus(gpus)}
    newest = 0
    while True:
        page = session.client.audit(after=newest, limit=KEPT if chosen or newest else count)
        wanted = [one for one in page.records if chosen is None or one.gpu in chosen]
        # Everything since the first query is of interest.
        report = _report(session, wanted if newest else wanted[-count:], page.dropped)
        if report.events or not newest:
            session.answer(report, _lines(report, heading=not newest))
        newest = max([newest, *(record.number for record in page.records)])
        if not follow:
            return
        time.sleep(_FOLLOW_S)


def _report(
    session: Session,
    records: Sequence[AuditRecord],
    dropped: int,
) -> AuditReport:
    from zeusctl.reports import AuditReport

    indices = {gpu.uuid: gpu.index for gpu in session.node.gpus}
    events = [_event(record, indices, session.readable) for record in records]
    return AuditReport(at=now(), events=events, dropped=dropped)


def _event(
    record: AuditRecord, indices: Mapping[str, int], readable: Callable[[str], str]
) -> Event:
    from zeusctl.reports import Event

    now_ns = time.monotonic_ns()
    return Event(
        number=record.number,
        when=wall_time(record.t_ns, now_ns),
        until=wall_time(record.last_ns, now_ns),
        count=record.count,
        event=record.event,
        warning=record.warning,
        gpu=None if record.gpu is None else indices.get(record.gpu),
        uuid=record.gpu,
        control=record.control,
        uid=record.uid,
        user=None if record.uid is None else user_name(record.uid),
        pid=record.pid,
        command=record.command or None,
        job=record.job or None,
        old=record.old,
        new=record.new,
        reason=None if record.reason is None else readable(record.reason),
        result=None if record.result is None else readable(record.result),
    )


def _who(event: Event) -> str:
    if event.pid is None:
        return event.user or ""
    if event.pid == 0:
        return event.command or ""  # zeusd itself
    who = f"{event.command or 'process'} {event.pid} ({event.user})"
    return f"{who}, job {event.job}" if event.job else who


def _lines(report: AuditReport, heading: bool) -> list[str]:
    rows = []
    for event in report.events:
        what = event.event + (f" x{event.count}" if event.count > 1 else "")
        why = [part for part in (event.reason, event.result) if part not in (None, "requested")]
        rows.append(
            [
                event.when.strftime("%Y-%m-%d %H:%M:%S"),
                style(what, fg="yellow") if event.warning else what,
                "" if event.uuid is None else str(event.uuid if event.gpu is None else event.gpu),
                event.control or "",
                event.old or "",
                event.new or "",
                _who(event),
                ", ".join(str(part) for part in why),
            ]
        )
    lines = table(HEADER, rows)
    return lines if heading else lines[1:]

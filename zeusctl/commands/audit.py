"""`zeusctl audit`: recent changes and who made them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from zeusctl.arguments import gpus_argument
from zeusctl.columns import lines as table_of
from zeusctl.entities import EVENT
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import user_name, wall_time

if TYPE_CHECKING:
    from zeus_ipc.replies import AuditRecord
    from zeusctl.reports import AuditReport, Event

_FOLLOW_S = 0.5
KEPT = 1000
"""Records that zeusd keeps."""


@click.command()
@gpus_argument()
@click.option(
    "-n",
    "--lines",
    "count",
    default=50,
    type=click.IntRange(1, KEPT),
    show_default=True,
    help="Begin with this many of the latest entries.",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new entries until Ctrl-C.")
@common_options
@pass_session
def audit(session: Session, gpus: str, count: int, follow: bool) -> None:
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
            lines = table_of(EVENT, report.events)
            session.answer(report, lines[1:] if newest else lines)
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

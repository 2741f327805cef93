"""`zeusctl audit`: recent changes and who made them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeus_common.options import Whole, option
from zeusctl.arguments import gpus_argument
from zeusctl.columns import lines as table_of
from zeusctl.entities import EVENT, Event
from zeusctl.reports import AuditReport
from zeusctl.session import Session, now, verb
from zeusctl.text import wall_time

if TYPE_CHECKING:
    from zeus_ipc.replies import AuditRecord

KEPT = 1000
"""Records that zeusd keeps."""


@verb()
@gpus_argument()
@option("-n --lines count", "Begin with this many of the latest entries.", Whole(1, KEPT), 50)
@option("-f --follow", "Keep printing new entries until Ctrl-C.", bool)
def audit(session: Session, gpus: str, count: int, follow: bool) -> None:
    """Show recent changes and who made them.

    Sets, restores, refusals, and changes made outside zeusd. Many successful sets of one control
    under one lease are one line. zeusd keeps the latest thousand; its log has everything
    (`journalctl -u zeusd`).
    """
    page = session.client.audit(limit=count if gpus == "all" else KEPT)
    chosen = session.uuids(gpus, (record.gpu for record in page.records))
    wanted = [record for record in page.records if not chosen or record.gpu in chosen][-count:]
    report = _report(session, wanted, page.dropped)
    session.answer(report, table_of(EVENT, report.events))
    newest = 0
    while follow:
        sys.stdout.flush()
        newest = max([newest, *(record.number for record in page.records)])
        time.sleep(0.5)
        page = session.client.audit(after=newest, limit=KEPT)
        wanted = [record for record in page.records if not chosen or record.gpu in chosen]
        report = _report(session, wanted, page.dropped)
        if report.events:
            session.answer(report, table_of(EVENT, report.events)[1:])


def _report(session: Session, records: Sequence[AuditRecord], dropped: int) -> AuditReport:
    indices = {gpu.uuid: gpu.index for gpu in session.node.gpus}
    now_ns = time.monotonic_ns()

    def readable(text: str | None) -> str | None:
        return None if text is None else session.readable(text)

    events = [
        Event.of(
            record,
            when=wall_time(record.t_ns, now_ns),
            until=wall_time(record.last_ns, now_ns),
            gpu=None if record.gpu is None else indices.get(record.gpu),
            reason=readable(record.reason),
            result=readable(record.result),
        )
        for record in records
    ]
    return AuditReport(at=now(), events=events, dropped=dropped)

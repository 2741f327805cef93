"""`zeusctl processes`: processes on the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeusctl.arguments import gpus_argument
from zeusctl.columns import Output, output_options
from zeusctl.columns import lines as table_of
from zeusctl.entities import PROCESS, Process
from zeusctl.reports import ProcessesReport
from zeusctl.session import Session, now, verb
from zeusctl.text import style
from zeusctl.views import lease_reports, process_reports


@verb()
@gpus_argument()
@output_options(PROCESS)
def processes(session: Session, gpus: str, output: Output[Any]) -> None:
    """List processes on the GPUs, with user and GPU memory.

    TYPE is C for compute, G for graphics. Only administrators see pids, commands and jobs of other
    users. The list is at most one second old.
    """
    output.run(
        lambda: read(session, gpus),
        _lines,
        lambda report: report.processes,
    )


def read(session: Session, gpus: str) -> ProcessesReport:
    """The processes of some GPUs."""
    session.look_again()
    chosen = session.gpus(gpus)
    leases = lease_reports(session.client, session.node.gpus)
    found, errors = process_reports(session.client, chosen, leases)
    return ProcessesReport(at=now(), processes=found, errors=errors)


def _lines(report: ProcessesReport) -> list[str]:
    failed = [style(error, fg="red") for error in report.errors]
    return [*process_lines(report.processes), *failed] if report.processes or not failed else failed


def process_lines(found: Sequence[Process], width: int | None = None) -> list[str]:
    """Processes as a table."""
    return table_of(PROCESS, found, width) if found else ["no process uses these GPUs"]

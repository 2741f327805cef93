"""`zeusctl processes`: processes on the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from zeusctl.columns import PROCESS_COLUMNS, Output, output_options
from zeusctl.completing import gpus_argument, id_option
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import memory, shorten, table

if TYPE_CHECKING:
    from zeusctl.reports import Process, ProcessesReport

HEADER = ("GPU", "PID", "USER", "MEM", "TYPE", "COMMAND", "JOB", "HOLDS")


@click.command()
@gpus_argument(required=False)
@id_option
@output_options(PROCESS_COLUMNS)
@common_options
@pass_session
def processes(
    session: Session,
    gpus: str,
    columns: Sequence[str],
    form: str | None,
    watch: float | None,
) -> None:
    """List processes on the GPUs, with user and GPU memory.

    TYPE is C for compute, G for graphics. Only administrators see pids, commands and jobs of other
    users. The list is at most one second old.
    """
    output = Output(session.json, columns, form, watch, PROCESS_COLUMNS)
    output.run(lambda: read(session, gpus), lambda report: process_lines(report.processes), rows)


def read(session: Session, gpus: str) -> ProcessesReport:
    """The processes of some GPUs."""
    from zeusctl.reports import ProcessesReport
    from zeusctl.views import lease_reports, process_reports

    session.look_again()
    chosen = session.gpus(gpus)
    leases = lease_reports(session.client, session.node.gpus)
    return ProcessesReport(at=now(), processes=process_reports(session.client, chosen, leases))


def rows(report: ProcessesReport) -> Iterator[dict[str, Any]]:
    """The report by column."""
    for process in report.processes:
        yield process.model_dump()


def process_lines(found: Sequence[Process]) -> list[str]:
    """Processes as a table."""
    if not found:
        return ["no process uses these GPUs"]
    cells = [
        [
            str(one.gpu) + ("" if one.gpu_instance is None else f":{one.gpu_instance}"),
            "-" if one.pid is None else str(one.pid),
            one.user or "-",
            memory(one.memory_mib),
            one.type,
            shorten(one.command or "-", 40),
            one.job or "",
            ", ".join(one.leases),
        ]
        for one in found
    ]
    return table(HEADER, cells, (0, 1, 3))

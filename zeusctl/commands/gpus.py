"""`zeusctl gpus`: the GPUs of the node, and what each accepts."""

from __future__ import annotations

from typing import Any

from zeusctl.arguments import gpus_argument
from zeusctl.columns import Output, output_options
from zeusctl.columns import lines as table_of
from zeusctl.commands.status import not_enforced
from zeusctl.entities import KNOWN_GPU, KnownGpu
from zeusctl.reports import GpusReport
from zeusctl.session import Session, now, verb


@verb()
@gpus_argument()
@output_options(KNOWN_GPU)
def gpus(session: Session, gpus: str, output: Output[Any]) -> None:
    """List GPUs: names, UUIDs, and the limits they accept."""
    output.run(lambda: _read(session, gpus), _lines, lambda report: report.gpus)


def _read(session: Session, gpus: str) -> GpusReport:
    session.look_again()
    return GpusReport(at=now(), gpus=[KnownGpu.of(gpu) for gpu in session.listed(gpus)])


def _lines(report: GpusReport) -> list[str]:
    return [*table_of(KNOWN_GPU, report.gpus), *not_enforced(report.gpus)]

"""`zeusctl gpus`: the GPUs of the node, and what each accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zeusctl.arguments import gpus_argument
from zeusctl.columns import Output, output_options
from zeusctl.columns import lines as table_of
from zeusctl.commands.status import not_enforced
from zeusctl.entities import KNOWN_GPU, KnownGpu
from zeusctl.session import Session, common_options, now, pass_session

if TYPE_CHECKING:
    from zeusctl.reports import GpusReport


@click.command()
@gpus_argument()
@output_options(KNOWN_GPU)
@common_options
@pass_session
def gpus(session: Session, gpus: str, output: Output[Any]) -> None:
    """List GPUs: names, UUIDs, and the limits they accept."""
    output.run(lambda: _read(session, gpus), _lines, lambda report: report.gpus)


def _read(session: Session, gpus: str) -> GpusReport:
    from zeusctl.reports import GpusReport

    session.look_again()
    chosen = session.gpus(gpus) if gpus != "all" else session.node.gpus
    return GpusReport(at=now(), gpus=[KnownGpu.of(gpu) for gpu in chosen])


def _lines(report: GpusReport) -> list[str]:
    return [*table_of(KNOWN_GPU, report.gpus), *not_enforced(report.gpus)]

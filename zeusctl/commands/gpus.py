"""`zeusctl gpus`: the GPUs of the node, and what each accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from zeusctl.columns import Output, output_options
from zeusctl.commands.status import not_enforced
from zeusctl.completing import gpus_argument, id_option
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import table

if TYPE_CHECKING:
    from zeusctl.reports import GpusReport

COLUMNS = (
    *("index", "name", "uuid", "pci_address", "architecture", "memory_mib", "mig_enabled"),
    *("min_power_limit_w", "max_power_limit_w", "default_power_limit_w", "site_limit_w"),
    "controls",
)
HEADER = ("GPU", "NAME", "MEMORY", "UUID", "PCI", "LIMITS", "SITE", "CONTROLS")


@click.command()
@gpus_argument(required=False)
@id_option
@output_options(COLUMNS)
@common_options
@pass_session
def gpus(
    session: Session,
    gpus: str,
    columns: Sequence[str],
    form: str | None,
    watch: float | None,
) -> None:
    """List GPUs: names, UUIDs, and the limits they accept."""
    output = Output(session.json, columns, form, watch, COLUMNS)
    output.run(lambda: _read(session, gpus), _lines, _rows)


def _read(session: Session, gpus: str) -> GpusReport:
    from zeusctl.reports import GpusReport
    from zeusctl.views import known_report

    session.look_again()
    chosen = session.gpus(gpus) if gpus != "all" else session.node.gpus
    return GpusReport(at=now(), gpus=[known_report(gpu) for gpu in chosen])


def _rows(report: GpusReport) -> Iterator[dict[str, Any]]:
    for gpu in report.gpus:
        limit = gpu.power_limit_w
        yield {
            **gpu.model_dump(),
            "min_power_limit_w": limit.smallest,
            "max_power_limit_w": limit.largest,
            "default_power_limit_w": limit.default,
            "site_limit_w": limit.site,
        }


def _lines(report: GpusReport) -> list[str]:
    cells = []
    for gpu in report.gpus:
        limit = gpu.power_limit_w
        span = "-" if limit.smallest is None else f"{limit.smallest:g}-{limit.largest:g} W"
        site = "-" if limit.site is None else f"{limit.site:g} W"
        memory = f"{gpu.memory_mib / 1024:.0f} GiB"
        controls = ", ".join(gpu.controls)
        cells.append(
            [str(gpu.index), gpu.name, memory, gpu.uuid, gpu.pci_address, span, site, controls]
        )
    return [*table(HEADER, cells, (0, 2)), *not_enforced(report.gpus)]

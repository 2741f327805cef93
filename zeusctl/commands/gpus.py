"""`zeusctl gpus`: which GPUs there are, and what each takes."""

from __future__ import annotations

import click

from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import table


@click.command()
@common_options
@pass_session
def gpus(session: Session) -> None:
    """GPUs of the node: names, UUIDs, and the limits they take."""
    from zeusctl.reports import GpusReport
    from zeusctl.views import known_report

    report = GpusReport(at=now(), gpus=[known_report(gpu) for gpu in session.node.gpus])

    def lines() -> list[str]:
        rows = []
        for gpu in report.gpus:
            limit = gpu.power_limit_w
            span = "-" if limit.smallest is None else f"{limit.smallest:g}-{limit.largest:g} W"
            site = "-" if limit.site is None else f"{limit.site:g} W"
            memory = f"{gpu.memory_mib / 1024:.0f} GiB"
            rows.append(
                [
                    str(gpu.index),
                    gpu.name,
                    memory,
                    gpu.uuid,
                    gpu.pci_address,
                    span,
                    site,
                    ", ".join(gpu.controls),
                ]
            )
        header = ("GPU", "NAME", "MEMORY", "UUID", "PCI", "LIMITS", "SITE", "CONTROLS")
        return table(header, rows, (0, 2))

    session.answer(report, lines)

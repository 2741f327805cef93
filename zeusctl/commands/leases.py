"""`zeusctl leases`: leases and their holders."""

from __future__ import annotations

import click

from zeusctl.commands.status import ceiling_lines, lease_lines
from zeusctl.session import Session, common_options, now, pass_session


@click.command()
@click.option("--mine", is_flag=True, help="Only leases of your own processes.")
@common_options
@pass_session
def leases(session: Session, mine: bool) -> None:
    """List leases and ceilings: holder, age, restore target.

    Only the process's own user and administrators see the process, its program and its job.
    """
    import os

    from zeusctl.reports import LeasesReport
    from zeusctl.views import ceiling_reports, lease_reports

    found = lease_reports(session.client, session.node.gpus)
    if mine:
        found = [lease for lease in found if lease.uid == os.geteuid()]
    ceilings = [] if mine else ceiling_reports(session.node.gpus)
    report = LeasesReport(at=now(), leases=found, ceilings=ceilings)

    def lines() -> list[str]:
        said = lease_lines(found) if found else ["no leases"]
        return [*said, "", *ceiling_lines(ceilings)] if ceilings else said

    session.answer(report, lines)

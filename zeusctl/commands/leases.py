"""`zeusctl leases`: leases and their holders."""

from __future__ import annotations

import click

from zeusctl.commands.status import lease_lines
from zeusctl.session import Session, common_options, now, pass_session


@click.command()
@click.option("--mine", is_flag=True, help="Only leases of your own processes.")
@common_options
@pass_session
def leases(session: Session, mine: bool) -> None:
    """List leases: holder, age, and restore target.

    Only the process's own user and administrators see the process, its program and its job.
    """
    import os

    from zeusctl.reports import LeasesReport
    from zeusctl.views import lease_reports

    found = lease_reports(session.client, session.node.gpus)
    if mine:
        found = [lease for lease in found if lease.uid == os.geteuid()]
    report = LeasesReport(at=now(), leases=found)
    session.answer(report, lambda: lease_lines(found) if found else ["no leases"])

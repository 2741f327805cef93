"""`zeusctl leases`: who holds what."""

from __future__ import annotations

import click

from zeusctl.commands.status import lease_lines
from zeusctl.session import Session, common_options, now, pass_session


@click.command()
@click.option("--mine", is_flag=True, help="Only those of your own processes.")
@common_options
@pass_session
def leases(session: Session, mine: bool) -> None:
    """Who holds what, since when, and what it goes back to.

    The process, its program and its job are shown to its own user and to administrators.
    """
    import os

    from zeusctl.reports import LeasesReport
    from zeusctl.views import lease_reports

    found = lease_reports(session.client, session.node.gpus)
    if mine:
        found = [lease for lease in found if lease.uid == os.geteuid()]
    report = LeasesReport(at=now(), leases=found)
    session.answer(report, lambda: lease_lines(found) if found else ["nobody holds anything"])

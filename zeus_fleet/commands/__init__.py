"""`zeus-fleet`: a power budget for many nodes."""

from __future__ import annotations

import click

from zeus_fleet.commands import budgeting, operating, running
from zeus_ipc import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zeus-fleet")
def main() -> None:
    """Keep the power limits of many nodes within a budget."""


for _command in (
    running.node,
    running.allocate,
    budgeting.budget,
    budgeting.follow,
    operating.status,
    operating.watch,
    operating.report,
    operating.serve,
    running.simulate,
):
    main.add_command(_command)

"""`zeus-fleet`: a power budget for many nodes."""

from __future__ import annotations

import click

from zeus_fleet.commands import budgeting, operating, running, simulating


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
    simulating.simulate,
):
    main.add_command(_command)

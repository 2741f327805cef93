"""How the budget is used: now, as it goes on, and afterwards."""

from __future__ import annotations

from typing import Any

import click

from zeus_fleet.commands.etcd import Reach, with_etcd


@click.command()
@with_etcd
def status(reach: Reach[Any]) -> None:
    """Show what each node is granted, what it held with its last heartbeat, and what it wants."""

    async def look(store: Any) -> Any:
        return (await store.read())[0]

    read = reach(look)
    if read is None:
        raise click.ClickException("there is no budget yet; see zeus-fleet budget --help")
    held = granted = 0
    click.echo("NODE             FLOOR  GRANTED     HELD   WANTED")
    for name, floor in sorted(read.budget.floors_mw.items()):
        beat = read.heartbeats.get(name)
        grant = None if read.plan is None else read.plan.grants.get(name)
        limit = floor if grant is None else grant.limit_mw
        granted, held = granted + limit, held + (floor if beat is None else beat.held_mw)
        said = "     no heartbeat" if beat is None else f"{_w(beat.held_mw)} {_w(beat.wanted_mw)}"
        stuck = f"  stuck: {beat.stuck_mw / 1000:g} W" if beat and beat.stuck_mw else ""
        click.echo(f"{name:<13} {_w(floor)} {_w(limit)} {said}{stuck}")
    click.echo(f"granted {granted / 1000:g} W, held {held / 1000:g} W of ", nl=False)
    click.echo(f"{read.budget.site.limit_mw / 1000:g} W")


def _w(mw: int) -> str:
    return f"{mw / 1000:>6.0f} W"

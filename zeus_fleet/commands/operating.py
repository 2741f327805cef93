"""What an operator asks: the budget, and how it is used."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zeus_fleet.commands.etcd import Reach, with_etcd
from zeus_fleet.messages import Budget


@click.command()
@with_etcd
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML with the nodes, their floors and the limits.",
)
@click.argument("watts", type=float, required=False)
def budget(reach: Reach[Any], file: Path | None, watts: float | None) -> None:
    """Show the budget, or set it: WATTS for the site, or all of it from a file.

    Reachable nodes obey a smaller budget with their next heartbeat, the others within 15 s.
    """
    from zeus_fleet import wire

    async def change(store: Any) -> Budget | None:
        read, _ = await store.read()
        present = None if read is None else read.budget
        if file is not None:
            present = wire.budget_from_table(_toml(file))
        if watts is not None:
            if present is None:
                raise ValueError("there is no budget yet; give --file with the nodes")
            site = replace(present.site, limit_mw=round(1000 * watts))
            present = Budget((site, *present.domains[1:]), present.floors_mw, present.leaving)
        if present is not None and (file is not None or watts is not None):
            revision = 0 if read is None else read.budget_revision
            if not await store.set_budget(present, revision):
                raise ValueError("somebody else changed the budget meanwhile; look, and try again")
        return present

    found = reach(change)
    if found is None:
        raise click.ClickException("there is no budget yet; give --file with the nodes")
    for domain in found.domains:
        floors = sum(found.floors_mw[name] for name in domain.nodes)
        click.echo(
            f"{domain.name}: {domain.limit_mw / 1000:g} W for {len(domain.nodes)} nodes, "
            f"floors {floors / 1000:g} W, reserve {domain.reserve_mw / 1000:g} W"
        )


def _toml(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        return table
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file} cannot be read as TOML: {error}") from None


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

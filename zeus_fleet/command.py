"""`zeus-fleet`: a power budget over many nodes."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from zeus_fleet.messages import Budget, Timing
from zeus_fleet.policies import FLOOR, POLICIES, JobPolicy, water_filling
from zeus_fleet.simulation import CLUSTERS, Result, blind, compare, of_jobs

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Keep the power limits of many nodes within a budget."""


def _with_etcd(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of what speaks to etcd."""
    for option in (
        click.option(
            "--etcd",
            "endpoints",
            multiple=True,
            default=("localhost:2379",),
            show_default=True,
            metavar="HOST:PORT",
            help="A member of etcd; repeat it for the others.",
        ),
        click.option(
            "--prefix", default="/zeus-fleet/", show_default=True, help="Of all keys in etcd."
        ),
    ):
        command = option(command)
    return command


def _run(
    use: Callable[[Any], Coroutine[Any, Any, T]], endpoints: tuple[str, ...], prefix: str
) -> T:
    """Does something with the store; ends with a sentence if that fails."""
    from zeus_fleet.store import Store, StoreUnavailable

    async def with_store() -> T:
        store = Store(endpoints, prefix=prefix)
        try:
            return await use(store)
        finally:
            await store.close()

    try:
        return asyncio.run(with_store())
    except (StoreUnavailable, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(0)


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)


@main.command()
@_with_etcd
@click.option("--name", default=socket.gethostname, help="As the budget lists it.  [host name]")
@click.option("--socket", "path", help="zeusd's socket.  [$ZEUSD_SOCK_PATH]")
def node(endpoints: tuple[str, ...], prefix: str, name: str, path: str | None) -> None:
    """Bound this node's GPUs as the plan says; run it on each node.

    Its user must be an administrator of zeusd. It needs no other rights.
    """
    from zeus_fleet.shells import ZEUSD_TIMEOUT_S, ZeusdGpus, run_agent
    from zeus_ipc import Client
    from zeus_ipc.errors import ZeusIpcError

    _log()
    try:
        with Client(path, timeout_s=ZEUSD_TIMEOUT_S, heartbeat=False) as client:
            gpus = ZeusdGpus(client)
            _run(lambda store: run_agent(name, store, gpus), endpoints, prefix)
    except ZeusIpcError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@_with_etcd
@click.option("--name", default=socket.gethostname, help="Of this allocator.  [host name]")
def allocate(endpoints: tuple[str, ...], prefix: str, name: str) -> None:
    """Plan who may hold what; run several, one of them leads."""
    from zeus_fleet.allocator import Allocator
    from zeus_fleet.shells import run_allocator

    _log()
    core = Allocator(Timing())
    _run(lambda store: run_allocator(name, store, core), endpoints, prefix)


@main.command()
@_with_etcd
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML with the nodes, their floors and the limits.",
)
@click.argument("watts", type=float, required=False)
def budget(endpoints: tuple[str, ...], prefix: str, file: Path | None, watts: float | None) -> None:
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

    found = _run(change, endpoints, prefix)
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


@main.command()
@_with_etcd
def status(endpoints: tuple[str, ...], prefix: str) -> None:
    """Show what each node is granted, what it held with its last heartbeat, and what it wants."""

    async def look(store: Any) -> Any:
        return (await store.read())[0]

    read = _run(look, endpoints, prefix)
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


def _cell(result: Result, *, latency: bool) -> str:
    beside = f"{100 * result.squeezed:.0f} %" if latency else f"{result.worst:.2f}"
    return f"{result.progress:.3f} ({beside})"


@main.command()
@click.option(
    "--cluster",
    type=click.Choice([*CLUSTERS]),
    default="a40",
    show_default=True,
    help="Which GPUs.",
)
@click.option(
    "--budget",
    "budgets",
    type=click.FloatRange(0, 100, min_open=True),
    multiple=True,
    default=(50, 60, 70, 80, 90),
    show_default=True,
    help="Budget in % of the sum of all maximum limits; repeat it for several.",
)
@click.option("--mixes", type=click.IntRange(1), default=6, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first mix of jobs.")
@click.option(
    "--known",
    type=click.FloatRange(0, 100),
    default=100,
    show_default=True,
    help="Jobs in % whose profile is known; others count by the mean profile.",
)
@click.option(
    "--floor",
    type=click.FloatRange(0, 1),
    default=FLOOR,
    show_default=True,
    help="Least progress of each job under water-filling, by its progress under busy.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0, 100),
    default=0,
    show_default=True,
    help="Jobs in % that serve under a latency objective; prints in parentheses the % of their "
    "GPUs that get less than it needs.",
)
def simulate(
    cluster: str,
    budgets: tuple[float, ...],
    mixes: int,
    seed: int,
    known: float,
    floor: float,
    latency: float,
) -> None:
    """Compare policies on measured tables of training jobs.

    Prints the mean progress of a busy GPU, relative to no limit, and in parentheses that of the job
    with the least. It is computed from the tables, and not measured on a cluster.
    """
    policies: dict[str, JobPolicy] = {
        **POLICIES,
        "water-filling": functools.partial(water_filling, floor=floor),
    }
    compared = {name: of_jobs(policy) for name, policy in policies.items()}
    if latency:
        compared["not told"] = blind(policies["water-filling"])
    found = compare(
        cluster,
        [budget / 100 for budget in budgets],
        range(seed, seed + mixes),
        compared,
        known / 100,
        latency / 100,
    )
    click.echo(f"{CLUSTERS[cluster]}; 512 GPUs, 85 % busy; mean of {mixes} mixes of jobs")
    click.echo("BUDGET  " + "".join(f"{name.upper():<15}" for name in compared).rstrip())
    for share, results in found.items():
        cells = [_cell(one, latency=latency > 0) for one in results.values()]
        click.echo(f"{f'{100 * share:g} %':<8}" + "".join(f"{cell:<15}" for cell in cells).rstrip())

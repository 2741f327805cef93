"""Commands that show how the budget is used: now, over time, and afterwards."""

from __future__ import annotations

import asyncio
import functools
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_common.atomic import append_text
from zeus_common.options import FILE, Number, Whole, one_sentence
from zeus_common.tables import distinct
from zeus_common.text import percent
from zeus_fleet.commands.etcd import Reach, log_to_stderr, with_etcd
from zeus_fleet.records import EventReport, Record, read, reports, svg
from zeus_fleet.view import FleetView, NodeView, Watcher
from zeus_ipc.parsing import host_and_port

if TYPE_CHECKING:
    from zeus_fleet.store import FleetStore

NO_BUDGET = "there is no budget yet; see zeus-fleet budget --help"


@click.command()
@with_etcd
def status(reach: Reach[Any]) -> None:
    """Show each node's granted, held, drawn and wanted power."""

    async def look(store: FleetStore) -> FleetView:
        await store.seek()
        snapshot, _ = await store.read()
        if snapshot is None:
            raise ValueError(NO_BUDGET)
        return Watcher().look(snapshot, time.monotonic(), time.time())

    view = reach(look)
    click.echo("NODE             FLOOR  GRANTED     HELD    DRAWN   WANTED")
    for node in view.nodes:
        click.echo(f"{node.name:<13} {_w(node.floor_w)} {_w(node.granted_w)} {_said(node)}")
        if node.unreadable:
            click.echo(f"  left out: {node.unreadable}; the agent on {node.name} writes it again")
    for domain in view.domains:
        click.echo(
            f"{domain.name}: granted {domain.granted_w:g} W, held {domain.held_w:g} W, "
            f"drawn {domain.drawn_w:.0f} W of {domain.limit_w:g} W"
        )


def _said(node: NodeView) -> str:
    if node.silent_s is None:
        return "    no heartbeat"
    trouble = f"  stuck: {node.stuck_w:g} W" if node.stuck_w else ""
    trouble += "  silent" if node.reclaimed else ""
    return f"{_w(node.held_w)} {_w(node.drawn_w)} {_w(node.wanted_w)}{trouble}"


def _w(watts: float) -> str:
    return f"{watts:>6.0f} W"


@click.command()
@with_etcd
@click.option("--every", type=Number(0.1), default=1, show_default=True, help="Seconds.")
@click.option("--record", type=FILE, help="Append each line to this file, as JSON, for report.")
@click.option("--count", type=Whole(1), help="Exit after this many records.  [never]")
def watch(reach: Reach[Any], every: float, record: Path | None, count: int | None) -> None:
    """Print one line per interval: limit, sum of limits, power drawn, nodes that wait."""

    async def look_on(store: FleetStore) -> None:
        from zeus_fleet.store import StoreUnavailable

        watcher, left = Watcher(), count
        while left is None or left > 0:
            try:
                snapshot, _ = await store.read()
                if snapshot is None:
                    raise ValueError(NO_BUDGET)
                view = watcher.look(snapshot, time.monotonic(), time.time())
                click.echo(_line(view))
                if record is not None:
                    append(record, view)
            except StoreUnavailable as error:
                click.echo(str(error), err=True)
            left = None if left is None else left - 1
            if left != 0:
                await asyncio.sleep(every)

    reach(look_on)


def append(file: Path, view: FleetView) -> None:
    """Adds a record to a file.

    Raises:
        ValueError: It cannot be written.
    """
    try:
        append_text(file, Record.of(view).line())
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from None


def _line(view: FleetView) -> str:
    site = view.site
    line = f"{datetime.fromtimestamp(view.at_s):%H:%M:%S}  limit {_w(site.limit_w)}"
    line += f"  granted {_w(site.granted_w)}  held {_w(site.held_w)}  drawn {_w(site.drawn_w)}"
    for state in ("waits", "silent", "absent", "stuck", "unreadable"):
        names = [node.name for node in view.nodes if node.state == state]
        if names:
            line += f"  {state}: {' '.join(names[:4])}" + (" ..." if len(names) > 4 else "")
    return line


@click.command()
@with_etcd
@click.option(
    "--listen",
    default="127.0.0.1:9860",
    show_default=True,
    metavar="HOST:PORT",
    envvar="ZEUS_FLEET_LISTEN",
    help="Address to listen on. The page is read-only and has no password.",
)
@click.option(
    "--record",
    type=FILE,
    envvar="ZEUS_FLEET_RECORD",
    help="Append a record each second to this file, for report.",
)
def serve(reach: Reach[Any], listen: str, record: Path | None) -> None:
    """Serve a web page of the fleet, and metrics for Prometheus (/metrics)."""
    try:
        import uvicorn

        from zeus_fleet.server import FleetServer
    except ImportError as error:
        raise click.ClickException(
            f'{error.name} is missing: pip install "zeusd[fleet-server]"'
        ) from None
    address = host_and_port(listen)
    if address is None or not address[0]:
        raise click.UsageError(f"{listen} is not an address; give HOST:PORT")
    log_to_stderr()
    keep = None if record is None else functools.partial(append, record)

    async def run(store: FleetStore) -> None:
        options = uvicorn.Config(
            FleetServer(store, keep=keep),
            host=address[0].strip("[]"),
            port=address[1],
            log_level="warning",
            access_log=False,
        )
        await uvicorn.Server(options).serve()

    reach(run)


@click.command()
@click.option("--picture", type=FILE, help="Write a chart of the whole file to this path, as SVG.")
@click.argument("file", type=FILE)
def report(picture: Path | None, file: Path) -> None:
    """Print promised and delivered reductions, from a file of watch --record."""
    with one_sentence():
        distinct((file,), (picture,))
        records = read(file)
        if picture is not None:
            picture.write_text(svg(records), encoding="utf-8")
    events = reports(records)
    if not events:
        click.echo("The limit was never below the standing limit.")
    for event in events:
        click.echo(event_text(event))


def event_text(one: EventReport) -> str:
    """What an event promised and what was delivered, on lines."""
    start, end = (
        f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}" for at in (one.start_s, one.end_s)
    )
    lines = [
        f"From {start} to {end}",
        f"  promised   {_kw(one.limit_w)}, {_kw(one.standing_w - one.limit_w)} below the standing "
        f"limit: {_kwh(one.promised_kwh)}",
        f"  limits     at most {_kw(one.most_held_w)} in sum; above the limit for "
        f"{one.above_s:.0f} s, by at most {_kw(one.most_above_w)}",
    ]
    if one.before_w is not None and one.delivered_kwh is not None:
        lines.append(
            f"  delivered  {_kw(one.drawn_w)} drawn, {_kw(one.before_w)} in the 15 minutes before: "
            f"{_kwh(one.delivered_kwh)} less"
        )
    else:
        lines.append(f"  delivered  {_kw(one.drawn_w)} drawn; earlier power is not known")
    share = f" ({percent(one.lost_gpu_h / one.busy_gpu_h)})" if one.busy_gpu_h else ""
    lines.append(
        f"  jobs lost  {_figure(one.lost_gpu_h)} of {_figure(one.busy_gpu_h)} GPU-hours{share}, "
        "by their profiles"
    )
    if one.unknown_s:
        lines.append(f"  no records of {one.unknown_s:.0f} s")
    return "\n".join(lines)


def _kwh(energy: float) -> str:
    return f"{_figure(energy, 3)} kWh" if abs(energy) >= 0.0005 else "0 kWh"


def _kw(watts: float) -> str:
    return f"{_figure(watts / 1000)} kW"


def _figure(value: float, digits: int = 4) -> str:
    """A figure of so many digits; a large one has zeros, where `g` alone has an exponent."""
    return f"{float(f'{value:.{digits}g}'):.15g}"

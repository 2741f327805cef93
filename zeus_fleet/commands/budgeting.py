"""Commands that set the budget: now, at a time, or from a signal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_common.options import FILE, Number
from zeus_fleet import schedule, signals
from zeus_fleet.commands.etcd import Reach, log_to_stderr, with_etcd
from zeus_fleet.messages import Budget, LimitEvent
from zeus_fleet.quantities import power_mw, ramp_mw_per_s, time_s
from zeus_ipc.parsing import parse_toml, read_file

if TYPE_CHECKING:
    from zeus_fleet.store import FleetStore

NONE_YET = "there is no budget yet; give --file with the nodes"
CHANGED = "someone else changed the budget meanwhile; check it and try again"

log = logging.getLogger("zeus_fleet")


@click.command()
@with_etcd
@click.option(
    "--file",
    "file",
    type=FILE,
    help="TOML file with the nodes, their floors and the limits. Events are kept.",
)
@click.option("--at", help="Start of the event: 17:00, or 2026-11-23T17:00+01:00.  [now]")
@click.option("--until", help="End of the event; then the previous limit applies again.")
@click.option(
    "--ramp", help="Rate at which the limit falls before and rises after: 5kW/min.  [at once]"
)
@click.option("--name", help="Name of the event.  [operator/TIME]")
@click.option("--cancel", metavar="NAME", help="Cancel an event.")
@click.argument("limit", required=False)
def budget(
    reach: Reach[Any],
    file: Path | None,
    at: str | None,
    until: str | None,
    ramp: str | None,
    name: str | None,
    cancel: str | None,
    limit: str | None,
) -> None:
    """Show the budget, or set it: LIMIT (80kW) for the site, or everything from a file.

    Reachable nodes apply a smaller budget with their next heartbeat, the others within 15 s. With
    --until, the limit is an event: it is in force at --at, and its ramp begins before.
    """
    from zeus_fleet import wire

    if (at or ramp or name) and not until:
        raise click.UsageError("--at, --ramp and --name need --until, the end of the event")
    if until and limit is None:
        raise click.UsageError("an event needs a limit: zeus-fleet budget 80kW --at 17:00 ...")

    def changed(present: Budget | None) -> Budget | None:
        now_s = time.time()
        if file is not None:
            events = () if present is None else present.events
            present = wire.budget_from_table(_toml(file))
            present = schedule.scheduled(present, events, now_s) if events else present
        if present is None:
            return None
        if cancel is not None:
            left = [event for event in present.events if event.name != cancel]
            if len(left) == len(present.events):
                raise ValueError(f"there is no event {cancel!r}; zeus-fleet budget lists them")
            present = schedule.scheduled(present, left, now_s)
        if until is not None and limit is not None:
            event = _event(limit, at, until, ramp, name, now_s)
            others = [other for other in present.events if other.name != event.name]
            present = schedule.scheduled(present, [*others, event], now_s)
        elif limit is not None:
            present = schedule.with_standing(present, power_mw(limit), now_s)
        return present

    changed_budget = reach(lambda store: _change(store, changed))
    if changed_budget is None:
        raise click.ClickException(NONE_YET)
    _show(changed_budget)


def _event(
    limit: str, at: str | None, until: str, ramp: str | None, name: str | None, now_s: float
) -> LimitEvent:
    start_s = now_s if at is None else time_s(at, now_s)
    end_s = time_s(until, start_s)
    if end_s <= now_s:
        raise ValueError(f"{until} is over; give an end in the future")
    rate = 0 if ramp is None else ramp_mw_per_s(ramp)
    label = name or f"operator/{datetime.fromtimestamp(start_s):%Y-%m-%dT%H:%M}"
    return LimitEvent(label, power_mw(limit), start_s, end_s, rate)


async def _change(
    store: FleetStore, changed: Callable[[Budget | None], Budget | None]
) -> Budget | None:
    await store.seek()
    read, _ = await store.read()
    present = None if read is None else read.budget
    wanted = changed(present)
    if wanted is not None and wanted != present:
        revision = 0 if read is None else read.budget_revision
        if not await store.set_budget(wanted, revision):
            raise ValueError(CHANGED)
    return wanted


def _show(current: Budget) -> None:
    for domain in current.domains:
        floors = sum(current.floors_mw[name] for name in domain.nodes)
        nodes = f"{len(domain.nodes)} node{'' if len(domain.nodes) == 1 else 's'}"
        click.echo(
            f"{domain.name}: {domain.limit_mw / 1000:g} W for {nodes}, "
            f"floors {floors / 1000:g} W, reserve {domain.reserve_mw / 1000:g} W"
        )
    if current.standing_mw is not None:
        click.echo(f"outside of events: {current.standing_mw / 1000:g} W")
    for event in current.events:
        start, end = (
            f"{datetime.fromtimestamp(one):%Y-%m-%d %H:%M:%S}"
            for one in (event.start_s, event.end_s)
        )
        rate = f", {round(event.ramp_mw_per_s * 60 / 1000)} W/min" if event.ramp_mw_per_s else ""
        click.echo(f"{event.name}: {event.limit_mw / 1000:g} W from {start} to {end}{rate}")


@click.command()
@with_etcd
@click.option(
    "--label", default="signal", show_default=True, help="Prefix of the events' names: LABEL/NAME."
)
@click.option("--every", type=Number(1), default=30, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Read the source once and exit.")
@click.argument("source")
def follow(reach: Reach[Any], label: str, every: float, once: bool, source: str) -> None:
    """Follow the events in SOURCE: a JSON file, or its address (http:// or https://).

    While it cannot be read, its last events are kept.
    """
    log_to_stderr()

    async def look(store: FleetStore) -> None:
        now_s = time.time()
        data = await asyncio.to_thread(signals.fetch, source)
        events = signals.events_from(data, now_s)
        await store.seek()
        read, _ = await store.read()
        if read is None:
            raise ValueError(NONE_YET)
        wanted = signals.merged(read.budget, label, events, now_s)
        if wanted != read.budget:
            if not await store.set_budget(wanted, read.budget_revision):
                raise ValueError(CHANGED)
            log.info("%s: %d events", source, len(events))

    async def look_on(store: FleetStore) -> None:
        from zeus_fleet.store import StoreUnavailable

        while True:
            try:
                await look(store)
            except (OSError, ValueError, StoreUnavailable) as error:
                log.warning("%s: %s", source, error)
            await asyncio.sleep(every)

    async def look_once(store: FleetStore) -> None:
        try:
            await look(store)
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error}") from None

    reach(look_once if once else look_on)


def _toml(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_file(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as TOML: {error}") from None

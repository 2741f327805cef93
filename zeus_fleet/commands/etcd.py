"""Access of the commands to etcd: options, environment variables, and errors as one sentence."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zeus_common.options import FILE

if TYPE_CHECKING:
    from zeus_fleet.store import FleetStore

T = TypeVar("T")

Reach = Callable[[Callable[["FleetStore"], Coroutine[Any, Any, T]]], T]
"""Runs an operation on the store, and ends the command with a sentence if it fails."""


def with_etcd(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of commands that use etcd; the command receives a `Reach` as `reach`."""

    @functools.wraps(command)
    def wrapped(
        endpoints: tuple[str, ...],
        prefix: str,
        ca: Path | None,
        cert: Path | None,
        key: Path | None,
        **others: Any,
    ) -> Any:
        if (cert or key) and not (ca and cert and key):
            raise click.UsageError("a client certificate needs --cacert, --cert and --key")

        def reach(use: Callable[[FleetStore], Coroutine[Any, Any, T]]) -> T:
            return _run(use, endpoints, prefix, ca, cert, key)

        return command(reach=reach, **others)

    options = (
        click.option(
            "--etcd",
            "endpoints",
            multiple=True,
            default=("localhost:2379",),
            show_default=True,
            metavar="HOST:PORT",
            envvar="ZEUS_FLEET_ETCD",
            help="Address of a member of etcd; repeatable.",
        ),
        click.option(
            "--prefix",
            default="/zeus-fleet/",
            show_default=True,
            envvar="ZEUS_FLEET_PREFIX",
            help="Prefix of all keys in etcd.",
        ),
        click.option(
            "--cacert",
            "ca",
            type=FILE,
            envvar="ZEUS_FLEET_CACERT",
            help="Use TLS with this CA certificate of etcd.",
        ),
        click.option("--cert", type=FILE, envvar="ZEUS_FLEET_CERT", help="Client certificate."),
        click.option(
            "--key",
            type=FILE,
            envvar="ZEUS_FLEET_KEY",
            help="Private key of the client certificate.",
        ),
    )
    for option in reversed(options):
        option(wrapped)
    return wrapped


def log_to_stderr() -> None:
    """Logging for commands that keep running."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)


def _run(
    use: Callable[[FleetStore], Coroutine[Any, Any, T]],
    endpoints: tuple[str, ...],
    prefix: str,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> T:
    from zeus_fleet.connection import Tls
    from zeus_fleet.store import FleetStore, StoreUnavailable

    async def with_store() -> T:
        tls = None if ca is None else Tls(ca, cert, key)
        store = FleetStore(endpoints, prefix=prefix, tls=tls)
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

"""Commands that keep running: an agent per node, and allocators."""

from __future__ import annotations

import functools
import socket
from typing import Any

import click

from zeus_fleet.commands.etcd import Reach, log_to_stderr, with_etcd
from zeus_fleet.messages import Timing
from zeus_fleet.policies import POLICIES
from zeus_ipc.options import SOCKET, Number


@click.command()
@with_etcd
@click.option(
    "--name",
    default=socket.gethostname,
    envvar="ZEUS_FLEET_NAME",
    help="The node's name in the budget.  [host name]",
)
@click.option("--socket", "path", type=SOCKET, help="zeusd's socket.  [$ZEUSD_SOCK_PATH]")
def node(reach: Reach[Any], name: str, path: str | None) -> None:
    """Limit this node's GPUs according to the plan. Run it on each node.

    Its user must be a zeusd administrator. It needs no other permissions.
    """
    from zeus_fleet.gpus import ZEUSD_TIMEOUT_S, ZeusdGpus
    from zeus_fleet.shells import run_agent
    from zeus_ipc import Client
    from zeus_ipc.errors import ZeusIpcError
    from zeus_ipc.processes import sd_notify

    log_to_stderr()
    try:
        with Client(path, timeout_s=ZEUSD_TIMEOUT_S, heartbeat=False) as client:
            gpus = ZeusdGpus(client, name)
            ready = functools.partial(sd_notify, "READY=1")
            reach(lambda store: run_agent(name, store, gpus, ready=ready))
    except ZeusIpcError as error:
        raise click.ClickException(str(error)) from None


@click.command()
@with_etcd
@click.option(
    "--name",
    default=socket.gethostname,
    envvar="ZEUS_FLEET_NAME",
    help="Unique name of this allocator.  [host name]",
)
@click.option(
    "--policy",
    type=click.Choice([*POLICIES]),
    default=[*POLICIES][-1],
    show_default=True,
    envvar="ZEUS_FLEET_POLICY",
    help="Policy that divides the power; use the same for all allocators.",
)
@click.option(
    "--latency-share",
    type=Number(0, 100),
    default=100,
    show_default=True,
    envvar="ZEUS_FLEET_LATENCY_SHARE",
    help="Largest share that jobs with a latency objective may claim of the power above the "
    "minimum limits, %.",
)
def allocate(reach: Reach[Any], name: str, policy: str, latency_share: float) -> None:
    """Plan the nodes' grants. Run several allocators; one of them leads."""
    from zeus_fleet.allocator import Allocator, evenly
    from zeus_fleet.jobs import ByJobs
    from zeus_fleet.shells import run_allocator

    log_to_stderr()
    shared = functools.partial(POLICIES[policy], latency_share=latency_share / 100)
    jobs = None if policy == "uniform" else ByJobs(shared)
    core = Allocator(Timing(), jobs or evenly)
    reach(lambda store: run_allocator(name, store, core, jobs=jobs))

"""Commands that run the parts of a fleet: an agent per node, allocators, and a simulation."""

from __future__ import annotations

import functools
import socket
from typing import Any

import click

from zeus_common.options import SOCKET, WHOLE, Number, Whole
from zeus_fleet.commands.etcd import Reach, log_to_stderr, with_etcd
from zeus_fleet.messages import Timing
from zeus_fleet.policies import FLOOR, POLICIES, JobPolicy, water_filling
from zeus_fleet.simulation import CLUSTERS, PolicyResult, blind, compare, of_jobs


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
    from zeus_common.processes import sd_notify
    from zeus_fleet.gpus import ZEUSD_TIMEOUT_S, ZeusdGpus
    from zeus_fleet.shells import run_agent
    from zeus_ipc import Client
    from zeus_ipc.errors import ZeusIpcError

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


def _cell(result: PolicyResult, *, latency: bool) -> str:
    beside = f"{100 * result.squeezed:.0f} %" if latency else f"{result.worst:.2f}"
    return f"{result.progress:.3f} ({beside})"


@click.command()
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
    type=Number(0, 100, min_open=True),
    multiple=True,
    default=(50, 60, 70, 80, 90),
    show_default=True,
    help="Budget in % of the sum of all maximum limits; repeatable.",
)
@click.option("--mixes", type=Whole(1), default=6, show_default=True, help="How many.")
@click.option(
    "--seed", type=WHOLE, default=0, show_default=True, help="Seed of the first mix of jobs."
)
@click.option(
    "--known",
    type=Number(0, 100),
    default=100,
    show_default=True,
    help="Percentage of jobs whose profile is known; others count with the mean profile.",
)
@click.option(
    "--floor",
    type=Number(0, 1),
    default=FLOOR,
    show_default=True,
    help="Minimum progress of each job under water-filling, relative to its progress under busy.",
)
@click.option(
    "--latency",
    type=Number(0, 100),
    default=0,
    show_default=True,
    help="Percentage of jobs with a latency objective; prints in parentheses the percentage of "
    "their GPUs that get less than the job needs.",
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

    Prints the mean progress of a busy GPU, relative to no limit, and in parentheses the progress of
    the slowest job. The results are computed from the tables, not measured on a cluster.
    """
    policies: dict[str, JobPolicy] = {
        **POLICIES,
        "water-filling": functools.partial(water_filling, floor=floor),
    }
    compared = {name: of_jobs(policy) for name, policy in policies.items()}
    if latency:
        compared["not told"] = blind(policies["water-filling"])
    by_share = compare(
        cluster,
        [budget / 100 for budget in budgets],
        range(seed, seed + mixes),
        compared,
        known / 100,
        latency / 100,
    )
    click.echo(f"{CLUSTERS[cluster]}; 512 GPUs, 85 % busy; mean of {mixes} mixes of jobs")
    click.echo("BUDGET  " + "".join(f"{name.upper():<15}" for name in compared).rstrip())
    for share, results in by_share.items():
        cells = [_cell(result, latency=latency > 0) for result in results.values()]
        click.echo(f"{f'{100 * share:g} %':<8}" + "".join(f"{cell:<15}" for cell in cells).rstrip())

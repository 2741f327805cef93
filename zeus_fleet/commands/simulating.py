"""Command that compares policies on measured tables."""

from __future__ import annotations

import functools

import click

from zeus_fleet.policies import FLOOR, POLICIES, JobPolicy, water_filling
from zeus_fleet.simulation import CLUSTERS, PolicyResult, blind, compare, of_jobs
from zeus_ipc.options import WHOLE, Number, Whole


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

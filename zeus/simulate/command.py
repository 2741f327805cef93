"""Commands about simulations: `python -m zeus.simulate`."""

from __future__ import annotations

from pathlib import Path

import click

from zeus.simulate import groups as groups_of_jobs
from zeus.simulate.plots import FORMATS, KINDS
from zeus.simulate.results import RunRow, read_rows
from zeus.simulate.summary import tables
from zeus.simulate.workloads import WORKLOADS
from zeus_common.options import FILE, WHOLE, one_sentence
from zeus_common.tables import distinct
from zeus_common.text import percent
from zeus_ipc import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zeus.simulate")
def main() -> None:
    """Make groups of recurring jobs, and show results of simulations."""


@main.command("synthetic-groups")
@click.option("--groups", type=WHOLE, default=60, show_default=True, help="Number of groups.")
@click.option("--seed", type=WHOLE, default=20, show_default=True, help="Random seed.")
@click.option("-o", "--output", type=FILE, required=True, help="CSV file; .gz and .xz compress.")
def synthetic_groups(groups: int, seed: int, output: Path) -> None:
    """Generate groups of recurring jobs."""
    with one_sentence():
        jobs = groups_of_jobs.synthetic_groups(groups, seed)
        groups_of_jobs.write_groups(jobs, output)
    _tell_of(jobs, output)


@main.command("make-groups")
@click.option("--job", "jobs", type=FILE, required=True, help="pai_job_table.csv, or its .tar.gz.")
@click.option("--tags", type=FILE, required=True, help="pai_group_tag_table.csv, or its .tar.gz.")
@click.option("--least-jobs", type=WHOLE, default=1, show_default=True, help="Omit smaller groups.")
@click.option("-o", "--output", type=FILE, required=True, help="CSV file; .gz and .xz compress.")
def make_groups(jobs: Path, tags: Path, least_jobs: int, output: Path) -> None:
    """Make groups from Alibaba's GPU cluster trace of 2020.

    The tables: https://github.com/alibaba/clusterdata, cluster-trace-gpu-v2020.
    """
    with one_sentence():
        distinct((jobs, tags), (output,))
        made = groups_of_jobs.make_groups(jobs, tags, least_jobs=least_jobs)
        groups_of_jobs.write_groups(made, output)
    _tell_of(made, output)


@main.command()
@click.argument("results", type=FILE, nargs=-1, required=True)
def show(results: tuple[Path, ...]) -> None:
    """Print what was chosen, and what it cost.

    RESULTS are what simulations wrote with --output: CSV or Parquet.
    """
    with one_sentence():
        click.echo(tables(_rows(results)))


@main.command()
@click.argument("results", type=FILE, nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=FILE,
    required=True,
    help=f"The plot, with one of these extensions: {', '.join(FORMATS)}.",
)
@click.option("--kind", type=click.Choice(KINDS), multiple=True, help="Only this; may be repeated.")
def plot(results: tuple[Path, ...], output: Path, kind: tuple[str, ...]) -> None:
    """Draw cost per recurrence, cumulative regret, and batch size over time.

    RESULTS are what simulations wrote with --output: CSV or Parquet.
    """
    from zeus.simulate.plots import draw

    with one_sentence():
        distinct(results, (output,))
        draw(_rows(results), output, kind or KINDS)
    click.echo(f"{output} is drawn.")


def _rows(results: tuple[Path, ...]) -> list[RunRow]:
    rows = [row for path in results for row in read_rows(path)]
    if not rows:
        raise ValueError(f"{', '.join(map(str, results))} has no simulated runs")
    return rows


def _tell_of(jobs: list[groups_of_jobs.GroupJob], path: Path) -> None:
    groups = groups_of_jobs.by_group(jobs)
    overlapping = percent(groups_of_jobs.overlapping(jobs), ".0")
    click.echo(
        f"{path}: {len(jobs)} jobs in {len(groups)} groups; {overlapping} begin while an earlier "
        "one of their group runs."
    )
    for workload in WORKLOADS:
        some = [one for one in jobs if one.dataset == workload.dataset]
        if some:
            mean = sum(one.end_time - one.start_time for one in some) / len(some)
            count = len({one.group for one in some})
            click.echo(
                f"{workload.dataset:<14} {count:>7} groups {len(some):>8} jobs, mean {mean:.0f} s"
            )

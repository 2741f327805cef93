"""Commands about the energy of inference servers: `python -m zeus.serving`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from zeus.simulate.extras import needed

_IN = click.Path(path_type=Path, dir_okay=False)

METHODS = ("regression", "tokens", "roofline")
IDLE = ("exclude", "proportional", "owner")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Energy of the requests of an inference server."""


@main.command()
@click.option("--steps", type=_IN, required=True, help="The engine's steps, CSV or Parquet.")
@click.option("--energy", type=_IN, required=True, help="The sensor's updates, CSV or Parquet.")
@click.option("--out", type=_IN, required=True, help="One row per request, CSV or Parquet.")
@click.option("--totals", type=_IN, required=True, help="Sums, JSON.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=METHODS[0],
    show_default=True,
    help="How energy is attributed.",
)
@click.option(
    "--idle",
    type=click.Choice(IDLE),
    default=IDLE[0],
    show_default=True,
    help="Idle energy: leave it out of requests, add it in proportion, or charge the owner.",
)
@click.option("--tenants", type=_IN, help="Columns request,tenant: adds sums per tenant.")
def replay(
    steps: Path,
    energy: Path,
    out: Path,
    totals: Path,
    method: str,
    idle: str,
    tenants: Path | None,
) -> None:
    """Attribute the energy of a recorded run to its requests.

    STEPS has the columns step,begin_ns,end_ns,request,phase,tokens,context with one row per request
    and step; ENERGY has begin_ns,end_ns,joules,seen_begin_ns,seen_end_ns,clock_mhz.
    """
    with one_sentence():
        needed("numpy", "python -m zeus.serving", "serving")
        from zeus.serving.replay import replay as run
        from zeus.serving.replay import totals_json, write_rows
        from zeus.utils.atomic import write_text

        paid = run(steps, energy, method=method, idle=idle, tenants=tenants)
        write_rows(paid.rows, out)
        write_text(totals, totals_json(paid, method, tenants=tenants is not None))


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns errors into a message of one sentence and an exit code."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"{error.filename} cannot be used: {error.strerror}" if error.filename else str(error)
        ) from None

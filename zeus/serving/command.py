"""Commands about the energy of inference servers: `python -m zeus.serving`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from zeus.serving.clock_command import clocks, show_log, tune
from zeus.serving.rows import BY, IDLE
from zeus.utils.lazy import needed
from zeus_common.options import FILE, one_sentence, option
from zeus_common.tables import distinct
from zeus_ipc import __version__

_idle = option(
    "--idle",
    "Idle energy: exclude it, add it in proportion to own energy, or charge the owner.",
    IDLE,
    IDLE[0],
)

METHODS = ("regression", "tokens")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zeus.serving")
def main() -> None:
    """Energy of the requests of an inference server."""


@main.command()
@option("--steps", "The engine's steps, CSV or Parquet.", FILE, required=True)
@option("--energy", "The sensor's updates, CSV or Parquet.", FILE, required=True)
@option("--out", "One row per request, CSV or Parquet.", FILE, required=True)
@option("--totals", "Sums, JSON.", FILE, required=True)
@option(
    "--method",
    "Method of attribution; tokens divides each step by tokens, for comparison.",
    METHODS,
    METHODS[0],
)
@_idle
@option("--tenants", "File with columns request,tenant: add sums per tenant.", FILE)
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
        from zeus.serving.replay import unknown, write_rows
        from zeus_common.atomic import write_text

        distinct((steps, energy, tenants), (out, totals))
        rows, sums = run(steps, energy, method=method, idle=idle, tenants=tenants)
        write_rows(rows, out)
        write_text(totals, json.dumps(sums, indent=2) + "\n")
        if why := unknown(rows):
            raise ValueError(why)


@main.command()
@option("--model", "Name of the model, for metrics and the log.", default="")
@option(
    "--engine engines",
    "NAME=GPU,GPU: an engine and its GPUs, by index or UUID; may be repeated. "
    "Default: engine 0 on all GPUs.",
    multiple=True,
)
@option("--socket", "Socket that receives steps. Default: $ZEUS_SERVING_SOCKET.")
@option("--log log_path", "Append settled requests as JSON lines.", FILE)
@option("--listen", "HOST:PORT for /energy/{request id} and /metrics.", default="")
@option("--weights", "File that keeps the fit's weights for the next start.", FILE)
@option(
    "--feed",
    "Address of forward-pass metrics; they give energy by phase, not by request.",
    default="",
)
@option(
    "--otlp",
    "Send spans and hw.energy to this address, such as http://localhost:4318.",
    default="",
)
@option("--front-end", "Steps come from vLLM with ZEUS_SERVING=stats.", bool)
def serve(engines: tuple[str, ...], **options: Any) -> None:
    """Keep the ledger of an engine on this node until Ctrl-C.

    The engine sends its steps when it is started with ZEUS_SERVING=steps.
    """
    with one_sentence():
        needed("numpy", "python -m zeus.serving", "serving")
        from zeus.serving.service import run

        show_log()
        run(engines, **options)


@main.command()
@click.argument("logs", type=FILE, nargs=-1, required=True)
@option("--by", "Group by this.", BY, "model")
@_idle
@option("--join", "Add rows of the same request in logs of prefill and decode servers.", bool)
@option("--csv as_table", "Print CSV.", bool)
@option("--plot", "Also write a chart: .png, .svg or .pdf.", FILE)
def report(
    logs: tuple[Path, ...], by: str, idle: str, join: bool, as_table: bool, plot: Path | None
) -> None:
    """Print joules, joules per token and percentiles of a service's log."""
    from zeus.serving import report as module

    with one_sentence():
        distinct(logs, (plot,))
        groups, totals = module.read(logs, by, idle, join=join)
        text = module.as_csv(groups, by) if as_table else module.table(groups, totals, by) + "\n"
        click.echo(text, nl=False)
        if plot is not None:
            module.plot(groups, by, plot)


@main.command(context_settings={"ignore_unknown_options": True})
@option("--gpu gpus", "A GPU by index or UUID; default: all.", multiple=True)
@option("--json path", "Result file to add energy to.", FILE)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def bench(gpus: tuple[str, ...], path: Path | None, command: tuple[str, ...]) -> None:
    """Run a benchmark and add joules, joules per token and watts to its JSON result.

    For example: python -m zeus.serving bench -- vllm bench serve. The result file is the one in the
    benchmark's options, or the one given here.
    """
    from zeus.serving import bench as module
    from zeus.serving.gpus import chosen
    from zeus_ipc import Client

    with one_sentence():
        target = path or module.result_path(command)
        with Client() as client:
            uuids = chosen(client.node().gpus, gpus)
            status, energy = module.run(command, client, uuids)
        joules = energy["energy_joules"]
        if target is not None and status == 0:
            module.add(target, energy)
        click.echo(
            "the energy is not known: it was not measured all the time"
            if joules is None
            else f"{joules:.1f} J, {energy['mean_power_watts']:.1f} W",
            err=True,
        )
    raise SystemExit(status)


main.add_command(clocks)
main.add_command(tune)

"""The command `bso`: serve, show and change jobs in a database or on a server."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from zeus import __version__
from zeus.optimizer.batch_size.exceptions import ZeusBSOError, ZeusBSORuntimeError
from zeus_common.text import count, duration, explain, percent, table

APP = "zeus.optimizer.batch_size.server.router:app"
PORT = 7788

FAILED, USAGE, UNAVAILABLE, DENIED, UNKNOWN = 1, 2, 3, 4, 6
"""Exit codes; codes that `zeusctl` has, too, have the same meaning."""

_LOCAL = ("127.0.0.1", "::1", "localhost")


def _refused(message: str, exit_code: int) -> click.ClickException:
    error = click.ClickException(message)
    error.exit_code = exit_code  # type: ignore[misc]  # ClassVar in click
    return error


class _BsoVerbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # not alphabetical

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ZeusBSORuntimeError as error:
            raise _refused(error.message, _code(error.status)) from None
        except ZeusBSOError as error:
            raise _refused(error.message, USAGE) from None
        except ModuleNotFoundError as error:
            said = f"bso needs {error.name}: pip install 'zeusd[bso-server]'"
            raise _refused(said, FAILED) from None
        except ImportError as error:
            raise _refused(str(error), FAILED) from None


def _code(status: int) -> int:
    if status in (401, 403):
        return DENIED
    if status == 404:
        return UNKNOWN
    return UNAVAILABLE if status == 0 or status >= 500 else FAILED


@click.group(
    cls=_BsoVerbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 3 database or server cannot be used, "
    "4 permission denied (token), 6 no such job.",
)
@click.version_option(__version__, prog_name="bso")
def main() -> None:
    """Find the batch size of recurring jobs across their runs."""


_DATABASE = click.option(
    "--db",
    metavar="PATH|URL",
    envvar="ZEUS_BSO_DATABASE_URL",
    help="SQLite file, or postgresql://user@host/name.  [default: bso.db]",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="For programs.")


def _job(context: click.Context, parameter: click.Parameter, name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from zeus.optimizer.batch_size.common import JobId

    try:
        return TypeAdapter(JobId).validate_python(name)
    except ValidationError as error:
        raise click.BadParameter(explain(error.errors()[0]), context, parameter) from None


_JOB = click.argument("job", callback=_job)


@contextmanager
def _opened(
    database: str | None, server: str | None = None, *, create: bool = False
) -> Iterator[Any]:
    """Opens the jobs of a server, or of a database: `HttpTrials` or a `Store`.

    Args:
        create: Whether the database may be new.

    Raises:
        ZeusBSORuntimeError: It cannot be used.
    """
    if server is not None:
        from zeus.optimizer.batch_size.http import TOKEN_ENV, HttpTrials

        token = os.environ.get(TOKEN_ENV) or os.environ.get("ZEUS_BSO_READ_TOKEN")
        with closing(HttpTrials(server, token)) as trials:
            yield trials
        return
    from zeus.optimizer.batch_size.database import url_of
    from zeus.optimizer.batch_size.store import Store

    name = database or "bso.db"
    file = url_of(name)
    if not create and file.drivername == "sqlite" and not Path(file.database or "").is_file():
        raise ZeusBSORuntimeError(
            f"there is no database {file.database}; name it with --db, or a server with --server",
        )
    with closing(Store(name)) as store:
        yield store


def _where(function: Any) -> Any:
    server = click.option("--server", metavar="URL", help="Ask this server, not the database.")
    return _DATABASE(server(function))


@main.command()
@_DATABASE
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: all interfaces.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="TCP port to listen on; 0: any that is free.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that serve requests.",
)
@click.option("--lease", type=float, metavar="S", help="A silent trial is lost after this time.")
@click.option("--log-level", metavar="LEVEL", help="DEBUG logs each request.")
def serve(
    db: str | None,
    host: str,
    port: int,
    workers: int,
    lease: float | None,
    log_level: str | None,
) -> None:
    """Serve jobs and the web page.

    Further settings are environment variables, such as ZEUS_BSO_TOKEN.
    """
    options: dict[str, object] = {"DATABASE_URL": db, "LEASE_S": lease, "LOG_LEVEL": log_level}
    if "ZEUS_BSO_WORKERS" not in os.environ:
        options["WORKERS"] = workers
    given = {f"ZEUS_BSO_{name}": str(of) for name, of in options.items() if of is not None}
    import uvicorn

    # Here it fails once, with a message, not in each worker.
    from zeus.optimizer.batch_size.server import metrics as metrics
    from zeus.optimizer.batch_size.server.settings import ServerSettings
    from zeus.optimizer.batch_size.store import Store
    from zeus.utils import web as web

    settings = ServerSettings.from_env({**os.environ, **given})
    Store(settings.database_url).close()
    if host not in _LOCAL and not settings.token:
        click.echo(
            "bso: anyone who can reach this machine may change jobs; set ZEUS_BSO_TOKEN", err=True
        )
    os.environ.update(given)  # for the workers
    uvicorn.run(
        APP,
        host=host,
        port=port,
        workers=workers,
        log_level=settings.log_level.lower(),
        access_log=settings.log_level == "DEBUG",
    )


@main.command()
@_where
@_JSON
def jobs(db: str | None, server: str | None, as_json: bool) -> None:
    """List the jobs."""
    with _opened(db, server) as source:
        summaries = source.summaries()
    if as_json:
        _print_json(summaries)
        return
    if not summaries:
        click.echo("no jobs registered yet")
        return
    head = ("JOB", "GPU", "POLICY", "CONVERGED", "RUNNING", "CHEAPEST", "COST", "DEFAULT", "HEARD")
    rows = [
        (
            one["job_id"],
            f"{one['number_of_gpus']} x {one['gpu_model']}",
            one["policy"],
            f"{one['converged']} of {sum(one['counts'].values())}",
            one["counts"]["running"],
            _text(one["cheapest_batch_size"]),
            joules(one["cheapest_mean_cost_j"]),
            f"{one['default_batch_size']}: {joules(one['default_mean_cost_j'])}",
            ago(one["heard_ago_s"]),
        )
        for one in summaries
    ]
    click.echo(table(head, rows, left=3))


@main.command()
@_JOB
@_where
@_JSON
def show(job: str, db: str | None, server: str | None, as_json: bool) -> None:
    """Show a job: estimates for its batch sizes, and its trials."""
    with _opened(db, server) as source:
        details = source.details(job)
    if as_json:
        _print_json(details)
        return
    click.echo("\n".join(job_lines(details)))


def job_lines(job: dict[str, Any]) -> list[str]:
    """A job, its estimates and trials, as `bso show` prints them."""
    spec = job["spec"]
    better = "at least" if spec["higher_is_better_metric"] else "at most"
    bound = "no bound" if spec["beta_knob"] is None else f"beta {spec['beta_knob']:g}"
    best = job["best_batch_size"]
    lines = [
        f"{job['job_id']}: {job['number_of_gpus']} x {job['gpu_model']}, {spec['max_power']:g} W, "
        f"{job['policy']}",
        f"target {better} {spec['target_metric']:g} within {spec['max_epochs']} epochs; "
        f"eta {spec['eta_knob']:g}, {bound}",
        f"{job['converged']} of {sum(job['counts'].values())} trials reached the target, at "
        f"{joules(job['energy_j'])} and {duration(job['time_s'])} in all",
        "no batch size is known to reach it yet"
        if best is None
        else f"best batch size {best}, expected to cost {joules(job['best_cost_j'])}",
        "",
        table(
            ("BATCH SIZE", "COST", "90 % FROM", "TO", "P(BEST)", "RUNS", "STATE"),
            [
                (
                    one["batch_size"],
                    joules(one["mean_j"]),
                    joules(one["low_j"]),
                    joules(one["high_j"]),
                    percent(one["probability_best"], ".0"),
                    one["runs"],
                    one["excluded"] or ("" if one["explored"] else "not considered"),
                )
                for one in job["estimates"]
            ],
            left=0,
            last_left=True,
        ),
    ]
    if job["trials"]:
        lines += ["", _trials(job)]
    return lines


def _trials(job: dict[str, Any]) -> str:
    head = ("TRIAL", "BATCH SIZE", "EPOCHS", "METRIC", "TIME", "ENERGY", "COST", "BOUND", "STATE")
    rows = [
        (
            one["trial_number"],
            one["batch_size"],
            one["epochs"],
            "-" if one["metric"] is None else f"{one['metric']:g}",
            duration(one["time_s"]),
            joules(one["energy_j"]),
            joules(one["cost_j"]),
            joules(one["cost_bound_j"]),
            state(one),
        )
        for one in job["trials"]
    ]
    return table(head, rows, left=0, last_left=True)


def state(trial: dict[str, Any]) -> str:
    """Describes how a trial ended."""
    if trial["status"] == "running":
        return f"running, heard {ago(trial['heard_ago_s'])}"
    if trial["status"] != "ok":
        return {"oom": "out of GPU memory"}.get(trial["status"], str(trial["status"]))
    if trial["converged"]:
        return "reached the target"
    return "stopped early: too expensive" if trial["stopped_by_cost"] else "missed the target"


@main.command()
@_JOB
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="-", help="Not to stdout.")
@_where
def export(job: str, output: str, db: str | None, server: str | None) -> None:
    """Write a job's trials as CSV. Units are in the columns' names."""
    with _opened(db, server) as source:
        trials = source.details(job)["trials"]
    columns = ["job_id", *_COLUMNS]
    try:
        with click.open_file(output, "w", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows({**trial, "job_id": job} for trial in trials)
    except BrokenPipeError:
        raise  # click ends without a word
    except OSError as error:
        raise _refused(f"{output} cannot be written: {error.strerror}", FAILED) from None


_COLUMNS = (
    "trial_number",
    "batch_size",
    "status",
    "converged",
    "stopped_by_cost",
    "began_s",
    "ended_s",
    "epochs",
    "metric",
    "time_s",
    "energy_j",
    "overhead_time_s",
    "overhead_energy_j",
    "cost_j",
    "cost_bound_j",
)


@main.command()
@_JOB
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_where
def delete(job: str, yes: bool, db: str | None, server: str | None) -> None:
    """Delete a job and all its trials."""
    with _opened(db, server) as source:
        _confirm(job, len(source.details(job)["trials"]), yes)
        source.delete(job)
    click.echo(f"job {job} is deleted")


def _confirm(job: str, count: int, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise _refused(f"job {job} has {count} trials; add --yes to delete them", USAGE)
    click.confirm(f"Delete job {job} and its {count} trials?", abort=True)


@main.command()
@_JOB
@_where
def release(job: str, db: str | None, server: str | None) -> None:
    """Make parked batch sizes (after crashes or out of GPU memory) available again."""
    with _opened(db, server) as source:
        sizes = source.release(job)
    if sizes:
        click.echo(f"job {job} may choose again: {', '.join(map(str, sizes))}")
    else:
        click.echo(f"no batch size of job {job} was parked")


@main.command()
@_DATABASE
def restored(db: str | None) -> None:
    """Say that the database was restored from a backup.

    Run it once after each restore, before servers and jobs use the database: trials that the backup
    lacks may still be running, so their numbers are not given again.
    """
    with _opened(db) as store:
        number = store.restored()
    click.echo(f"numbers of new trials are above {number}")


@main.command("import")
@click.argument("source", metavar="PATH|URL")
@_DATABASE
def import_(source: str, db: str | None) -> None:
    """Take over the jobs of ml-energy/zeus's server, with their trials.

    SOURCE is its database: a SQLite file, or a URL of SQLite, PostgreSQL or MySQL. It is only read.
    Jobs that are here already stay as they are.
    """
    from zeus.optimizer.batch_size import theirs

    imported = theirs.read(source)
    with _opened(db, create=True) as store:
        for spec, trials in imported:
            if store.adopt(spec, trials):
                click.echo(f"{spec.job_id}: {count(len(trials), 'trial')}")
            else:
                click.echo(f"{spec.job_id}: is here already, and stays as it is")
    if not imported:
        click.echo("there are no jobs in it")


# ------------------------------------------------------------------------------------- as text


def joules(value: float | None) -> str:
    """Formats energy, or a cost, to four digits."""
    if value is None:
        return "-"
    for unit, size in (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g} J"


def ago(seconds: float | None) -> str:
    """Formats how long ago a time was."""
    return "never" if seconds is None else f"{duration(round(seconds))} ago"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))

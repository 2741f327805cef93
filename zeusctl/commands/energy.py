"""`zeusctl energy` and `forget`: who used how much energy, from zeusd's ledger."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_ipc.options import FILE, OUTPUT
from zeus_ipc.text import count
from zeusctl.arguments import without_effect
from zeusctl.exits import CommandError, Exit
from zeusctl.session import Session, common_options, now, pass_session

if TYPE_CHECKING:
    from zeus_ipc.replies import Usage
    from zeusctl.reports import EnergyReport

BY = ("user", "job", "pod", "namespace", "process", "gpu", "day")


@click.command()
@click.option("--by", type=click.Choice(BY), default="user", show_default=True, help="Sum by this.")
@click.option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    show_default=True,
    help="Energy of GPUs, or of CPU packages: never added up.",
)
@click.option("--since", default="7d", show_default=True, help="Start: 7d, 2026-11-01.")
@click.option("--until", default="now", show_default=True, help="Until when.")
@click.option("--tz", "zone_name", metavar="ZONE", help="Time zone of days.  [default: local]")
@click.option("--daily", is_flag=True, help="Print a sum for each day.")
@click.option("--by-method", is_flag=True, help="Print a sum for each method, with its bounds.")
@click.option("--user", metavar="USER", help="Only for this user: a name or number.")
@click.option("--job", metavar="ID", help="Only for this job, run by run; or a SLUID.")
@click.option("--pod", metavar="NAMESPACE/POD", help="Only for this pod.")
@click.option(
    "--html",
    "web_page",
    type=FILE,
    help="Write an HTML page to this file: energy by day and user, and idle energy by job.",
)
@click.option(
    "--from",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Add up the files of --export in this folder, instead of asking zeusd.",
)
@click.option(
    "--export",
    "target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Write a file for each UTC day to this folder.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json", "parquet"]),
    default="table",
    show_default=True,
    help="parquet needs -o, or --export.",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    help="Write to this file instead of standard output.",
)
@click.option(
    "--plot",
    "picture",
    type=FILE,
    help="Draw energy by day to this file: .png, .svg or .pdf.",
)
@common_options
@pass_session
def energy(
    session: Session,
    by: str,
    device: str,
    since: str,
    until: str,
    zone_name: str | None,
    daily: bool,
    by_method: bool,
    user: str | None,
    job: str | None,
    pod: str | None,
    web_page: Path | None,
    folder: Path | None,
    target: Path | None,
    form: str,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Show who used how much energy.

    BASIS is how a sum was found; estimates have bounds, [LOWER, UPPER]:

    \b
    allocated    a job or pod held the GPU: exact
    exclusive    nobody held it, and only one account used it: exact
    utilization  several used it: by the use that the driver measured
    weights      several held parts of it: by their size
    slices       MIG instances: by their size
    equal        several had processes on it: in equal parts
    unread       its users changed while it could not be read: by time

    Bounds follow from activity (who used it when), or from presence: each may have used everything,
    or nothing. --by-method prints a sum for each basis.

    --by process shows processes on GPUs that nobody held, for a week; what was not charged by
    process remains with its user.

    HELD IDLE is energy that a GPU drew while the driver reported it as idle. The sums add up to
    the GPUs' counters: the exit code is 1 if they do not.

    Users see their own energy, and everyone else's as one sum; administrators see everything. Times
    are rounded to quarters of an hour.

    \b
    zeusctl energy --since 2026-11-01 --until 2026-12-01
    zeusctl energy --by job --user alice --format csv
    zeusctl energy --since 30d --by job --format parquet -o jobs.parquet
    zeusctl energy --since 30d --plot energy.png
    zeusctl energy --job 1234
    zeusctl energy --since 30d --html energy.html
    zeusctl energy --since 1d --export /shared/energy         # on each node, every night
    zeusctl energy --since 30d --from /shared/energy          # over all nodes
    """
    from zeusctl import day_files, plots
    from zeusctl import usage as shown
    from zeusctl.commands.allocate import _uid
    from zeusctl.reports import Done, EnergyReport

    this = datetime.now(timezone.utc)
    chosen = ("--plot", "-o", "--by", "--daily", "--by-method", "--job", "--pod")
    if target is not None:
        without_effect("with --export", "--from", "--html", "--user", *chosen)
    if web_page is not None:
        without_effect("with --html", "--format", *chosen)
    if picture is not None:
        without_effect("with --plot", "--format", "-o")
    if job or pod:
        without_effect("with --job" if job else "with --pod", "--by", *(["--pod"] if job else []))
    try:
        where = shown.zone(zone_name)
        begin, end = shown.instant(since, where, this), shown.instant(until, where, this)
        ends = shown.edges(begin, end, where, daily or by == "day" or picture is not None)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if form == "parquet" and output is None and target is None:
        raise click.UsageError("Parquet cannot go to standard output; name a file with -o")
    if picture is not None:
        if picture.suffix not in plots.ENDINGS:
            endings = ", ".join(plots.ENDINGS)
            raise click.BadParameter(f"name a file that ends in {endings}", param_hint="--plot")
        plots.check_available()
    if job or pod:
        by = "job" if job else "pod"
    if device == "cpu" and (target is not None or folder is not None or web_page is not None):
        raise click.UsageError("files and pages cover GPUs only; omit --device cpu")
    if target is not None:
        _export(session, target, begin, end, ".parquet" if form == "parquet" else ".csv")
        return
    if folder is not None and by in ("gpu", "process"):
        which = "GPU" if by == "gpu" else "process"
        raise click.UsageError(f"exported files do not name each {which}; omit --by {by}")
    rows = None if folder is None else day_files.read(folder)

    def ask(edges: Sequence[int], kind: str) -> Usage:
        if rows is None:
            return session.client.usage(
                edges, kind, uid=uid, name=name, device=device, by_method=by_method
            )
        return day_files.usage_of(rows, edges, kind, uid, name, by_method)

    uid, name = _uid(user), job or pod or ""
    if web_page is not None:
        days = shown.edges(begin, end, where, daily=True)
        _page(session, web_page, ask(days, "user"), ask([days[0], days[-1]], "job"), days, where)
        return
    found = ask(ends, "total" if by == "day" else by)
    if name and not found.sums:
        since_when = begin.astimezone(where).strftime("%Y-%m-%d %H:%M")
        raise CommandError(
            f"the ledger has no such {by} that you may see since {since_when}; look further back "
            "with --since",
            Exit.UNKNOWN,
            "unknown_job",
        )
    whole = uid is None and not job and not pod
    if whole and not by_method:
        found = shown.tightened(found)
    off_uj = shown.check(found) if whole else 0
    report = EnergyReport(
        at=now(),
        by=by,
        sums=[shown.reported(one, ends, where) for one in found.sums],
        metered_j=sum(found.metered_uj) / 1e6 if whole else None,
        begins=None
        if found.begins_s is None
        else datetime.fromtimestamp(found.begins_s, timezone.utc),
    )
    indices = {} if folder else {gpu.uuid: gpu.index for gpu in session.node.gpus}
    if picture is not None:
        names = [shown.label(one, indices) for one in report.sums]
        drawn = plots.draw_energy(report.sums, names, picture)
        done = Done(at=now(), path=str(picture), rows=drawn)
        session.answer(done, [f"drew {count(drawn, 'row')} in {picture}"])
    elif form == "parquet" and output is not None:
        shown.write_parquet(report, output)
        done = Done(at=now(), path=str(output), rows=len(report.sums))
        session.answer(done, [f"wrote {count(len(report.sums), 'row')} to {output}"])
    elif output is not None:
        texts = {"csv": shown.csv_text, "json": shown.json_text}
        text = texts[form](report) if form in texts else _table(report, indices)
        output.write_text(text, encoding="utf-8")
        if not session.json:
            click.echo(f"wrote {count(len(report.sums), 'row')} to {output}", err=True)
    elif form == "csv" and not session.json:
        click.echo(shown.csv_text(report), nl=False)
    else:
        session.json = session.json or form == "json"
        session.answer(report, lambda: shown.lines(report.sums, indices, report.metered_j))
    if off_uj:
        raise CommandError(
            f"the sums differ from the GPUs' counters by {off_uj} microjoules; please report it "
            "with zeusd's log",
            Exit.FAILED,
            "sum",
        )


def _page(
    session: Session,
    path: Path,
    users: Usage,
    jobs: Usage,
    days: Sequence[int],
    where: tzinfo | None,
) -> None:
    from zeusctl.energy_page import page
    from zeusctl.reports import Done
    from zeusctl.usage import reported

    by_day = [reported(one, days, where) for one in users.sums]
    by_job = [reported(one, [days[0], days[-1]], where) for one in jobs.sums]
    first, last = (datetime.fromtimestamp(one, timezone.utc) for one in (days[0], days[-1] - 1))
    title = (
        f"Energy of GPUs, {first.astimezone(where):%Y-%m-%d} to {last.astimezone(where):%Y-%m-%d}"
    )
    path.write_text(page(by_day, by_job, title, sum(users.metered_uj) / 1e6), encoding="utf-8")
    report = Done(at=now(), path=str(path), rows=len(by_day))
    session.answer(report, [f"wrote {count(len(by_day), 'row')} to {path}"])


def _table(report: EnergyReport, indices: dict[str, int]) -> str:
    from zeusctl.usage import lines

    return "\n".join([*lines(report.sums, indices, report.metered_j), ""])


def _export(session: Session, folder: Path, begin: datetime, end: datetime, ending: str) -> None:
    from zeusctl.day_files import export
    from zeusctl.reports import Done

    paths = export(session.client, socket.gethostname(), folder, begin, end, ending)
    report = Done(at=now(), path=str(folder), rows=len(paths))
    session.answer(report, [str(path) for path in paths])


@click.command()
@click.option("--user", required=True, metavar="USER", help="A name or number.")
@common_options
@pass_session
def forget(session: Session, user: str) -> None:
    """Remove a user from the energy ledger (administrators).

    A random number replaces the user. Every sum stays the same. The names of the user's jobs are
    replaced as well. Energy that the user uses from now on is charged to the user again.
    """
    from zeusctl.commands.allocate import _uid
    from zeusctl.reports import ForgetReport

    uid = _uid(user)
    assert uid is not None
    accounts = session.client.forget_user(uid)
    session.answer(
        ForgetReport(at=now(), accounts=accounts),
        [f"{user} is replaced by a number in {count(accounts, 'account')}"],
    )

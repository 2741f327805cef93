"""`zeusctl energy` and `forget`: who used how much energy, from zeusd's ledger."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_ipc.options import EXISTING_FOLDER, FILE, OUTPUT, option
from zeus_ipc.text import count
from zeusctl.arguments import User, without_effect
from zeusctl.energy_page import page
from zeusctl.exits import CommandError, Exit
from zeusctl.reports import EnergyReport, ForgetReport
from zeusctl.session import Session, now, verb
from zeusctl.text import user_name
from zeusctl.usage import csv_lines, reported, write_parquet
from zeusctl.usage import lines as table

if TYPE_CHECKING:
    from zeus_ipc.replies import Usage

BY = ("user", "job", "pod", "namespace", "process", "gpu", "day")


@verb()
@option("--by", "Sum by this.", BY, "user")
@option("--device", "Energy of GPUs, or of CPU packages: never added up.", ("gpu", "cpu"), "gpu")
@option("--since", "Start: 7d, 2026-11-01.", default="7d")
@option("--until", "Until when.", default="now")
@option("--tz zone_name", "Time zone of days.  [default: local]", metavar="ZONE")
@option("--daily", "Print a sum for each day.", bool)
@option("--by-method", "Print a sum for each method, with its bounds.", bool)
@option("--user uid", "Only for this user: a name or number.", User())
@option("--job", "Only for this job, run by run; or a SLUID.", metavar="ID")
@option("--pod", "Only for this pod.", metavar="NAMESPACE/POD")
@option(
    "--html web_page",
    "Write an HTML page to this file: energy by day and user, and idle energy by job.",
    FILE,
)
@option(
    "--from folder",
    "Add up the files of --export in this folder, instead of asking zeusd.",
    EXISTING_FOLDER,
)
@option("--export target", "Write a file for each UTC day to this folder.", EXISTING_FOLDER)
@option(
    "--format form", "parquet needs -o, or --export.", ("table", "csv", "json", "parquet"), "table"
)
@option("-o --output", "Write to this file instead of standard output.", OUTPUT)
@option("--plot picture", "Draw energy by day to this file: .png, .svg or .pdf.", FILE)
def energy(
    session: Session,
    by: str,
    device: str,
    since: str,
    until: str,
    zone_name: str | None,
    daily: bool,
    by_method: bool,
    uid: int | None,
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

    this = datetime.now(timezone.utc)
    chosen = ("--plot", "-o", "--by", "--daily", "--by-method", "--job", "--pod")
    if target is not None:
        without_effect("with --export", "--from", "--html", "--user", *chosen)
    if web_page is not None:
        without_effect("with --html", "--format", *chosen)
    if picture is not None:
        without_effect("with --plot", "--format", "-o")
    if "" in (job, pod):  # a script's variable that is not set: not everyone's energy
        raise click.UsageError(f"--{'job' if job == '' else 'pod'} is empty; name one, or omit it")
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
        plots.check_available(picture, "--plot")
    if job or pod:
        by = "job" if job else "pod"
    if device == "cpu" and (target is not None or folder is not None or web_page is not None):
        raise click.UsageError("files and pages cover GPUs only; omit --device cpu")
    if target is not None:
        ending = ".parquet" if form == "parquet" else ".csv"
        paths = day_files.export(session.client, socket.gethostname(), target, begin, end, ending)
        session.done(target, len(paths), *map(str, paths))
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

    name = job or pod or ""
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
        session.done(picture, drawn, f"drew {count(drawn, 'row')} in {picture}")
    else:
        _answer(
            session, report, indices, "json" if session.json and output is None else form, output
        )
    if off_uj:
        raise CommandError(
            f"the sums differ from the GPUs' counters by {off_uj} microjoules; please report it "
            "with zeusd's log",
            Exit.FAILED,
            "sum",
        )


def _answer(
    session: Session, report: EnergyReport, indices: dict[str, int], form: str, output: Path | None
) -> None:
    """Prints or writes the report."""
    if form == "parquet" and output is not None:
        write_parquet(report, output)
    else:
        lines: Sequence[str] = [report.json()]
        if form == "csv":
            lines = csv_lines(report)
        elif form == "table":
            lines = table(report.sums, indices, report.metered_j)
        if output is None:
            click.echo("\n".join(lines))
            return
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = len(report.sums)
    session.done(output, rows, f"wrote {count(rows, 'row')} to {output}", err=not session.json)


def _page(
    session: Session,
    path: Path,
    users: Usage,
    jobs: Usage,
    days: Sequence[int],
    where: tzinfo | None,
) -> None:
    by_day = [reported(one, days, where) for one in users.sums]
    by_job = [reported(one, [days[0], days[-1]], where) for one in jobs.sums]
    first, last = (
        datetime.fromtimestamp(one, timezone.utc).astimezone(where)
        for one in (days[0], days[-1] - 1)
    )
    title = f"Energy of GPUs, {first:%Y-%m-%d} to {last:%Y-%m-%d}"
    path.write_text(page(by_day, by_job, title, sum(users.metered_uj) / 1e6), encoding="utf-8")
    session.done(path, len(by_day), f"wrote {count(len(by_day), 'row')} to {path}")


@verb()
@option("--user uid", "A name or number.", User(), required=True)
def forget(session: Session, uid: int) -> None:
    """Remove a user from the energy ledger (administrators).

    A random number replaces the user. Every sum stays the same. The names of the user's jobs are
    replaced as well. Energy that the user uses from now on is charged to the user again.
    """
    accounts = session.client.forget_user(uid)
    session.answer(
        ForgetReport(at=now(), accounts=accounts),
        [f"{user_name(uid)} is replaced by a number in {count(accounts, 'account')}"],
    )

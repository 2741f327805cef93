"""`zeusctl energy` and `forget`: who used how much energy, from zeusd's ledger."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_common import tables
from zeus_common.options import EXISTING_FOLDER, FILE, OUTPUT, option
from zeus_common.text import count, user_name
from zeusctl import usage
from zeusctl.arguments import UserArgument, without_effect
from zeusctl.columns import csv_lines
from zeusctl.entities import UsedEnergy
from zeusctl.exits import UNKNOWN_JOB, CommandError
from zeusctl.reports import EnergyReport, ForgetReport
from zeusctl.session import Session, now, verb

if TYPE_CHECKING:
    from zeus_ipc.replies import Usage

SECOND = timedelta(seconds=1)
BY = ("user", "job", "pod", "namespace", "process", "gpu", "day")


@verb()
@option("--by", "Sum by this.", BY, "user")
@option("--device", "Energy of GPUs, or of CPU packages: never added up.", ("gpu", "cpu"), "gpu")
@option("--since", "Start: 7d, 2026-11-01.", default="7d")
@option("--until", "Until when.", default="now")
@option("--tz zone_name", "Time zone of days.  [default: local]", metavar="ZONE")
@option("--daily", "Print a sum for each day.", bool)
@option("--by-method", "Print a sum for each method, with its bounds.", bool)
@option("--user uid", "Only for this user: a name or number.", UserArgument())
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

    BASIS is how a sum was found; estimates have bounds, LOWER and UPPER:

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

    for given, why in ((target, "--export"), (web_page, "--html"), (picture, "--plot")):
        if given is not None:
            without_effect(f"with {why}", *_WITHOUT[why])
    if "" in (job, pod):  # a script's variable that is not set: not everyone's energy
        raise click.UsageError(f"--{'job' if job == '' else 'pod'} is empty; name one, or omit it")
    if job or pod:
        without_effect("with --job" if job else "with --pod", "--by", *(["--pod"] if job else []))
        by = "job" if job else "pod"
    try:
        this, where = datetime.now(timezone.utc), usage.zone(zone_name)
        begin, end = usage.instant(since, where, this), usage.instant(until, where, this)
        ends = usage.edges(begin, end, where, daily or by == "day" or bool(web_page or picture))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if form == "parquet" and output is None and target is None:
        raise click.UsageError("Parquet cannot go to standard output; name a file with -o")
    if picture is not None:
        plots.check_available(picture, "--plot")
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
    gpus = {} if folder else {gpu.uuid: gpu.index for gpu in session.node.gpus}
    name = job or pod or ""

    def ask(edges: Sequence[int], kind: str) -> tuple[Usage, list[UsedEnergy]]:
        if rows is not None:
            answer = day_files.usage_of(rows, edges, kind, uid, name, by_method)
        else:
            answer = session.client.usage(
                edges, kind, uid=uid, name=name, device=device, by_method=by_method
            )
        if uid is None and not name and not by_method:
            answer = usage.tightened(answer)
        return answer, [usage.reported(used, edges, where, gpus) for used in answer.sums]

    if web_page is not None:
        whole = [ends[0], ends[-1]]
        metered, days = ask(ends, "user")
        _page(session, web_page, days, ask(whole, "user")[1], ask(whole, "job")[1], metered)
        return
    answer, sums = ask(ends, "total" if by == "day" else by)
    if name and not sums:
        since_when = begin.astimezone(where).strftime("%Y-%m-%d %H:%M")
        raise CommandError(
            f"the ledger has no such {by} that you may see since {since_when}; look further back "
            "with --since",
            UNKNOWN_JOB,
        )
    everything = uid is None and not name
    begins = answer.begins_s
    report = EnergyReport(
        at=now(),
        by=by,
        sums=sums,
        metered_j=sum(answer.metered_uj) / 1e6 if everything else None,
        begins=None if begins is None else datetime.fromtimestamp(begins, timezone.utc),
    )
    if picture is not None:
        drawn = plots.draw_energy(sums, picture)
        session.done(picture, drawn, f"drew {count(drawn, 'row')} in {picture}")
    else:
        _answer(session, report, "json" if session.json and output is None else form, output)
    off_uj = usage.check(answer) if everything else 0
    if off_uj:
        raise CommandError(
            f"the sums differ from the GPUs' counters by {off_uj} microjoules; please report it "
            "with zeusd's log"
        )


_CHOSEN = ("-o", "--by", "--daily", "--by-method", "--job", "--pod")
_WITHOUT = {
    "--export": ("--from", "--html", "--user", "--plot", *_CHOSEN),
    "--html": ("--format", "--plot", *_CHOSEN),
    "--plot": ("--format", "-o"),
}
"""What has no effect with an option."""


def _answer(session: Session, report: EnergyReport, form: str, output: Path | None) -> None:
    """Prints or writes the report."""
    names = tables.kinds(UsedEnergy) if form in ("csv", "parquet") else {}
    if output is not None and names:
        tables.write(output, names, usage.rows(report.sums), is_parquet=form == "parquet")
    else:
        lines = [report.json()]
        if form == "csv":
            lines = csv_lines([[*names], *usage.rows(report.sums)])
        elif form == "table":
            lines = usage.lines(report.sums, report.metered_j)
        if output is None:
            click.echo("\n".join(lines))
            return
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = len(report.sums)
    session.done(output, rows, f"wrote {count(rows, 'row')} to {output}", err=not session.json)


def _page(
    session: Session,
    path: Path,
    days: Sequence[UsedEnergy],
    users: Sequence[UsedEnergy],
    jobs: Sequence[UsedEnergy],
    metered: Usage,
) -> None:
    from zeusctl.energy_page import page

    span = f", {days[0].since:%Y-%m-%d} to {days[-1].until - SECOND:%Y-%m-%d}" if days else ""
    text = page(days, users, jobs, f"Energy of GPUs{span}", sum(metered.metered_uj) / 1e6)
    path.write_text(text, encoding="utf-8")
    session.done(path, len(days), f"wrote {count(len(days), 'row')} to {path}")


@verb()
@option("--user uid", "A name or number.", UserArgument(), required=True)
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

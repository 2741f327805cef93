"""`zeusctl exercise`: test each control through its range, on GPUs of one's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_common.options import FILE, option
from zeus_common.processes import output_of
from zeus_common.text import count
from zeus_ipc.errors import ErrorCode
from zeusctl.arguments import gpus_argument, without_effect
from zeusctl.exits import USAGE, CommandError, Exit, check_writable
from zeusctl.session import Session, verb

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo


@verb()
@gpus_argument(required=True)
@option("-y --yes", "Do not ask for confirmation.", bool)
@option("-o --output", "Write the report (JSON) to this file.", FILE, Path("zeus-exercise.json"))
@option("--kill-zeusd", "Also kill zeusd once; systemd restarts it.", bool)
@option(
    "--zeusd-pid",
    "With --kill-zeusd: zeusd's process.  [default: from systemd]",
    int,
    metavar="PID",
)
@option(
    "--library",
    "Load this libnvidia-ml to see how the driver itself refuses values.",
    metavar="PATH",
)
def exercise(
    session: Session,
    gpus: str,
    yes: bool,
    output: Path,
    kill_zeusd: bool,
    zeusd_pid: int | None,
    library: str | None,
) -> None:
    """Test every control through its range (administrators).

    Set power limit, clocks and persistence mode to many values, under leases, on GPUs that nobody
    uses, and report rounding, refusals, latency, how long values take to show, and whether limit
    and clocks affect each other. As root, also ask the driver itself for values outside its ranges
    and report its error codes. Then kill a process that holds a limit. Every GPU is left as it was
    found, and the report proves it; if zeusctl dies, zeusd restores everything. The exit code is 8
    if a value is not as found, and 1 if another check fails.

    \b
    sudo zeusctl exercise 0
    sudo zeusctl exercise all --yes --kill-zeusd -o report.json
    """
    from zeusctl.exercise.report import lines
    from zeusctl.exercise.run import refuse_unless_free, run

    if not kill_zeusd:
        without_effect("without --kill-zeusd", "--zeusd-pid")
    check_writable(output)
    chosen = session.gpus(gpus)
    refuse_unless_free(session.client, chosen)
    pid = (zeusd_pid or _main_pid()) if kill_zeusd else None
    if not yes:
        _ask(chosen, kill_zeusd)
    report = run(
        session.client,
        session.socket,
        chosen,
        daemon_pid=pid,
        library=library,
        say=lambda text: click.echo(text, err=True),
    )
    text = report.to_json()
    output.write_text(text + "\n", encoding="utf-8")
    if session.json:
        click.echo(text)
    else:
        for line in lines(report):
            click.echo(line)
        click.echo(f"\nwrote {output}")
    if not report.as_found:
        raise CommandError(
            "a GPU is not as it was found; see `zeusctl leases` and `zeusctl audit`",
            ErrorCode.RESTORE_PENDING,
        )
    click.get_current_context().exit(Exit.OK if report.ok else Exit.FAILED)


def _ask(gpus: Sequence[GpuInfo], kill_zeusd: bool) -> None:
    """Ask on the terminal.

    Raises:
        CommandError: The answer is no, or there is no terminal.
    """
    which = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
    if not sys.stdin.isatty():
        raise CommandError(
            f"this sets limits and clocks of {count(len(gpus), 'GPU')}, and standard input is no "
            "terminal to confirm it at; add --yes",
            USAGE,
        )
    also = ", and kill zeusd once" if kill_zeusd else ""
    question = f"Set limits, clocks and persistence mode of GPU {which} to many values{also}?"
    if not click.confirm(question, err=True):
        raise CommandError("nothing was set")


def _main_pid() -> int:
    """The process that systemd runs as zeusd.

    Raises:
        CommandError: There is none: nothing would start zeusd again.
    """
    asked = ("--property=MainPID", "--value", "zeusd.service")
    shown = output_of("systemctl", "show", *asked) or ""
    pid = int(shown) if shown.strip().isdecimal() else 0
    if not pid:
        raise CommandError(
            "systemd runs no zeusd.service, so nothing would start it again; omit --kill-zeusd, "
            "or name the process with --zeusd-pid"
        )
    return pid

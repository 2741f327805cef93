"""`zeusctl exercise`: test each control through its range, on GPUs of one's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_ipc.options import FILE
from zeus_ipc.text import count
from zeusctl.arguments import gpus_argument, without_effect
from zeusctl.exits import CommandError, Exit, check_writable
from zeusctl.session import Session, common_options, pass_session

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo


@click.command()
@gpus_argument(required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path("zeus-exercise.json"),
    show_default=True,
    help="Write the report (JSON) to this file.",
)
@click.option("--kill-zeusd", is_flag=True, help="Also kill zeusd once; systemd restarts it.")
@click.option(
    "--zeusd-pid",
    type=int,
    metavar="PID",
    help="With --kill-zeusd: zeusd's process.  [default: from systemd]",
)
@click.option(
    "--library",
    metavar="PATH",
    help="Load this libnvidia-ml to see how the driver itself refuses values.",
)
@common_options
@pass_session
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
            "a GPU is not as it was found; see `zeusctl leases` and `zeusctl audit`", Exit.PENDING
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
            Exit.USAGE,
            "usage",
        )
    also = ", and kill zeusd once" if kill_zeusd else ""
    question = f"Set limits, clocks and persistence mode of GPU {which} to many values{also}?"
    if not click.confirm(question, err=True):
        raise CommandError("nothing was set", Exit.FAILED)


def _main_pid() -> int:
    """The process that systemd runs as zeusd.

    Raises:
        CommandError: There is none: nothing would start zeusd again.
    """
    command = ["systemctl", "show", "--property=MainPID", "--value", "zeusd.service"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        pid = 0
    else:
        pid = int(done.stdout.strip() or 0) if done.stdout.strip().isdecimal() else 0
    if not pid:
        raise CommandError(
            "systemd runs no zeusd.service, so nothing would start it again; omit --kill-zeusd, "
            "or name the process with --zeusd-pid",
            Exit.FAILED,
        )
    return pid

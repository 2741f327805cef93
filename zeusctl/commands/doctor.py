"""`zeusctl doctor` and `probe`: find problems, and measure what GPUs and driver really do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from zeus_common.checks import Check
from zeus_common.options import option
from zeusctl.exits import Exit
from zeusctl.probe import ABOUT, OPTIONS
from zeusctl.reports import DoctorReport
from zeusctl.session import Session, now, verb
from zeusctl.text import style

_COLORS = {"ok": "green", "note": "yellow", "fault": "red"}


@verb()
def doctor(session: Session) -> None:
    """Find problems on this node, and say how to fix them.

    Check driver, library, socket, groups, policy, units, containers, sampling and
    CUDA_VISIBLE_DEVICES. Each line says ok, or what to do. The exit code is 1 if a check fails.
    """
    from zeusctl.checks import examine

    checks = list(examine(session))
    healthy = all(check.state != "fault" for check in checks)
    report = DoctorReport(at=now(), healthy=healthy, checks=checks)

    session.answer(report, lambda: [line for check in checks for line in lines(check)])
    click.get_current_context().exit(Exit.OK if healthy else Exit.FAILED)


def lines(check: Check) -> Iterator[str]:
    """A check, and below it what to do."""
    yield f"{style(f'{check.state:5}', fg=_COLORS[check.state])}  {check.name:10} {check.found}"
    if check.remedy:
        yield f"{'':18}-> {check.remedy}"


def _declared(command: Any) -> Any:
    for one in reversed(OPTIONS):
        names = f"-o {one.name}" if one.name == "--output" else one.name
        more = {} if one.kind is None else {"metavar": one.metavar}
        command = option(names, one.help, one.kind or bool, one.default, **more)(command)
    return command


@verb(help=ABOUT)
@_declared
def probe(session: Session, /, **options: Any) -> None:
    """Measure what GPUs and driver really do; set nothing.

    The rest of the help is in `ABOUT`.
    """
    from zeusctl.probe.main import finish, run

    report = run(options, lambda text: click.echo(text, err=True))
    finish(report, options, session.json, click.echo)

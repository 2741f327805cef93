"""`zeusctl doctor`: find problems, and say how to fix them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from zeus_ipc.checks import Check
from zeusctl.exits import Exit
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

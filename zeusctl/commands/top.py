"""`zeusctl top`: the node, live."""

from __future__ import annotations

import os
import sys
import time

import click

from zeus_common.options import Number, Whole, option
from zeusctl.arguments import gpus_argument
from zeusctl.commands.status import lines as status_lines
from zeusctl.commands.status import read as read_status
from zeusctl.exits import CommandError, Exit
from zeusctl.session import Session, verb

SLOWEST_S, FASTEST_S = 60.0, 0.1


@verb()
@gpus_argument()
@option("-d --interval", "Seconds between updates.", Number(FASTEST_S, SLOWEST_S), 1.0)
@option("-n --frames", "Stop after this many updates.", Whole(min=1))
def top(session: Session, gpus: str, interval: float, frames: int | None) -> None:
    """Show the node live: utilization, power, limits, leases.

    Scroll, sort and filter as in htop and nvitop; Enter shows a GPU with its last hour, h all keys.
    Without a terminal, each update is printed below the last; with --json each is one line, as in
    `zeusctl status`.
    """
    if session.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(session, gpus, interval, frames)
    else:
        _show(session, gpus, interval, frames)


def _print(session: Session, gpus: str, interval_s: float, frames: int | None) -> None:
    while True:
        report = read_status(session, gpus, processes=True)
        session.answer(report, [*status_lines(report), ""])
        sys.stdout.flush()
        if frames is not None:
            frames -= 1
            if frames == 0:
                return
        time.sleep(interval_s)
        session.look_again()


def _show(session: Session, gpus: str, interval_s: float, frames: int | None) -> None:
    from zeusctl.top.source import NodeSource

    source = NodeSource(session, gpus)  # reports errors before it takes over the screen
    try:
        from zeusctl.top.app import TopApp
    except ImportError:
        raise CommandError(
            f"the live view needs textual, which is not installed; run: {sys.executable} -m pip "
            "install textual, or pipe it: zeusctl top | cat"
        ) from None
    for name in ("COLUMNS", "LINES"):  # use the terminal's own size: it may change
        os.environ.pop(name, None)
    code = TopApp(source, interval_s, frames).run()
    click.get_current_context().exit(Exit.OK if code is None else code)

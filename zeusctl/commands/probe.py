"""`zeusctl probe`: what the GPUs of this node and their driver really do."""

from __future__ import annotations

from typing import Any

import click

from zeus_ipc.options import option
from zeusctl.probe.options import ABOUT, OPTIONS
from zeusctl.session import Session, verb


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

"""`zeusctl probe`: what the GPUs of this node and their driver really do."""

from __future__ import annotations

from typing import Any

import click

from zeus_ipc.options import PLAIN
from zeusctl.exits import CommandError, Exit
from zeusctl.probe.options import ABOUT, OPTIONS
from zeusctl.session import Session, verb


def _declared(command: Any) -> Any:
    for option in reversed(OPTIONS):
        short = ("-o",) if option.name == "--output" else ()
        if option.kind is None:
            command = click.option(option.name, is_flag=True, help=option.help)(command)
        else:
            command = click.option(
                *short,
                option.name,
                type=PLAIN.get(option.kind, option.kind),
                metavar=option.metavar,
                default=option.default,
                show_default=option.default is not None,
                help=option.help,
            )(command)
    return command


@verb(help=ABOUT)
@_declared
def probe(session: Session, /, **options: Any) -> None:
    """Measure what GPUs and driver really do; set nothing.

    The rest of the help is in `ABOUT`.
    """
    from zeusctl.probe.driver import NoDriverError
    from zeusctl.probe.main import finish, run

    try:
        report = run(options, lambda text: click.echo(text, err=True))
    except NoDriverError as error:
        raise CommandError(str(error), Exit.NOT_SUPPORTED, "no_driver") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    finish(report, options, session.json, click.echo)

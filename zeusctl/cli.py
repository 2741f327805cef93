"""The command `zeusctl`: its subcommands, and how errors reach the user."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from zeus_common.options import SOCKET, Number, option
from zeus_common.processes import discard_output, prepare_streams
from zeus_ipc import __version__
from zeusctl.exits import USAGE, CommandError, Exit, exit_for
from zeusctl.session import TIMEOUT_S, Session, now

VERBS = {
    "status": "status",
    "gpus": "status",
    "show": "show",
    "processes": "status",
    "leases": "status",
    "top": "top",
    "set": "set:set_",
    "reset": "reset",
    "release": "reset",
    "measure": "measure",
    "record": "record",
    "plot": "record",
    "energy": "energy",
    "receipt": "receipt",
    "allocate": "allocate",
    "deallocate": "allocate",
    "allocations": "allocate",
    "forget": "energy",
    "audit": "audit",
    "doctor": "doctor",
    "probe": "doctor",
    "exercise": "exercise",
    "quiesce": "quiesce",
    "resume": "quiesce",
    "schema": "about",
    "completion": "about",
    "man": "about",
}
"""Each verb and its module in `zeusctl.commands`, imported on first use; after a colon, the verb's
name there, if it differs."""


def _summary(verb: str) -> str:
    """The first line of a verb's help, from the source: importing every module would take twice as
    long as all else that `--help` does.
    """
    module, _, name = VERBS[verb].partition(":")
    source = pathlib.Path(__file__).with_name("commands").joinpath(f"{module}.py").read_text()
    form = rf'^def {name or verb}\(.*?-> None:\n    """(.*?)(?:"""|$)'
    match = re.search(form, source, re.DOTALL | re.MULTILINE)
    return match[1] if match is not None else ""


class _ReaderGoneError(Exception):
    """Ends quietly when the reader of a pipe has read enough; click would call that a failure."""


class _Verbs(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        from zeus_ipc.errors import ZeusIpcError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGoneError from None
        except ZeusIpcError as error:
            error.message = ctx.obj.readable(error.message)
            if error.message.endswith("ask an administrator of this node's GPUs"):
                error.message += f": {ctx.obj.as_root()}"
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].partition(":")
        verb_module = import_module(f"zeusctl.commands.{module}")
        command: click.Command = getattr(verb_module, name or cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in VERBS])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from difflib import get_close_matches

            meant = get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else "run `zeusctl` to list all commands"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}") from None


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Name GPUs by index (0,2 or 0-3), UUID, PCI address, or all. For exit codes, files and "
    "environment, run `zeusctl man`.",
)
@option(
    "--socket",
    "zeusd's socket.  [default: $ZEUSD_SOCK_PATH or /run/zeusd/zeusd.sock]",
    SOCKET,
    metavar="PATH",
)
@option("--json json_wanted", "Print one JSON object.", bool)
@option(
    "--timeout",
    "Time limit for each reply of zeusd.",
    Number(min=0, min_open=True),
    TIMEOUT_S,
    envvar="ZEUSCTL_TIMEOUT",
    metavar="SECONDS",
)
@click.version_option(__version__, prog_name="zeusctl")
@click.pass_context
def cli(context: click.Context, socket: str | None, json_wanted: bool, timeout: float) -> None:
    """Show and control the GPUs of this node through zeusd: power limits, clocks, energy, leases.

    Reading needs no permissions. Settings are held under a lease, and restored when it ends.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        return
    context.obj = Session(socket, json_wanted, timeout, context.obj or ())
    context.call_on_close(context.obj.close)


_FULL = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
"""Errors of writing to a full or broken disk."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    # Looking for plugins in every installed distribution takes longer than a request.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    json_wanted = "--json" in (
        arguments[: arguments.index("--")] if "--" in arguments else arguments
    )
    try:
        result = cli.main(arguments, "zeusctl", standalone_mode=False, obj=arguments)
        code = result if isinstance(result, int) else Exit.OK
        sys.stdout.flush()
    except (_ReaderGoneError, BrokenPipeError):
        discard_output()
        code = Exit.OK
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = Exit.INTERRUPTED
    except SystemExit as end:  # of shell completion
        code = int(end.code or 0)
    except Exception as error:  # noqa: BLE001 - no user must ever see a traceback
        code = _fail(error, json_wanted)
    sys.exit(int(code))


def _fail(error: Exception, json_wanted: bool) -> int:
    """Reports what went wrong in one sentence. Returns the exit code."""
    command_error, hint = _as_command_error(error), ""
    if isinstance(error, click.UsageError) and error.ctx is not None and not _here(error):
        hint = f" (see `{error.ctx.command_path} --help`)"
    message = str(command_error)
    click.echo(f"zeusctl: {message.rstrip('.')}{hint}", err=True)
    if json_wanted:
        from zeusctl.reports import Failed

        code = int(command_error.exit_code)
        failed = Failed(at=now(), code=command_error.code, message=message, exit_code=code)
        try:
            click.echo(failed.json())
        except OSError:
            discard_output()
    return command_error.exit_code


def _as_command_error(error: Exception) -> CommandError:
    """What went wrong, as a user is told."""
    from zeus_common.tables import TableError
    from zeus_ipc.errors import ErrorCode, ZeusIpcError

    if isinstance(error, CommandError):
        return error
    if isinstance(error, click.ClickException):
        other = _here(error)
        text = f"there is no {getattr(error, 'option_name', '')} here; write {other}"
        return CommandError(text if other else error.format_message(), USAGE)
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return CommandError("a name given is not UTF-8; write it as text", USAGE)
    if isinstance(error, TableError) or (isinstance(error, ImportError) and "pip" in str(error)):
        return CommandError(str(error))
    if isinstance(error, ZeusIpcError):
        several = getattr(error, "errors", None)
        first = next(iter(several.values())) if isinstance(several, dict) and several else error
        return CommandError(error.message, error.code, exit_for(first.code))
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        where = error.filename
        if where is None:
            where = "standard output cannot be written"
            discard_output()
        what = "make room, or write elsewhere" if error.errno in _FULL else "check the path"
        return CommandError(f"{where}: {error.strerror}; {what}")
    if os.environ.get("ZEUSCTL_TRACEBACK"):
        raise error
    return CommandError(
        f"this is a bug in zeusctl ({type(error).__name__}: {error}); please report it, with what "
        "ZEUSCTL_TRACEBACK=1 shows",
        ErrorCode.INTERNAL,
    )


_ELSEWHERE = {
    "-n": ("--watch SECONDS", "--lines NUMBER", "--frames NUMBER"),
    "-l": ("--watch SECONDS", "--interval SECONDS"),
    "-d": ("--watch SECONDS",),
    "-q": ("--columns NAME,...",),
    "--query-gpu": ("--columns NAME,...",),
    "--loop": ("--watch SECONDS", "--interval SECONDS"),
    "-P": ("--persistence on",),
    "--power": ("--power-limit WATTS",),
    "--lock-gpu-clocks": ("--gpu-clocks MHZ,MHZ",),
}
"""Options of nvidia-smi, watch and top, and those of verbs here."""


def _here(error: click.ClickException) -> str:
    """What the verb has instead of another program's option; empty: nothing."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    if isinstance(error.ctx.command, click.Group):
        known = error.option_name in ("-i", "--gpus", "--id")
        return f"it after a command: zeusctl status {error.option_name}" if known else ""
    names = [name for param in error.ctx.command.params for name in param.opts]
    forms = _ELSEWHERE.get(error.option_name, ())
    return next((form for form in forms if form.split()[0] in names), "")

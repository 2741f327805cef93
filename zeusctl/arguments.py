"""Arguments of verbs: the GPUs, a command after `--`, and how shells complete them."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from zeus_common.options import ParamType, option
from zeus_ipc.errors import ZeusIpcError
from zeusctl.session import Session
from zeusctl.text import parse_duration

F = TypeVar("F", bound=Callable[..., Any])

_GPUS = re.compile(r"all|slurm|(gpu-)?[0-9a-f][0-9a-f:.,-]*", re.IGNORECASE)
"""What looks like the GPUS of a command line."""

_FROM_OPTION = "zeusctl.gpus"

_EMPTY = "GPUS is empty; name them (0,2 or 0-3), or all"
"""A script's variable that is not set does not mean all GPUs."""


class Duration(ParamType):
    """A time such as 30s or 10m, in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Seconds."""
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class UserArgument(ParamType):
    """A user's name or number, as a number."""

    name = "USER"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Looks a name up."""
        is_number = re.fullmatch("[0-9]{1,10}", str(value))
        try:
            uid = int(value) if is_number else pwd.getpwnam(value).pw_uid
        except KeyError:
            uid = None
        # The next number means no user.
        if uid is None or uid > 2**32 - 2:
            self.fail(f"there is no user {value!r}", param, ctx)
        return uid


def gpus_argument(required: bool = False, default: str = "all") -> Callable[[F], F]:
    """The GPUS of a verb: an argument, or `-i` as in nvidia-smi.

    Args:
        default: Without any.
    """

    def remember(context: click.Context, _: click.Parameter, text: str | None) -> None:
        if text == "":
            raise click.UsageError(_EMPTY)
        context.meta[_FROM_OPTION] = text

    def chosen(context: click.Context, parameter: click.Parameter, text: str | None) -> str:
        other = context.meta.get(_FROM_OPTION)
        if text == "" and not isinstance(context.command, CommandVerb):
            raise click.UsageError(_EMPTY)
        if text and other:
            raise click.UsageError(f"GPUs are named twice, {text} and {other}; omit one")
        if required and not (text or other or context.resilient_parsing):
            raise click.UsageError("Missing argument GPUS: name them (0,2 or 0-3), or all")
        return text or other or default

    def add(function: F) -> F:
        function = click.argument(
            "gpus",
            required=False,
            callback=chosen,
            shell_complete=complete_gpus,
            metavar="GPUS" if required else "[GPUS]",
        )(function)
        own: dict[str, Any] = {"expose_value": False, "is_eager": True, "callback": remember}
        own |= {"shell_complete": complete_gpus, "metavar": "GPUS"}
        return option("-i --gpus --id chosen_gpus", "The same as GPUS.", **own)(function)

    return add


class CommandVerb(click.Command):
    """A verb that runs a command: `zeusctl VERB [GPUS] [OPTIONS] -- COMMAND`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Requires `--` before the command, whose options are not the verb's."""
        at = args.index("--") if "--" in args else len(args)
        own, command = args[:at], args[at + 1 :]
        words = self._arguments(own)
        if words and not own[words[0]]:
            raise click.UsageError(_EMPTY, ctx)
        if words and not _GPUS.fullmatch(own[words[0]]):
            words.insert(0, -1)
        if len(words) > 1 and not ctx.resilient_parsing:
            raise click.UsageError(self._right_form(ctx, own, words[1]), ctx)
        if "--" in args and not any(command[:1]) and not ctx.resilient_parsing:
            raise click.UsageError("Missing argument COMMAND: nothing follows --", ctx)
        if "--" in args and not words:
            own = [*own, ""]  # GPUS, so that the command's first word is not taken for it
        return super().parse_args(ctx, [*own, *args[at : at + 1], *command])

    def _arguments(self, words: list[str]) -> list[int]:
        """Places of words that are neither an option nor an option's value."""
        valued = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for name in param.opts
        }
        return [
            place
            for place, word in enumerate(words)
            if not (word.startswith("-") and len(word) > 1)
            and not (place and words[place - 1] in valued)
        ]

    def _right_form(self, ctx: click.Context, words: list[str], place: int) -> str:
        if words[place] in ("W", "MHz"):
            return f"give a value and its unit as one word: {words[place - 1]}{words[place]}"
        form = [ctx.command_path, shlex.join(words[:place]), "--", shlex.join(words[place:])]
        return f"write -- before the command: {' '.join(filter(None, form))}"


def command_argument(required: bool) -> Callable[[F], F]:
    """The COMMAND of a `CommandVerb`."""
    return click.argument(
        "command",
        nargs=-1,
        required=required,
        type=click.UNPROCESSED,
        shell_complete=complete_command,
        metavar="-- COMMAND..." if required else "[-- COMMAND...]",
    )


def without_effect(why: str, *names: str) -> None:
    """Refuses options and arguments that have no effect in this combination.

    Args:
        why: The end of the sentence.
        names: Options, or arguments in capitals.

    Raises:
        UsageError: One of them was given.
    """
    context = click.get_current_context()
    given = [name for name in names if _is_given(context, name)]
    if given:
        verb = "has" if len(given) == 1 else "have"
        raise click.UsageError(f"{', '.join(given)} {verb} no effect {why}")


def _is_given(context: click.Context, name: str) -> bool:
    if name == "GPUS" and context.meta.get(_FROM_OPTION):
        return True
    (parameter,) = (
        param for param in context.command.params if name in (*param.opts, str(param.name).upper())
    )
    value = context.params.get(parameter.name or "")
    source = context.get_parameter_source(parameter.name or "")
    return source is ParameterSource.COMMANDLINE and value not in ((), None)


def complete_gpus(context: click.Context, _: click.Parameter, begun: str) -> Sequence[str]:
    """Completes the part after the last comma: to UUIDs if it begins like one, else to indices."""
    done, comma, begun = begun.rpartition(",")
    session = Session(context.find_root().params.get("socket"))
    try:
        names = [*([] if comma else ["all"]), *(str(gpu.index) for gpu in session.node.gpus)]
        if begun.upper().startswith("GPU-"):
            names = [gpu.uuid for gpu in session.node.gpus]
    except ZeusIpcError:  # no daemon, no suggestions
        names = [] if comma else ["all"]
    finally:
        session.close()
    return [done + comma + name for name in names if name.lower().startswith(begun.lower())]


def complete_command(
    context: click.Context, parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Completes the first word after `--` to programs in the PATH and files, later words to
    files.
    """
    items = [CompletionItem(begun, type="file")]
    if context.params.get(parameter.name or "") or not begun or "/" in begun:
        return items
    return [*(CompletionItem(name) for name in sorted(_programs(begun))), *items]


def complete_verb(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """Names of the commands."""
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    return [name for name in root.command.list_commands(root) if name.startswith(begun)]


def complete_schema(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """Names of the reports."""
    from zeusctl.reports import schemas

    return [name for name in schemas() if name.startswith(begun)]


def _programs(begun: str) -> set[str]:
    names = set()
    for folder in os.get_exec_path():
        try:
            with os.scandir(folder) as entries:
                names |= {entry.name for entry in entries if entry.name.startswith(begun)}
        except OSError:
            continue  # shells skip it too
    return names

"""Shell completion of GPUs, commands and reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from zeusctl.session import Session

F = TypeVar("F", bound=Callable[..., Any])


def gpus_argument(required: bool = True) -> Callable[[F], F]:
    """The GPUS argument; completes to the GPUs of the node."""
    if required:
        return click.argument("gpus", shell_complete=complete_gpus)
    return click.argument("gpus", default="all", shell_complete=complete_gpus)


def id_option(function: F) -> F:
    """`-i`, as users of nvidia-smi name GPUs: the same as the argument."""

    def chosen(context: click.Context, _: click.Parameter, text: str | None) -> None:
        if text is not None:
            context.params["gpus"] = text

    return click.option(
        "-i",
        "--id",
        expose_value=False,
        callback=chosen,
        shell_complete=complete_gpus,
        metavar="GPUS",
        help="The same as GPUS.",
    )(function)


def complete_gpus(context: click.Context, _: click.Parameter, begun: str) -> Sequence[str]:
    """Completes the part after the last comma: to UUIDs if it begins like one, else to indices."""
    from zeus_ipc.errors import ZeusIpcError

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


def complete_schema(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """Names of the reports."""
    from zeusctl.reports import schemas

    return [name for name in schemas() if name.startswith(begun)]


def _programs(begun: str) -> set[str]:
    found = set()
    for folder in os.get_exec_path():
        try:
            with os.scandir(folder) as entries:
                found |= {one.name for one in entries if one.name.startswith(begun)}
        except OSError:
            continue  # shells skip it too
    return found

"""Shell completion of GPUs, commands and reports."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from zeus_ipc.errors import ZeusIpcError
from zeusctl.session import Session


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
    found = set()
    for folder in os.get_exec_path():
        try:
            with os.scandir(folder) as entries:
                found |= {one.name for one in entries if one.name.startswith(begun)}
        except OSError:
            continue  # shells skip it too
    return found

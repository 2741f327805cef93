"""Every command, verb and option, from the objects that read the command line."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import click

from .markdown import code, heading, paragraphs, prose, table

CLICK = {
    "zeusd": ("zeusd.cli", "main"),
    "zeusctl": ("zeusctl.cli", "cli"),
    "zeusd-exporter": ("zeusctl.exporter.__main__", "main"),
    "zeusd-kubernetes": ("zeusctl.kubernetes.__main__", "main"),
    "zeus-fleet": ("zeus_fleet.commands", "main"),
    "bso": ("zeus.optimizer.batch_size.command", "main"),
    "python -m zeus.optimizer.pipeline_frequency": (
        "zeus.optimizer.pipeline_frequency.command",
        "main",
    ),
    "python -m zeus.simulate": ("zeus.simulate.command", "main"),
    "python -m zeus.serving": ("zeus.serving.command", "main"),
}
"""Where the object is that each command is made of."""

ARGPARSE = {
    "zeusd restore": "zeusd.restore",
    "python -m zeus.monitor": "zeus.monitor.__main__",
    "python -m zeus.show_env": "zeus.show_env",
    "python -m zeusctl.probe": "zeusctl.probe.__main__",
}
"""The modules whose `command_line` makes the parser."""

PAGES = {
    "reference/commands/zeusd.md": ("zeusd",),
    "reference/commands/zeusctl.md": ("zeusctl",),
    "reference/commands/zeusd-exporter.md": ("zeusd-exporter",),
    "reference/commands/zeusd-kubernetes.md": ("zeusd-kubernetes",),
    "reference/commands/zeus-fleet.md": ("zeus-fleet",),
    "reference/commands/bso.md": ("bso",),
    "reference/commands/python-m-zeus.md": (
        "python -m zeus.monitor",
        "python -m zeus.show_env",
        "python -m zeus.optimizer.pipeline_frequency",
        "python -m zeus.simulate",
        "python -m zeus.serving",
        "python -m zeusctl.probe",
    ),
}
"""The commands on each page."""

_TITLES = {
    "reference/commands/python-m-zeus.md": (
        "python -m zeus…",
        "Modules that are commands.",
    )
}


def pages() -> dict[str, str]:
    """The pages by path."""
    return {path: _page(path, names) for path, names in PAGES.items()}


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command in `ARGPARSE`."""
    parser = importlib.import_module(ARGPARSE[name]).command_line()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def command_of(name: str) -> click.Command:
    """The object of a command in `CLICK`."""
    module, attribute = CLICK[name]
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    return command


def _page(path: str, names: tuple[str, ...]) -> str:
    if path not in _TITLES:
        return "".join(_command(names[0], level=1))
    title, lead = _TITLES[path]
    return f"# {title}\n\n{lead}\n" + "".join(
        part for name in names for part in _command(name, level=2)
    )


def _command(name: str, level: int) -> Iterator[str]:
    if name in ARGPARSE:
        yield from _of_argparse(parser_of(name), name, level)
    else:
        command = command_of(name)
        yield from _of_click(command, _context(command, name), level)


# ------------------------------------------------------------------------------------------ click


def _of_click(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    path = context.command_path
    if path in ARGPARSE:  # it hands its arguments on
        yield from _of_argparse(parser_of(path), path, level)
        return
    yield heading(level, path).lstrip("\n")
    yield paragraphs(command.help or command.get_short_help_str(200))
    yield _usage(" ".join([path, *command.collect_usage_pieces(context)]))
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and (record[1] or isinstance(parameter, click.Option)):
            rows.append((code(record[0]), prose(record[1])))
    yield table(("option", "meaning"), rows) + "\n"
    if not isinstance(command, click.Group):
        return
    verbs = [(verb, command.get_command(context, verb)) for verb in command.list_commands(context)]
    found = [(verb, one) for verb, one in verbs if one is not None and not one.hidden]
    rows = [
        (f"[{verb}](#{_anchor(f'{path} {verb}')})", prose(one.get_short_help_str(200)))
        for verb, one in found
    ]
    yield table(("verb", ""), rows) + "\n"
    for verb, one in found:
        yield from _of_click(one, _context(one, verb, context), level + 1)


def _context(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    """As it is made for a command line."""
    settings: dict[str, Any] = dict(command.context_settings)
    return click.Context(command, info_name=name, parent=parent, **settings)


# --------------------------------------------------------------------------------------- argparse


def _of_argparse(parser: argparse.ArgumentParser, path: str, level: int) -> Iterator[str]:
    yield heading(level, path).lstrip("\n")
    yield paragraphs(parser.description or "")
    yield _usage(" ".join(parser.format_usage().removeprefix("usage: ").split()))
    rows = []
    verbs: list[tuple[str, str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            verbs = [(verb, helps.get(verb, ""), one) for verb, one in action.choices.items()]
        else:
            rows.append((code(_spelling(action)), _meaning(action)))
    yield table(("option", "meaning"), rows) + "\n"
    if not verbs:
        return
    listed = [(f"[{verb}](#{_anchor(f'{path} {verb}')})", prose(text)) for verb, text, _ in verbs]
    yield table(("verb", ""), listed) + "\n"
    for verb, text, one in verbs:
        one.description = one.description or f"{text[:1].upper()}{text[1:]}."
        yield from _of_argparse(one, f"{path} {verb}", level + 1)


def _spelling(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or action.dest
    if action.nargs == 0:
        return names
    value = str(action.metavar or "")
    if not value:
        value = "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    more = f" [{value} …]" if action.nargs in ("+", "*") else ""
    return f"{names} {value}{more}"


def _meaning(action: argparse.Action) -> str:
    found = prose(action.help or "")
    if action.nargs != 0 and action.default not in (None, argparse.SUPPRESS):
        found += f" \\[default: {action.default}\\]"
    return found


# --------------------------------------------------------------------------------------- together


def _usage(text: str) -> str:
    return f"\n```text\n{text}\n```\n\n"


def _anchor(path: str) -> str:
    return path.replace(" ", "-").replace(".", "").lower()

"""Manual pages, made from the commands themselves."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import tempfile

import click

from zeus_ipc import __version__
from zeusctl.exits import MEANINGS

_ENVIRONMENT = {
    "ZEUSD_SOCK_PATH": "zeusd's socket; default /run/zeusd/zeusd.sock.",
    "NO_COLOR": "If set, output has no color.",
    "ZEUSCTL_TIMEOUT": "Seconds to wait for each reply of zeusd; default 10.",
    "ZEUSCTL_TRACEBACK": "If set, a bug in zeusctl shows its traceback.",
}

_FILES = {
    "/run/zeusd/zeusd.sock": "zeusd's socket.",
    "/etc/zeusd/zeusd.toml": "zeusd's configuration, including permissions.",
}


def pages(root: click.Command, program: str = "zeusctl") -> dict[str, str]:
    """The page of the whole command and one of each verb, in troff, by name."""
    context = click.Context(root, info_name=program)
    found = {program: _page(root, context)}
    if isinstance(root, click.Group):
        for name in root.list_commands(context):
            command = root.get_command(context, name)
            if command is not None:
                own = click.Context(command, info_name=name, parent=context)
                found[f"{program}-{name}"] = _page(command, own)
    return found


def show(page: str) -> bool:
    """Shows a page with `man`. Returns whether this system has one."""
    viewer = shutil.which("man")
    if viewer is None:
        return False
    with tempfile.NamedTemporaryFile("w", suffix=".1", encoding="utf-8") as file:
        file.write(page)
        file.flush()
        return subprocess.run([viewer, "-l", file.name], check=False).returncode == 0


def _page(command: click.Command, context: click.Context) -> str:
    title = context.command_path.replace(" ", "-")
    program = context.find_root().info_name or ""
    lines = [
        f'.TH "{_text(title.upper())}" "1" "" "zeusd {__version__}" "zeusd"',
        ".SH NAME",
        f"{_text(title)} \\- {_text(command.get_short_help_str(200).rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(context.command_path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_prose(command.help or ""),
        ".SH OPTIONS",
    ]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            lines += [".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1])]
    if isinstance(command, click.Group):
        lines.append(".SH VERBS")
        for name in command.list_commands(context):
            verb = command.get_command(context, name)
            assert verb is not None
            lines += [".TP", f"\\fB{_text(name)}\\fR", _text(verb.get_short_help_str(200))]
    if title == "zeusctl":
        lines += _section("EXIT STATUS", {str(int(c)): f"{m}." for c, m in MEANINGS.items()})
        lines += _section("ENVIRONMENT", _ENVIRONMENT)
        lines += _section("FILES", _FILES)
    page = "zeusctl" if program == "zeusctl" else "zeusd"
    lines += [
        ".SH SEE ALSO",
        _text(f"{program}(1)" if title != program else f"docs/operate/{page}.md of zeusd"),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, entries: dict[str, str]) -> list[str]:
    lines = [f".SH {title}"]
    for name, meaning in entries.items():
        lines += [".TP", f"\\fB{_text(name)}\\fR", _text(meaning)]
    return lines


def _prose(help_text: str) -> list[str]:
    """Formats paragraphs; those that click must not rewrap (marked by a backspace) are examples."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(help_text)):
        lines.append(".PP")
        if paragraph.startswith("\b"):
            lines += [".nf", *(_text(line) for line in paragraph.splitlines()[1:]), ".fi"]
        else:
            lines.append(_text(" ".join(paragraph.split())))
    return lines


def _text(text: str) -> str:
    """Escapes text for troff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\\&" + escaped if escaped.startswith(".") else escaped

"""`zeusctl schema`, `completion` and `man`: about zeusctl itself."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from zeus_common.options import FOLDER, option
from zeus_ipc import __version__
from zeusctl.arguments import complete_schema, complete_verb, without_effect
from zeusctl.exits import MEANINGS
from zeusctl.reports import schemas as published
from zeusctl.session import Session, verb


@click.command()
@click.argument("name", required=False, shell_complete=complete_schema)
def schema(name: str | None) -> None:
    """Print the JSON schema of the output of --json.

    Every answer has a field `schema`, such as zeusctl.status/1. Within one version, fields are
    added and never changed or removed.
    """
    kinds = published()
    if name is not None and name not in kinds:
        raise click.UsageError(f"there is no schema {name}; there are: {', '.join(kinds)}")
    schemas = {key: kind() for key, kind in kinds.items() if name in (None, key)}
    click.echo(json.dumps(schemas if name is None else schemas[name], indent=2))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  zeusctl completion bash > /etc/bash_completion.d/zeusctl
    zsh:   zeusctl completion zsh > /usr/share/zsh/site-functions/_zeusctl
    fish:  zeusctl completion fish > /etc/fish/completions/zeusctl.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    # click's own bash class runs bash to get its version, which source() does not need.
    source = kind(root, {}, "zeusctl", "_ZEUSCTL_COMPLETE")
    click.echo(source.source_template % source.source_vars())


@verb()
@click.argument("verb", required=False, shell_complete=complete_verb)
@option("--write directory", "Write all pages to this folder, for `man` to find.", FOLDER)
@click.pass_context
def man(context: click.Context, session: Session, verb: str | None, directory: Path | None) -> None:
    """Show the manual page of zeusctl, or of one of its commands.

    \b
    zeusctl man set
    zeusctl man --write /usr/local/share/man/man1
    """
    root = context.find_root()
    manual = pages(root.command)
    if directory is None:
        name = f"zeusctl-{verb}" if verb else "zeusctl"
        if name not in manual:
            raise click.UsageError(f"there is no command {verb!r}; run `zeusctl` to list them")
        if not show(manual[name]):
            assert isinstance(root.command, click.Group)
            command = root.command.get_command(root, verb) if verb else root.command
            assert command is not None
            click.echo(command.get_help(click.Context(command, info_name=verb, parent=root)))
        return
    without_effect("with --write", "VERB")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in manual.items():
        (directory / f"{name}.1").write_text(text, encoding="utf-8")
    session.done(directory, len(manual), f"{len(manual)} pages in {directory}")


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
    manual = {program: _page(root, context)}
    if isinstance(root, click.Group):
        for name in root.list_commands(context):
            command = root.get_command(context, name)
            if command is not None:
                own = click.Context(command, info_name=name, parent=context)
                manual[f"{program}-{name}"] = _page(command, own)
    return manual


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

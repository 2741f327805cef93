"""Command lines in the documentation, held against the commands that would read them."""

from __future__ import annotations

import pwd
import re
import shlex
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import click

from scripts.site.reference import commands

_OPERATORS = re.compile(r"[;&|()]+")
_REDIRECTION = re.compile(r"[<>]+[&|]?")
_BEFORE = {
    "sudo",
    "exec",
    "time",
    "srun",
    "nohup",
    "env",
    "!",
    "then",
    "do",
    "if",
    "while",
    "until",
}


def simple_commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, without redirections and what stands before them."""
    for line in _logical_lines(script):
        words: list[str] = []
        tokens = iter(line)
        for token in tokens:
            if _OPERATORS.fullmatch(token):
                yield from _command(words)
                words = []
            elif _REDIRECTION.fullmatch(token):
                if words and words[-1].isdigit():
                    words.pop()
                next(tokens, None)
            else:
                words.append(token)
        yield from _command(words)


def _logical_lines(script: str) -> Iterator[list[str]]:
    pending = ""
    for line in script.replace("\\\n", " ").splitlines():
        pending += line
        # A substitution of another command's output is not an option of ours.
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=";&|()<>")
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:  # a quotation continues in the next line
            pending += "\n"
            continue
        pending = ""
        yield tokens


def _command(words: list[str]) -> Iterator[list[str]]:
    while words and (words[0] in _BEFORE or re.match(r"\w+=", words[0])):
        words = words[1:]
    if words:
        yield words


def complaint(words: list[str]) -> str:
    """Why one of our commands would reject this line; empty if it accepts it, or is not ours."""
    if words[0] in ("python", "python3") and words[1:2] == ["-m"] and len(words) > 2:
        name, arguments = f"python -m {words[2]}", words[3:]
        known = name in commands.CLICK or name in commands.ARGPARSE
        if not known:
            return f"there is no {name}" if words[2].startswith("zeus") else ""
    else:
        name, arguments = words[0], words[1:]
    # Placeholders stand for numbers where that matters.
    arguments = [re.sub(r"\$\w+|\$\{\w+\}|^[A-Z]+$", "1", one) for one in arguments]
    verb = f"{name} {arguments[0]}" if arguments else ""
    if verb in commands.ARGPARSE:
        return _of_argparse(verb, arguments[1:])
    if name in commands.ARGPARSE:
        return _of_argparse(name, arguments)
    if name in commands.CLICK:
        with patch("pwd.getpwnam", _user_of_a_page):
            return _of_click(commands.command_of(name), name, arguments)
    return ""


def _user_of_a_page(name: str) -> pwd.struct_passwd:
    """Users of the pages, such as alice, are users of their nodes, not of this machine."""
    if not re.fullmatch(r"[a-z_][a-z0-9_-]*", name):
        raise KeyError(name)
    return pwd.struct_passwd((name, "x", 1000, 1000, "", f"/home/{name}", "/bin/sh"))


def _of_click(command: click.Command, name: str, arguments: list[str]) -> str:
    try:
        context = command.make_context(name, list(arguments), obj=SimpleNamespace())
        while isinstance(command, click.Group):
            rest = [*context._protected_args, *context.args]
            verb, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command = found
            context = command.make_context(verb, rest, parent=context)
    except click.exceptions.Exit:  # --help, --version
        return ""
    except click.ClickException as error:
        return f"{name}: {error.format_message()}"
    return ""


def _of_argparse(name: str, arguments: list[str]) -> str:
    parser = commands.parser_of(name)
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        return f"{name} does not take {arguments}" if end.code else ""
    return ""

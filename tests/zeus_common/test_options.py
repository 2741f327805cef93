from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from zeus.optimizer.pipeline_frequency.command import main as pipeline
from zeus.serving.command import main as serving
from zeus.simulate.command import main as simulate
from zeus_common.options import FILE, FOLDER, OUTPUT, Number, Whole
from zeus_fleet.commands import main as fleet
from zeusctl.cli import cli as zeusctl


@click.command()
@click.option("--every", type=Number(0.1))
@click.option("--times", type=Whole(1))
@click.option("--file", type=FILE)
@click.option("--output", type=OUTPUT)
@click.option("--folder", type=FOLDER)
def command(**options: Any) -> None:
    given = [value for value in options.values() if value is not None]
    click.echo(repr(given))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--every", "nan", "nan is not a finite number"),
        ("--every", "inf", "inf is not a finite number"),
        ("--every", "0", "0"),
        ("--every", "1_0", "1_0 is not a finite number in decimal digits"),
        ("--every", "\uff11", "is not a finite number in decimal digits"),
        ("--every", "1e400", "is not a finite number in decimal digits"),
        ("--times", "1_0", "1_0 is not a finite number in decimal digits"),
        ("--times", "1.5", "1.5"),
        ("--times", "0", "0"),
        ("--file", "", "'' names no file"),
        ("--file", "-", "write ./- for one named -"),
        ("--output", "", "'' names no file"),
        ("--folder", "", "'' names no directory"),
        ("--folder", "-", "'-' names no directory"),
    ],
)
def test_a_value_without_a_meaning_is_wrong_usage(option: str, value: str, words: str) -> None:
    done = CliRunner().invoke(command, [option, value])
    assert (done.exit_code, words in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("option", "value", "given"),
    [
        ("--every", "0.5", 0.5),
        ("--times", "20", 20),
        ("--file", "./-", Path("./-")),
        ("--output", "x", Path("x")),
        ("--output", "-", None),  # as without the option: standard output
    ],
)
def test_others_are_taken(option: str, value: str, given: object) -> None:
    done = CliRunner().invoke(command, [option, value])
    assert done.output == f"{[] if given is None else [given]!r}\n"


def parameters(command: click.Command, path: str) -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(command)
    for parameter in command.params:
        yield f"{path} {parameter.name}", parameter
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            verb = command.get_command(context, name)
            assert verb is not None
            yield from parameters(verb, f"{path} {name}")


NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


@pytest.mark.parametrize("root", [zeusctl, fleet, serving, simulate, pipeline])
def test_every_command_line_uses_these_types(root: click.Command) -> None:
    """Click's own take NaN, `1_0` and an empty path; a path that must exist is never empty."""
    for name, parameter in parameters(root, root.name or ""):
        kind = parameter.type
        assert not isinstance(kind, NUMBERS) or type(kind).__module__ == Number.__module__, name
        assert type(kind) is not click.Path or kind.exists, name

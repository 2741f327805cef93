"""Write the manual pages of all programs but zeusctl, which writes its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import click

from zeus_fleet.commands import main as fleet
from zeusctl.commands.about import pages
from zeusctl.exporter.__main__ import main as exporter
from zeusctl.kubernetes.__main__ import main as kubernetes
from zeusd.cli import main as zeusd
from zeusd.restore import command_line

PROGRAMS = {
    "zeusd": zeusd,
    "zeusd-exporter": exporter,
    "zeusd-kubernetes": kubernetes,
    "zeus-fleet": fleet,
}


def main() -> None:
    """Writes them to the folder that the command line names."""
    folder = Path(sys.argv[1])
    # It passes its arguments on to a parser, which click does not know.
    zeusd.add_command(_command_of(command_line()), "restore")
    for name, command in PROGRAMS.items():
        for page, text in pages(command, name).items():
            (folder / f"{page}.1").write_text(text, encoding="utf-8")


def _command_of(parser: argparse.ArgumentParser) -> click.Command:
    options: list[click.Parameter] = []
    for action in parser._actions:
        if isinstance(action.help, str) and action.dest != "help":
            text = f"{action.help[:1].upper()}{action.help[1:]}."
            options.append(
                click.Option(action.option_strings, is_flag=action.nargs == 0, help=text)
            )
    return click.Command("restore", help=parser.description, params=options)


if __name__ == "__main__":
    main()

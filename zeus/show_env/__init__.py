"""`python -m zeus.show_env`: shows what `zeus` finds on this machine, and remedies for problems.

It changes nothing: it acquires no lease, sets no GPU, and imports no framework. Each failure is a
line with a remedy.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zeus.show_env import daemon, devices, packages
from zeus.show_env.packages import Row, unexpected
from zeus_common.processes import discard_output
from zeus_ipc import __version__


def command_line() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m zeus.show_env",
        description="Show what zeus finds on this machine: packages, zeusd, GPUs, CPUs, rights.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    command_line().parse_args(arguments)
    output: Any = sys.stdout
    with contextlib.suppress(AttributeError, ValueError):
        output.reconfigure(errors="backslashreplace")
    try:
        _show_all()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone
        discard_output()
    return 0


def _show_all() -> None:
    _show("Packages", lambda: packages.packages())
    _show("System", lambda: packages.system())
    zeusd = daemon.ask_zeusd()
    _show("zeusd", lambda: daemon.rows(zeusd))
    found, notes = devices.find(zeusd)
    _show("GPUs", lambda: [*devices.cuda(), *devices.mapping(found, zeusd), *notes])
    _show("CPUs and memory", lambda: [*devices.cpus(zeusd), *devices.zones(zeusd)])
    _show("System-on-chip", lambda: [("SoC", "none")])
    _show("Rights", lambda: packages.rights(zeusd.info is not None))


def _show(title: str, rows: Callable[[], Sequence[Row]]) -> None:
    try:
        found = rows()
    except Exception as error:  # noqa: BLE001 - what is broken here is what the reader looks for
        found = [("not known", unexpected(error))]
    print(title)
    width = max((len(name) for name, _ in found), default=0)
    for name, text in found:
        print(f"  {name:<{width}}  {text}")
    print(flush=True)

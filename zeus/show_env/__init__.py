"""`python -m zeus.show_env`: what `zeus` finds on this machine, and what to do about the rest.

It changes nothing: no lease is taken, no GPU is set, no framework is imported. Whatever fails is a
line that says what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zeus.show_env import cpus, daemon, gpus, packages, rights
from zeus.show_env.lines import Row, unexpected


def command_line() -> argparse.ArgumentParser:
    """What the command takes."""
    return argparse.ArgumentParser(
        prog="python -m zeus.show_env",
        description="Shows what zeus finds on this machine: packages, zeusd, GPUs, CPUs, rights.",
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    command_line().parse_args(arguments)
    output: Any = sys.stdout
    with contextlib.suppress(AttributeError, ValueError):
        output.reconfigure(errors="backslashreplace")
    try:
        _show_all()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; nor must Python flush it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_all() -> None:
    _show("Packages", lambda: packages.packages())
    _show("System", lambda: packages.system())
    zeusd = daemon.ask_zeusd()
    _show("zeusd", lambda: daemon.rows(zeusd))
    found, notes = gpus.find(zeusd)
    _show("GPUs", lambda: [*gpus.cuda(), *gpus.mapping(found, zeusd), *notes])
    _show("CPUs and memory", lambda: [*cpus.measured(zeusd), *cpus.zones(zeusd)])
    _show("System-on-chip", lambda: [("SoC", "none")])
    _show("Rights", lambda: rights.rows(found, zeusd))


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

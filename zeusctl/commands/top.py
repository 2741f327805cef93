"""`zeusctl top`: the node, live."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any

import click

from zeusctl.commands.status import lines as status_lines
from zeusctl.commands.status import read as read_status
from zeusctl.completing import gpus_argument
from zeusctl.exits import CommandError, Exit
from zeusctl.session import Session, common_options, pass_session

SLOWEST_S, FASTEST_S = 60.0, 0.1


@click.command()
@gpus_argument(required=False)
@click.option(
    "-i",
    "--interval",
    default=1.0,
    type=click.FloatRange(FASTEST_S, SLOWEST_S),
    show_default=True,
    help="Seconds between looks.",
)
@click.option("-n", "--frames", type=click.IntRange(min=1), help="End after so many looks.")
@common_options
@pass_session
def top(session: Session, gpus: str, interval: float, frames: int | None) -> None:
    """The node live: power, limits, clocks, leases. q quits.

    Each GPU has a bar of its power within its limit (| marks the limit), and the power of the last
    minutes as a line. Without a terminal each look is printed below the last; with --json each is
    one line, as `zeusctl status` has it.
    """
    _run(session, gpus, interval, frames)


@click.command()
@gpus_argument(required=False)
@click.option("-i", "--interval", default=1.0, type=click.FloatRange(FASTEST_S, SLOWEST_S))
@click.option("-n", "--frames", type=click.IntRange(min=1), help="End after so many looks.")
@common_options
@pass_session
def watch(session: Session, gpus: str, interval: float, frames: int | None) -> None:
    """The same as top."""
    _run(session, gpus, interval, frames)


def _run(session: Session, gpus: str, interval_s: float, frames: int | None) -> None:
    if session.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(session, gpus, interval_s, frames)
    else:
        _show(session, gpus, interval_s, frames)


def _print(session: Session, gpus: str, interval_s: float, frames: int | None) -> None:
    while True:
        report = read_status(session, gpus)
        session.answer(report, [*status_lines(report), ""])
        sys.stdout.flush()
        if frames is not None:
            frames -= 1
            if frames == 0:
                return
        time.sleep(interval_s)
        session.look_again()


def _show(session: Session, gpus: str, interval_s: float, frames: int | None) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise CommandError(
            'the live view needs rich, which is not installed; pip install "zeusd[top]", or pipe '
            "it: zeusctl top | cat"
        ) from None

    from zeusctl.dashboard import Dashboard

    console = Console(no_color=bool(os.environ.get("NO_COLOR")) or None)
    dashboard = Dashboard(session, gpus)
    dashboard.refresh()  # what is wrong is told before the screen is taken
    with (
        _keys() as pressed,
        _resized() as wake,
        Live(
            dashboard.render(console.size), console=console, screen=True, auto_refresh=False
        ) as live,
    ):
        while True:
            key = pressed(interval_s, wake)
            if key in ("q", "Q", "\x03", "\x04", "\x1b"):
                return
            if key != "resize":
                dashboard.refresh()
                if frames is not None:
                    frames -= 1
                    if frames == 0:
                        return
            live.update(dashboard.render(console.size), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float, int], str]]:
    """Single keys from the terminal, without an echo; whatever happens it is as before again."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(timeout_s: float, wake: int) -> str:
        ready, _, _ = select.select([fd, wake], [], [], timeout_s)
        if wake in ready:
            os.read(wake, 64)
            return "resize"
        if fd in ready:
            found = os.read(fd, 1)
            if not found:
                raise CommandError("the terminal is gone", Exit.FAILED)
            return found.decode(errors="replace")
        return ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resized() -> Iterator[int]:
    """A descriptor that is readable after the terminal has another size."""
    reads, writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def resized(number: int, frame: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writes, b"r")

    before = signal.signal(signal.SIGWINCH, resized)
    try:
        yield reads
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(reads)
        os.close(writes)

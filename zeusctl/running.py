"""Runs a command in the foreground, as a shell would."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from zeus_ipc.programs import is_missing
from zeusctl.exits import CommandError, Exit

LOOK_S = 1.0
"""Interval between checks."""


def run(command: Sequence[str], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Runs a command to its end.

    Signals that request this process's end are passed to the command; this process outlives it, to
    restore its leases.

    Args:
        command: Program and arguments.
        meanwhile: Called about once a second.

    Returns:
        Its exit code; 128 and the signal's number if a signal ended it, as shells have it.

    Raises:
        CommandError: It cannot be run.
    """
    with _forwarding() as forward:
        try:
            process = subprocess.Popen(command)
        except OSError as error:
            if is_missing(command[0], error):
                message = f"{command[0]}: command not found; check the name and the PATH"
                raise CommandError(message, Exit.NOT_FOUND, "failed") from None
            message = f"{command[0]}: cannot be executed ({error.strerror})"
            raise CommandError(message, Exit.NOT_EXECUTABLE, "failed") from None
        forward(process)
        while True:
            try:
                code = process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                meanwhile()
            else:
                return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _forwarding() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Passes SIGTERM and SIGHUP on; the terminal sends Ctrl-C to both processes itself."""
    target: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        if not target:
            early.append(number)
        for process in target:
            process.send_signal(number)

    def forward(process: subprocess.Popen[bytes]) -> None:
        target.append(process)
        for number in early:
            process.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    handlers: dict[int, Any] = {signal.SIGTERM: hand_on, signal.SIGHUP: hand_on}
    handlers |= {signal.SIGINT: ignore, signal.SIGQUIT: ignore}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Ending(threading.Event):
    """Set when an end is requested.

    Attributes:
        code: The exit
        code: `INTERRUPTED` for Ctrl-C, else success.
    """

    code = Exit.OK

    def asked(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if number == signal.SIGINT:
            self.code = Exit.INTERRUPTED
        self.set()


@contextlib.contextmanager
def asked_to_end() -> Iterator[Ending]:
    """Returns an event that Ctrl-C, SIGTERM and SIGHUP set."""
    ended = Ending()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ended.asked) for number in numbers}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

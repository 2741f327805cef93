"""Runs a command in the foreground, as a shell would."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from zeusctl.exits import CommandError, Exit

_LOOK_S = 1.0


def run(command: Sequence[str], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Runs a command to its end.

    Signals that ask this process to end are the command's; this process outlives it, to put back
    what it holds.

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
        except FileNotFoundError:
            message = f"{command[0]}: no such command; check the name and the PATH"
            raise CommandError(message, Exit.NOT_FOUND, "failed") from None
        except OSError as error:
            message = f"{command[0]}: cannot be executed ({error.strerror})"
            raise CommandError(message, Exit.NOT_EXECUTABLE, "failed") from None
        forward(process)
        while True:
            try:
                code = process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                meanwhile()
            else:
                return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _forwarding() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Hands SIGTERM and SIGHUP on; the terminal gives Ctrl-C to both processes by itself."""
    target: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in target:
            process.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    handlers: dict[int, Any] = {signal.SIGTERM: hand_on, signal.SIGHUP: hand_on}
    handlers |= {signal.SIGINT: ignore, signal.SIGQUIT: ignore}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield target.append
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def until_interrupted(meanwhile: Callable[[], None] = lambda: None) -> None:
    """Waits for Ctrl-C, SIGTERM or SIGHUP."""
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        while signal.sigtimedwait(ends, _LOOK_S) is None:
            meanwhile()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)

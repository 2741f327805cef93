"""Runs a command in the foreground, as a shell would."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from zeus_common.processes import is_missing
from zeusctl.exits import CommandError, Exit

if TYPE_CHECKING:
    from zeusctl.session import Session

_OWN = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_OWN |= {signal.SIGTTIN, signal.SIGTTOU, signal.SIGKILL, signal.SIGSTOP}
"""Signals that are about this process itself, or cannot be caught."""

_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores; the command must not."""

_OF_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def run(command: Sequence[str]) -> int:
    """Runs a command to its end.

    Every signal that reaches this process reaches the command, once. This process outlives it, to
    restore its leases, and stops and continues with it.

    Returns:
        Its exit code; 128 and the signal's number if a signal ended it, as shells have it.

    Raises:
        CommandError: It cannot be run.
    """
    with _caught() as woken:
        job = _spawn(command)
        witness = _Witness()  # knows no signal that came before the job: these are passed on
        try:
            while True:
                select.select([woken], [], [])
                numbers = [*filter(signal.SIGCHLD.__ne__, os.read(woken, 4096))]
                if numbers:
                    # Time for a signal to reach all processes that it is sent to.
                    time.sleep(0.02)
                    witness = _pass_on(job, numbers, witness)
                ended, status = os.waitpid(job, os.WNOHANG | os.WUNTRACED)
                if not ended:
                    continue
                if not os.WIFSTOPPED(status):
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
                if os.WSTOPSIG(status) in _OF_TERMINAL:
                    os.kill(os.getpid(), signal.SIGSTOP)  # so that the shell sees it
        finally:
            witness.end()


def without(
    session: Session, command: Sequence[str], what: str, error: Exception, best_effort: bool
) -> NoReturn:
    """Ends a verb that failed before its command ran.

    Args:
        what: What is not done, if the command runs all the same.
        best_effort: Whether it does.

    Raises:
        CommandError: It does not; the exit code is one that the command cannot have.
    """
    message = session.readable(str(getattr(error, "message", None) or error))
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    if not best_effort:
        code = str(getattr(error, "code", "failed"))
        raise CommandError(message, code, Exit.NOT_RUN) from None
    session.close()  # GPUs that were already set are restored
    click.echo(f"zeusctl: warning: {what} ({message}); running the command anyway", err=True)
    click.get_current_context().exit(run(command))


def _spawn(command: Sequence[str]) -> int:
    """Starts a command with all that this process has inherited. Returns its pid."""
    try:
        return os.posix_spawnp(command[0], [*command], os.environ, setsigdef=_RESTORED)
    except OSError as error:
        if is_missing(command[0], error):
            why, code = "command not found; check the name and the PATH", Exit.NOT_FOUND
        else:
            why, code = f"cannot be executed ({error.strerror})", Exit.NOT_EXECUTABLE
        raise CommandError(f"{command[0]}: {why}", exit_code=code) from None


def _pass_on(job: int, numbers: Sequence[int], witness: _Witness) -> _Witness:
    """Passes signals to the job that did not reach it by themselves. Returns the next witness."""
    following = _Witness()
    reached = witness.received() if os.getpgid(job) == os.getpgrp() else set()
    witness.end()
    for number in numbers:
        if number not in reached:
            with contextlib.suppress(PermissionError):  # it is root's, as sudo is
                os.kill(job, number)  # it is waited for later, so the pid is the job's
    return following


@contextlib.contextmanager
def _caught() -> Iterator[int]:
    """Catches all signals that are not ignored, as after `nohup`. Returns a pipe with the number of
    each, and of SIGCHLD, as bytes."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before_fd = signal.set_wakeup_fd(wakes)
    before: dict[int, Any] = {}
    try:
        for number in (signal.valid_signals() - _OWN) | {signal.SIGCHLD}:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                before[number] = signal.signal(number, lambda *_: None)
        yield woken
    finally:
        for old, handler in before.items():
            signal.signal(old, signal.SIG_DFL if handler is None else handler)
        os.close(signal.set_wakeup_fd(before_fd))
        os.close(woken)


class _Witness:
    """A process beside the command that keeps all signals pending, so that one sent to both of us
    can be told from one sent to this process alone: the terminal, a service manager, and a batch
    system send it to all processes, and the command must not get it twice.
    """

    def __init__(self) -> None:
        reads, self._writes = os.pipe2(os.O_CLOEXEC)
        actions = [
            (os.POSIX_SPAWN_DUP2, reads, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ]
        every = signal.valid_signals()
        try:
            # It ends with the pipe, and so with this process.
            self._pid = os.posix_spawnp("cat", ["cat"], {}, file_actions=actions, setsigmask=every)
        except OSError:
            self._pid = 0
        os.close(reads)

    def received(self) -> set[int]:
        """Numbers of the signals that it has received."""
        pending = 0
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
                if line.startswith(("SigPnd:", "ShdPnd:")):
                    pending |= int(line.split()[1], 16)
        return {number for number in signal.valid_signals() if pending >> (number - 1) & 1}

    def end(self) -> None:
        """Ends it."""
        os.close(self._writes)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


class Ending(threading.Event):
    """Set when an end is requested.

    Attributes:
        code: The exit code: `INTERRUPTED` for Ctrl-C, else success.
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

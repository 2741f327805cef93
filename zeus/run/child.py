"""A training script as a process: its output goes to a file, and to the console as it comes."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from zeus_common.processes import is_missing

POLL_S = 0.2
"""Interval at which its output is read."""
TAIL_LINES = 15
"""Number of lines shown of the output of a failed script."""
_TAIL_BYTES = 20_000
_PATIENCE_S = 10.0


def run_script(
    command: Sequence[str],
    env: Mapping[str, str],
    workdir: str | None,
    log_path: Path,
) -> int:
    """Runs a script to its end, and prints what it prints.

    It does not outlive this function: an error here, such as KeyboardInterrupt, ends it, too. If
    this process is killed, it keeps running; see `follow`.

    Args:
        env: The whole environment.
        workdir: Where it runs; None: here.
        log_path: File that gets its standard output and standard error.

    Returns:
        Its exit code; negative: the signal that killed it.

    Raises:
        RuntimeError: It cannot be started; one sentence says why.
        OSError: The log cannot be written.
    """
    with log_path.open("wb") as log, log_path.open("ab") as lock:
        # The script inherits the lock, which ends with its last process: see `still_trains`.
        with contextlib.suppress(BlockingIOError):  # a process of an earlier try has it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            process = subprocess.Popen(
                command,
                cwd=workdir,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
            )
        except OSError as error:
            reason = error.strerror
            path = os.pathsep.join(os.get_exec_path(env))
            # The missing file may be its folder.
            by_name = error.filename == command[0] and not os.path.dirname(command[0])
            if by_name and is_missing(command[0], error, path):
                reason = "command not found"
            raise RuntimeError(
                f"the command {' '.join(command)!r} cannot be started in {workdir or Path.cwd()} "
                f"({reason}: {error.filename})"
            ) from None
        with _ended_in_the_end(process):
            follow(lambda: _runs(process), log_path, os.SEEK_SET, 0.0)
            return process.wait()


def still_trains(log_path: Path) -> bool:
    """Whether a script that `run_script` started runs, perhaps for a process that was killed."""
    try:
        with log_path.open("r+b") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def follow(
    alive: Callable[[], bool], log_path: Path, begin: int = os.SEEK_END, pause_s: float = POLL_S
) -> None:
    """Prints the output of a script until it ends.

    Args:
        alive: Whether it runs.
        begin: `os.SEEK_SET` to print all of it, `os.SEEK_END` without its present contents.
        pause_s: Time from one look to the next, besides that which `alive` takes, s.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with log_path.open("rb") as output:
        output.seek(0, begin)
        runs = True
        while runs:
            runs = alive()
            if runs:
                time.sleep(pause_s)
            text = decoder.decode(output.read(), not runs)
            if text:
                print(text, end="", flush=True)


def _runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


@contextlib.contextmanager
def _ended_in_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def how_it_ended(exit_code: int) -> str:
    """Describes an exit code."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    more = " (perhaps out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{more}"


def tail(log_path: Path) -> str:
    """Returns the last lines of a log, indented."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"    ({error})"
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"

"""Python programs in processes that are forked after their slowest imports.

For tests in which the start of a process is not the point: `import torch` alone takes a second, in
each of a job's ranks, and imports are most of what a `zeusd` in a test computes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.preloaded.protocol import ask, hold, integer

SERVER = (
    "import runpy\n"
    f"runpy.run_path({str(Path(__file__).with_name('server.py'))!r}, run_name='__main__')"
)
"""Such a process has the command line of `python -c`, by which zeusd names it and its programs."""

STAND_IN = Path(__file__).with_name("stand_in.py")


SHARED = "ZEUSD_TEST_SHARED"
"""Environment variable: a folder that all workers of a test run have."""


@functools.cache
def preloaded(*modules: str, env: tuple[tuple[str, str], ...] = ()) -> Preloaded:
    """Starts programs with these modules for all tests of all workers."""
    folder = os.environ.get(SHARED)
    found = Preloaded(*modules, env=dict(env), shared=Path(folder) if folder else None)
    atexit.register(found.close)
    return found


class Preloaded:
    """Starts Python programs, each in its own process.

    Args:
        modules: What all of them import. Modules of this project come from the working directory.
        env: Further environment of these modules.
        shared: A folder where tests of other workers find what this has imported, and this finds
            what they have.

    Attributes:
        python: Path of what does for a script, for `-c` or for `-m torch.distributed.run`, what
            Python does: any program may start it, signal it, and wait for it. It is
            `sys.executable` in the programs that it runs, if PyTorch is among the modules.
    """

    def __init__(
        self, *modules: str, env: Mapping[str, str] | None = None, shared: Path | None = None
    ) -> None:
        environment = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._holder: IO[bytes] | socket.socket
        if shared is None:
            folder = self._start(modules, environment)
        else:
            key = repr((modules, environment, os.getcwd()))
            note = shared / f"preloaded-{hashlib.sha256(key.encode()).hexdigest()}"
            folder = self._find_or_start(note, modules, environment)
        self._socket = os.path.join(folder, "socket")
        self.python = os.path.join(folder, "python")

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`.

        Args:
            arguments: `SCRIPT.py`, `-m MODULE` or `-c CODE`, and what it is given.
            options: See `start`.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self.start(*arguments, stdout=out, stderr=err, **options).wait()
            output, errors = (_text(one) for one in (out, err))
        return subprocess.CompletedProcess([*arguments], code, output, errors)

    def start(self, *arguments: str, **options: Any) -> Program:
        """Like `subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, ...)`.

        Args:
            arguments: See `run`.
            options: Those of `subprocess.Popen` for the pipes, folder and environment.
        """
        command = [self._socket, self.python, *arguments]
        return Program(command, **{"stdin": subprocess.DEVNULL, **options})

    def close(self) -> None:
        """The server ends when nobody else holds it, and with it the programs that it runs."""
        self._holder.close()

    def _start(self, modules: Sequence[str], env: Mapping[str, str]) -> str:
        """Starts a server. Returns its folder, which it removes when it ends."""
        folder = tempfile.mkdtemp(prefix="preloaded-")
        os.chmod(folder, 0o755)
        path, python = os.path.join(folder, "socket"), os.path.join(folder, "python")
        command = shlex.join([sys.executable, "-IS", str(STAND_IN), path, python])
        # Another user's program is that user's own: the server would run it as this one's.
        own = shlex.join(["test", "-w", path, "-a", "-r", str(STAND_IN)])
        plain = shlex.quote(sys.executable)
        Path(python).write_text(f'#!/bin/sh\n{own} || exec {plain} "$@"\nexec {command} "$@"\n')
        os.chmod(python, 0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, path, *modules],
            # PyTorch reads this when it is imported: it warns where no DNS answers.
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_as_from_a_shell,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "what is to be preloaded cannot be imported"
        self._process.stdout.close()
        self._holder = self._process.stdin
        return folder

    def _find_or_start(self, note: Path, modules: Sequence[str], env: Mapping[str, str]) -> str:
        """Holds the server whose folder is noted, or starts it."""
        with note.open("a+") as noted:
            fcntl.flock(noted, fcntl.LOCK_EX)
            noted.seek(0)
            folder = noted.read()
            with contextlib.suppress(OSError):
                self._holder = hold(os.path.join(folder, "socket"))
                return folder
            noted.truncate(0)
            noted.write(self._start(modules, env))
            noted.flush()
            return note.read_text()


def _as_from_a_shell() -> None:
    """No signal is ignored or blocked, as tests before may have left some in this worker."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


class Program(subprocess.Popen[Any]):
    """A program of a server; it is killed when nothing refers to this, or this process ends."""

    stdin: IO[Any]
    stdout: IO[Any]
    stderr: IO[Any]

    def _execute_child(self, command: list[str], *given: Any) -> None:
        """Starts it; all else of a process that forks one is the same."""
        path, python, *arguments = command
        cwd, env, pipes = given[4], given[5], given[9:15]
        ends = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
        self._server = ask(
            *(path, python, arguments, str(cwd or os.getcwd()), os.environ if env is None else env),
            {number: number if end == -1 else end for number, end in ends.items()},
        )
        self.pid = integer(self._server)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # typeshed lacks it

    def __del__(self) -> None:
        """Nothing: the server kills it, and waits for it."""

    def poll(self) -> int | None:
        """See `subprocess.Popen.poll`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen.wait`."""
        if self.returncode is None:
            most_s = None if timeout is None else max(timeout, 0)
            if not select.select([self._server], [], [], most_s)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = os.waitstatus_to_exitcode(integer(self._server))
            self._server.close()
        return self.returncode

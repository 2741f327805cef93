"""Python programs in processes that are forked after the imports which take them longest.

For tests in which the start of a process is not the point: `import torch` alone takes a second, in
each of a job's ranks. What is preloaded is third parties'; the project's own packages are imported
by each program as usual.

    python preloaded.py --serve SOCKET MODULE ...     imports the modules, and waits for programs
    python preloaded.py --run SOCKET SCRIPT.py ...    is the program for whoever has started it
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

FILE = Path(__file__).resolve()
FORWARDED = (signal.SIGTERM, signal.SIGINT)
_INTEGER = struct.Struct("i")


class Preloaded:
    """Starts Python programs, each in a process of its own.

    Args:
        modules: What all of them import.
        env: Further environment of these modules.

    Attributes:
        python: Path of what does for a script, or for `-m torch.distributed.run`, what Python does:
            any program may start it, signal it, and wait for it. It is `sys.executable` in each
            program that it runs.
    """

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        self._socket = os.path.join(self._folder.name, "socket")
        self.python = os.path.join(self._folder.name, "python")
        self._process = subprocess.Popen(
            [sys.executable, str(FILE), "--serve", self._socket, *modules],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.PIPE,  # its end is that of whoever started it
            stdout=subprocess.PIPE,
        )
        command = shlex.join([sys.executable, "-IS", str(FILE), "--run", self._socket])
        Path(self.python).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        os.chmod(self.python, 0o755)
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "what is to be preloaded cannot be imported"

    def run(
        self, *arguments: str, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`.

        Args:
            arguments: `SCRIPT.py` or `-m MODULE`, and what it is given.
            cwd: Where it runs.
            env: Its whole environment.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with open(os.devnull) as nothing, socket.socket(socket.AF_UNIX) as server:
                server.connect(self._socket)
                files = [one.fileno() for one in (nothing, out, err)]
                _ask(server, self.python, [*arguments], str(cwd), {**env}, files)
                status = _status(server)
            output, errors = (_text(one) for one in (out, err))
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess([*arguments], code, output, errors)

    def close(self) -> None:
        """Ends it, and the programs that it runs, if any."""
        self._process.terminate()
        self._process.communicate()
        self._folder.cleanup()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def _ask(
    server: socket.socket,
    python: str,
    arguments: list[str],
    cwd: str,
    env: dict[str, str],
    files: list[int],
) -> None:
    """Has the server start a program with this standard input, output and error."""
    request = {"python": python, "arguments": arguments, "cwd": cwd, "env": env}
    data = json.dumps(request).encode()
    socket.send_fds(server, [_INTEGER.pack(len(data))], files)
    server.sendall(data)


def _status(server: socket.socket) -> int:
    """How a program ended, as `waitpid` says."""
    data = server.recv(_INTEGER.size)
    assert data, "what starts programs has ended"
    return int(_INTEGER.unpack(data)[0])


# ----------------------------------------------------------------- in the place of a Python program


def _stand_in(path: str, arguments: list[str]) -> None:
    """Has the server run a program, and lives and dies as that does."""
    plain = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if not plain or not (plain[0].endswith(".py") or plain[:2] == ["-m", "torch.distributed.run"]):
        os.execv(sys.executable, [sys.executable, *arguments])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        python = os.path.join(os.path.dirname(path), "python")
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        _ask(server, python, plain, os.getcwd(), {**os.environ}, [0, 1, 2])
        for number in FORWARDED:
            signal.signal(number, lambda number, _: server.send(_INTEGER.pack(number)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        status = _status(server)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


# --------------------------------------------------------------------------------- what forks them


def _serve(path: str, modules: list[str]) -> list[str]:
    """Forks a child for each request. Returns in the child, with the arguments of its program."""
    sys.path[0] = os.path.dirname(path)  # not that of this file, where other packages are
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child that looked through it for garbage would copy it
    programs: dict[int, socket.socket] = {}

    def end(*_: Any) -> None:
        for pid in programs:
            _kill(pid)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    with socket.socket(socket.AF_UNIX) as door, selectors.DefaultSelector() as selector:
        door.bind(path)
        door.listen()
        selector.register(door, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ, end)
        os.write(1, b"ready\n")
        while True:
            for key, _ in selector.select():
                if key.fileobj is door:
                    client, _ = door.accept()
                    request, files = _request(client)
                    pid = os.fork()
                    if pid == 0:
                        client.close()
                        break
                    for file in files:
                        os.close(file)
                    programs[pid] = client
                    _watch(selector, programs, pid, client)
                else:
                    key.data()
            else:
                continue
            break
        # The child: of the server it keeps nothing but the modules.
        for one in programs.values():
            one.close()
        for key in [*selector.get_map().values()]:
            if key.fileobj is not door and key.fd > 2 and isinstance(key.fileobj, int):
                os.close(key.fd)
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return _become(request, files)


def _watch(
    selector: selectors.BaseSelector, programs: dict[int, socket.socket], pid: int, client: Any
) -> None:
    """Tells the client when its program ends, and the program what the client is told."""
    pidfd = os.pidfd_open(pid)

    def ended() -> None:
        status = os.waitpid(pid, 0)[1]
        selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(KeyError):  # a client that has gone is no longer watched
            selector.unregister(client)
        with contextlib.suppress(OSError):
            client.sendall(_INTEGER.pack(status))
        programs.pop(pid).close()

    def said() -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = client.recv(_INTEGER.size)
        if data:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _INTEGER.unpack(data)[0])
        else:
            selector.unregister(client)
            _kill(pid)

    selector.register(pidfd, selectors.EVENT_READ, ended)
    selector.register(client, selectors.EVENT_READ, said)


def _kill(pid: int) -> None:
    """Kills a program, and what it has started and left in its group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _request(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, files, _, _ = socket.recv_fds(client, _INTEGER.size, 3)
    data = b""
    while len(data) < _INTEGER.unpack(size)[0]:
        data += client.recv(1 << 16)
    return json.loads(data), files


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """This process gets what a new one is started with. Returns its arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    modules = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [os.path.abspath(one) for one in modules]
    sys.executable = request["python"]
    arguments: list[str] = request["arguments"]
    return arguments


def _program(arguments: list[str]) -> None:
    """What Python does with its arguments."""
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _exit_code(arguments: list[str]) -> int:
    """Runs the program. Returns what it ends with."""
    try:
        _program(arguments)
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """What Python does at its end, but that it frees nothing: of all these modules that takes as
    long as it took to import them.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    order, path, *given = sys.argv[1:]
    if order == "--run":
        _stand_in(path, given)
    else:
        _end(_exit_code(_serve(path, given)))

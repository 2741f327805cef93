"""Imports modules, and forks a process for each requested program.

    python server.py SOCKET MODULE ...

It runs until its standard input is closed and nobody else holds it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[2])
from tests.preloaded.protocol import INTEGER, move, request  # noqa: E402 - found by the line above

for _name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
    del sys.modules[_name]  # a program may have other tests: those of a copy

Asked = tuple[dict[str, Any], list[int]]
"""A request, and the open files that came with it."""


class Server:
    """Forks programs, and reports their exit codes to the clients.

    Args:
        door: The socket, which listens.
    """

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._programs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)
        self._holders: set[Any] = set()
        self._hold(sys.stdin)

    def serve(self) -> Asked | None:
        """Returns in each child with its program; returns None when no client is left."""
        child = False
        try:
            while self._holders:
                for key, _ in self._selector.select():
                    if key.fileobj is not self._door:
                        key.data()
                    elif (asked := self._accept()) is not None:
                        child = True
                        return asked
            return None
        finally:
            if not child:
                for pid in self._programs:
                    kill(pid)

    def _accept(self) -> Asked | None:
        """Returns in the child."""
        client, _ = self._door.accept()
        asked = request(client)
        if asked is None:
            self._hold(client)
            return None
        pid = os.fork()
        if pid == 0:
            client.close()
            self._forget()
            return asked
        for file in asked[1]:
            os.close(file)
        self._watch(pid, client)
        return None

    def _forget(self) -> None:
        """Of the server a child keeps nothing but the modules."""
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _hold(self, holder: Any) -> None:
        def leave() -> None:
            self._selector.unregister(holder)
            self._holders.remove(holder)

        self._holders.add(holder)
        self._selector.register(holder, selectors.EVENT_READ, leave)
        if isinstance(holder, socket.socket):
            _say(holder, 0)

    def _watch(self, pid: int, client: socket.socket) -> None:
        """Reports the end of a program to the client, and passes the client's signals to it."""
        self._programs[pid] = client
        pidfd = os.pidfd_open(pid)

        def ended() -> None:
            status = os.waitpid(pid, 0)[1]
            self._selector.unregister(pidfd)
            os.close(pidfd)
            with contextlib.suppress(KeyError):  # a client that has gone is no longer watched
                self._selector.unregister(client)
            _say(client, status)
            self._programs.pop(pid).close()

        def said() -> None:
            if pid not in self._programs:
                return  # it ended and the client hung up at once
            data = b""
            with contextlib.suppress(OSError):
                data = client.recv(INTEGER.size)
            if data:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, INTEGER.unpack(data)[0])
            else:
                self._selector.unregister(client)
                kill(pid)

        self._selector.register(pidfd, selectors.EVENT_READ, ended)
        self._selector.register(client, selectors.EVENT_READ, said)
        _say(client, pid)


def _say(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        client.sendall(INTEGER.pack(number))


def kill(pid: int) -> None:
    """Kills a program, and the processes that it left in its group."""
    for signaled in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            signaled(pid, signal.SIGKILL)


# ----------------------------------------------------------------------------- what a child becomes


def become(asked: dict[str, Any], files: list[int]) -> list[str]:
    """Sets up this process as a new one. Returns its arguments."""
    os.setpgid(0, 0)
    move(dict(zip(asked["files"], files, strict=True)))
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    modules = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [os.path.abspath(one) for one in modules]
    if "torch" in sys.modules:  # others know the processes that they start by their IDs
        sys.executable = asked["python"]
    if "multiprocessing.spawn" in sys.modules:  # notes both when it is imported
        multiprocessing = importlib.import_module("multiprocessing")
        multiprocessing.set_executable(sys.executable)
        multiprocessing.process.ORIGINAL_DIR = asked["cwd"]
    arguments: list[str] = asked["arguments"]
    return arguments


def run(arguments: list[str]) -> None:
    """What Python does with its arguments."""
    first, *others = arguments
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *others[1:]]
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *others[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(others[0], main.__dict__)  # that is what -c is
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def exit_code(arguments: list[str]) -> int:
    """Runs the program. Returns its exit code."""
    try:
        run(arguments)
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code: int) -> NoReturn:
    """What Python does at its end, but that it frees nothing: of all these modules that takes as
    long as it took to import them.
    """
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def main(path: str, *modules: str) -> NoReturn:
    """Imports the modules, and serves."""
    sys.path[0] = os.getcwd()
    gc.disable()  # nothing that is imported is garbage
    for name in modules:
        importlib.import_module(name)
    sys.path[0] = os.path.dirname(path)  # a folder without modules
    gc.collect()
    gc.freeze()  # a child that collected it would copy it
    gc.enable()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        os.write(1, b"ready\n")
        asked = Server(door).serve()
    if asked is None:
        shutil.rmtree(os.path.dirname(path))
        os._exit(0)
    end(exit_code(become(*asked)))


if __name__ == "__main__":
    main(*sys.argv[1:])

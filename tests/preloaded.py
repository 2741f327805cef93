"""Python programs in processes that are forked after the imports which take them longest.

For tests in which the start of a process is not the point: `import torch` alone takes a second, in
each of a job's ranks. What is preloaded is third parties'; the project's own packages are imported
by each program as ever.

    python preloaded.py --ranks N SCRIPT.py ...   what torchrun does for a job on one node
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve()


class Preloaded:
    """Runs Python programs one by one, each in a process of its own.

    Args:
        modules: What all of them import.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(FILE), "--serve", *modules],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: str, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`.

        Args:
            arguments: `SCRIPT.py` or `-m MODULE`, or `--ranks N` before either, and what it is
                given.
            cwd: Where it runs.
            env: Its whole environment.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            request = {"arguments": arguments, "cwd": str(cwd), "env": {**env}, "files": files}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, f"what starts programs ended with {self._process.wait()}"
            output, errors = (Path(file).read_text(errors="replace") for file in files)
        return subprocess.CompletedProcess([*arguments], int(answer), output, errors)

    def close(self) -> None:
        """Ends it, and the program that it runs, if any."""
        self._process.terminate()
        self._process.communicate()


def _serve(modules: list[str]) -> list[str]:
    """Forks a child for each request. Returns in the child, with the arguments of its program."""
    for name in modules:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    child = 0

    def end(*_: Any) -> None:
        if child:
            os.killpg(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            answers.close()
            return _become(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        print(code, file=answers, flush=True)
    os._exit(0)


def _become(request: dict[str, Any]) -> list[str]:
    """This process gets what a new one is started with. Returns its arguments."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number, file in enumerate(request["files"], start=1):
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, number)
        os.close(target)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    modules = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [os.path.abspath(one) for one in modules]
    arguments: list[str] = request["arguments"]
    return arguments


def _as_ranks(count: int) -> None:
    """Forks a process for each rank, and returns in those; the parent ends with them."""
    told, tell = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            port = os.read(told, 5).decode()
            os.close(told)
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count))
            places = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            os.environ.update(sizes | places)
            os.environ.update(GROUP_RANK="0", GROUP_WORLD_SIZE="1")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port.strip())
            os.environ.update(TORCHELASTIC_RUN_ID="preloaded", TORCHELASTIC_RESTART_COUNT="0")
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
            return
        ranks[pid] = rank
    from torch.distributed import TCPStore

    # As torchrun has it: the store is its own, so that no rank's end ends it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(count):
        os.write(tell, f"{store.port:5d}".encode())

    def end(*_: Any) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            print(f"rank {rank} ended with exit code {code}", file=sys.stderr, flush=True)
            end()
    os._exit(0)


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


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[0] == "--serve":
        given = _serve(given[1:])
    if given[0] == "--ranks":
        importlib.import_module("torch.distributed")
        _as_ranks(int(given[1]))
        given = given[2:]
    _program(given)

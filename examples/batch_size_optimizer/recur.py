"""Runs a job repeatedly, as a scheduler would, and shows the best batch size.

    python recur.py                 # trials in a file
    python recur.py --server        # trials on a server, which this program starts

Each run is a separate process of `train.py`. Without ZEUSD_SOCK_PATH, a simulated node with one
V100 is started, and stopped at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

HERE = Path(__file__).parent
START_TIMEOUT_S = 60.0
JOB_ID = "toy"


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops node and server, too
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recur-")))
        folder.mkdir(parents=True, exist_ok=True)
        if "ZEUSD_SOCK_PATH" not in os.environ:
            os.environ["ZEUSD_SOCK_PATH"] = str(folder / "zeusd.sock")
            stack.enter_context(node(folder))
        database = folder / "bso.db"
        kept = ["--store", str(database)]
        if options.server:
            kept = ["--server-url", stack.enter_context(server(database, folder))]
        seed = [] if options.seed is None else ["--seed", str(options.seed)]
        for number in range(1, options.recurrences + 1):
            print(f"recurrence {number} of {options.recurrences}", flush=True)
            python("train.py", "--job-id", JOB_ID, *kept, *seed)
        python("-m", "zeus.optimizer.batch_size", "show", JOB_ID, "--db", str(database))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--recurrences", type=int, default=12, help="number of runs (12)")
    add("--server", action="store_true", help="store the trials on a server")
    add("--seed", type=int, help="make the choice of batch sizes reproducible")
    add("--folder", type=Path, help="keep trials and logs in this folder")
    return parser.parse_args()


def python(*arguments: str) -> None:
    """Runs a command, and exits if it fails."""
    command = [sys.executable, *arguments]
    if arguments[0] == "train.py":
        command[1] = str(HERE / "train.py")
    code = subprocess.run(command).returncode
    if code:
        fail(f"{shlex.join(command)} has failed with exit code {code}; see above")


@contextlib.contextmanager
def node(folder: Path) -> Iterator[None]:
    """A zeusd with a simulated V100."""
    path = os.environ["ZEUSD_SOCK_PATH"]
    command = ["-m", "zeusd", "serve", "--simulate", "1xv100-pcie", "--socket", path]
    command += ["--state-dir", str(folder / "state")]

    def answers() -> bool:
        try:
            with Client(path, timeout_s=1.0) as client:
                return bool(client.node().gpus)
        except ZeusIpcError:
            return False

    with started(command, folder / "zeusd.log", answers):
        yield


@contextlib.contextmanager
def server(database: Path, folder: Path) -> Iterator[str]:
    """Starts a batch size server, and returns its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "zeus.optimizer.batch_size", "serve", "--db", str(database), "--port", port]

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=1.0):
                return True
        except OSError:
            return False

    with started(command, folder / "server.log", answers):
        print(f"the server's page: {url}", flush=True)
        yield url


@contextlib.contextmanager
def started(command: list[str], log_path: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """Starts a program in the background, and waits until it answers."""
    with log_path.open("wb") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
    try:
        ends = time.monotonic() + START_TIMEOUT_S
        while not answers():
            if process.poll() is not None or time.monotonic() > ends:
                fail(f"python {shlex.join(command)} did not start: {log_path.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def fail(sentence: str) -> NoReturn:
    """Stops the program."""
    print(f"recur.py: {sentence}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()

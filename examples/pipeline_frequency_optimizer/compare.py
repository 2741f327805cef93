"""Runs all steps on simulated GPUs: profile, plan, server, and training without and with the plan.

    python compare.py

Each step is a command that is printed before it runs; the README lists them. Without
ZEUSD_SOCK_PATH, a simulated node with four A100s is started, and stopped at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

HERE = Path(__file__).parent
START_TIMEOUT_S = 60.0
STAGES = 4
APP = "zeus.optimizer.pipeline_frequency.server.router:app"


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops node and server, too
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline-")))
        folder.mkdir(parents=True, exist_ok=True)
        if "ZEUSD_SOCK_PATH" not in os.environ:
            stack.enter_context(node(folder))
        profile, plans, p2p = folder / "profile.csv", folder / "plans", str(options.p2p_power)
        measured = ("--gpu", gpu_model(), "--num-stages", STAGES, "--scale", options.scale)
        python("measured_profile.py", *measured, profile)
        if options.p2p_power is None:
            p2p = str(folder / "p2p.json")
            python("profile_p2p.py", "--backend", "gloo", "--duration", 5, "--output", p2p)
        shape = ["--num-mbs", options.num_mbs]
        python(
            "run_optimization.py",
            *("--inst-profile", profile, "--output-dir", plans, *shape),
            *("--num-stages", STAGES, "--p2p-power", p2p, "--points", 20, "--plot-interval", 0),
        )
        fastest = max(plans.glob("freqs_pipeline_*.py"))  # the last one is as fast as full clocks
        url = stack.enter_context(server(fastest, folder))
        torchrun = ("-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d")
        torchrun += ("--local-addr", "127.0.0.1")
        training = ["--simulate", profile, "--server-url", url, "--plan", fastest, *shape]
        training += ["--device", "cpu", "--iterations", options.iterations]
        training += [] if options.output is None else ["--output", options.output]
        python(
            *(*torchrun, "--rdzv-endpoint", "127.0.0.1:0", "--nproc_per_node", STAGES),
            *(HERE / "train_pipeline.py", *training),
        )


def parse() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--num-mbs", type=int, default=8, help="microbatches per iteration (8)")
    add("--iterations", type=int, default=4, help="iterations to measure in each case (4)")
    scale_help = "scale of the profile's times and energies; 10 is a whole stage of GPT-3 (4)"
    add("--scale", type=float, default=4.0, help=scale_help)
    add("--p2p-power", type=float, help="W, instead of measuring it")
    add("--folder", type=Path, help="keep profile and plans in this folder")
    add("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    if options.num_mbs < STAGES:
        fail(f"--num-mbs must be at least {STAGES}, one for each stage, not {options.num_mbs}")
    if options.folder is not None and (options.folder / "plans").exists():
        fail(f"there are plans in {options.folder}; choose an empty folder")
    options.folder = options.folder and options.folder.resolve()
    options.output = options.output and options.output.resolve()
    return options


def python(*arguments: object) -> None:
    """Runs a command, and exits if it fails."""
    command = [sys.executable, *map(str, arguments)]
    shown(command)
    with subprocess.Popen(command, cwd=HERE, env=environment()) as process:
        try:
            code = process.wait()
        except BaseException:
            stop(process)
            raise
    if code:
        fail(f"{command[1]} has failed with exit code {code}; see above")


@contextlib.contextmanager
def node(folder: Path) -> Iterator[None]:
    """A zeusd with four simulated A100s."""
    socket = folder / "zeusd.sock"
    command = [sys.executable, "-m", "zeusd", "serve", "--simulate", f"{STAGES}xa100"]
    command += ["--socket", str(socket), "--state-dir", str(folder / "state")]
    shown(command)
    with (folder / "zeusd.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    os.environ["ZEUSD_SOCK_PATH"] = str(socket)
    try:
        ends = time.monotonic() + START_TIMEOUT_S
        while not answers(socket):
            if process.poll() is not None or time.monotonic() > ends:
                fail(f"zeusd did not start; see {folder / 'zeusd.log'}")
            time.sleep(0.05)
        yield
    finally:
        del os.environ["ZEUSD_SOCK_PATH"]
        stop(process)


def answers(socket: Path) -> bool:
    """Whether a zeusd answers at this socket."""
    try:
        with Client(str(socket), timeout_s=1.0) as client:
            return len(client.node().gpus) >= STAGES
    except ZeusIpcError:
        return False


def gpu_model() -> str:
    """Returns the kind of the simulated GPUs, as in the names of their profiles."""
    try:
        with Client() as client:
            found = client.node()
    except ZeusIpcError as error:
        fail(str(error))
    if found.simulated is None or len(found.gpus) < STAGES:
        fail(f"this needs {STAGES} simulated GPUs: zeusd serve --simulate {STAGES}xa100")
    return "a40" if "A40" in found.gpus[0].name else "a100"


@contextlib.contextmanager
def server(plan: Path, folder: Path) -> Iterator[str]:
    """Starts the server on a free port, and returns its URL."""
    arguments = {"ZEUS_PFO_SCHEDULER_ARGS": json.dumps({"solution_path": str(plan)})}
    arguments["ZEUS_PFO_DATABASE"] = ":memory:"
    command = [sys.executable, "-m", "uvicorn", APP, "--host", "127.0.0.1", "--port", "0"]
    command.append("--no-access-log")
    shown(command, arguments)
    process = subprocess.Popen(
        command, cwd=folder, env=environment(**arguments), stderr=subprocess.PIPE, text=True
    )
    try:
        yield address(process)
    finally:
        stop(process)


def address(process: subprocess.Popen[str]) -> str:
    """Reads the address from the server's log."""
    assert process.stderr is not None
    said = ""
    found = None
    while found is None:
        line = process.stderr.readline()
        if not line:
            fail(f"the server did not start: {said.strip()}")
        said += line
        found = re.search(r"running on (http://\S+)", line)
    # The rest of the log does not matter, but must be read.
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return found[1]


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Stops the process with SIGTERM, or SIGKILL if it does not end."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment(**more: str) -> dict[str, str]:
    """Limits each process to one thread, since there are more processes than cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def shown(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Prints a command as a user would type it."""
    parts = [f"{name}={shlex.quote(value)}" for name, value in (variables or {}).items()]
    print("$", *parts, "python", *map(shlex.quote, command[1:]), flush=True)


def fail(message: str) -> NoReturn:
    """Exits as argparse does for invalid options."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()

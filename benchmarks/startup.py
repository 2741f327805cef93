"""Measures the start-up time of `zeusctl`, beside an interpreter that does nothing.

    python benchmarks/startup.py [--rounds N]

All in one run, alternating: `python -c pass`, `import click`, the help, `zeusctl status` on a
simulated node of 8 GPUs, and the imports of the library for training jobs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import click": ["-c", "import click"],
    "import zeus_ipc.client": ["-c", "import zeus_ipc.client"],
    "import zeus.monitor": ["-c", "import zeus.monitor"],
    "zeusctl --help": ["-m", "zeusctl", "--help"],
    "zeusctl set --help": ["-m", "zeusctl", "set", "--help"],
    "zeusctl status (8 GPUs)": ["-m", "zeusctl", "status"],
    "zeusctl status --json": ["-m", "zeusctl", "status", "--json"],
    "zeusctl release --job 1": ["-m", "zeusctl", "release", "--job", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "zeusd.sock"))
        command = [sys.executable, "-m", "zeusd", "serve", "--simulate", "8xv100-pcie"]
        command += ["--socket", path, "--state-dir", f"{directory}/state", "--log-level", "error"]
        daemon = subprocess.Popen(command)
        try:
            wait_until_serving(path)
            times = measure(path, rounds)
        finally:
            daemon.terminate()
            daemon.wait()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}\n")
    print("| | median ms | p95 ms | times python -c pass |")
    print("|---|--:|--:|--:|")
    base_s = statistics.median(times["python -c pass"])
    for name, found in times.items():
        median_s = statistics.median(found)
        p95_s = sorted(found)[int(0.95 * (len(found) - 1))]
        print(f"| {name} | {median_s * 1e3:.0f} | {p95_s * 1e3:.0f} | {median_s / base_s:.1f} |")


def wait_until_serving(path: str) -> None:
    while True:
        try:
            with Client(path, timeout_s=1.0) as client:
                client.node()
                return
        except ZeusIpcError:
            time.sleep(0.05)


def measure(path: str, rounds: int) -> dict[str, list[float]]:
    env = {**os.environ, "ZEUSD_SOCK_PATH": path, "PYTHONPYCACHEPREFIX": f"{path}.cache"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], env=env, check=True, stdout=subprocess.DEVNULL
            )
            if turn:  # the first fills caches
                times[name].append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()

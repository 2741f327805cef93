"""The joules of every request, on a simulated node: starts zeusd, the ledger and a small engine.

python quickstart.py --seconds 45
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine import Engine, load

from zeus.serving import Recorder
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError


def main() -> None:
    parser = argparse.ArgumentParser(description="The energy of each request.")
    parser.add_argument("--seconds", type=float, default=45.0, help="of load (45)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second (1.5)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (1)")
    parser.add_argument("--weights", help="of an earlier run, so that a short one has figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        os.environ["ZEUSD_SOCK_PATH"] = str(home / "zeusd.sock")
        os.environ["ZEUS_SERVING_SOCKET"] = str(home / "steps.sock")
        zeusd = ["-m", "zeusd", "serve", "--simulate", "a100", "--state-dir", str(home / "state")]
        zeusd += ["--socket", os.environ["ZEUSD_SOCK_PATH"], "--log-level", "warning"]
        stack.enter_context(running(zeusd))
        node = wait_for_node()
        log = home / "requests.jsonl"
        serve = ["-m", "zeus.serving", "serve", "--model", "example", "--log", str(log)]
        serve += ["--weights", options.weights] if options.weights else []
        with running(serve):
            while not (home / "steps.sock").exists():
                time.sleep(0.05)
            time.sleep(1.0)  # some idle time to measure
            assert node.simulated is not None
            requests = load(options.seconds, options.rate, options.seed)
            Engine(node.simulated, node.gpus[0].uuid, Recorder()).run(requests)
            time.sleep(3.0)  # the sensor's last updates
        show(log, {one.name: one.true_j for one in requests})


def show(log: Path, true_j: dict[str, float]) -> None:
    """What was attributed, beside what is true."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    totals = lines.pop()["settled"]
    print(f"{'request':12}{'true J':>9}{'J':>9}{'±':>7}  prefill + decode + shared")
    errors = []
    for row in lines:
        if row["joules"] is None:
            print(f"{row['request']:12}{true_j[row['request']]:9.1f}        -  {row['reason']}")
            continue
        sigma = 2 * (row["uncertainty_j"] ** 2 + row["rule_uncertainty_j"] ** 2) ** 0.5
        errors.append(abs(row["joules"] / true_j[row["request"]] - 1))
        print(
            f"{row['request']:12}{true_j[row['request']]:9.1f}{row['joules']:9.1f}{sigma:7.1f}  "
            f"{row['prefill_j']:.1f} + {row['decode_j']:.1f} + {row['shared_j']:.1f}"
        )
    print(
        f"requests {totals['requests_j']:.1f} J + idle {totals['idle_j']:.1f} J + unattributed "
        f"{totals['unattributed_j']:.1f} J = measured {totals['measured_j']:.1f} J"
    )
    if errors:
        print(f"mean error {100 * sum(errors) / len(errors):.1f} %")


@contextlib.contextmanager
def running(arguments: list[str]):
    """A Python program as long as the block runs."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_for_node():
    """The node, when zeusd answers."""
    while True:
        with contextlib.suppress(ZeusIpcError), Client() as client:
            node = client.node()
            if node.gpus:
                return node
        time.sleep(0.05)


if __name__ == "__main__":
    main()

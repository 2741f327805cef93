"""Measures how long training waits for a zeusd that does not answer, in the README's loop.

    python benchmarks/stalls.py

A loop trains with the power limit optimizer and measures each epoch; a zeusd with a simulated GPU
runs beside it. In the middle of the search, an event disturbs zeusd. The table shows the longest
wait of a step, of a read of a window's energy, and of the end of the process (in s), the sum of all
steps' waits, whether an exception reached the loop, and the final state of the search. A step
without zeusd takes no time; the last row is the same loop without an event.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEP_S = 0.01
STEPS = 700
"""Of the loop; what happens, happens at `AT_STEP`, and ends `BACK_STEPS` later, if it ends."""
AT_STEP, BACK_STEPS = 30, 250


class Daemon:
    """A zeusd with one simulated GPU.

    Args:
        folder: For its socket, state and log.
    """

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "zeusd.sock")
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        from zeus_ipc import Client
        from zeus_ipc.errors import ZeusIpcError

        command = [sys.executable, "-m", "zeusd", "serve", "--simulate", "v100-pcie:setter_ms=0"]
        command += ["--socket", self.socket, "--state-dir", str(self._folder / "state")]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        while True:
            try:
                with Client(self.socket, timeout_s=1.0) as client:
                    if client.node().gpus:
                        return
            except ZeusIpcError:
                time.sleep(0.02)

    def simulated(self, **fault: object) -> None:
        """Has a call of the driver fail, or take long."""
        from zeus_ipc import Client
        from zeus_ipc.simulation import SimulatedNode

        with Client(self.socket) as client:
            path = client.node().simulated
        assert path is not None
        node = SimulatedNode(path)
        node.inject(0, **fault)
        node.close()

    def end(self) -> None:
        """Ends the daemon, in any state."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


def killed(daemon: Daemon) -> None:
    """SIGKILL."""
    daemon.process.kill()
    daemon.process.wait()


def stopped_in_order(daemon: Daemon) -> None:
    """SIGTERM."""
    daemon.process.terminate()
    daemon.process.wait()


def frozen(daemon: Daemon) -> None:
    """SIGSTOP."""
    daemon.process.send_signal(signal.SIGSTOP)


def thawed(daemon: Daemon) -> None:
    """SIGCONT."""
    daemon.process.send_signal(signal.SIGCONT)


def gpu_lost(daemon: Daemon) -> None:
    """The GPU is lost."""
    for call in ("set_power_limit", "sensors"):
        daemon.simulated(call=call, code=15)


def wedged(daemon: Daemon) -> None:
    """No call of the driver returns for a long time."""
    for call in ("set_power_limit", "sensors"):
        daemon.simulated(call=call, latency_s=120.0)


Event = Callable[[Daemon], None]
EVENTS: dict[str, tuple[Event | None, Event | None]] = {
    "zeusd killed permanently": (killed, None),
    "zeusd killed and started": (killed, Daemon.start),
    "zeusd stopped orderly and started": (stopped_in_order, Daemon.start),
    "zeusd frozen permanently (SIGSTOP)": (frozen, None),
    "zeusd frozen, and continued": (frozen, thawed),
    "GPU lost": (gpu_lost, None),
    "driver wedged": (wedged, None),
    "nothing": (None, None),
}


def train() -> None:
    """Runs the loop in its own process. Requests the event, and prints the observations."""
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint

    waits: dict[str, list[float]] = {"step": [], "read": [], "with": []}
    error = state = ""
    number = 0
    warnings.simplefilter("ignore")
    monitor = ZeusMonitor(cpu_indices=[], log_file=sys.argv[2])
    began = time.monotonic()

    def waited(what: str) -> None:
        waits[what].append(time.monotonic() - began)

    try:
        with GlobalPowerLimitOptimizer(monitor, MaxSlowdownConstraint(1.1)) as plo:
            while number < STEPS:
                with monitor.window("epoch") as window:
                    began = time.monotonic()
                    for _ in plo.steps(range(20)):
                        waited("step")
                        time.sleep(STEP_S)
                        number += 1
                        if number in (AT_STEP, AT_STEP + BACK_STEPS):
                            print("event", flush=True)
                            sys.stdin.readline()
                        began = time.monotonic()
                    waited("step")
                began = time.monotonic()
                _ = window.total_energy
                waited("read")
            state = repr(plo.state)
            began = time.monotonic()
        waited("with")
    except Exception as raised:
        error = repr(raised)
    print(json.dumps({**waits, "error": error, "state": state}), flush=True)


def disturbed(events: tuple[Event | None, Event | None]) -> tuple[dict[str, Any], float]:
    """The observations of a loop, and the time that its process took to end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = Daemon(folder)
        env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
        command = [sys.executable, __file__, "--train", str(folder / "energy.csv")]
        loop = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert loop.stdin is not None
        assert loop.stdout is not None
        try:
            for event in events:
                assert loop.stdout.readline() == "event\n"
                if event is not None:
                    event(daemon)
                loop.stdin.write("\n")
                loop.stdin.flush()
            seen = json.loads(loop.stdout.readline())
            ends_s = time.monotonic()
            loop.wait()
            return seen, time.monotonic() - ends_s
        finally:
            loop.kill()
            daemon.end()


def main() -> int:
    """Prints the table."""
    table = Table()
    for column in ("event", "longest step", "all steps", "longest read", "all reads", "with exit",
                   "process exit", "exception", "final state"):  # fmt: skip
        table.add_column(column)
    for name, events in EVENTS.items():
        seen, exit_s = disturbed(events)
        times = {what: [float(one) for one in seen[what]] for what in ("step", "read", "with")}
        table.add_row(
            name,
            f"{max(times['step']):.3f}",
            f"{sum(times['step']):.2f}",
            f"{max(times['read'], default=0):.3f}",
            f"{sum(times['read']):.2f}",
            f"{max(times['with'], default=0):.3f}",
            f"{exit_s:.2f}",
            str(seen["error"]) or "none",
            str(seen["state"]),
        )
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    return 0


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
        sys.exit(0)
    sys.exit(main())

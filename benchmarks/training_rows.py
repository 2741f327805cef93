"""One row of `training_cost.py`: a process that runs a loop with a front, on a node of its own.

This file is the process, which prints what it saw as JSON, and what starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: a peer has a `zeus` of its own

from benchmarks.training_fronts import BARE, FRONTS, PEERS, QUIET, Front, Hook, Job

ROOT = Path(__file__).resolve().parents[1]
TICK_MS = 100
WARM_UP_S = 1.0
FAILS_S, BACK_S, FAILURE_S = 1.5, 2.5, 5.0
"""When the driver or zeusd fails and works again, and the length of the loop, in seconds."""


@dataclass
class Row:
    """What a process runs.

    Attributes:
        loop: `sleep` or `compute`.
        seconds: Of each loop.
        fails: Whether to wait for an event at `FAILS_S` and at `BACK_S`.
    """

    front: str
    gpus: int = 1
    step_ms: float = 10.0
    loop: str = "sleep"
    seconds: float = 1.0
    fails: bool = False


def _step(seconds: float, computes: bool) -> Hook:
    if not computes:
        return lambda: time.sleep(seconds)

    def spin(rounds: int) -> None:
        value = 0
        for number in range(rounds):
            value += number

    best = min(timeit.repeat(lambda: spin(20_000), number=1, repeat=20))
    return lambda: spin(round(20_000 * seconds / best))


@dataclass
class Loop:
    """What a loop took.

    Attributes:
        steps: When each began, s, what it and the hooks around it took, and the hooks alone.
        end_s: From the end of the last step to that of training.
        cpu: The process's share of a core.
    """

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    end_s: float = 0.0
    cpu: float = 0.0

    @property
    def mean(self) -> float:
        """Of a step, s."""
        return statistics.fmean(took for _, took, _ in self.steps)

    @property
    def longest(self) -> float:
        """Of a step, s."""
        return max(took for _, took, _ in self.steps)


def _loop(step: Hook, front: Front, seconds: float, warm_up_s: float = WARM_UP_S) -> Loop:
    """Runs steps for some seconds after a warm-up."""
    loop = Loop()
    began = last = stopped = used = 0.0
    events = [FAILS_S, BACK_S] if not warm_up_s else []

    def run() -> bool:
        nonlocal began, last, stopped, used
        now = time.perf_counter()
        began = began or now + warm_up_s  # a trainer takes a while to begin
        if last:
            loop.steps.append((last - began, now - last, now - stopped))
        elif now >= began:
            used = time.process_time()
        if events and now - began > events[0]:
            events.pop(0)
            print("event", flush=True)
            sys.stdin.readline()
        last = time.perf_counter() if now >= began else 0.0
        step()
        stopped = time.perf_counter()
        more = stopped - began < seconds
        if not more:
            loop.cpu = (time.process_time() - used) / seconds
            loop.end_s = stopped
        return more

    front.drive(run)
    loop.end_s = time.perf_counter() - loop.end_s
    return loop


def _failing(step: Hook, front: Front, bare_s: float) -> dict[str, Any]:
    error, loop = "none", Loop([(0.0, 0.0, 0.0)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            loop = _loop(step, front, FAILURE_S, warm_up_s=0.0)
        except Exception as raised:
            error = repr(raised)
    since = [one for one in loop.steps if one[0] > FAILS_S - 0.1]
    late = [(at, took - bare_s) for at, took, _ in since if took - bare_s > 0.002]
    return {
        "longest": max((delay for _, delay in late), default=0.0),
        "between": max((hooks for *_, hooks in since), default=0.0),
        "first": sum(delay for at, delay in late if at < BACK_S),
        "after": sum(delay for at, delay in late if at >= BACK_S),
        "end": loop.end_s,
        "warnings": len(told),
        "error": error,
    }


def main(row: Row) -> None:
    """Runs the loop, and prints what was observed."""
    step = _step(row.step_ms / 1000, row.loop == "compute")
    bare = _loop(step, BARE.get(row.front, Front)(), row.seconds)
    front = (FRONTS | PEERS)[row.front](Job(list(range(row.gpus))))
    if row.fails:
        print(json.dumps(_failing(step, front, bare.mean)), flush=True)
        return  # how long the process takes to end is seen from outside
    measured = _loop(step, front, row.seconds)
    seen = {
        "ratio": measured.mean / bare.mean,
        "cpu": measured.cpu - bare.cpu,
        "longest": measured.longest - bare.mean,
        "bare_longest": bare.longest - bare.mean,
        "end": measured.end_s - bare.end_s,
    }
    print(json.dumps(seen), flush=True)
    os._exit(0)  # the end of the process is not measured


# ------------------------------------------------------------------------------- what starts it


class Node:
    """A node: the stand-in for its driver, and a zeusd, if it has one.

    Attributes:
        env: The environment of a process on it.
    """

    def __init__(self, directory: str, gpus: int, with_zeusd: bool) -> None:
        from benchmarks.processes import without_limits
        from tests.fake_nvml.double import ALWAYS, NvmlDouble

        specs = [{"tick_ms": TICK_MS, "architecture": 7} for _ in range(gpus)]
        self.double = double = NvmlDouble(Path(directory), specs, privilege=ALWAYS)
        self.env = {**os.environ, **double.env, "PYTHONPATH": str(ROOT)}
        self.env["LD_LIBRARY_PATH"] = str(Path(double.library).parent)
        self.env |= {"ZEUSD_STATE_DIR": f"{directory}/embedded", "ZEUS_LOG_DIR": directory}
        self.env["ZEUS_TARGET_METRIC"] = "2"  # that no row reaches
        for name in ("ZEUSD_SOCK_PATH", "CUDA_VISIBLE_DEVICES"):
            self.env.pop(name, None)
        if not with_zeusd:
            return
        self.socket = f"{directory}/zeusd.sock"
        config = Path(directory, "zeusd.toml")
        config.write_text(without_limits() + "[[allow]]\nusers = ['*']\n")
        self._command = [sys.executable, "-m", "zeusd", "serve", "--socket", self.socket]
        self._command += ["--config", str(config), "--state-dir", f"{directory}/state"]
        self._command += ["--log-level", "error", "--nvml-library", double.library]
        self._env = dict(self.env)
        self.start()
        _await(self.socket, gpus)
        self.env["ZEUSD_SOCK_PATH"] = self.socket

    def start(self) -> None:
        """Starts zeusd."""
        self.daemon = subprocess.Popen(self._command, env=self._env, stderr=subprocess.DEVNULL)

    def send(self, number: int) -> None:
        """Sends zeusd a signal, and waits for its end if it ends."""
        self.daemon.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.daemon.wait()


def _await(socket: str, gpus: int) -> None:
    from zeus_ipc import Client
    from zeus_ipc.errors import ZeusIpcError

    with Client(socket) as client:
        while True:
            with contextlib.suppress(ZeusIpcError):
                if len(client.node().gpus) == gpus:
                    return
            time.sleep(0.05)


@contextlib.contextmanager
def node(kind: str, gpus: int) -> Iterator[Node]:
    """A node with zeusd, or without."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        opened = Node(directory, gpus, kind == "zeusd")
        try:
            yield opened
        finally:
            if kind == "zeusd":
                opened.send(signal.SIGKILL)


def run(row: Row, env: dict[str, str], *events: Hook) -> dict[str, Any]:
    """Runs a row. Returns what it saw; nothing if the front cannot be imported or used."""
    with subprocess.Popen(
        [sys.executable, __file__, json.dumps(asdict(row))],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if row.front in (*PEERS, *QUIET) else None,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        due, found = iter(events), {}
        for line in process.stdout:
            if line == "event\n":
                next(due)()
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith('{"'):
                found, began = json.loads(line), time.perf_counter()
                process.wait()
                found["exit"] = time.perf_counter() - began
        return found


if __name__ == "__main__":
    main(Row(**json.loads(sys.argv[1])))

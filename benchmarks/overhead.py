"""Measures the cost of measuring: to the training loop, and to the node.

    python benchmarks/overhead.py [--seconds N]
    python benchmarks/overhead.py --against CHECKOUT    # of another commit, such as a git worktree

1. `begin_window` + `end_window` of ZeusMonitor for 1 and 8 GPUs, alternating with reads of each
   GPU's energy counter through NVML at both ends.
2. CPU and memory of zeusd, all its processes together, by the sensors' update period, the number of
   GPUs, and the number of clients that each request one window per second.

With `--against`, zeusd of another commit runs at the same time, on its own stand-in.

The GPUs are the C stand-in for libnvidia-ml, which takes almost no time, so the figures are those
of zeusd. It needs gcc.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.processes import Usage, usage, with_children, without_limits
from zeus_ipc import Client
from zeus_ipc.codec import encode
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.wire import PROTOCOL_VERSION

SETTLE_S = 4.0
"""How long a daemon finds its sensors' ticks before it is measured."""


SAMPLED = 0
"""Stands for a period of 20 ms, sampled by the driver itself as on H100."""

FASTEST = (8, 20, 0)
"""GPUs, their update period in ms, clients."""
MOST_CLIENTS = (8, 100, 256)
SAMPLED_CASES = [(8, SAMPLED, 0), (8, SAMPLED, 256)]
CASES = [
    *((gpus, tick_ms, 0) for tick_ms in (100, 20) for gpus in (1, 4, 8)),
    *((8, 100, clients) for clients in (1, 16, 64, 256)),
    *SAMPLED_CASES,
]


ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def daemon(
    gpus: int, tick_ms: int, checkout: Path = ROOT
) -> Iterator[tuple[subprocess.Popen[bytes], str, Any]]:
    """zeusd on the C library."""
    from tests.fake_nvml.double import NvmlDouble

    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        double = NvmlDouble(Path(directory), _gpus(gpus, tick_ms))
        path = f"{directory}/zeusd.sock"
        config = Path(directory, "zeusd.toml")
        config.write_text(without_limits() + "[[allow]]\nusers = ['*']\n")
        command = [sys.executable, "-m", "zeusd", "serve", "--socket", path]
        command += ["--state-dir", f"{directory}/state", "--log-level", "warning"]
        command += ["--nvml-library", double.library, "--config", str(config)]
        process = subprocess.Popen(
            command,
            env={**os.environ, **double.env, "PYTHONPATH": str(checkout)},
            cwd=checkout,
        )
        try:
            with Client(path) as client:
                while True:
                    with contextlib.suppress(ZeusIpcError):
                        if len(client.node().gpus) == gpus:
                            break
                    time.sleep(0.05)
            yield process, path, double
        finally:
            process.terminate()
            process.wait()


def _gpus(count: int, tick_ms: int) -> list[dict[str, Any]]:
    """GPUs whose sensors tick at different times."""
    from tests.fake_nvml.double import H100

    now_ns = time.monotonic_ns()
    if tick_ms == SAMPLED:
        quick = {"counter_read_us": 0, "counter_slow_every": 0, "idle_mw": 0}
        return [H100 | quick | {"start_ns": now_ns + index * 2_000_000} for index in range(count)]
    counts = {"tick_ms": tick_ms, "counts_limited": 1}
    return [
        counts | {"start_ns": now_ns + (index * 7 * tick_ms * 1_000_000) // (8 * count)}
        for index in range(count)
    ]


# ------------------------------------------------------------------------------- in the loop


def _loop_cost(gpus: int, rounds: int, results: Any) -> None:
    """Runs in its own process: ZeusMonitor and raw counters, alternating."""
    with daemon(gpus, 100) as (_, path, double):
        os.environ["ZEUSD_SOCK_PATH"] = path
        os.environ.update(double.env)
        import ctypes

        import pynvml

        from zeus.monitor import ZeusMonitor

        pynvml.nvmlLib = ctypes.CDLL(double.library)
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]
        monitor = ZeusMonitor()
        assert len(monitor.gpu_indices) == gpus
        ours, raw = [], []
        for _ in range(rounds):
            start = time.perf_counter_ns()
            for _ in range(100):
                monitor.begin_window("step", sync_execution=False)
                monitor.end_window("step", sync_execution=False)
            ours.append((time.perf_counter_ns() - start) / 100)
            start = time.perf_counter_ns()
            for _ in range(10):
                begin = [pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in handles]
                end = [pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in handles]
                _ = [b - a for a, b in zip(begin, end, strict=True)]
            raw.append((time.perf_counter_ns() - start) / 10)
        results.put((statistics.median(ours), p99(ours), statistics.median(raw), p99(raw)))


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def loop_table(rounds: int) -> None:
    print("## begin_window + end_window, without synchronisation\n")
    print("| GPUs | ours p50 µs | p99 µs | raw counters p50 µs | p99 µs | ours / raw |")
    print("|--:|--:|--:|--:|--:|--:|")
    context = multiprocessing.get_context("spawn")
    for gpus in (1, 8):
        results = context.Queue()
        process = context.Process(target=_loop_cost, args=(gpus, rounds, results))
        process.start()
        ours, ours99, raw, raw99 = results.get(timeout=120)
        process.join()
        print(
            f"| {gpus} | {ours / 1e3:.2f} | {ours99 / 1e3:.2f} | {raw / 1e3:.1f} | "
            f"{raw99 / 1e3:.1f} | {ours / raw:.3f} |",
            flush=True,
        )
    print()


# -------------------------------------------------------------------------------- the daemon


class Clients:
    """Connections that each look a window up once a second."""

    def __init__(self, path: str, count: int, gpus: list[str]) -> None:
        self._gpus = gpus
        self._context = zmq.Context(io_threads=1)
        self._sockets = []
        for _ in range(count):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{path}")
            self._sockets.append(socket)
        self.asked = self.answered = 0

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        pause_s = 1.0 / max(1, len(self._sockets))
        number = 0
        due = time.monotonic()
        while (now := time.monotonic()) < end:
            if not self._sockets:
                time.sleep(0.1)
                continue
            if now < due:
                time.sleep(min(due - now, 0.05))
                continue
            due += pause_s
            socket = self._sockets[number % len(self._sockets)]
            number += 1
            while socket.poll(0):
                socket.recv()
                self.answered += 1
            now_ns = time.monotonic_ns()
            message = {"v": PROTOCOL_VERSION, "id": number, "op": "windows"}
            message |= {"sources": self._gpus, "windows": [now_ns - 200_000_000, now_ns, 0]}
            socket.send(encode(message))
            self.asked += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


@dataclass(frozen=True)
class Cost:
    """Measures a daemon's CPU and memory while clients query it for some seconds."""

    cpu_percent: float
    usage: Usage
    answered: float
    """Share of the look-ups that were answered."""


def measure(gpus: int, tick_ms: int, clients: int, seconds: float) -> Cost:
    with daemon(gpus, tick_ms) as (process, path, _):
        with Client(path) as client:
            uuids = [gpu.uuid for gpu in client.node().gpus]
        others = Clients(path, clients, uuids)
        others.run(SETTLE_S)
        pids = with_children(process.pid)
        before, asked, answered = usage(pids), others.asked, others.answered
        start = time.monotonic()
        others.run(seconds)
        elapsed_s = time.monotonic() - start
        after = usage(pids)
        others.close()
        share = (others.answered - answered) / max(1, others.asked - asked)
    return Cost(100 * (after.cpu_s - before.cpu_s) / elapsed_s, after, share)


def daemon_table(seconds: float, cases: list[tuple[int, int, int]]) -> None:
    print("## zeusd: all its processes together; CPU in percent of one core, memory in MiB\n")
    print("| GPUs | update ms | clients | CPU | RSS | PSS | processes | answered |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    costs = {}
    for gpus, tick_ms, clients in cases:
        cost = costs[gpus, tick_ms, clients] = measure(gpus, tick_ms, clients, seconds)
        answered = f"{cost.answered:.0%}" if clients else ""
        print(
            f"| {gpus} | {tick_ms or '20, sampled'} | {clients} | {cost.cpu_percent:.2f} | "
            f"{cost.usage.rss_mib:.0f} | {cost.usage.pss_mib:.0f} | {cost.usage.processes} | "
            f"{answered} |",
            flush=True,
        )
    busiest, fastest = costs[MOST_CLIENTS], costs[FASTEST]
    print("\n| goal | at most | seen | |")
    print("|---|--:|--:|---|")
    for name, most, seen in (
        ("256 clients that each look up 8 GPUs once a second, CPU %", 15, busiest.cpu_percent),
        ("8 GPUs that update every 20 ms, CPU %", 3, fastest.cpu_percent),
        ("processes", 1, fastest.usage.processes),
        ("RSS, MB", 60, fastest.usage.rss_mib * 1.048576),
    ):
        verdict = "met" if seen <= most else "missed"
        print(f"| {name} | {most} | {seen:.2f} | {verdict} |")


def comparison(seconds: float, checkout: Path, rounds: int = 3) -> None:
    """Prints the CPU of two zeusd that run at the same time."""
    print("## zeusd beside that of the other commit; CPU in percent of one core\n")
    print("| GPUs | update ms | other | this | this / other |")
    print("|--:|--:|--:|--:|--:|")
    for gpus, tick_ms, _ in (FASTEST, (8, 100, 0), SAMPLED_CASES[0]):
        other_s = this_s = 0.0
        for _ in range(rounds):
            with (
                daemon(gpus, tick_ms, checkout) as (other, *_),
                daemon(gpus, tick_ms) as (this, *_),
            ):
                time.sleep(SETTLE_S)
                pids = [with_children(one.pid) for one in (other, this)]
                before = [usage(one).cpu_s for one in pids]
                time.sleep(seconds / rounds)
                spent = [usage(one).cpu_s - begin for one, begin in zip(pids, before, strict=True)]
            other_s, this_s = other_s + spent[0], this_s + spent[1]
        print(
            f"| {gpus} | {tick_ms or '20, sampled'} | {100 * other_s / seconds:.2f} | "
            f"{100 * this_s / seconds:.2f} | {this_s / other_s:.3f} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each daemon")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--goals", action="store_true", help="measure only what has a goal")
    parser.add_argument("--against", type=Path, help="measure only, beside zeusd of this checkout")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}\n")
    if options.against is not None:
        comparison(options.seconds, options.against.resolve())
        return 0
    if not options.goals:
        loop_table(options.rounds)
    with_goals = [FASTEST, MOST_CLIENTS, *SAMPLED_CASES]
    daemon_table(options.seconds, with_goals if options.goals else CASES)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the latency of requests to zeusd, beside bare Unix sockets and HTTP.

    python benchmarks/ipc.py [--rounds N]

All are measured in one run, alternating, by one client process: a bare AF_UNIX SOCK_SEQPACKET
ping-pong between two Python processes, pyzmq's DEALER against a responder that parses nothing (the
lower bound for clients that use libzmq), the daemon with eight simulated GPUs whose setters take no
time, and httpx over a Unix socket against a responder that parses nothing. Compare the ratios;
microseconds depend on the machine. The client has its own core, as the goals assume.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.processes import without_limits
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.prepared import PreparedClocks, sibling
from zeus_ipc.zmtp import frame
from zeusd.server.zmtp import Role, ZmtpEngine, ZmtpState

REQUEST = b"x" * 56
REPLY = b"y" * 45
SPACING_S = 0.001
"""Pause between sends that get no reply, so that no queue fills."""

BARE, HTTP, SEND = "bare AF_UNIX ping-pong", "httpx over AF_UNIX", "bare AF_UNIX send"
DEALER, DEALER_SEND = "pyzmq DEALER ping-pong", "pyzmq DEALER send"
SET, HEARTBEAT, CLOCK = "set_power_limit", "heartbeat", "clock change without waiting"
GOALS = (
    (SET, BARE, 5.0),
    (SET, HTTP, 0.65),
    (HEARTBEAT, BARE, 3.0),
    (HEARTBEAT, HTTP, 0.4),
    (CLOCK, SEND, 1.0),
)
FLOORS = ((SET, DEALER), (HEARTBEAT, DEALER), (CLOCK, DEALER_SEND))
"""What every client that uses libzmq pays, and how much of it is ours."""
"""What may take at most how many times the p50 of what."""


@dataclass
class Case:
    """One thing to measure: a call, and the time that each took, ns."""

    name: str
    call: Callable[[], object]
    spaced: bool = False
    before: Callable[[], object] | None = None
    times_ns: list[int] = field(default_factory=list)

    def measure(self, count: int) -> None:
        if self.before is not None:
            self.before()
        for _ in range(count):
            if self.spaced:
                time.sleep(SPACING_S)
            start = time.perf_counter_ns()
            self.call()
            self.times_ns.append(time.perf_counter_ns() - start)

    def percentile_us(self, percent: float) -> float:
        ordered = sorted(self.times_ns)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] / 1000


def _pong(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        connection, _ = listening.accept()
        while connection.recv(4096):
            connection.send(REPLY)


def _swallow(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        connection, _ = listening.accept()
        while connection.recv(4096):
            pass


def _zmtp_pong(path: str) -> None:
    _zmtp(path, frame(REPLY))


def _zmtp_swallow(path: str) -> None:
    _zmtp(path, b"")


def _zmtp(path: str, reply: bytes) -> None:
    """Sends a ROUTER's handshake, and answers each message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        connection, _ = listening.accept()
        router = ZmtpEngine(Role.ROUTER)
        connection.sendall(router.data_to_send())
        while router.state is not ZmtpState.TRAFFIC:
            router.receive(connection.recv(4096))
            router.next_event()
        connection.sendall(router.data_to_send())
        while connection.recv(4096):
            connection.sendall(reply)


def _http_pong(path: str) -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(REPLY), REPLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        connection, _ = listening.accept()
        received = b""
        while part := connection.recv(65536):
            received += part
            if received.endswith(REQUEST):
                received = b""
                connection.sendall(reply)


@contextlib.contextmanager
def peer(target: Callable[[str], None], path: str) -> Iterator[str]:
    """A peer process that listens at `path`."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=(path,), daemon=True)
    process.start()
    while not os.path.exists(path):
        time.sleep(0.01)
    try:
        yield path
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[Client]:
    """zeusd with eight simulated GPUs, and a client of it."""
    path = str(directory / "zeusd.sock")
    command = [sys.executable, "-m", "zeusd", "serve", "--simulate", "8xv100-pcie:setter_ms=0"]
    command += ["--socket", path, "--state-dir", str(directory / "state"), "--log-level", "warning"]
    config = directory / "zeusd.toml"
    config.write_text(without_limits())
    command += ["--config", str(config)]
    process = subprocess.Popen(command)
    client = Client(path)
    try:
        while True:
            with contextlib.suppress(ZeusIpcError):
                if client.node().gpus:
                    break
            time.sleep(0.02)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait()


def seqpacket(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection.connect(path)
            return connection
        time.sleep(0.01)


def run(rounds: int, per_round: int, pinned: bool) -> dict[str, Case]:
    client_cores, peer_cores = _cores(pinned)
    os.sched_setaffinity(0, peer_cores)  # inherited by everything that is started
    # The journal is on tmpfs, as /run is on a node.
    shm = Path("/dev/shm")
    with contextlib.ExitStack() as stack:
        where = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="zeusd-")
            )
        )
        client = stack.enter_context(daemon(where))
        floor = seqpacket(stack.enter_context(peer(_pong, str(where / "pong"))))
        sink = seqpacket(stack.enter_context(peer(_swallow, str(where / "sink"))))
        context = stack.enter_context(zmq.Context())
        dealer, sender = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for one, target in ((dealer, _zmtp_pong), (sender, _zmtp_swallow)):
            one.setsockopt(zmq.LINGER, 0)
            path = str(where / target.__name__)
            one.connect("ipc://" + stack.enter_context(peer(target, path)))
            stack.callback(one.close)
        http_path = stack.enter_context(peer(_http_pong, str(where / "http")))
        http = stack.enter_context(
            httpx.Client(
                # Its responder takes one connection, which may wait for its turn for a while.
                transport=httpx.HTTPTransport(
                    uds=http_path, limits=httpx.Limits(keepalive_expiry=None)
                ),
                timeout=30,
            )
        )
        uuid = client.node().gpus[0].uuid
        values = [200_000, 190_000]

        def ping() -> None:
            floor.send(REQUEST)
            floor.recv(4096)

        def dealer_ping() -> None:
            dealer.send(REQUEST)
            dealer.recv()

        requests = [REQUEST, REQUEST[::-1]]

        def bare_send() -> None:
            requests.reverse()
            sink.send(requests[0])

        def dealer_send() -> None:
            requests.reverse()
            sender.send(requests[0])

        def set_limit(block: bool = True) -> None:
            values.reverse()
            client.set_power_limit(uuid, values[0], block=block)

        straight = stack.enter_context(sibling(client))
        straight.acquire(uuid, ["gpu_clocks"])
        supported = client.clocks(uuid)
        clocks = PreparedClocks(straight, uuid)
        clocks.renew()
        changes = next(iter(supported.gpu_mhz.values()))[1:3]
        clocks.prepare({mhz: mhz for mhz in changes})

        def change_clock() -> None:
            changes.reverse()
            assert clocks.lock(changes[0]), "zeusd is behind with the changes"

        cases = {
            case.name: case
            for case in (
                Case(BARE, ping),
                Case(DEALER, dealer_ping),
                Case(SET, set_limit),
                Case("state", lambda: client.state(uuid)),
                Case(HEARTBEAT, client.heartbeat),
                Case(HTTP, lambda: http.post("http://x/", content=REQUEST)),
                Case(SEND, bare_send, spaced=True),
                Case(DEALER_SEND, dealer_send, spaced=True),
                Case(CLOCK, change_clock, spaced=True, before=clocks.renew),
                Case("set_power_limit, block=False", lambda: set_limit(False), spaced=True),
            )
        }
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), client_cores)
        for case in cases.values():
            case.measure(200)
            case.times_ns.clear()
        order = list(cases.values())
        chance = random.Random(1)
        for _ in range(rounds):
            chance.shuffle(order)
            for case in order:
                case.measure(per_round)
        return cases


def _cores(pinned: bool) -> tuple[set[int], set[int]]:
    """Cores of the client and of all its peers."""
    cores = os.sched_getaffinity(0)
    if not pinned or len(cores) < 2:
        return cores, cores
    first = min(cores)
    return {first}, cores - {first}


def ratios(case: Case, base: Case, percent: float) -> str:
    return f"{case.percentile_us(percent) / base.percentile_us(percent):.2f}"


def print_table(cases: dict[str, Case]) -> None:
    floor, http, send = cases[BARE], cases[HTTP], cases[SEND]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        end="",
    )
    print(f"{len(floor.times_ns)} calls each\n")
    print("| round trip | p50 µs | p99 µs | p50 / bare | p99 / bare | p50 / httpx | p99 / httpx |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for case in cases.values():
        if not case.spaced:
            print(
                f"| {case.name} | {case.percentile_us(50):.0f} | {case.percentile_us(99):.0f} "
                f"| {ratios(case, floor, 50)} | {ratios(case, floor, 99)} "
                f"| {ratios(case, http, 50)} | {ratios(case, http, 99)} |"
            )
    print("\n| sent without waiting | p50 µs | p99 µs | p50 / bare send | p99 / bare send |")
    print("|---|--:|--:|--:|--:|")
    for case in cases.values():
        if case.spaced:
            print(
                f"| {case.name} | {case.percentile_us(50):.1f} | {case.percentile_us(99):.1f} "
                f"| {ratios(case, send, 50)} | {ratios(case, send, 99)} |"
            )


def print_goals(cases: dict[str, Case]) -> None:
    print("\n| goal | at most | p50 | | p99 |")
    print("|---|--:|--:|---|--:|")
    for name, base, most in GOALS:
        p50, p99 = (
            cases[name].percentile_us(percent) / cases[base].percentile_us(percent)
            for percent in (50, 99)
        )
        verdict = "met" if p50 <= most else "missed"
        print(f"| {name} / {base} | {most:g} | {p50:.2f} | {verdict} | {p99:.2f} |")
    for name, base in FLOORS:
        p50, p99 = (
            cases[name].percentile_us(percent) / cases[base].percentile_us(percent)
            for percent in (50, 99)
        )
        print(f"| {name} / {base} | | {p50:.2f} | | {p99:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of all cases (100)")
    parser.add_argument(
        "--per-round", type=int, default=50, help="calls of each case in a round (50)"
    )
    parser.add_argument(
        "--unpinned",
        action="store_true",
        help="let the kernel place all processes; by default the client has its own core",
    )
    options = parser.parse_args()
    assert threading.active_count() == 1, "threads of this process would disturb the figures"
    cases = run(options.rounds, options.per_round, not options.unpinned)
    print_table(cases)
    print_goals(cases)


if __name__ == "__main__":
    main()

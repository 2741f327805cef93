"""Kills and stops what keeps a power budget, in real processes: are the limits ever above it?

    python benchmarks/fleet_chaos.py --minutes 30

Three members of etcd, simulated nodes with zeusd and agent each, two allocators. At random, one of
them is stopped for up to 30 s or killed and started again, and the budget falls to 60 % of the sum
of maxima and rises again. All limits are read one after another, with 20 ms between. In the sum a
cut counts from 15 s on. How soon nodes obeyed it is printed, apart for those that could be reached:
neither they nor etcd had a fault just before or meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeus_fleet.messages import Budget, Domain
from zeus_fleet.store import Store, StoreUnavailable
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import NodeInfo

FLOOR_W, MOST_W = 200, 500
LEASE_S = 15.1
FLEET = [sys.executable, "-m", "zeus_fleet"]


@dataclass
class Program:
    """A process that is started again."""

    name: str
    command: list[str]
    log: Path
    killable: bool = True
    process: subprocess.Popen[bytes] | None = None
    again_at: float = 0.0
    resume_at: float = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def tick(self, now: float) -> None:
        """Starts it again, or lets it go on, when it is time."""
        if self.resume_at and now >= self.resume_at:
            self.signal(signal.SIGCONT)
            self.resume_at = 0.0
        if self.process is not None and self.process.poll() is not None:
            self.again_at = self.again_at or now + 2
            if now >= self.again_at:
                self.again_at = 0.0
                self.start()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def etcd_commands(folder: Path) -> tuple[list[list[str]], list[str]]:
    """Three members: how to start each, and their endpoints."""
    ports = free_ports(6)
    peers = ",".join(f"m{i}=http://127.0.0.1:{ports[3 + i]}" for i in range(3))
    commands = []
    for i in range(3):
        client, peer = (f"http://127.0.0.1:{port}" for port in (ports[i], ports[3 + i]))
        command = ["etcd", "--name", f"m{i}", "--data-dir", str(folder / f"etcd{i}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        commands.append([*command, "--initial-cluster", peers])
    return commands, [f"127.0.0.1:{port}" for port in ports[:3]]


def answer(client: Client) -> NodeInfo:
    """What a zeusd says that may still be starting."""
    end = time.monotonic() + 180
    while True:
        try:
            return client.node()
        except ZeusIpcError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@dataclass
class Site:
    """All that runs."""

    folder: Path
    nodes: int
    programs: list[Program] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)

    def start(self) -> None:
        commands, members = etcd_commands(self.folder)
        for i, command in enumerate(commands):
            self._add(f"etcd{i}", command)
        self.endpoints = [word for one in members for word in ("--etcd", one)]
        for i in range(self.nodes):
            command = [sys.executable, "-m", "zeusd", "serve", "--simulate", "2xv100-pcie"]
            command += ["--socket", self.socket(i), "--state-dir", str(self.folder / f"state{i}")]
            self._add(f"zeusd{i}", command)
        for i in range(self.nodes):
            # As an administrator would before the node is used: the floor, until a plan says more.
            with Client(self.socket(i)) as client:
                uuids = [gpu.uuid for gpu in answer(client).gpus]
                client.set_ceiling(uuids, "fleet", 1000 * FLOOR_W // 2)
            command = [*FLEET, "node", "--name", f"n{i}", "--socket", self.socket(i)]
            self._add(f"agent{i}", [*command, *self.endpoints])
        for i in range(2):
            # Uniform, so that GPUs without a job are raised, too.
            command = [*FLEET, "allocate", "--name", f"l{i}", "--policy", "uniform"]
            self._add(f"allocator{i}", [*command, *self.endpoints])

    def _add(self, name: str, command: list[str]) -> None:
        program = Program(name, command, self.folder / f"{name}.log")
        self.programs.append(program)
        program.start()

    def socket(self, node: int) -> str:
        return str(self.folder / f"n{node}.sock")

    def stop(self) -> None:
        for program in self.programs:
            program.signal(signal.SIGKILL)
            if program.process is not None:
                program.process.wait()

    def budget(self, watts: int) -> Budget:
        """All nodes, and no reserve: no GPU is stuck here."""
        floors = {f"n{i}": 1000 * FLOOR_W for i in range(self.nodes)}
        return Budget((Domain("site", 1000 * watts, frozenset(floors)),), floors)


class Writer(threading.Thread):
    """Writes a budget while sampling goes on.

    Attributes:
        before: What was allowed until then, W.
        watts: The new budget.
        held: What each node held then, W.
        at: When the request that succeeded was sent; None: none has.
    """

    def __init__(self, site: Site, before: int, watts: int, held: list[float]) -> None:
        super().__init__(daemon=True)
        self.before, self.watts, self.held = before, watts, held
        self.at: float | None = None
        self._site = site

    def run(self) -> None:
        """Tries each member twice."""
        asyncio.run(self._write())

    async def _write(self) -> None:
        store = Store(self._site.endpoints[1::2], timeout_s=2.0)
        for _ in range(6):
            with contextlib.suppress(StoreUnavailable):
                read, _ = await store.read()
                revision = 0 if read is None else read.budget_revision
                at = time.monotonic()
                if await store.set_budget(self._site.budget(self.watts), revision):
                    self.at = at
                    break
        await store.close()


class Sampler:
    """Reads all limits; remembers a node's last ones while its zeusd does not answer."""

    def __init__(self, site: Site) -> None:
        self._clients = [Client(site.socket(i), timeout_s=0.3) for i in range(site.nodes)]
        self._uuids = [[gpu.uuid for gpu in answer(one).gpus] for one in self._clients]
        self._last = [FLOOR_W * 1000] * site.nodes

    def held_w(self) -> list[float]:
        """Of each node."""
        for index, client in enumerate(self._clients):
            with contextlib.suppress(ZeusIpcError):
                states = client.state(self._uuids[index]).values()
                self._last[index] = sum(state.power_limit_mw or 0 for state in states)
        return [held / 1000 for held in self._last]


@dataclass
class Fault:
    """When something was stopped or dead, and some seconds until it is back."""

    name: str
    what: str
    began: float
    ended: float

    def touches(self, node: int, since: float, until: float) -> bool:
        """Whether a node could not be reached at some time."""
        near = self.began <= until and self.ended >= since
        return near and (
            self.name.startswith("etcd") or self.name in (f"agent{node}", f"zeusd{node}")
        )


AFTER_S = {"etcd": 8.0, "agent": 8.0, "zeusd": 4.0, "allocator": 0.0}
"""How long a fault lasts on: until a leader is elected, or a program has started."""


def strike(program: Program, generator: random.Random, now: float) -> Fault:
    """Stops or kills a program."""
    group = program.name.rstrip("0123456789")
    kind = generator.choice(("stopped", "killed"))
    if group == "zeusd":
        kind = "killed"  # nobody lowers the limits while zeusd is stopped
    program.signal(signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
    back = now + 2
    if kind == "stopped":
        back = program.resume_at = now + generator.uniform(1, 30)
    elif group == "zeusd":
        program.again_at = now + 0.1  # as systemd does it
    return Fault(program.name, f"{group} {kind}", now, back + AFTER_S[group])


@dataclass
class Cut:
    """A smaller budget, and which nodes have to follow."""

    at: float
    bounds: dict[int, float]
    reached: dict[int, float] = field(default_factory=dict)

    def see(self, now: float, held: list[float]) -> None:
        """Notes who has followed by now."""
        for node, bound in self.bounds.items():
            if node not in self.reached and held[node] <= bound:
                self.reached[node] = now


def cut_of(now: float, held: list[float], before: int, budget: int) -> Cut:
    """What each node has to come down to at once, see `obeyed_mw`."""
    floors = FLOOR_W * len(held)
    share = (budget - floors) / (before - floors)
    bounds = {node: FLOOR_W + (watts - FLOOR_W) * share + 1 for node, watts in enumerate(held)}
    return Cut(now, {node: bound for node, bound in bounds.items() if held[node] > bound})


def said(cuts: list[Cut], faults: list[Fault]) -> str:
    """How soon nodes obeyed, by whether they could be reached."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for cut in cuts:
        for node, at in cut.reached.items():
            reachable = not any(one.touches(node, cut.at - 2, at) for one in faults)
            times[reachable].append(at - cut.at)
    lines = []
    for reachable, some in times.items():
        some.sort()
        what = "reachable" if reachable else "not reachable"
        if some:
            middle, late = some[len(some) // 2], some[int(len(some) * 0.99)]
            lines.append(
                f"nodes {what} obeyed a cut ({len(some)} times) after: median {middle:.2f} s, "
                f"99 % {late:.2f} s, last {some[-1]:.2f} s"
            )
    return "\n".join(lines)


def main() -> int:
    """Prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        site = Site(Path(name), options.nodes)
        stack.callback(site.stop)
        site.start()
        budget = options.nodes * MOST_W
        first = Writer(site, 0, budget, [])
        first.run()
        assert first.at is not None, "etcd did not start"
        sampler = Sampler(site)
        allowed: list[tuple[float, int]] = []
        samples = violations = 0
        most, used, low = 0.0, 0.0, False
        cuts: list[Cut] = []
        faults: list[Fault] = []
        writer: Writer | None = None
        began = time.monotonic()
        fault_at, budget_at = began + 20, began + 30
        while (now := time.monotonic()) < began + 60 * options.minutes:
            each = sampler.held_w()
            held = sum(each)
            allowed = [one for one in allowed if one[0] > now]
            bound = max([budget, *(watts for _, watts in allowed)])
            samples, used, most = samples + 1, used + held / budget, max(most, held / bound)
            for cut in cuts[-1:]:
                cut.see(time.monotonic(), each)
            if held > bound:
                violations += 1
                print(f"{now - began:.2f} s: {held:g} W of {bound} W", flush=True)
            for program in site.programs:
                program.tick(now)
            if now >= fault_at:
                fault_at = now + generator.uniform(1, 8)
                fault = strike(generator.choice(site.programs), generator, now)
                counts[fault.what] = counts.get(fault.what, 0) + 1
                faults.append(fault)
            if writer is None and now >= budget_at:
                low = not low
                watts = int(options.nodes * MOST_W * (0.6 if low else 1.0))
                writer = Writer(site, budget, watts, each)
                allowed += [(now + LEASE_S + 30, watts), (now + LEASE_S + 30, budget)]
                writer.start()
            if writer is not None and not writer.is_alive():
                budget_at = now + generator.uniform(20, 40)
                if writer.at is not None:
                    allowed = [(writer.at + LEASE_S, writer.before)]
                    budget = writer.watts
                    if budget < writer.before:
                        cuts.append(cut_of(writer.at, writer.held, writer.before, budget))
                        cuts[-1].see(time.monotonic(), each)
                else:
                    low = not low
                writer = None
            time.sleep(0.02)
        print(f"samples {samples}, above the budget {violations}, nearest {most:.3f} of it")
        print(f"held on average {used / samples:.2f} of the budget")
        print(said(cuts, faults))
        print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    return 1 if violations else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())

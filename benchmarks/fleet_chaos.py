"""Kills and stops what keeps a power budget, in real processes: are the limits ever above it?

    python benchmarks/fleet_chaos.py --minutes 30

Three members of etcd, simulated nodes with zeusd and agent each, two allocators. At random, one of
them is stopped for up to 30 s or killed and started again, and the budget changes. All limits are
read every 20 ms. A cut counts from 15 s on; how soon it was obeyed is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

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
        time.sleep(5)
        for i in range(self.nodes):
            # As an administrator would before the node is used: the floor, until a plan says more.
            with Client(self.socket(i)) as client:
                uuids = [gpu.uuid for gpu in client.node().gpus]
                client.set_ceiling(uuids, "fleet", 1000 * FLOOR_W // 2)
            command = [*FLEET, "node", "--name", f"n{i}", "--socket", self.socket(i)]
            self._add(f"agent{i}", [*command, *self.endpoints])
        for i in range(2):
            self._add(f"allocator{i}", [*FLEET, "allocate", "--name", f"l{i}", *self.endpoints])

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

    def set_budget(self, watts: int) -> bool:
        file = self.folder / "budget.toml"
        nodes = "\n".join(f"n{i} = {FLOOR_W}" for i in range(self.nodes))
        file.write_text(f"limit_w = {watts}\n[nodes]\n{nodes}\n")
        command = [*FLEET, "budget", "--file", str(file), *self.endpoints]
        return subprocess.run(command, capture_output=True).returncode == 0


class Sampler:
    """Reads all limits; remembers a node's last ones while its zeusd does not answer."""

    def __init__(self, site: Site) -> None:
        self._clients = [Client(site.socket(i), timeout_s=0.3) for i in range(site.nodes)]
        self._uuids = [[gpu.uuid for gpu in one.node().gpus] for one in self._clients]
        self._last = [FLOOR_W * 1000] * site.nodes

    def held_w(self) -> float:
        for index, client in enumerate(self._clients):
            with contextlib.suppress(ZeusIpcError):
                states = client.state(self._uuids[index]).values()
                self._last[index] = sum(state.power_limit_mw or 0 for state in states)
        return sum(self._last) / 1000


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
        budget = int(options.nodes * MOST_W * 0.8)
        assert site.set_budget(budget)
        sampler = Sampler(site)
        allowed: list[tuple[float, int]] = []
        samples = violations = 0
        most, used, cut_at, obeyed = 0.0, 0.0, 0.0, []
        began = time.monotonic()
        fault_at, budget_at = began + 20, began + 25
        while (now := time.monotonic()) < began + 60 * options.minutes:
            held = sampler.held_w()
            allowed = [one for one in allowed if one[0] > now]
            bound = max([budget, *(watts for _, watts in allowed)])
            samples, used, most = samples + 1, used + held / budget, max(most, held / bound)
            if cut_at and held <= budget:
                obeyed.append(now - cut_at)
                cut_at = 0.0
            if held > bound:
                violations += 1
                print(f"{now - began:.2f} s: {held:g} W of {bound} W", flush=True)
            for program in site.programs:
                program.tick(now)
            if now >= fault_at:
                fault_at = now + generator.uniform(1, 8)
                program = generator.choice(site.programs)
                kind = generator.choice(("stopped", "killed"))
                if kind == "stopped" and program.name.startswith("zeusd"):
                    kind = "killed"  # nobody lowers the limits while zeusd is stopped
                what = f"{program.name.rstrip('0123456789')} {kind}"
                counts[what] = counts.get(what, 0) + 1
                program.signal(signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
                if kind == "stopped":
                    program.resume_at = now + generator.uniform(1, 30)
                elif program.name.startswith("zeusd"):
                    program.again_at = now + 0.1  # as systemd does it
            if now >= budget_at:
                budget_at = now + generator.uniform(20, 40)
                watts = int(options.nodes * MOST_W * generator.uniform(0.5, 0.95))
                allowed.append((now + LEASE_S + 5, budget))  # the command itself may take some time
                if site.set_budget(watts):
                    allowed.append((time.monotonic() + LEASE_S, budget))
                    cut_at = time.monotonic() if watts < budget else 0.0
                    budget = watts
            time.sleep(0.02)
        print(f"samples {samples}, above the budget {violations}, nearest {most:.3f} of it")
        print(f"held on average {used / samples:.2f} of the budget")
        if obeyed:
            times = " ".join(f"{one:.1f}" for one in sorted(obeyed))
            print(f"cuts obeyed by all after, s: {times}")
        print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    return 1 if violations else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())

"""A site on one machine, in real processes: members of etcd, zeusds on stand-in GPUs, agents.

The GPUs are the C stand-in for NVIDIA's library. Their limits are in a file that is mapped here, so
they can be read at any time, also while a zeusd is dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fake_nvml.double import ALWAYS, NvmlDouble
from zeus_fleet.messages import Budget, BudgetDomain
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import NodeInfo

GPUS = 2
FLOOR_W, MOST_W = 200, 600
"""Of a node with two A40."""
A40 = {
    "name": "NVIDIA A40",
    "limit_mw": 300_000,
    "limit_default_mw": 300_000,
    "limit_min_mw": 100_000,
    "limit_max_mw": 300_000,
    "board_limit_mw": 300_000,
    "load_mw": 250_000,
    "tick_ms": 100,
    "architecture": 7,
}
FLEET = [sys.executable, "-m", "zeus_fleet"]


@dataclass
class Program:
    """A process that is started again."""

    name: str
    command: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    again_at: float = 0.0
    resume_at: float = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            environment = {**os.environ, **self.env}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def tick(self, now: float) -> None:
        """Starts or continues a stopped process when its time has come."""
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
    """Asks a zeusd that may still be starting."""
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
    hardware: list[NvmlDouble] = field(default_factory=list)

    def start(self) -> None:
        commands, members = etcd_commands(self.folder)
        for i, command in enumerate(commands):
            self._add(f"etcd{i}", command)
        self.endpoints = [word for one in members for word in ("--etcd", one)]
        for i in range(self.nodes):
            state = self.folder / f"state{i}"
            (self.folder / f"gpus{i}").mkdir()
            gpus = NvmlDouble(self.folder / f"gpus{i}", [A40] * GPUS, privilege=ALWAYS)
            self.hardware.append(gpus)
            command = [sys.executable, "-m", "zeusd", "serve", "--nvml-library", gpus.library]
            command += ["--socket", self.socket(i), "--state-dir", str(state)]
            self._add(f"zeusd{i}", command, gpus.env)
        for i in range(self.nodes):
            # As an administrator would, before the node is used: the floor, until the first plan.
            with Client(self.socket(i)) as client:
                uuids = [gpu.uuid for gpu in answer(client).gpus]
                client.set_ceiling(uuids, "fleet", 1000 * FLOOR_W // GPUS)
            command = [*FLEET, "node", "--name", f"n{i}", "--socket", self.socket(i)]
            self._add(f"agent{i}", [*command, *self.endpoints])
        for i in range(2):
            # Uniform, so that GPUs without a job are raised, too.
            command = [*FLEET, "allocate", "--name", f"l{i}", "--policy", "uniform"]
            self._add(f"allocator{i}", [*command, *self.endpoints])

    def held_w(self) -> float:
        """The sum of all limits that the hardware holds now."""
        return sum(one.limit_mw(gpu) for one in self.hardware for gpu in range(GPUS)) / 1000

    def _add(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        program = Program(name, command, self.folder / f"{name}.log", env or {})
        self.programs.append(program)
        program.start()

    def socket(self, node: int) -> str:
        return str(self.folder / f"n{node}.sock")

    def stop(self) -> None:
        for program in self.programs:
            program.signal(signal.SIGKILL)
            if program.process is not None:
                program.process.wait()

    @property
    def most(self) -> int:
        """The sum of all maximum limits, W."""
        return self.nodes * MOST_W

    def budget(self, watts: int) -> Budget:
        """All nodes, and no reserve: no GPU is stuck here."""
        floors = {f"n{i}": 1000 * FLOOR_W for i in range(self.nodes)}
        return Budget((BudgetDomain("site", 1000 * watts, frozenset(floors)),), floors)

"""Measures how far a power budget scales: real agents on a real etcd, and plans for thousands of
nodes.

    python benchmarks/fleet_scale.py                    200 agents for a minute, and the plans
    python benchmarks/fleet_scale.py --agents 50 --seconds 20
    python benchmarks/fleet_scale.py --plans            only the plans, without etcd

Three members of etcd and two allocators are processes; the agents run in four more. Each agent is
the shipped one, with its own connection; only its zeusd is simulated (8 GPUs, 4 of which have a
job). It prints CPU and memory of each kind of process, the size of the plan, and the time until a
cut to 60 % is in force on all nodes. Plans for up to 5,000 nodes are made by the pure core, with
simulated nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fleet_site import FLEET, etcd_commands
from zeus_fleet import wire
from zeus_fleet.allocator import Allocator, Snapshot
from zeus_fleet.gpus import GpuLoad
from zeus_fleet.jobs import ByJobs
from zeus_fleet.messages import Budget, BudgetDomain, GrantPlan, NodeReport, NodeWork, Timing
from zeus_fleet.node import FleetCeilings, GpuRange
from zeus_fleet.profiles import ProgressProfile
from zeus_fleet.shells import clock_ns, run_agent
from zeus_fleet.simulation import tables
from zeus_fleet.store import FleetStore

GPUS, LOW, HIGH = 8, 100_000, 300_000
PROCESSES = 4


class SimulatedZeusd:
    """Ceilings with a deadline, and a job on half of the GPUs."""

    ranges = (GpuRange(LOW, HIGH),) * GPUS

    def __init__(self, job: str, profile: ProgressProfile) -> None:
        self._limits, self._deadline_ns = [LOW] * GPUS, 0
        gpus = tuple(range(GPUS // 2))
        self._load = GpuLoad(
            (HIGH,) * len(gpus) + (LOW,) * (GPUS - len(gpus)),
            GPUS * LOW,
            (NodeWork(job, "A40", gpus, LOW, HIGH, profile),),
        )

    def holds_mw(self) -> list[int]:
        """The most that each may hold now."""
        return self._limits if clock_ns() < self._deadline_ns else [LOW] * GPUS

    def carry_out(self, command: FleetCeilings) -> list[int]:
        """Sets the ceilings."""
        self._limits, self._deadline_ns = [*command.limits_mw], command.deadline_ns
        return self.holds_mw()

    def load(self) -> GpuLoad:
        """The running processes."""
        return self._load


def work_of(index: int, profiles: list[ProgressProfile]) -> tuple[str, ProgressProfile]:
    """Jobs of four nodes each."""
    job = index // 4
    return f"job{job}", profiles[job % len(profiles)]


async def agents(endpoints: list[str], first: int, count: int, file: Path) -> None:
    """Runs agents. Writes their limits, in W, whenever these change."""
    profiles = [run.profile for run in tables("a40")]
    zeusds = [SimulatedZeusd(*work_of(first + i, profiles)) for i in range(count)]
    for i, zeusd in enumerate(zeusds):
        store = FleetStore(endpoints[i % 3 :] + endpoints[: i % 3])
        task = asyncio.create_task(run_agent(f"n{first + i}", store, zeusd))
        task.add_done_callback(lambda one: one.result())
        TASKS.append(task)
    before = -1
    while True:
        held = sum(sum(zeusd.holds_mw()) for zeusd in zeusds) // 1000
        if held != before:
            before = held
            file.with_suffix(".new").write_text(str(held))
            file.with_suffix(".new").rename(file)
        await asyncio.sleep(0.02)


TASKS: list[asyncio.Task[None]] = []


def usage(pid: int) -> tuple[float, float]:
    """CPU time in s and memory in MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def real(count: int, seconds: float) -> None:
    """Agents on etcd."""
    floor_w, most_w = GPUS * LOW // 1000, GPUS * HIGH // 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands, endpoints = etcd_commands(folder)
        options = [word for one in endpoints for word in ("--etcd", one)]
        kinds: dict[str, list[subprocess.Popen[bytes]]] = {}
        log = (folder / "log").open("wb")

        def start(kind: str, command: list[str]) -> None:
            kinds.setdefault(kind, []).append(subprocess.Popen(command, stdout=log, stderr=log))

        def set_budget(watts: int) -> None:
            file = folder / "budget.toml"
            nodes = "\n".join(f"n{i} = {floor_w}" for i in range(count))
            file.write_text(f"limit_w = {watts}\n[nodes]\n{nodes}\n")
            subprocess.run(
                [*FLEET, "budget", "--file", str(file), *options], check=True, stdout=log
            )

        def held_w() -> int:
            return sum(int(file.read_text()) for file in folder.glob("held*[0-9]"))

        try:
            for command in commands:
                start("etcd member", command)
            time.sleep(3)
            full = count * (floor_w + most_w) // 2
            set_budget(full)
            for i in range(2):
                start("allocator", [*FLEET, "allocate", "--name", f"l{i}", *options])
            share = -(-count // PROCESSES)
            for i in range(PROCESSES):
                some = min(share, count - i * share)
                part = [*map(str, (i * share, some, folder / f"held{i}"))]
                start("process of agents", [sys.executable, __file__, "--run", *part, *endpoints])
            end = time.monotonic() + 120
            while held_w() < 0.97 * full and time.monotonic() < end:
                time.sleep(0.2)
            print(f"{count} agents hold {held_w()} of {full} W")
            processes = [(kind, one) for kind, some in kinds.items() for one in some]
            before = {one.pid: usage(one.pid)[0] for _, one in processes}
            time.sleep(seconds)
            print("| | CPU, % of a core | memory, MB |\n|---|--:|--:|")
            for kind, one in processes:
                cpu, memory = usage(one.pid)
                per = f" ({share} agents)" if kind == "process of agents" else ""
                used = 100 * (cpu - before[one.pid]) / seconds
                print(f"| {kind}{per} | {used:.1f} | {memory:.0f} |")
            cuts = []
            for _ in range(5):
                less = int(0.6 * full)
                set_budget(less)
                written = time.monotonic()
                while held_w() > less and time.monotonic() < written + 30:
                    time.sleep(0.01)
                cuts.append(time.monotonic() - written)
                set_budget(full)
                time.sleep(8)
            times = " ".join(f"{one:.2f}" for one in sorted(cuts))
            print(f"a cut to 60 % in force at all {count} agents after, s: {times}")
        finally:
            for started in kinds.values():
                for one in started:
                    one.kill()
                    one.wait()


def plans() -> None:
    """The pure core on many nodes: all jobs change between two plans."""
    profiles = [run.profile for run in tables("a40")]
    columns = "first plan, s | later, s | plan, kB | a node reads, kB | the allocator reads, kB"
    print(f"| nodes | GPUs | {columns} |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for count in (200, 1000, 5000):
        names = [f"n{i}" for i in range(count)]
        site = BudgetDomain("site", count * GPUS * 180_000, frozenset(names))
        rows = tuple(
            BudgetDomain(f"row{i}", 200 * GPUS * 190_000, frozenset(names[i : i + 200]))
            for i in range(0, count, 200)
        )
        budget = Budget((site, *rows), dict.fromkeys(names, GPUS * LOW))
        beats = {
            name: NodeReport(1, 0, GPUS * LOW, GPUS * LOW, GPUS * HIGH, GPUS * HIGH)
            for name in names
        }
        times = []
        allocator = Allocator(Timing(), ByJobs())
        allocator.lead(1)
        plan: GrantPlan | None = None
        for step in range(3):
            works = {
                name: (NodeWork(*_placed(i + step, profiles)),) for i, name in enumerate(names)
            }
            read = Snapshot(1, budget, 1, plan, step, beats, works)
            began = time.perf_counter()
            commit = allocator.plan(read, step * 10**9)
            times.append(time.perf_counter() - began)
            plan = plan if commit is None else commit.plan
        assert plan is not None
        head, pieces = len(wire.plan_bytes(plan)), [*map(len, wire.pieces_of(plan).values())]
        size, part = (head + sum(pieces)) / 1000, (head + max(pieces)) / 1000
        told = sum(len(wire.works_bytes(one)) for one in works.values())
        told += sum(len(wire.heartbeat_bytes(one)) for one in beats.values())
        later = max(times[1:])
        row = f"| {count} | {count * GPUS} | {times[0]:.2f} | {later:.2f} | {size:.0f} | "
        print(f"{row}{part:.1f} | {told / 1000:.0f} |", flush=True)


def _placed(
    index: int, profiles: list[ProgressProfile]
) -> tuple[str, str, tuple[int, ...], int, int, ProgressProfile]:
    job, profile = work_of(index, profiles)
    return job, "A40", tuple(range(GPUS // 2)), LOW, HIGH, profile


def main() -> None:
    """Runs the benchmark, and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--plans", action="store_true", help="only the plans")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        first, count, file, *endpoints = options.run
        asyncio.run(agents(endpoints, int(first), int(count), Path(file)))
        return
    plans()
    if not options.plans:
        real(options.agents, options.seconds)


if __name__ == "__main__":
    main()

"""Kills and stops the processes that keep a power budget: do the limits ever exceed it?

    python benchmarks/fleet_chaos.py --minutes 30

It runs three members of etcd, two allocators, and nodes of two stand-in GPUs, each with a zeusd and
an agent. At random, it stops one of them for up to 30 s, or kills and restarts it, and lets the
budget fall to 60 % of the sum of maxima and rise again. It reads the limits of all GPUs every 20
ms, from the stand-ins themselves, and at the end checks every change of a limit, from the calls to
their drivers. A cut applies to the sum after 15 s. The times until nodes obeyed it are printed,
separately for nodes that could be reached: neither they nor etcd had a fault just before it or
during it.

A machine that is too slow for so many nodes proves nothing: programs that do not get the CPU leave
nodes at their minimum. The duration of this is printed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fleet_audit
from benchmarks.fleet_site import FLOOR_W, Program, Site
from zeus_fleet.store import FleetStore, StoreUnavailable

LEASE_S = 15.1


@dataclass
class Budgeted:
    """A change of the budget.

    Attributes:
        before: The budget until then, W.
        watts: The new budget.
        began: Time of the first attempt, s since 1970.
        at: Time of the successful request; infinity: none has succeeded yet.
    """

    before: int
    watts: int
    began: float = field(default_factory=time.time)
    at: float = math.inf


class Writer(threading.Thread):
    """Writes a budget, with retries, while sampling continues."""

    def __init__(self, site: Site, budgeted: Budgeted) -> None:
        super().__init__(daemon=True)
        self._site, self._budgeted = site, budgeted

    def run(self) -> None:
        asyncio.run(self._write())

    async def _write(self) -> None:
        store = FleetStore(self._site.endpoints[1::2], timeout_s=2.0)
        while True:
            with contextlib.suppress(StoreUnavailable):
                read, _ = await store.read()
                revision = 0 if read is None else read.budget_revision
                at = time.time()
                if await store.set_budget(self._site.budget(self._budgeted.watts), revision):
                    self._budgeted.at = at
                    break
            await asyncio.sleep(0.2)
        await store.close()


def allowed_w(budgets: list[Budgeted], at: float) -> float:
    """The bound of all nodes' limits at a time: a cut applies `LEASE_S` after it was written."""
    one = [budget for budget in budgets if budget.began <= at][-1]
    return one.watts if at >= one.at + LEASE_S else max(one.before, one.watts)


@dataclass
class Fault:
    """When something was stopped or dead, and some seconds until it has recovered."""

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
    seconds = 2.0
    if kind == "stopped":
        seconds = generator.uniform(1, 30)
        program.resume_at = time.monotonic() + seconds
    elif group == "zeusd":
        program.again_at = time.monotonic() + 0.1  # as systemd does it
    back = now + seconds
    return Fault(program.name, f"{group} {kind}", now, back + AFTER_S[group])


def obeyed(
    budgets: list[Budgeted], faults: list[Fault], lines: list[list[tuple[float, float]]]
) -> str:
    """How soon nodes obeyed cuts, by whether they could be reached.

    A node has, once it has come down to its own share, or all of them to the new budget: then a new
    plan may give one node more than its share.

    Args:
        budgets: All that were written.
        faults: All there were.
        lines: The sum of each node's limits from each time on.
    """
    total = fleet_audit.total_of(lines)
    times: dict[bool, list[float]] = {True: [], False: []}
    for cut in budgets:
        if cut.watts < cut.before and cut.at < math.inf:
            for node, line in enumerate(lines):
                took = _took(cut, line, len(lines))
                if took is not None:
                    later = (at for at, held in total if at > cut.at and held <= cut.watts)
                    took = min(took, next(later, math.inf) - cut.at)
                    since, until = cut.at - 2, cut.at + took
                    touched = any(one.touches(node, since, until) for one in faults)
                    times[not touched].append(took)
    said = []
    for reachable, some in times.items():
        some.sort()
        what = "reachable" if reachable else "not reachable"
        if some:
            middle, late = some[len(some) // 2], some[int(len(some) * 0.99)]
            said.append(
                f"nodes {what} obeyed a cut ({len(some)} times) after: median {middle:.2f} s, "
                f"99 % {late:.2f} s, last {some[-1]:.2f} s"
            )
    return "\n".join(said)


def _took(cut: Budgeted, line: list[tuple[float, float]], nodes: int) -> float | None:
    """How long a node took to what `obeyed_mw` asks of it; None: it had no more before."""
    held = next((watts for at, watts in reversed(line) if at <= cut.at), 0.0)
    floors = FLOOR_W * nodes
    bound = FLOOR_W + (held - FLOOR_W) * (cut.watts - floors) / (cut.before - floors) + 1
    if held <= bound:
        return None
    return next((at - cut.at for at, watts in line if at > cut.at and watts <= bound), math.inf)


def unexplained(
    faults: list[Fault], lines: list[list[tuple[float, float]]], began: float, ended: float
) -> float:
    """The share of time that nodes were at their minimum though no fault kept them from etcd."""
    seconds = low = 0
    for node, line in enumerate(lines):
        known = [fault for fault in faults if fault.touches(node, began, ended)]
        times, last = [at for at, _ in line], len(line) - 1
        for second in range(int(ended - began)):
            at = began + second
            # After a lease without an answer, an allocator waits before it raises the node again.
            if not any(fault.touches(node, at - 2 * LEASE_S, at) for fault in known):
                seconds += 1
                low += line[min(last, bisect.bisect_right(times, at) - 1)][1] <= FLOOR_W
    return low / seconds if seconds else math.nan


class Run:
    """Faults and budgets at random, while all limits are read."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.budgets = [Budgeted(0, site.most)]
        self.faults: list[Fault] = []
        self.samples = self.above = 0
        self.used = self.longest_s = 0.0
        self.began = time.time()
        self._random = random.Random(seed)
        self._writer: Writer | None = None

    def start(self) -> None:
        """Writes the first budget and gives all nodes time to reach it."""
        writer = Writer(self.site, self.budgets[0])
        writer.start()
        writer.join(60)
        end = time.monotonic() + 600
        while self.site.held_w() < 0.99 * self.site.most:
            if time.monotonic() > end:
                raise SystemExit("the nodes do not reach the budget: too many for this machine")
            time.sleep(0.5)
        self.began = time.time()

    def go_on(self, seconds: float, every_s: float) -> None:
        """Samples, and strikes now and then."""
        now = self.began
        fault_at, budget_at, sample_at = now + 5, now + 10, now
        while now < self.began + seconds:
            before, now = now, time.time()
            self.longest_s = max(self.longest_s, now - before)
            for program in self.site.programs:
                program.tick(time.monotonic())
            if now >= sample_at:
                sample_at = now + every_s
                self._sample()
            if now >= fault_at:
                fault_at = now + self._random.uniform(1, 8)
                program = self._random.choice(self.site.programs)
                self.faults.append(strike(program, self._random, now))
            if self._writer is not None and not self._writer.is_alive():
                self._writer = None
                budget_at = now + self._random.uniform(20, 40)
            elif self._writer is None and now >= budget_at:
                last = self.budgets[-1].watts
                low = last == self.site.most
                self.budgets.append(Budgeted(last, int(self.site.most * (0.6 if low else 1.0))))
                self._writer = Writer(self.site, self.budgets[-1])
                self._writer.start()
                budget_at = math.inf
            time.sleep(min(0.05, every_s / 4))

    def _sample(self) -> None:
        began = time.time()
        held = self.site.held_w()
        allowed = max(allowed_w(self.budgets, at) for at in (began, time.time()))
        self.samples += 1
        self.used += held / allowed
        if held > allowed:
            self.above += 1
            print(f"{began - self.began:.2f} s: {held:g} W of {allowed:g} W", flush=True)

    def report(self, every_s: float) -> bool:
        """Prints the observations. Returns whether no sum was exceeded."""
        found = fleet_audit.changes(self.site.hardware)
        ends = [fleet_audit.Change(one.at + LEASE_S, -1, 0, 0.0) for one in self.budgets]
        every = sorted([*found, *(end for end in ends if end.at_s < time.time())])
        above, most = fleet_audit.excesses(
            every, lambda at: allowed_w(self.budgets, at), self.began
        )
        print(f"{self.samples} samples of all limits, {every_s:g} s between them: ")
        print(f"  above the budget {self.above}; {self.used / self.samples:.2f} of it on average")
        print(f"{len(found)} limits that the drivers received:")
        print(f"  above the budget {len(above)}; at most {most:.3f} of it")
        for one in above[:20]:
            at = one.at_s - self.began
            print(f"  {at:.3f} s: {one.held_w:g} W of {one.allowed_w:g} W")
        lines = fleet_audit.of_nodes(found, self.site.nodes)
        print(obeyed(self.budgets, self.faults, lines))
        idle = unexplained(self.faults, lines, self.began, time.time())
        print(f"at their minimum without a fault that explains it: {idle:.4f} of the time of nodes")
        kinds = Counter(fault.what for fault in self.faults)
        print(", ".join(f"{what} {count}" for what, count in sorted(kinds.items())))
        print(f"longest time that this program did not run: {self.longest_s:.2f} s")
        return not above and not self.above


def main() -> int:
    """Prints the observations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=0.02, help="seconds between samples")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        site = Site(Path(name), options.nodes)
        stack.callback(site.stop)
        site.start()
        run = Run(site, options.seed)
        run.start()
        run.go_on(60 * options.minutes, options.every)
        kept = run.report(options.every)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            for log in Path(name).glob("*.log"):
                shutil.copy(log, options.keep)
    return 0 if kept else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())

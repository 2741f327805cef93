"""GPUs whose truth is known, and the accounts that are kept of them."""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from zeus_common.units import SECOND_NS
from zeus_ipc.replies import Usage, UsageSum
from zeus_ipc.requests import Allocate, Deallocate, GetUsage
from zeusd.energy.curve import EnergyCurve
from zeusd.energy.history import SIZE, History, Slow
from zeusd.energy.meter import Edge
from zeusd.ledger.schema import open_ledger, open_to_read
from zeusd.ledger.store import LedgerStore
from zeusd.ledger.usage import Reader, Sum
from zeusd.runtime.accounts import Accounts, Clocks, Retention
from zeusd.runtime.control_groups import JobGroups
from zeusd.runtime.readings import REASON_IDLE
from zeusd.runtime.sources import Source
from zeusd.runtime.usages import page_of, usage_of

TICK_NS = SECOND_NS // 10
START_NS = 1_000 * SECOND_NS
START_S = 1_790_000_100  # a quarter of an hour begins
BOOT = "boot-1"
GPU = "GPU-0"
ALL = [START_S - 40 * 86_400, START_S + 40 * 86_400]
"""Edges around all that happens, each at a quarter of an hour."""


def energy_uj(one: UsageSum | Sum) -> int:
    return one.active_uj + one.idle_uj


class Gpu:
    """A GPU in memory that is shared with forked children, and outlives each of them.

    Args:
        start_ns: When its history begins.
    """

    failure = None
    aligns = True
    period_ns = TICK_NS

    def __init__(self, start_ns: int = START_NS) -> None:
        self.limited: dict[str, float] = {}  # shares of any time, by cause
        self._memory = mmap.mmap(-1, SIZE)
        self.open()
        self._add(start_ns, 0, 0, idle=True)

    @property
    def curve(self) -> EnergyCurve:
        return EnergyCurve(self.history, None, 1_000_000)

    def limited_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        return {cause: round(share * (end_ns - begin_ns)) for cause, share in self.limited.items()}

    @property
    def now_ns(self) -> int:
        return self.history.ends_ns

    @property
    def energy_uj(self) -> int:
        """The truth."""
        return self.history.energy_uj[self.history.ticks.end - 1]

    def tick(self, watts: int, ticks: int = 1, idle: bool = False, every_ns: int = TICK_NS) -> None:
        """Time passes."""
        for _ in range(ticks):
            energy_uj = self.energy_uj + watts * every_ns // 1000
            self._add(self.now_ns + every_ns, energy_uj, 1000 * watts, idle)

    def open(self) -> None:
        """Opens the history again, as a zeusd does that follows one that was killed."""
        self.history = History(memoryview(self._memory))

    def _add(self, t_ns: int, energy_uj: int, mw: int, idle: bool) -> None:
        edge = Edge(t_ns, energy_uj, mw, mw, energy_uj)
        self.history.add(edge, None, Slow(reasons=REASON_IDLE if idle else 0))


class ReadAccounts(Accounts):
    """Accounts, and what a user is told of them."""

    def __init__(self, directory: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._directory = directory

    def usage(self, request: GetUsage, reader: int | None) -> Usage:
        """The answer to a request."""
        self.refresh()
        with open_to_read(self._directory) as connection:
            steps = usage_of(Reader(connection, request.gpus), request, reader)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return page_of(end.value, request, Reader(connection).begins_s())


class World:
    """A node: GPUs with the same time, its clocks, its control groups and its ledger."""

    def __init__(self, directory: Path, gpus: int = 1) -> None:
        self.directory = directory / "ledger"
        self.groups = directory / "groups"
        self.groups.mkdir(parents=True, exist_ok=True)
        self.gpus = {f"GPU-{number}": Gpu() for number in range(gpus)}
        self.step_ns = self.slept_ns = self.ahead_ns = 0

    @property
    def now_ns(self) -> int:
        return max(gpu.now_ns for gpu in self.gpus.values())

    def tick(self, watts: int, ticks: int = 1, idle: bool = False) -> None:
        """Time passes for all GPUs alike."""
        for gpu in self.gpus.values():
            gpu.tick(watts, ticks, idle)

    def utc_ns(self) -> int:
        return self.utc_ns_at(self.now_ns)

    def utc_ns_at(self, t_ns: int) -> int:
        return START_S * SECOND_NS + t_ns - START_NS + self.step_ns

    def open(
        self,
        boot: str = BOOT,
        ignored_units: Iterable[str] | None = None,
        retention: Retention | None = None,
    ) -> World:
        """Opens the ledger, like a zeusd that starts now."""
        self.connection = open_ledger(self.directory)
        self.store = LedgerStore(self.connection, boot)
        clocks = Clocks(
            lambda: self.now_ns + self.ahead_ns, self.utc_ns, lambda: self.now_ns + self.slept_ns
        )
        known = [*self.gpus, "cpu:0"]
        self.accounts = ReadAccounts(
            self.directory,
            self.store,
            lambda: known,
            cast("Callable[[str], Source | None]", self.gpus.get),
            clocks,
            JobGroups(str(self.groups), os.getuid()),
            retention or Retention(),
            ignored_units,
        )
        self.accounts.recover()
        return self

    def restart(self) -> None:
        """zeusd is killed, nothing more is settled, and the next one starts."""
        self.accounts.close()
        self.open()

    def run(self, times: int, watts: int, ticks: int = 10, idle: bool = False) -> None:
        """Time passes, and zeusd works now and then."""
        for _ in range(times):
            self.tick(watts, ticks, idle)
            self.accounts.work()

    def group(self, name: str) -> Path:
        """Where the control group of a job is."""
        return self.groups / "system.slice/slurmstepd.scope" / name

    def allocate(self, name: str, uid: int = 1000, **fields: Any) -> None:
        gpus = fields.pop("gpus", [GPU])
        request = Allocate(id=1, gpus=gpus, name=name, uid=uid, **fields)
        self.accounts.allocate(request, self.now_ns)

    def deallocate(self, name: str, **fields: Any) -> list[str]:
        return self.accounts.deallocate(Deallocate(id=1, name=name, **fields), self.now_ns)

    def answer(
        self, by: str = "job", edges: list[int] = ALL, reader: int | None = None, **fields: Any
    ) -> Usage:
        """What a request gives, once all until now is settled."""
        self.accounts.settle()
        return self.accounts.usage(GetUsage(id=1, edges=edges, by=by, **fields), reader)

    def usage(self, by: str = "job", edges: list[int] = ALL, **fields: Any) -> dict[str, int]:
        """Joules by name, or else by kind or uid; checks that they add up to the meters."""
        answer = self.answer(by, edges, **fields)
        found: dict[str, int] = defaultdict(int)
        for one in answer.sums:
            label = one.name or (f"uid {one.uid}" if one.kind == "user" else one.kind)
            found[label + (f"/{one.run}" if one.run else "")] += energy_uj(one) // 1_000_000
        if not {*fields} - {"reader"}:
            assert sum(map(energy_uj, answer.sums)) == sum(answer.metered_uj)
        return dict(found)

"""Around the cores: loops that ask etcd and zeusd. An agent per node, any number of allocators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from zeus_fleet.allocator import Allocator
from zeus_fleet.messages import S, Timing
from zeus_fleet.node import Ceilings, Gpu, Node
from zeus_fleet.store import Store, StoreUnavailable
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

HEARTBEAT_S = 1.2
PLAN_S = 1.0
CEILING = "fleet"
ZEUSD_TIMEOUT_S = 1.0
"""zeusd drops a request that it does not come to within this time."""

log = logging.getLogger("zeus_fleet")


def clock_ns() -> int:
    """Time that counts while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Gpus(Protocol):
    """The GPUs of a node."""

    ranges: Sequence[Gpu]

    def holds_mw(self) -> list[int]:
        """The most that each may hold now."""
        ...

    def carry_out(self, command: Ceilings) -> list[int]:
        """Sets the ceilings; returns the most that each may hold then.

        Raises:
            ZeusIpcError: zeusd did not answer.
        """
        ...

    def wanted_mw(self) -> list[int]:
        """What each has use for."""
        ...


class ZeusdGpus:
    """The GPUs of a zeusd. It must take this process's user for an administrator.

    Args:
        client: Of that zeusd.

    Raises:
        ValueError: A GPU has no power limit.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._uuids = []
        ranges = []
        for gpu in client.node().gpus:
            low, high = gpu.power_limit_min_mw, gpu.power_limit_max_mw
            if low is None or high is None:
                raise ValueError(f"GPU {gpu.index} ({gpu.name}) has no power limit to bound")
            self._uuids.append(gpu.uuid)
            ranges.append(Gpu(low, high))
        self.ranges: Sequence[Gpu] = tuple(ranges)

    def holds_mw(self) -> list[int]:
        """The most that each may hold now: what may be set, and what is in force."""
        bounds = {gpu.uuid: gpu.power_limit_site_mw for gpu in self._client.node().gpus}
        states = self._client.state(self._uuids)
        holds = []
        for uuid, gpu in zip(self._uuids, self.ranges, strict=True):
            bound, limit = bounds.get(uuid), states[uuid].power_limit_mw
            holds.append(gpu.max_mw if bound is None or limit is None else max(bound, limit))
        return holds

    def carry_out(self, command: Ceilings) -> list[int]:
        """Sets the ceilings. A GPU that refuses keeps what it held."""
        before = self.holds_mw()
        holds = []
        for index, (uuid, gpu) in enumerate(zip(self._uuids, self.ranges, strict=True)):
            limit = command.limits_mw[index]
            bounded = limit > gpu.min_mw
            try:
                highest = self._client.set_ceiling(
                    uuid,
                    CEILING,
                    limit,
                    until_boot_ns=command.deadline_ns if bounded else None,
                    fallback_mw=gpu.min_mw if bounded else None,
                )
                holds.append(highest[uuid])
            except ZeusIpcError as error:
                log.warning("GPU %d keeps up to %g W: %s", index, before[index] / 1000, error)
                holds.append(max(before[index], limit))
        return holds

    def wanted_mw(self) -> list[int]:
        """The maximum of GPUs that compute, the minimum of others."""
        states = self._client.state(self._uuids)
        return [
            gpu.min_mw if states[uuid].utilization_percent == 0 else gpu.max_mw
            for uuid, gpu in zip(self._uuids, self.ranges, strict=True)
        ]


async def run_agent(
    name: str,
    store: Store,
    gpus: Gpus,
    *,
    timing: Timing | None = None,
    clock: Callable[[], int] = clock_ns,
) -> None:
    """Keeps a node's ceilings as the plan says, until it is cancelled.

    It begins at the floor: it does not know what an agent before it was granted.
    """
    timing = timing or Timing()
    number = await _newest_number(name, store)
    holds = await asyncio.to_thread(gpus.holds_mw)
    node = Node(name, gpus.ranges, holds, timing, number=number)
    while True:
        began = clock()
        await _carry_out(node, gpus, node.tick(clock()), clock)
        try:
            wanted = await asyncio.to_thread(gpus.wanted_mw)
            await _carry_out(node, gpus, node.wants(wanted, clock()), clock)
        except ZeusIpcError as error:
            log.warning("zeusd does not say what is computed: %s", error)
        beat = node.heartbeat(clock())
        try:
            answer = await store.beat(name, beat)
            if answer is None:
                log.error("another agent speaks for %s; stop one of the two", name)
            else:
                await _carry_out(node, gpus, node.answered(beat.number, *answer, clock()), clock)
        except StoreUnavailable as error:
            log.warning("%s; zeusd lowers the GPUs if this lasts", error)
        await asyncio.sleep(max(0.05, HEARTBEAT_S - (clock() - began) / S))


async def _newest_number(name: str, store: Store) -> int:
    while True:
        try:
            return await store.newest_number(name)
        except StoreUnavailable as error:
            log.warning("%s", error)
            await asyncio.sleep(HEARTBEAT_S)


async def _carry_out(
    node: Node, gpus: Gpus, command: Ceilings | None, clock: Callable[[], int]
) -> None:
    while command is not None:
        try:
            holds = await asyncio.to_thread(gpus.carry_out, command)
        except ZeusIpcError as error:
            log.warning("zeusd does not answer: %s", error)
            node.failed()
            return
        command = node.applied(holds, clock())


async def run_allocator(
    name: str,
    store: Store,
    core: Allocator,
    *,
    clock: Callable[[], int] = clock_ns,
) -> None:
    """Plans whenever it is elected, until it is cancelled."""
    lease: int | None = None
    token: int | None = None
    while True:
        try:
            now, lease = await store.campaign(name, lease)
            if now != token:
                token = now
                log.info("%s %s", name, "follows" if token is None else f"leads, token {token}")
                if token is None:
                    core.follow()
                else:
                    core.lead(token)
            if token is not None:
                snapshot, revisions = await store.read()
                commit = None if snapshot is None else core.plan(snapshot, clock())
                if commit is not None and not await store.commit(commit, revisions):
                    log.info("the plan was not written: something has changed meanwhile")
        except StoreUnavailable as error:
            log.warning("%s", error)
        await asyncio.sleep(PLAN_S)

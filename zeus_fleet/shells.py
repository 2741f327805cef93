"""I/O around the cores: loops that use etcd and zeusd. An agent per node, any number of
allocators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from zeus_common.outage import Outage
from zeus_fleet import schedule
from zeus_fleet.allocator import Allocator, Snapshot
from zeus_fleet.gpus import Gpus
from zeus_fleet.jobs import ByJobs
from zeus_fleet.messages import NodeWork, S, Timing
from zeus_fleet.node import FleetCeilings, FleetNode
from zeus_fleet.store import FleetStore, StoreUnavailable
from zeus_ipc.errors import ZeusIpcError

HEARTBEAT_S = 1.2
PLAN_S = 1.0
log = logging.getLogger("zeus_fleet")

REPEATED_S = 60.0
"""Period of log records about a failure that continues."""


def _outage(of: str) -> Outage:
    return Outage(log, f"{of} answers again", again_s=REPEATED_S)


def clock_ns() -> int:
    """CLOCK_BOOTTIME, which counts during suspend."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


async def run_agent(
    name: str,
    store: FleetStore,
    gpus: Gpus,
    *,
    timing: Timing | None = None,
    clock: Callable[[], int] = clock_ns,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Applies the plan to a node's ceilings until it is cancelled.

    It starts at the floor, even if etcd responds: it does not know what was granted to an earlier
    agent, and after a boot the driver's default is in force.

    Args:
        name: The node's name in the budget.
        store: The store with plan and budget.
        gpus: The node's GPUs.
        timing: The common times.
        clock: CLOCK_BOOTTIME.
        ready: Called when all GPUs are at the floor.
    """
    timing = timing or Timing()
    await _begin(name, gpus, timing, clock)
    ready()
    number = await _newest_number(name, store)
    holds = await asyncio.to_thread(gpus.holds_mw)
    node = FleetNode(name, gpus.ranges, holds, timing, number=number)
    works: tuple[NodeWork, ...] = ()
    written: tuple[NodeWork, ...] | None = None
    etcd, zeusd = _outage("etcd"), _outage("zeusd")
    listed = Outage(log, f"the budget lists {name}", again_s=REPEATED_S)
    alone = Outage(log, f"no other agent is running for {name} now", again_s=REPEATED_S)
    while True:
        began = clock()
        await _carry_out(node, gpus, node.tick(clock()), clock)
        try:
            load = await asyncio.to_thread(gpus.load)
            works = load.works
            node.draws(load.drawn_mw)
            await _carry_out(node, gpus, node.wants(load.wanted_mw, clock()), clock)
            zeusd.succeeded()
        except ZeusIpcError as error:
            zeusd.failed(f"zeusd does not report the GPUs' work: {error}")
        beat = node.heartbeat(clock())
        try:
            answer = await store.beat(name, beat, None if works == written else works)
            etcd.succeeded()
            if answer is None:
                alone.failed(f"another agent is running for {name}; stop one of the two")
            else:
                alone.succeeded()
                # Repeat it occasionally, because the store may have been recreated empty.
                written = works if beat.number % 50 else None
                if answer.budget is None or name in answer.budget.floors_mw:
                    listed.succeeded()
                else:
                    listed.failed(
                        f"the budget does not list {name}; its GPUs stay at their minimum"
                    )
                command = node.answered(
                    beat.number, answer.plan, answer.budget, clock(), answer.limits_mw
                )
                await _carry_out(node, gpus, command, clock)
        except StoreUnavailable as error:
            etcd.failed(f"{error}; zeusd lowers the GPUs if this lasts")
        await asyncio.sleep(max(0.05, HEARTBEAT_S - (clock() - began) / S))


async def _begin(name: str, gpus: Gpus, timing: Timing, clock: Callable[[], int]) -> None:
    """Lowers all GPUs to the floor, as far as possible."""
    while True:
        try:
            node = FleetNode(name, gpus.ranges, await asyncio.to_thread(gpus.holds_mw), timing)
            command = node.tick(clock())
            if command is not None:
                await asyncio.to_thread(gpus.carry_out, command)
            return
        except ZeusIpcError as error:
            log.warning("zeusd does not answer: %s", error)
            await asyncio.sleep(HEARTBEAT_S)


async def _newest_number(name: str, store: FleetStore) -> int:
    etcd = _outage("etcd")
    while True:
        try:
            number = await store.newest_number(name)
            etcd.succeeded()
            return number
        except StoreUnavailable as error:
            etcd.failed(f"{error}; the GPUs are at their minimum until it does")
            await asyncio.sleep(HEARTBEAT_S)


async def _carry_out(
    node: FleetNode, gpus: Gpus, command: FleetCeilings | None, clock: Callable[[], int]
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
    store: FleetStore,
    core: Allocator,
    *,
    jobs: ByJobs | None = None,
    clock: Callable[[], int] = clock_ns,
) -> None:
    """Computes plans whenever it is elected, until it is cancelled.

    Args:
        name: Unique name of this allocator.
        store: The store with the plan.
        core: Computes plans.
        jobs: The core's policy, if it divides a node's grant among its GPUs.
        clock: CLOCK_BOOTTIME.
    """
    advised: dict[str, dict[int, int]] = {}
    lease: int | None = None
    token: int | None = None
    etcd = _outage("etcd")
    while True:
        try:
            now, lease = await store.campaign(name, lease)
            if now != token:
                token, advised = now, {}
                log.info("%s %s", name, "follows" if token is None else f"leads, token {token}")
                if token is None:
                    core.follow()
                else:
                    core.lead(token)
            if token is not None:
                snapshot, revisions = await store.read()
                if snapshot is not None and await _keep_schedule(store, snapshot):
                    snapshot, revisions = await store.read()
                commit = None if snapshot is None else core.plan(snapshot, clock())
                before = None if snapshot is None else snapshot.plan
                if commit is not None and not await store.commit(commit, revisions, before):
                    log.info("the plan was not written: its inputs have changed meanwhile")
                if jobs is not None:
                    await _advise(store, jobs, advised)
            etcd.succeeded()
        except StoreUnavailable as error:
            etcd.failed(str(error))
        await asyncio.sleep(PLAN_S)


async def _keep_schedule(store: FleetStore, read: Snapshot) -> bool:
    """Writes the present budget according to the events; returns whether it changed."""
    budget = schedule.due(read.budget, time.time())
    if budget is read.budget:
        return False
    log.info("the site's limit is now %g W", budget.site.limit_mw / 1000)
    await store.set_budget(budget, read.budget_revision)
    return True


async def _advise(store: FleetStore, jobs: ByJobs, advised: dict[str, dict[int, int]]) -> None:
    """Writes how nodes divide their grants, if that has changed."""
    new = jobs.limits_mw.items()
    changed = {node: limits for node, limits in new if advised.get(node) != limits}
    if changed:
        await store.advise(changed)
        advised.update(changed)

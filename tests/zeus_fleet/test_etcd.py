"""Agents, allocators and commands on a real etcd, and with a real zeusd on simulated GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import subprocess
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import RunningDaemon, known, running_daemon, wait_for
from tests.zeus_fleet.etcd import running_etcd
from zeus.device.gpu import GPUs
from zeus.utils import web
from zeus_fleet import shells, wire
from zeus_fleet.allocator import Allocator, Commit, Snapshot, by_want
from zeus_fleet.commands import main
from zeus_fleet.connection import connect
from zeus_fleet.gpus import GpuLoad, ZeusdGpus
from zeus_fleet.jobs import ByJobs
from zeus_fleet.messages import (
    Budget,
    BudgetDomain,
    Grant,
    GrantPlan,
    LimitEvent,
    NodeReport,
    NodeWork,
    S,
    StoreAnswer,
    Timing,
)
from zeus_fleet.node import FleetCeilings, GpuRange
from zeus_fleet.policies import water_filling
from zeus_fleet.profiles import ProgressProfile
from zeus_fleet.server import FleetMetrics
from zeus_fleet.shells import run_agent, run_allocator
from zeus_fleet.store import FleetStore, StoreUnavailable
from zeus_fleet.view import Watcher
from zeus_ipc.controls import Control

pytestmark = pytest.mark.needs("etcd")

QUICK = Timing(lease_ns=2 * S, guard_ns=S // 2)
BUDGET = Budget(
    (BudgetDomain("site", 700_000, frozenset("ab")),), {"a": 200_000, "b": 200_000}, frozenset()
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(shells, "PLAN_S", 0.1)


def beat(number: int, held_mw: int = 200_000) -> NodeReport:
    return NodeReport(number, 0, held_mw, 200_000, 500_000, 500_000)


@contextlib.asynccontextmanager
async def opened(*endpoints: str, prefix: str, timeout_s: float = 5.0) -> AsyncIterator[FleetStore]:
    store = FleetStore(endpoints, prefix=prefix, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def put(etcd: str, key: bytes, value: bytes) -> None:
    """Writes below the store's feet."""
    client = connect(etcd, None, 5.0)
    await client.put(key, value)
    await client.close()


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 120))

    return run


class Fleet(contextlib.AsyncExitStack):
    """Agents and allocators that run until the end of the block, each with its own store.

    Attributes:
        store: The operator's.
        tasks: What runs.
    """

    def __init__(self, etcd: str, prefix: str, budget: Budget) -> None:
        super().__init__()
        self._open = functools.partial(opened, etcd, prefix=prefix)
        self._budget = budget
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self.store = await self.enter_async_context(self._open())
        await self.store.set_budget(self._budget, 0)
        return self

    async def __aexit__(self, *raised: Any) -> bool:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return await super().__aexit__(*raised)

    async def agent(self, name: str, gpus: Any) -> asyncio.Task[None]:
        return self._start(run_agent(name, await self._another(), gpus, timing=QUICK))

    async def allocator(self, jobs: ByJobs | None = None) -> asyncio.Task[None]:
        core = Allocator(QUICK, jobs or by_want)
        name = f"l{len(self.tasks)}"
        return self._start(run_allocator(name, await self._another(), core, jobs=jobs))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def read(self) -> Snapshot:
        snapshot, _ = await self.store.read()
        assert snapshot is not None
        return snapshot

    async def limit(self, limit_mw: int) -> None:
        """The operator writes another limit of the site."""
        read = await self.read()
        site = replace(read.budget.site, limit_mw=limit_mw)
        assert await self.store.set_budget(
            Budget((site,), read.budget.floors_mw), read.budget_revision
        )

    async def _another(self) -> FleetStore:
        return await self.enter_async_context(self._open())


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        await asyncio.sleep(0.02)


# -------------------------------------------------------------------------------------- the store


def test_messages_are_read_back_as_they_were_written() -> None:
    grants = {f"n{one}": Grant(3, 250_000 + one, 500_000) for one in range(200)}
    plan = GrantPlan(7, {"site": 300_000}, grants)
    pieces = wire.pieces_of(plan)
    assert wire.plan_from(wire.plan_bytes(plan), pieces.values()) == plan
    part = wire.plan_from(wire.plan_bytes(plan), [pieces[wire.piece_of("n7")]])
    assert part.grants["n7"] == grants["n7"]
    assert len(part.grants) < 20
    assert wire.budget_from(wire.budget_bytes(BUDGET)) == BUDGET
    one = replace(beat(12), stuck_mw=5)
    assert wire.heartbeat_from(wire.heartbeat_bytes(one)) == one
    assert wire.number_key(9) < wire.heartbeat_bytes(beat(9)) < wire.number_key(10)


@awaited
async def test_a_late_heartbeat_does_not_replace_a_newer_one(etcd: str, prefix: str) -> None:
    async with opened(etcd, prefix=prefix) as store:
        assert await store.newest_number("a") == 0
        assert await store.beat("a", beat(2)) == StoreAnswer(None, None)
        assert await store.beat("a", beat(1)) is None
        assert await store.beat("a", beat(2)) is None
        assert await store.newest_number("a") == 2
        assert await store.set_budget(BUDGET, 0)
        assert not await store.set_budget(BUDGET, 0), "someone changed it meanwhile"
        assert await store.beat("a", beat(3)) == StoreAnswer(None, BUDGET)
        snapshot, _ = await store.read()
        assert snapshot is not None
        assert snapshot.heartbeats == {"a": beat(3)}


NUMBER = b"%020d" % 7
POISON = {
    "nothing": b"",
    "no JSON": b"none",
    "too few": NUMBER + b"[1]",
    "a map": NUMBER + b"{}",
    "infinity": NUMBER + b"[0,Infinity,0,0,0,0,0]",
    "a large float": NUMBER + b"[0,1e999,0,0,0,0,0]",
    "a fraction": NUMBER + b"[0,1.5,0,0,0,0,0]",
    "many digits": NUMBER + b"[0," + b"9" * 400 + b",0,0,0,0,0]",
    "a gigawatt": NUMBER + b"[0,%d,0,0,0,0,0]" % 10**13,
    "negative": NUMBER + b"[0,-1,0,0,0,0,0]",
    "nesting": NUMBER + b"[" * 100_000,
    "digits of another script": "٧".encode() * 10 + b"[0,0,0,0,0,0,0]",
    "no UTF-8": NUMBER + b'[0,0,0,0,0,0,"\xff"]',
    "half a surrogate": rb'[{"job":"\ud800","kind":"","gpus":[0],"min_mw":1,"max_mw":2}]',
    "the last number": b"9" * 20 + b"[0,0,0,0,0,0,0]",
    "the last epoch of a plan": NUMBER + b"[%d,0,1,1,1,0,0]" % 2**62,
    "thousands of jobs": json.dumps(
        [{"job": f"{n}", "kind": "", "gpus": [n], "min_mw": 1, "max_mw": 2} for n in range(3000)]
    ).encode(),
    "above all numbers": b"~",
}


@pytest.mark.usefixtures("quick")
@awaited
async def test_what_nodes_write_stops_neither_the_budget_of_the_others_nor_status(
    etcd: str, prefix: str
) -> None:
    poisoned = {f"a{number}": text for number, text in enumerate(POISON.values())}
    floors = dict.fromkeys((*poisoned, "b"), 200_000)
    site = BudgetDomain("site", sum(floors.values()) + 300_000, frozenset(floors))
    gpus = FakeGpus(250_000)

    def status() -> str:
        command = ["status", "--etcd", etcd, "--prefix", prefix]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    async with Fleet(etcd, prefix, Budget((site,), floors)) as fleet:
        for name, text in poisoned.items():
            for key in ("node", "jobs"):
                await put(etcd, f"{prefix}{key}/{name}".encode(), text)
        await put(etcd, f"{prefix}node/".encode() + b"\xff\n", b"~")
        await fleet.agent("b", gpus)
        await fleet.allocator()
        await until(lambda: sum(gpus.limits) == 500_000, "b to get what it wants")
        read = await fleet.read()
        assert (read.heartbeats.keys(), read.works.keys()) == ({"b"}, {"b"})
        view = Watcher().look(read, 0.0, 0.0)
        states = dict.fromkeys(poisoned, "unreadable") | {"b": "ok"}
        assert {node.name: node.state for node in view.nodes} == states
        figures = bytes(web.figures(FleetMetrics(view, True)).body).decode()
        for name in poisoned:
            assert f'node_state{{fleet_node="{name}",state="unreadable"}} 1.0' in figures
        assert "left out: what it wrote is not" in await asyncio.to_thread(status)
        for text in POISON.values():
            await put(etcd, f"{prefix}limits/b".encode(), text)
            number = (await fleet.read()).heartbeats["b"].number
            while (await fleet.read()).heartbeats["b"].number < number + 2:
                await asyncio.sleep(0.02)
        await fleet.limit(site.limit_mw - 100_000)
        await until(lambda: sum(gpus.limits) == 400_000, "b to obey the cut")
        for name in poisoned:
            await fleet.agent(name, FakeGpus(100_000))
            while name in (await fleet.read()).unreadable:
                await asyncio.sleep(0.02)
        assert "left out" not in await asyncio.to_thread(status)
        assert not any(task.done() for task in fleet.tasks)


@pytest.mark.parametrize("key", ["budget", "plan", "plan/1"])
@awaited
async def test_a_budget_or_plan_that_cannot_be_read_is_reported_in_one_sentence(
    etcd: str, prefix: str, key: str
) -> None:
    async with opened(etcd, prefix=prefix) as store:
        await store.set_budget(BUDGET, 0)
        await put(etcd, f"{prefix}plan".encode(), b'{"token":1,"spare_mw":{}}')
        await put(etcd, f"{prefix}{key}".encode(), b'{"a":Infinity}')
        with pytest.raises(StoreUnavailable, match="delete that key"):
            await store.read()


@awaited
async def test_an_agent_continues_with_an_empty_store(etcd: str, prefix: str) -> None:
    async with opened(etcd, prefix=prefix) as store:
        assert await store.beat("a", beat(40)) == StoreAnswer(None, None)
        assert await store.newest_number("a") == 40


@awaited
async def test_a_plan_is_written_only_over_what_it_was_made_from(etcd: str, prefix: str) -> None:
    async with opened(etcd, prefix=prefix) as store:
        for node in "ab":
            await store.newest_number(node)
            await store.beat(node, beat(1))
        await store.set_budget(BUDGET, 0)
        token, lease = await store.campaign("one", None)
        assert token
        assert (await store.campaign("one", lease))[0] == token
        assert (await store.campaign("two", None))[0] is None
        snapshot, revisions = await store.read()
        assert snapshot is not None
        assert snapshot.token == token
        plan = GrantPlan(token, dict(BUDGET.spare_mw), {"a": Grant(0, 200_000, 200_000)})
        good = Commit(plan, token, 0, snapshot.budget_revision, {"a": 1})
        for wrong in (
            replace(good, token=token - 1),
            replace(good, plan_revision=1),
            replace(good, budget_revision=1),
        ):
            assert not await store.commit(wrong, revisions)
        await store.beat("b", beat(2))  # nothing is reclaimed from b
        assert await store.commit(good, revisions)
        snapshot, revisions = await store.read()
        assert snapshot is not None
        assert snapshot.plan == plan
        await store.beat("a", beat(2))
        again = replace(good, plan_revision=snapshot.plan_revision)
        assert not await store.commit(again, revisions)


def test_a_full_etcd_is_recovered_as_the_page_says(prefix: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/operate/fleet.md").read_text("utf-8")
    options = re.findall("--auto-compaction-[^`]*", page)
    assert options
    recovery = re.search(
        r"database space exceeded.*?```sh\n(.*?)```",
        page.replace("/zeus-fleet/", prefix),
        re.DOTALL,
    )
    assert recovery is not None
    padding = tuple(NodeWork("j" * 100_000, "A40", (0,), 1, 2) for _ in range(8))

    async def fill(endpoint: str) -> None:
        async with opened(endpoint, prefix=prefix) as store:
            assert await store.set_budget(BUDGET, 0)
            with pytest.raises(StoreUnavailable, match="database space exceeded"):
                for number in range(1, 1000):
                    await store.beat("n01", beat(number), padding)

    async def beats(endpoint: str) -> StoreAnswer | None:
        async with opened(endpoint, prefix=prefix) as store:
            return await store.beat("n01", beat(1000), ())

    full = ["--quota-backend-bytes", "4000000", options[0]]
    with running_etcd(options=full) as endpoint:
        asyncio.run(fill(endpoint))
        environment = {**os.environ, "ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": endpoint}
        command = ["bash", "-euc", textwrap.dedent(recovery[1])]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert asyncio.run(beats(endpoint)) is not None


@awaited
async def test_the_next_endpoint_is_asked_when_one_does_not_answer(etcd: str, prefix: str) -> None:
    async with opened("127.0.0.1:1", etcd, prefix=prefix, timeout_s=0.5) as store:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 does not answer"):
            await store.newest_number("a")
        newest = None
        for _ in range(20):  # half a second may be short on a busy machine
            with contextlib.suppress(StoreUnavailable):
                newest = await store.newest_number("a")
                break
        assert newest == 0


# --------------------------------------------------------------------------------------- the loops


class FakeGpus:
    """Two GPUs whose zeusd obeys at once."""

    ranges: Sequence[GpuRange] = (GpuRange(100_000, 250_000), GpuRange(100_000, 250_000))

    def __init__(self, wanted_mw: int) -> None:
        self.limits = [100_000, 100_000]
        self.now = GpuLoad((wanted_mw, wanted_mw), 0, ())

    def holds_mw(self) -> list[int]:
        return self.limits

    def carry_out(self, command: FleetCeilings) -> list[int]:
        self.limits = [*command.limits_mw]
        return self.limits

    def load(self) -> GpuLoad:
        return self.now


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as one:
        yield one


def test_gpus_are_busy_by_their_leases_and_jobs_by_what_they_publish(
    daemon: RunningDaemon,
) -> None:
    now_s = 0.0
    with daemon.client() as agent, daemon.client() as job:
        gpus = ZeusdGpus(agent, "n1", clock=lambda: now_s)
        uuids = [gpu.uuid for gpu in agent.node().gpus]
        agent.set_ceiling(uuids, "fleet", None)
        assert gpus.load().works == ()
        job.set_power_limit(uuids[1], 150_000)
        (one,) = gpus.load().works
        assert (one.gpus, one.max_mw, one.profile) == ((1,), 150_000, None)
        job.publish_profile(
            uuids[1], {100_000: 0.5, 200_000: 1.0}, measuring=True, needs_mw=180_000
        )
        load = gpus.load()
        (one,) = load.works
        assert one.measuring
        assert one.max_mw == load.wanted_mw[1] == gpus.ranges[1].max_mw
        assert one.profile == ProgressProfile((100_000, 200_000), (0.5, 1.0))
        assert one.needs_mw == 180_000
        assert load.wanted_mw[0] == gpus.ranges[0].min_mw
        assert 20_000 < load.drawn_mw < 500_000
        job.release(uuids)
        wait_for(lambda: gpus.load().works == (), "the GPU to be idle")


def test_a_process_sees_when_the_fleet_bounds_its_gpus(daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        infos = client.node().gpus
        gpus = GPUs(client, infos)
        most = known(infos[0].power_limit_max_mw)
        for watts, bounded in ((most - 1000, True), (most, False), (None, None)):
            client.set_ceiling(infos[0].uuid, "fleet", watts)
            assert gpus.bounded_by([0], "fleet") is bounded
            assert gpus[0].get_power_management_limit_constraints()[1] == (watts or most)


@pytest.mark.usefixtures("quick")
@awaited
async def test_watts_follow_the_budget_and_return_from_a_dead_agent(
    etcd: str, prefix: str, daemon: RunningDaemon
) -> None:
    """Node a is a zeusd with two idle GPUs; node b is synthetic."""
    b = FakeGpus(100_000)
    with daemon.client() as client, daemon.client() as observer:
        uuids = [gpu.uuid for gpu in observer.node().gpus]

        def ceilings() -> set[int | None]:
            """What may be set now, where there is a ceiling of the fleet's."""
            return {gpu.power_limit_highest_mw for gpu in observer.node().gpus if gpu.ceilings}

        def limits() -> set[int | None]:
            return {state.power_limit_mw for state in observer.state(uuids).values()}

        async with Fleet(etcd, prefix, BUDGET) as fleet:
            agent = await fleet.agent("a", ZeusdGpus(client, "a"))
            await fleet.agent("b", b)
            for _ in range(2):
                await fleet.allocator()
            await until(lambda: ceilings() == {175_000}, "a to be raised")
            await until(lambda: limits() == {175_000}, "its GPUs to follow")
            await until(lambda: sum(b.limits) == 350_000, "b to be raised")
            await fleet.limit(600_000)
            await until(lambda: limits() == {150_000}, "a to obey the cut")
            agent.cancel()
            await until(lambda: limits() == {100_000}, "zeusd to lower the GPUs by itself")
            assert sum(b.limits) <= 400_000
            await until(lambda: sum(b.limits) == 400_000, "b to get what a had")


@pytest.mark.usefixtures("quick")
@awaited
async def test_a_node_is_at_its_floor_before_etcd_has_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a boot the driver's default is in force: jobs wait until this is over."""
    gpus = FakeGpus(250_000)
    gpus.limits = [250_000, 250_000]
    held: list[int] = []
    async with opened("127.0.0.1:1", prefix="/none/", timeout_s=0.2) as store:
        agent = run_agent("a", store, gpus, timing=QUICK, ready=lambda: held.extend(gpus.limits))
        task = asyncio.create_task(agent)
        await until(lambda: held and caplog.messages, "the log to say why it waits")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert held == [100_000, 100_000]
    assert "the GPUs are at their minimum" in caplog.text


@pytest.mark.usefixtures("quick")
@awaited
async def test_an_agent_whose_name_the_budget_does_not_list_reports_it(
    etcd: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a host name with its domain, which is the default on some nodes."""
    caplog.set_level("INFO")
    async with Fleet(etcd, prefix, BUDGET) as fleet:
        await fleet.agent("a.example", FakeGpus(100_000))
        await until(lambda: "does not list a.example" in caplog.text, "the log to say so")
        site = replace(BUDGET.site, nodes=frozenset({"a.example"}))
        listed = Budget((site,), {"a.example": 200_000})
        assert await fleet.store.set_budget(listed, (await fleet.read()).budget_revision)
        await until(lambda: "the budget lists a.example" in caplog.text, "the end of that")


@pytest.mark.usefixtures("quick")
@awaited
async def test_watts_go_where_jobs_say_that_they_are_worth_most(etcd: str, prefix: str) -> None:
    steep = ProgressProfile((100_000, 250_000), (0.4, 1.0))
    flat = ProgressProfile((100_000, 250_000), (0.95, 1.0))
    nodes = {"a": FakeGpus(250_000), "b": FakeGpus(250_000)}
    for name, profile in (("a", steep), ("b", flat)):
        work = NodeWork(name, "V100", (0,), 100_000, 250_000, profile)
        nodes[name].now = GpuLoad((250_000, 100_000), 150_000, (work,))
    jobs = ByJobs(functools.partial(water_filling, floor=0.0))
    budget = Budget((replace(BUDGET.site, limit_mw=560_000),), BUDGET.floors_mw)
    async with Fleet(etcd, prefix, budget) as fleet:
        for name, gpus in nodes.items():
            await fleet.agent(name, gpus)
        await fleet.allocator(jobs)
        await until(lambda: nodes["a"].limits == [250_000, 100_000], "a's job to be raised")
        assert nodes["b"].limits[0] <= 110_000
        read = await fleet.read()
        assert {name: works[0].job for name, works in read.works.items()} == {"a": "a", "b": "b"}
        assert read.heartbeats["a"].drawn_mw == 150_000


@pytest.mark.usefixtures("quick")
@awaited
async def test_a_serving_process_has_what_its_latency_needs_until_it_takes_that_back(
    etcd: str, prefix: str, daemon: RunningDaemon
) -> None:
    """From the process through zeusd, its agent and etcd to the allocator, and back to the GPU."""
    budget = Budget((BudgetDomain("site", 400_000, frozenset("a")),), {"a": 200_000}, frozenset())
    steep, flat = {100_000: 0.4, 250_000: 1.0}, {100_000: 0.95, 250_000: 1.0}
    with daemon.client() as agent, daemon.client() as trains, daemon.client() as serves:
        first, second = (gpu.uuid for gpu in serves.node().gpus)

        def most() -> list[int | None]:
            return [gpu.power_limit_highest_mw for gpu in serves.node().gpus]

        async with Fleet(etcd, prefix, budget) as fleet:
            await fleet.agent("a", ZeusdGpus(agent, "a"))
            await fleet.allocator(ByJobs(functools.partial(water_filling, floor=0.0)))
            for client, gpu, curve in ((trains, first, steep), (serves, second, flat)):
                client.acquire([gpu], [Control.POWER_LIMIT])
                client.publish_profile(gpu, curve)
            await until(lambda: most() == [250_000, 150_000], "watts to go where they are worth")
            serves.publish_profile(second, flat, needs_mw=180_000)
            await until(lambda: most() == [220_000, 180_000], "the objective to be kept")
            serves.publish_profile(second, flat)
            await until(lambda: most() == [250_000, 150_000], "the watts to go back")


@pytest.mark.usefixtures("quick")
@awaited
async def test_the_leader_writes_what_an_event_asks_for(etcd: str, prefix: str) -> None:
    now_s = time.time()
    asked = LimitEvent("grid/now", 600_000, now_s - 60, now_s + 3600)
    budget = Budget(BUDGET.domains, BUDGET.floors_mw, frozenset(), 700_000, (asked,))
    async with Fleet(etcd, prefix, budget) as fleet:
        await fleet.allocator()
        while (plan := (await fleet.read()).plan) is None:
            await asyncio.sleep(0.02)
        assert (await fleet.read()).budget.site.limit_mw == 600_000
        assert plan.spare_mw == {"site": 200_000}

"""Who set a GPU's limit, and what others change without a trace in any setting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import RunningDaemon, configuration, running_daemon, wait_for
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc.client import Client
from zeus_ipc.limited import BMC, BY_LEASE, SITE
from zeus_ipc.replies import GpuInfo

SITED, FREE, BOARD = 0, 1, 2
SITE_MW, CEILING_MW, LEASE_MW, BOARD_MW = 230_000, 200_000, 170_000, 140_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    text = f'[[gpu]]\nmatch = "*V100*"\npower_limit_w = {SITE_MW / 1000}\n'
    options = configuration(tmp_path_factory.mktemp("etc"), text)
    with running_daemon("--simulate", "v100-pcie,2xa100-sxm-80", *options, gpus=3) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def simulated(client: Client) -> Iterator[SimulatedNode]:
    node = SimulatedNode(client.node().simulated or "")
    yield node
    node.close()


def outside(client: Client, gpu: GpuInfo) -> list[tuple[Any, ...]]:
    """What others have changed of a GPU, oldest first."""
    return [
        (one.control, one.old, one.new, one.result)
        for one in client.audit().records
        if one.event == "outside_change" and one.gpu == gpu.uuid
    ]


@pytest.mark.parametrize("site", [True, False])
def test_the_author_of_a_limit_is_right_in_all_combinations(
    client: Client, simulated: SimulatedNode, site: bool
) -> None:
    index = SITED if site else FREE
    uuid = client.node().gpus[index].uuid
    if site:
        client.reset(uuid, "power_limit")
    for ceiling, lease, board in itertools.product([False, True], repeat=3):
        if ceiling:
            client.set_ceiling(uuid, "fleet", CEILING_MW)
        if lease:
            client.set_power_limit(uuid, LEASE_MW)
        simulated.set_board_limit(index, BOARD_MW if board else None)
        expected = SITE if site else None
        if board:
            expected = BMC
        elif lease:
            expected = BY_LEASE
        elif ceiling:
            expected = "fleet"
        wait_for(
            lambda expected=expected: client.state(uuid)[uuid].limit_author == expected,
            f"{expected} to be the author with {ceiling=} {lease=} {board=}",
        )
        simulated.set_board_limit(index, None)
        if lease:
            client.release(uuid)
        if ceiling:
            client.set_ceiling(uuid, "fleet", None)


def test_a_limit_that_the_board_moves_is_an_outside_change_and_stays(
    client: Client, simulated: SimulatedNode
) -> None:
    gpu = client.node().gpus[BOARD]
    before = len(outside(client, gpu))
    client.set_power_limit(gpu.uuid, 300_000)
    simulated.set_board_limit(BOARD, BOARD_MW)
    wait_for(lambda: len(outside(client, gpu)) > before, "the board's limit to be noticed")
    simulated.set_board_limit(BOARD, None)
    wait_for(lambda: len(outside(client, gpu)) > before + 1, "its end to be noticed")
    assert outside(client, gpu)[before:] == [
        ("power_limit", "300 W", "140 W", "enforced"),
        ("power_limit", "140 W", "300 W", "enforced"),
    ]
    assert client.state(gpu.uuid)[gpu.uuid].power_limit_mw == 300_000
    client.release(gpu.uuid)


def test_locked_clocks_that_hold_no_more_are_named_once(
    client: Client, simulated: SimulatedNode
) -> None:
    gpu = client.node().gpus[FREE]
    work = SimulatedWork(client.node().simulated or "", [gpu.uuid], "model/memory")
    work.launch(1e9)
    try:
        client.set_gpu_clocks(gpu.uuid, 600, 600)
        before = len(outside(client, gpu))
        simulated.reset_clocks_outside(FREE)
        wait_for(lambda: len(outside(client, gpu)) > before, "the clocks to be seen above 600 MHz")
        ((control, old, _, result),) = outside(client, gpu)[before:]
        assert (control, old, result) == ("gpu_clocks", "600 MHz", "lost")
        client.release(gpu.uuid)
    finally:
        work.close()


def test_a_simulated_gpu_counts_what_limits_its_work(
    client: Client, simulated: SimulatedNode
) -> None:
    uuid = client.node().gpus[FREE].uuid
    work = SimulatedWork(client.node().simulated or "", [uuid], "model/memory")

    def reads_counters() -> bool:
        ago_ns = time.monotonic_ns() - 2_000_000_000
        found = client.windows(uuid, [(ago_ns, ago_ns, False)], limited=True)[uuid].limited_ms
        return found.get("heat") == [0]

    wait_for(reads_counters, "the counters to be read")
    simulated.limit_clocks(FREE, ["heat", "sync"])
    work.launch(1e9)
    begin_ns = time.monotonic_ns()
    try:
        wait_for(lambda: time.monotonic_ns() > begin_ns + 1_000_000_000, "a second of work")
        window = (begin_ns, time.monotonic_ns(), False)
        found = client.windows(uuid, [window], limited=True)[uuid].limited_ms
        took_ms = (window[1] - window[0]) / 1e6
        assert found["heat"] == found["sync"]
        assert found["heat"][0] == pytest.approx(took_ms, rel=0.01)
        assert found["board"] == [0]
    finally:
        simulated.limit_clocks(FREE, [])
        work.close()

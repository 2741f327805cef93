"""Compatibility of what queries a daemon: CPUs, streamed power, and the case without a daemon."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import RunningDaemon, running_daemon
from zeus import _node
from zeus.compat.devices import rapl_is_available
from zeus.device import cpu as cpu_module
from zeus.device import get_cpus, get_gpus
from zeus.device.cpu import (
    CpuDramMeasurement,
    ZeusCPUInitError,
    ZeusCPUNotFoundError,
    get_current_cpu_index,
)
from zeus.exceptions import ZeusGPUNoPermissionError
from zeus.monitor.power_streaming import (
    PowerStreamingClient,
    ZeusdConfig,
    ZeusdConnectionError,
)
from zeus_ipc.client import Client
from zeus_ipc.replies import CpuInfo, NodeInfo, WindowEnergies
from zeusd import embed
from zeusd.devices.port import CallOutcome, DeviceError
from zeusd.devices.simulated import SimulatedBackend
from zeusd.nodes import OpenedNode


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100", gpus=2) as running:
        yield running


class NodeWithCpus:
    """A client of a node whose packages draw 10 W, and 2 W for their memory."""

    def __init__(self, *names: str) -> None:
        self.cpus = [
            CpuInfo(index=index, name=name, dram=index == 0) for index, name in enumerate(names)
        ]

    def node(self) -> NodeInfo:
        return NodeInfo.model_construct(cpus=self.cpus, gpus=[])

    def windows(
        self, sources: list[str], windows: list[tuple[int, int, bool]]
    ) -> dict[str, WindowEnergies]:
        ((begin_ns, end_ns, _),) = windows
        return {
            name: WindowEnergies(
                energy_uj=[(end_ns - begin_ns) // (100 if name[0] == "c" else 500)],
                uncertainty_uj=[0],
                begins_ns=0,
                tick_ns=1,
            )
            for name in sources
        }


def use_cpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    client = NodeWithCpus(*names)
    monkeypatch.setattr(cpu_module, "_cpus", None)
    monkeypatch.setattr(_node, "get_client", lambda: client)


def test_the_energy_of_cpus_only_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpus(monkeypatch, "package-0", "package-1")
    now_s = 1000
    clock = types.SimpleNamespace(monotonic_ns=lambda: now_s * 10**9)
    monkeypatch.setattr(cpu_module, "time", clock)
    cpus = get_cpus()
    assert get_cpus() is cpus
    assert rapl_is_available()
    assert len(cpus) == 2
    assert [cpus.supports_get_dram_energy_consumption(index) for index in (0, 1)] == [True, False]
    now_s += 3
    first = cpus.get_total_energy_consumption(0)
    now_s += 2
    second = cpus.get_total_energy_consumption(0)
    assert (first, second - first) == (
        CpuDramMeasurement(30_000.0, 6_000.0),
        CpuDramMeasurement(20_000.0, 4_000.0),
    )
    assert cpus.get_total_energy_consumption(1) == CpuDramMeasurement(50_000.0)
    assert first - CpuDramMeasurement(1.0) == CpuDramMeasurement(29_999.0)
    assert CpuDramMeasurement(4.0, 2.0) / 2 == CpuDramMeasurement(2.0, 1.0)
    with pytest.raises(ValueError, match="no CPU 2 whose energy is measured; there are 2"):
        cpus.get_total_energy_consumption(2)


def test_without_counters_there_are_no_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpus(monkeypatch)
    assert not rapl_is_available()
    with pytest.raises(ZeusCPUInitError, match="offers no powercap counters"):
        get_cpus()


def test_a_process_runs_on_one_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(os.cpu_count() or 1):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("3\n")
        (topology / "die_id").write_text("1\n")
    monkeypatch.setattr(cpu_module, "_TOPOLOGY", tmp_path)
    use_cpus(monkeypatch, "package-0", "package-3-die-1")
    assert get_current_cpu_index() == get_current_cpu_index(os.getpid()) == 1
    rapl = importlib.import_module("zeus.device.cpu.rapl")
    assert rapl.get_current_rapl_zone_id("current") == 1
    use_cpus(monkeypatch, "package-0")
    with pytest.raises(ZeusCPUNotFoundError, match="package-3"):
        get_current_cpu_index()


def test_power_is_streamed(daemon: RunningDaemon) -> None:
    client = PowerStreamingClient([ZeusdConfig.uds(daemon.socket)])
    try:
        for readings in itertools.islice(client, 20):
            found = readings[daemon.socket]
            if len(found.gpu_power_w) == 2:
                break
        assert set(found.gpu_power_w) == {0, 1}
        assert all(10 < watts < 400 for watts in found.gpu_power_w.values())
        assert client.get_power()[daemon.socket].timestamp_s >= found.timestamp_s

        async def first() -> int:
            async for one in client:
                return len(one)
            return 0

        assert asyncio.run(first()) == 1
    finally:
        client.stop()
    assert list(client) == [], "an iteration ends when the client is stopped"
    one = PowerStreamingClient([ZeusdConfig.uds(daemon.socket, gpu_indices=[1])])
    try:
        assert set(next(iter(one))[daemon.socket].gpu_power_w) == {1}
    finally:
        one.stop()


def test_servers_that_cannot_be_followed_are_refused(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ZeusdConfig.uds(daemon.socket)
    with pytest.raises(ZeusdConnectionError, match="zeusd opens no port"):
        PowerStreamingClient([ZeusdConfig.tcp("node1", 4938)])
    with pytest.raises(ValueError, match="named twice"):
        PowerStreamingClient([there, there])
    with pytest.raises(ValueError, match="has no GPU 2; it has: 0, 1"):
        PowerStreamingClient([ZeusdConfig.uds(daemon.socket, gpu_indices=[0, 2])])
    with pytest.raises(ValueError, match="has no CPU 7"):
        PowerStreamingClient([ZeusdConfig.uds(daemon.socket, cpu_indices=[7])])
    with pytest.raises(ZeusdConnectionError):
        PowerStreamingClient([ZeusdConfig.uds("/nowhere/zeusd.sock")])
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    assert ZeusdConfig.from_env() == there


def test_without_a_daemon_a_refused_change_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = SimulatedBackend("v100:setter_ms=0")

    def refuse(*arguments: object) -> None:
        raise DeviceError(CallOutcome.DENIED, "setter", "insufficient permissions", 4)

    monkeypatch.setattr(nvml, "set_power_limit", refuse)
    client: Client = embed.connect(
        OpenedNode(nvml, "simulated", lambda: None), state_dir=str(tmp_path)
    )
    try:
        with (
            _node.use(client),
            pytest.raises(ZeusGPUNoPermissionError) as raised,
        ):
            get_gpus().set_power_management_limit(0, 200_000)
    finally:
        client.close()
    assert "no zeusd runs, and setting limits in this process needs root" in str(raised.value)
    assert "zeusd must run" not in str(raised.value)

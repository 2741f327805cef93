from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import wait_for
from tests.zeus.node import VirtualNode
from tests.zeus.powercap import spend_uj, zone
from zeus import _node
from zeus.monitor import (
    CPUPowerDomain,
    GPUPowerDomain,
    PowerDomain,
    PowerMonitor,
    TemperatureMonitor,
    infer_counter_update_period,
)
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend
from zeusd.devices.simulated.workloads import ScriptedWorkload
from zeusd.nodes import OpenedNode

OpenNode = Callable[[str], VirtualNode]


class Wall:
    """Time since the epoch, of a node whose time is virtual."""

    def __init__(self, node: VirtualNode) -> None:
        self._node = node

    def time(self) -> float:
        return 1_000_000.0 + self._node.clock() / 1e9

    def offset_ns(self) -> int:
        return 1_000_000 * 10**9


@pytest.fixture
def node(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> VirtualNode:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = virtual_node("2xa40:setter_ms=0")
    wall = Wall(node)
    for module in ("zeus.monitor.timeline", "zeus.monitor.power"):
        monkeypatch.setattr(f"{module}.time", wall)
        monkeypatch.setattr(f"{module}.offset_ns", wall.offset_ns)
    return node


def now(node: VirtualNode) -> float:
    return Wall(node).time()


def draw(node: VirtualNode, watts: float) -> Callable[[float], None]:
    """Makes GPU 0 draw a power, and returns a function that changes it."""
    load = ScriptedWorkload(watts)
    work = node.nvml.open_work([0], load)
    work.launch(1e6)

    def change(watts: float) -> None:
        load.draw_w = watts
        work.refresh()

    change(watts)
    return change


def test_constant_power_is_not_zero_joules_and_steps_are_counted(node: VirtualNode) -> None:
    change = draw(node, 100.0)
    monitor = PowerMonitor(gpu_indices=[0])
    node.clock.sleep(2)
    start = now(node)
    node.clock.sleep(6)
    middle = now(node)
    change(300.0)
    node.clock.sleep(4)
    end = now(node)
    assert monitor.get_energy(start, middle) == {0: pytest.approx(600, rel=0.01)}
    assert monitor.get_energy(start, end) == {0: pytest.approx(600 + 1200, rel=0.01)}
    average = monitor.get_energy(start, end, "device_average")
    assert average is not None
    assert average[0] == pytest.approx(1800, rel=0.1)  # good to a second


def test_timelines_have_every_tick_since_the_monitor_was_made_and_before(
    node: VirtualNode,
) -> None:
    draw(node, 120.0)
    first = PowerMonitor()
    node.clock.sleep(3)
    monitor = PowerMonitor()
    begin = now(node)
    node.clock.sleep(2)
    found = monitor.get_power_timeline(PowerDomain.DEVICE_INSTANT)
    assert set(found) == {0, 1}
    assert len(found[0]) == pytest.approx(20, abs=2)
    assert all(begin <= t_s <= now(node) for t_s, _ in found[0])
    assert all(watts == pytest.approx(120, abs=1) for _, watts in found[0])
    assert len(first.get_power_timeline("device_instant", 0)[0]) > 45
    early = monitor.get_power_timeline("device_instant", 0, begin - 2, begin - 1)
    assert len(early[0]) == pytest.approx(10, abs=1)
    every = monitor.get_all_power_timelines(gpu_index=1)
    assert set(every) == {"device_instant", "device_average"}


def test_timelines_can_be_thinned_and_bounded(node: VirtualNode) -> None:
    monitor = PowerMonitor(update_period=0.5, max_samples_per_gpu=4)
    node.clock.sleep(6)
    (samples,) = monitor.get_power_timeline("device_instant", 0).values()
    assert len(samples) == 4
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(samples)]
    assert min(gaps) >= 0.45
    assert samples[-1][0] > now(node) - 0.6, "the newest"
    monitor = PowerMonitor(gpu_update_period=0.5)
    found = monitor.get_power_timeline(
        gpu_power_domain="device_instant", gpu_index=0, start_time=now(node) - 3
    )
    assert len(found[0]) == pytest.approx(6, abs=1)


def test_present_power_and_what_is_not_known(node: VirtualNode) -> None:
    change = draw(node, 100.0)
    monitor = PowerMonitor()
    node.clock.sleep(2)
    before = now(node)
    change(200.0)
    node.clock.sleep(2)
    present = monitor.get_power()
    assert present is not None
    assert present[0] == pytest.approx(200, abs=1)
    past = monitor.get_power(before)
    assert past is not None
    assert past[0] == pytest.approx(100, abs=1)
    assert monitor.get_power(before - 10_000) is None
    assert monitor.get_energy(before - 10_000, before) is None
    assert monitor.get_energy(before - 10_000, before - 9_000, "device_average") is None
    node.nvml.lose(0)
    node.clock.sleep(10)
    assert monitor.get_power() is None, "it is too old"
    node.nvml.clear_faults()
    assert monitor.get_energy(before, now(node) + 100) is None
    monitor.stop()


def test_domains_that_are_not_there_are_named(node: VirtualNode) -> None:
    with pytest.raises(ValueError, match=r"do not offer .*memory_average.*device_instant"):
        PowerMonitor(power_domains=["memory_average"])
    with pytest.raises(ValueError, match=r"no domain is named; .*device_instant.* or None"):
        PowerMonitor(power_domains=[])
    with pytest.raises(ValueError, match="not a power domain"):
        PowerMonitor(power_domains=["volts"])
    monitor = PowerMonitor(power_domains=[PowerDomain.DEVICE_AVERAGE])
    with pytest.raises(ValueError, match="device_instant is not monitored"):
        monitor.get_power_timeline("device_instant")
    with pytest.raises(ValueError, match="GPU 7 is not monitored"):
        monitor.get_power_timeline("device_average", 7)
    with pytest.raises(ValueError, match="lies before"):
        monitor.get_energy(2.0, 1.0)
    for time_s in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"start_time must be seconds .* not {time_s}"):
            monitor.get_power_timeline("device_average", start_time=time_s)
        with pytest.raises(ValueError, match=f"end_time must be seconds .* not {time_s}"):
            monitor.get_power_timeline("device_average", end_time=time_s)
    for period_s in (0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"update_period must .* not {period_s}"):
            PowerMonitor(update_period=period_s)
    with pytest.raises(ValueError, match="no GPU 2"):
        PowerMonitor(gpu_indices=[2])
    with pytest.raises(ValueError, match="max_samples_per_gpu must be positive, not 0"):
        TemperatureMonitor(max_samples_per_gpu=0)


def test_the_power_of_cpus_and_of_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    packages = [zone(tmp_path / f"cap/intel-rapl:{index}", f"package-{index}") for index in (0, 1)]
    dram = zone(packages[1] / "intel-rapl:1:0", "dram")
    monkeypatch.setattr(embed, "POWERCAP", str(tmp_path / "cap"))
    node = OpenedNode(SimulatedBackend("v100:setter_ms=0"), None, lambda: None)
    with embed.connect(node, state_dir=str(tmp_path / "state")) as client, _node.use(client):
        monitor = PowerMonitor(gpu_power_domains=[GPUPowerDomain.DEVICE_INSTANT])
        assert monitor.cpu_indices == [0, 1]
        begun_s, spent_j = time.time(), {packages[0]: 0.0, packages[1]: 0.0, dram: 0.0}

        def joules(index: int | None, domain: CPUPowerDomain) -> dict[int, float]:
            """The integral of the timelines; each power is the mean since the one before."""
            for path, watts in zip(spent_j, (60, 20, 5), strict=True):
                spent_j[path] = watts * (time.time() - begun_s)
                spend_uj(path, round(1e6 * spent_j[path]))
            timelines = monitor.get_power_timeline(cpu_power_domain=domain, cpu_index=index)
            return {
                cpu: sum(w * (t - before) for (before, _), (t, w) in itertools.pairwise(samples))
                for cpu, samples in timelines.items()
            }

        def is_close(path: Path, found: float) -> bool:
            return spent_j[path] > 10 and abs(found / spent_j[path] - 1) < 0.2

        package, memory = CPUPowerDomain.PACKAGE_AVERAGE, CPUPowerDomain.DRAM_AVERAGE
        wait_for(lambda: is_close(packages[0], joules(None, package)[0]), "energy of CPU 0")
        wait_for(lambda: is_close(packages[1], joules(1, package)[1]), "energy of CPU 1")
        wait_for(lambda: is_close(dram, joules(None, memory)[1]), "energy of its memory")
        assert set(joules(None, memory)) == {1}
        every = monitor.get_all_power_timelines(cpu_index=1)
        assert set(every) == {"device_instant", "package_average", "dram_average"}
        for domains in ({}, {"gpu_power_domain": "device_instant", "cpu_power_domain": package}):
            with pytest.raises(ValueError, match="give one power domain"):
                monitor.get_power_timeline(**domains)
        with pytest.raises(ValueError, match="CPU 7 is not monitored"):
            monitor.get_power_timeline(cpu_power_domain=package, cpu_index=7)
        with pytest.raises(ValueError, match="max_samples_per_cpu must"):
            PowerMonitor(max_samples_per_cpu=0)
        assert PowerMonitor(cpu_indices=[]).cpu_power_domains == []
        with pytest.raises(ValueError, match="these CPUs do not offer dram_average"):
            PowerMonitor(cpu_indices=[0], cpu_power_domains=["dram_average"])


def test_temperature_over_time(node: VirtualNode) -> None:
    monitor = TemperatureMonitor(gpu_indices=[0])
    node.clock.sleep(2)
    cool = monitor.get_temperature()
    draw(node, 280.0)
    node.clock.sleep(120)
    warm = monitor.get_temperature()
    assert cool is not None
    assert warm is not None
    assert warm[0] > cool[0] + 20
    (samples,) = monitor.get_temperature_timeline(0).values()
    assert len(samples) == pytest.approx(122, abs=3)
    assert [celsius for _, celsius in samples] == sorted(celsius for _, celsius in samples)
    assert monitor.get_temperature(now(node) - 100_000) is None
    rare = TemperatureMonitor(None, 10.0, 3)
    (seldom,) = rare.get_temperature_timeline(0, now(node) - 100, now(node) - 40).values()
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(seldom)]
    assert gaps == pytest.approx([10, 10], abs=1)
    assert seldom[-1][0] > now(node) - 51, "the newest before the end"


def test_the_counters_period_is_known(node: VirtualNode, virtual_node: OpenNode) -> None:
    node.clock.sleep(3)
    assert infer_counter_update_period([0, 1]) == pytest.approx(0.05, rel=0.01)

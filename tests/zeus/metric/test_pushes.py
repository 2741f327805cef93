"""The series that are pushed for windows, and their names."""

from __future__ import annotations

import socket
import ssl
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import TIMEOUT_S, wait_for
from tests.zeus.gateway import Double, Series
from tests.zeus.metric.metrics import (
    GPU_J,
    IDLE_W,
    POWER_W,
    counter,
    gauge,
    histogram,
    pushed,
    spend,
    totals,
)
from tests.zeus.node import VirtualNode
from tests.zeus.powercap import spend_uj, zone
from zeus import _node, _pushgateway, metric
from zeus.exceptions import ZeusBaseError
from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, Metric
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend
from zeusd.nodes import OpenedNode


def scrape(address: str) -> Series:
    with urllib.request.urlopen(f"{address}/metrics", timeout=TIMEOUT_S) as answer:
        return Series(answer.read().decode())


def test_each_window_is_one_observation(node: VirtualNode, gateway: str) -> None:
    one = histogram(gateway, "each")
    for seconds in (1, 3, 30):  # 26, 78 and 780 J
        spend(node, one, "step", seconds)
    spend(node, one, "evaluation", 10)
    of_step = {"job": "each", "window": "step", "index": "1"}
    last = {"job": "each", "window": "evaluation"}
    wait_for(lambda: scrape(gateway).of(f"{GPU_J}_count", **last) == [1, 1], "all of them")
    found = scrape(gateway)
    assert found.types[GPU_J] == "histogram"
    buckets = [found.one(f"{GPU_J}_bucket", le=le, **of_step) for le in ("50", "100", "200", "500")]
    assert buckets == [1, 2, 2, 2]
    assert found.of(f"{GPU_J}_count", job="each", window="step") == [3, 3]
    assert found.one(f"{GPU_J}_bucket", le="1000", **of_step) == 3
    assert found.one(f"{GPU_J}_sum", **of_step) == pytest.approx(34 * IDLE_W, rel=0.02)


def test_buckets_can_be_chosen(node: VirtualNode, double: Double) -> None:
    one = histogram(double.address, gpu_bucket_range=[20, 40.5])
    spend(node, one, "step", 1)
    wait_for(lambda: double.series().of(f"{GPU_J}_count") == [1, 1], "an observation")
    of_step = {"window": "step", "index": "0"}
    assert double.series().one(f"{GPU_J}_bucket", le="20.0", **of_step) == 0
    assert double.series().one(f"{GPU_J}_bucket", le="40.5", **of_step) == 1
    assert len(double.series().of(f"{GPU_J}_bucket", **of_step)) == 3


def test_cpus_and_their_memory_have_metrics_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Double
) -> None:
    package = zone(tmp_path / "cap/intel-rapl:0", "package-0")
    dram = zone(package / "intel-rapl:0:0", "dram")
    monkeypatch.setattr(embed, "POWERCAP", str(tmp_path / "cap"))
    simulated = OpenedNode(SimulatedBackend("v100:setter_ms=0"), None, lambda: None)
    with embed.connect(simulated, state_dir=str(tmp_path / "state")) as client, _node.use(client):
        one = EnergyHistogram(None, [], double.address, "j")
        total = EnergyCumulativeCounter([0], [], 0.03, double.address, "j")
        one.begin_window("step")
        total.begin_window("step")
        begun_ns = time.monotonic_ns()
        for source in ("cpu:0", "dram:0"):
            wait_for(lambda: client.timeline(source, start_ns=begun_ns), "a reading")
        spend_uj(package, 30_000_000)
        spend_uj(dram, 7_000_000)
        wait_for(
            lambda: totals(double, "cpu") == [30] and totals(double, "dram") == [7], "both counters"
        )
        one.end_window("step")
        total.end_window("step")
        one.close()
        total.close()
    assert (totals(double, "cpu"), totals(double, "dram")) == ([30], [7])
    found = Series(pushed(double, "energy_histogram"))
    assert found.of("energy_monitor_cpu_energy_joules_sum") == [30]
    assert found.of("energy_monitor_cpu_energy_joules_bucket", le="10.0") == [0]
    assert found.of("energy_monitor_cpu_energy_joules_bucket", le="50.0") == [1]
    assert found.of("energy_monitor_dram_energy_joules_bucket", le="5.0") == [0]
    assert found.of("energy_monitor_dram_energy_joules_bucket", le="10.0") == [1]
    assert found.of(f"{GPU_J}_count") == []


def test_a_counter_grows_while_windows_are_open_and_ends_at_their_energy(
    node: VirtualNode, gateway: str
) -> None:
    one = counter(gateway, "grows")
    total = f"{GPU_J}_total"

    def joules(window: str) -> float:
        return scrape(gateway).one(total, job="grows", window=window, index="0") or 0.0

    before_j = node.nvml.true_energy_j(0)
    one.begin_window("training")
    for number in range(1, 6):
        node.clock.sleep(10)
        wait_for(lambda: joules("training") > number * 10 * IDLE_W * 0.98, f"{number} times 10 s")
    spend(node, one, "evaluation", 4)  # overlaps
    node.clock.sleep(1)
    one.end_window("training")
    truth_j = node.nvml.true_energy_j(0) - before_j
    node.clock.sleep(20)  # is nobody's
    wait_for(lambda: joules("training") == pytest.approx(truth_j, rel=0.002), "what it took")
    wait_for(lambda: joules("evaluation") == pytest.approx(4 * IDLE_W, rel=0.02), "the other")
    spend(node, one, "training", 10)
    truth_j += 10 * IDLE_W
    wait_for(lambda: joules("training") == pytest.approx(truth_j, rel=0.005), "both together")
    assert scrape(gateway).types[GPU_J] == "counter"


def test_a_window_that_waits_for_its_gpu_is_not_counted_twice(
    node: VirtualNode, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = counter(double.address)
    before_j = node.nvml.true_energy_j(1)
    one.begin_window("a")
    looked = threading.Event()
    ended = threading.Event()
    estimate = node.monitors[-1].estimate

    def slow(key: str) -> Any:
        piece = estimate(key)
        _ = piece.gpu_energy
        looked.set()
        ended.wait(TIMEOUT_S)
        return piece

    node.clock.sleep(10)
    monkeypatch.setattr(node.monitors[-1], "estimate", slow)
    assert looked.wait(TIMEOUT_S)
    node.clock.sleep(5)
    one.end_window("a")  # while the thread holds a piece of it
    truth_j = node.nvml.true_energy_j(1) - before_j
    ended.set()
    one.close()
    assert double.series().one(f"{GPU_J}_total", index="1") == pytest.approx(truth_j, rel=0.005)


def test_updates_are_no_progress_of_training_and_begin_nowhere_in_particular(
    node: VirtualNode, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[None] = []
    monkeypatch.setattr(node.client, "progress", lambda: progress.append(None))
    monkeypatch.setattr("zeus.monitor.energy.synchronize", lambda *_: True)
    one = counter(double.address)
    one.begin_window("a")
    for _ in range(3):
        node.clock.sleep(5)
        seen = len(double.pushes)
        wait_for(lambda: len(double.pushes) > seen, "an update")
    assert len(progress) == 1
    assert not node.monitors[-1].measurement_states["a"].aligned


def test_power_is_there_while_a_window_is_open_and_goes_after_it(
    real_time: None, gateway: str
) -> None:
    one = gauge(gateway, "power")
    one.begin_window("a")
    wait_for(
        lambda: (
            scrape(gateway).of(POWER_W, job="power", window="a")
            == [pytest.approx(IDLE_W, abs=2)] * 2
        ),
        "the power of two GPUs",
    )
    assert scrape(gateway).types[POWER_W] == "gauge"
    one.begin_window("b")
    one.end_window("a")
    wait_for(
        lambda: (
            [len(scrape(gateway).of(POWER_W, job="power", window=window)) for window in ("a", "b")]
            == [0, 2]
        ),
        "only the open window to have power",
    )
    one.end_window("b")
    wait_for(lambda: not scrape(gateway).of(POWER_W, job="power"), "nothing to be left")


def test_a_window_shorter_than_a_period_has_power_at_its_end(
    real_time: None, double: Double
) -> None:
    wait_for(lambda: _present_power(), "the first reading")
    one = gauge(double.address, period_s=30)
    one.begin_window("short")
    one.end_window("short")
    one.close()
    assert double.series().of(POWER_W, window="short") == [pytest.approx(IDLE_W, abs=2)] * 2


def test_power_has_no_gap_between_windows_and_stays_when_the_process_ends(
    real_time: None, double: Double
) -> None:
    wait_for(lambda: _present_power(), "the first reading")
    one = gauge(double.address, period_s=30)  # updated by this test only
    one.begin_window("step")
    one.end_window("step")
    for final in (False, False, True):
        one._update(final)
        assert one.group.registry.get_sample_value(POWER_W, {"window": "step", "index": "1"})
    one.close()
    assert one.group.registry.get_sample_value(POWER_W, {"window": "step", "index": "1"})


def _present_power() -> object:
    return metric.PowerMonitor(None).get_power()


def test_power_that_is_not_known_is_not_shown(
    real_time: None,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = gauge(double.address)
    one.begin_window("a")
    wait_for(lambda: double.series().of(POWER_W), "power")

    def gone(*args: object) -> None:
        raise ZeusBaseError("nobody there")

    with monkeypatch.context() as patch:
        patch.setattr(metric.PowerMonitor, "get_power", gone)
        wait_for(lambda: not double.series().of(POWER_W), "it to go")
        seen = len(double.pushes)
        wait_for(lambda: len(double.pushes) > seen + 3, "more updates")
    wait_for(lambda: double.series().of(POWER_W), "it to come back")
    assert [one.getMessage() for one in caplog.records] == [
        "the power of GPUs for j is not known now: nobody there"
    ]


def test_nodes_ranks_and_metrics_do_not_overwrite_each_other(
    node: VirtualNode, gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host, rank in (("alpha", "0"), ("alpha", "1"), ("beta", "2")):
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setenv("RANK", rank)
        _pushgateway.numbers.clear()  # each stands for its own process
        ones: list[Metric] = [
            histogram(gateway, "all"),
            histogram(gateway, "all", gpu_bucket_range=[1]),
            counter(gateway, "all"),
        ]
        for one in ones:
            spend(node, one, "step", 1)
            one.close()
    found = scrape(gateway)
    assert len(found.of(f"{GPU_J}_count", job="all")) == 3 * 2 * 2
    assert len(found.of(f"{GPU_J}_total", job="all")) == 3 * 2
    for name in ("energy_histogram", "energy_histogram_2", "energy_counter"):
        for host, rank in (("alpha", "0"), ("alpha", "1"), ("beta", "2")):
            of = {"job": "all", "instance": host, "rank": rank, "metric": name}
            assert found.one("push_failure_time_seconds", **of) == 0
    again = histogram(gateway, "all")  # the next run of rank 2
    again.group._key = {"instance": "beta", "rank": "2", "metric": "energy_histogram"}
    spend(node, again, "next", 1)
    again.close()
    assert len(scrape(gateway).of(f"{GPU_J}_count", job="all")) == 3 * 2 * 2


def test_the_rank_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pushgateway.rank() == "0"
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert _pushgateway.rank() == "5"
    monkeypatch.setenv("RANK", "3")
    assert _pushgateway.rank() == "3"
    monkeypatch.setattr("zeus.utils.framework.world_size", lambda: 8)
    monkeypatch.setattr("zeus.utils.framework.rank", lambda: 7)
    assert _pushgateway.rank() == "7"


def test_certificates_are_loaded_once_and_only_for_https(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *one: loaded.append(one))
    client, double = _pushgateway.prometheus_client(), Double()
    try:
        plain = _pushgateway.Group(client, double.address, "job", "plain")
        assert [plain.push(), plain.push()] == [True, True]
        assert (len(double.pushes), loaded) == (2, [])
        secure = _pushgateway.Group(client, "https://127.0.0.1:1", "job", "secure")
        assert [secure.push(), secure.push()] == [False, False]
        assert len(loaded) == 1
    finally:
        double.close()

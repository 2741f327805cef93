from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.support import script, wait_for
from tests.zeus.gateway import Double, Series
from tests.zeus.node import VirtualNode
from zeus import _node, _pushgateway, metric
from zeus.exceptions import ZeusBaseError
from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, Metric, PowerGauge
from zeus_ipc.errors import RequestTimeout
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend
from zeusd.nodes import Node

OpenNode = Callable[[str], VirtualNode]
Make = Callable[..., Any]
IDLE_W = 26.0
"""A V100 that nothing runs on."""

GPU_J = "energy_monitor_gpu_energy_joules"
POWER_W = "power_monitor_gpu_power_watts"

# ------------------------------------------------------------------------------------- gateways


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real push gateway; tests keep apart by their `job`."""
    program = needs.tool("pushgateway")
    log_path = tmp_path_factory.mktemp("gateway") / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [program, "--web.listen-address=127.0.0.1:0", "--persistence.file="], stderr=log
        )
    try:
        found = wait_for(
            lambda: re.search(r"address=(127\.0\.0\.1:\d+)", log_path.read_text()),
            "the push gateway to listen",
        )
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        process.wait()


def scrape(address: str) -> Series:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        return Series(answer.read().decode())


@pytest.fixture
def double() -> Iterator[Double]:
    double = Double()
    yield double
    double.close()


# ---------------------------------------------------------------------------------------- nodes


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fast updates, no rank, and no metric that outlives its test."""
    for name in (*_pushgateway.RANKS, "CUDA_VISIBLE_DEVICES", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric, "PUSH_EVERY_S", 0.03)
    _pushgateway._numbers.clear()
    yield
    with monkeypatch.context() as patch:
        patch.setattr(metric, "CLOSE_S", 0.5)
        metric._close_all()
    # What one goes on to say would be taken for the next test's.
    wait_for(
        lambda: all(one.name != "zeus-metric" for one in threading.enumerate()),
        "the threads of the metrics to end",
    )


@pytest.fixture
def node(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> VirtualNode:
    """Two V100 whose time passes only when a test lets it; metrics' clocks are the node's."""
    node = virtual_node("2xv100:setter_ms=0")
    monkeypatch.setattr(
        metric,
        "ZeusMonitor",
        lambda gpus, cpus: node.monitor(gpu_indices=gpus, cpu_indices=cpus),
    )
    return node


@pytest.fixture
def real_time(tmp_path: Path) -> Iterator[None]:
    client = embed.connect(
        Node(SimulatedBackend("2xv100:setter_ms=0"), "simulated", lambda: None),
        state_dir=str(tmp_path),
    )
    with client, _node.use(client):
        yield


def histogram(address: str, job: str = "j", **options: Any) -> EnergyHistogram:
    return EnergyHistogram([], None, address, job, **options)


def counter(address: str, job: str = "j") -> EnergyCumulativeCounter:
    return EnergyCumulativeCounter([], None, 0.03, address, job)


def gauge(address: str, job: str = "j", period_s: float = 0.03) -> PowerGauge:
    return PowerGauge(None, period_s, address, job)


def spend(node: VirtualNode, one: Metric, name: str, seconds: float) -> None:
    one.begin_window(name)
    node.clock.sleep(seconds)
    one.end_window(name)


# ------------------------------------------------------------------------------ what is pushed


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
    simulated = Node(SimulatedBackend("v100:setter_ms=0"), None, lambda: None)
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


def zone(path: Path, name: str) -> Path:
    """A counter of powercap."""
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", "0"), ("max_energy_range_uj", "1" * 12)):
        (path / file).write_text(text)
    return path


def spend_uj(path: Path, energy_uj: int) -> None:
    aside = path / "new"
    aside.write_text(str(energy_uj))
    aside.rename(path / "energy_uj")


def totals(double: Double, kind: str) -> list[float]:
    """What a counter has come to, to the microjoule."""
    found = Series(pushed(double, "energy_counter"))
    return [round(joules, 6) for joules in found.of(f"energy_monitor_{kind}_energy_joules_total")]


def pushed(double: Double, kind: str) -> str:
    """The newest body that a kind of metric pushed."""
    return next((body for path, body in reversed(double.pushes) if f"/{kind}/" in path), "")


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
    estimate = one._monitor.estimate

    def slow(key: str) -> Any:
        piece = estimate(key)
        _ = piece.gpu_energy
        looked.set()
        ended.wait(10)
        return piece

    node.clock.sleep(10)
    monkeypatch.setattr(one._monitor, "estimate", slow)
    assert looked.wait(10)
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
    assert not one._monitor.measurement_states["a"].aligned


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
        assert one._group.registry.get_sample_value(POWER_W, {"window": "step", "index": "1"})
    one.close()
    assert one._group.registry.get_sample_value(POWER_W, {"window": "step", "index": "1"})


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
        patch.setattr(one._power, "get_power", gone)
        wait_for(lambda: not double.series().of(POWER_W), "it to go")
        seen = len(double.pushes)
        wait_for(lambda: len(double.pushes) > seen + 3, "more updates")
    wait_for(lambda: double.series().of(POWER_W), "it to come back")
    assert [one.getMessage() for one in caplog.records] == [
        "the power of GPUs for j is not known now: nobody there"
    ]


# ---------------------------------------------------------------------- who overwrites whom


def test_nodes_ranks_and_metrics_do_not_overwrite_each_other(
    node: VirtualNode, gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host, rank in (("alpha", "0"), ("alpha", "1"), ("beta", "2")):
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setenv("RANK", rank)
        _pushgateway._numbers.clear()  # each is a process of its own
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
    again._group._key = {"instance": "beta", "rank": "2", "metric": "energy_histogram"}
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


# -------------------------------------------------------------------- gateways that do not work


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_gateway_that_is_down_is_told_of_once_and_nothing_is_lost(
    node: VirtualNode, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ones = histogram(f"127.0.0.1:{port}"), counter(f"127.0.0.1:{port}")
    failures = _count_failures(ones[0])
    for _ in range(3):
        for one in ones:
            spend(node, one, "step", 1)
        before = len(failures)
        wait_for(lambda: len(failures) > before, "another failure")
    wait_for(lambda: len(told(caplog)) == 2, "one warning of each metric")
    assert "Connection refused" in told(caplog)[0]
    assert "training continues" in told(caplog)[0]
    double = Double(port)
    try:
        # Nothing ends any more: it is tried again all the same.
        wait_for(lambda: pushed(double, "energy_histogram"), "the histogram")
        assert Series(pushed(double, "energy_histogram")).of(f"{GPU_J}_count") == [3, 3]
        wait_for(lambda: pushed(double, "energy_counter"), "the counter")
        totals = Series(pushed(double, "energy_counter")).of(f"{GPU_J}_total")
        assert totals == [pytest.approx(3 * IDLE_W, rel=0.02)] * 2
        double.does = "refuse"
        spend(node, ones[0], "step", 1)
        wait_for(lambda: len(told(caplog)) == 3, "the next trouble to be told of")
        assert "507" in told(caplog)[2]
    finally:
        double.close()


def _count_failures(one: Metric) -> list[bool]:
    failures: list[bool] = []
    push = one._group.push

    def counted() -> bool:
        worked = push()
        if not worked:
            failures.append(worked)
        return worked

    one._group.push = counted
    return failures


def test_a_gateway_that_hangs_delays_neither_windows_nor_the_end_for_long(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(metric, "CLOSE_S", 0.2)
    double.does = "hang"
    ones: list[Metric] = [histogram(double.address), counter(double.address)]
    for one in ones:
        spend(node, one, "step", 1)
    wait_for(lambda: double.asked == 2, "both to hang")
    for number in range(1000):
        for one in ones:
            one.begin_window(f"step {number % 3}", sync_execution=False)
            one.end_window(f"step {number % 3}", sync_execution=False)
    assert double.asked == 2  # all of that while the gateway kept both
    assert all(one._thread.is_alive() for one in ones)
    begun_s = time.monotonic()
    metric._close_all()
    assert 0.2 <= time.monotonic() - begun_s < 2.0  # together, not each
    assert [one for one in told(caplog) if "not pushed within 0.2 s" in one] == told(caplog)
    assert len(told(caplog)) == 2


def test_a_silent_gateway_is_given_up_after_a_while(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_pushgateway, "TIMEOUT_S", 0.05)
    double.does = "hang"
    one = histogram(double.address)
    spend(node, one, "step", 1)
    wait_for(lambda: double.asked >= 3, "it to be tried again")
    double.does = "take"
    wait_for(lambda: double.series().of(f"{GPU_J}_count") == [1, 1], "the observation")
    assert len(told(caplog)) == 1
    assert "timed out" in told(caplog)[0]


def test_what_answers_but_is_no_gateway_ends_nothing(
    node: VirtualNode, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.recv(65536)
                    connection.sendall(b"220 mail.example.org\r\n\r\n")
                    connection.close()

        threading.Thread(target=talk, daemon=True).start()
        one = histogram(f"127.0.0.1:{server.getsockname()[1]}")
        spend(node, one, "step", 1)
        wait_for(lambda: told(caplog), "a warning")
        failures = _count_failures(one)
        wait_for(lambda: failures, "another attempt")
        one.close()
    assert len(told(caplog)) == 1
    assert "takes no metrics (220 mail.example.org" in told(caplog)[0]


def test_a_mishap_of_its_own_does_not_end_the_thread(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = histogram(double.address)
    tried: list[None] = []

    def fail(final: bool) -> bool:
        tried.append(None)
        raise KeyError("a mishap")

    with monkeypatch.context() as patch:
        patch.setattr(one, "_update", fail)
        spend(node, one, "step", 1)
        wait_for(lambda: len(tried) > 2, "some attempts")
    wait_for(lambda: double.series().of(f"{GPU_J}_count") == [1, 1], "the observation")
    assert told(caplog) == ["EnergyHistogram could not be updated"]


# ------------------------------------------------------------------------ what is not known yet


def test_windows_that_end_while_zeusd_is_away_are_counted_later(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ones: list[Metric] = [histogram(double.address), counter(double.address)]
    asked: list[None] = []

    def gone(*args: object) -> None:
        asked.append(None)
        raise RequestTimeout("zeusd did not answer")

    with monkeypatch.context() as away:
        away.setattr(node.client, "windows", gone)
        for one in ones:
            for _ in range(3):
                spend(node, one, "step", 1)
        ones[1].begin_window("open")
        node.clock.sleep(1)
        before = len(asked)
        wait_for(lambda: len(asked) > before + 20, "many attempts")
    wait_for(
        lambda: Series(pushed(double, "energy_histogram")).of(f"{GPU_J}_count") == [3, 3],
        "the observations",
    )
    wait_for(
        lambda: len(Series(pushed(double, "energy_counter")).of(f"{GPU_J}_total")) == 4,
        "both windows of the counter",
    )
    totals = Series(pushed(double, "energy_counter"))
    assert totals.of(f"{GPU_J}_total", window="step") == [pytest.approx(3 * IDLE_W, rel=0.02)] * 2
    assert min(totals.of(f"{GPU_J}_total", window="open")) > 0.95 * IDLE_W
    assert [one for one in told(caplog) if "windows for j cannot be looked up now" in one] == [
        "the energy of windows for j cannot be looked up now: zeusd did not answer"
    ] * 2


def test_what_will_never_be_known_is_left_out_and_the_rest_goes_on(
    node: VirtualNode, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    node.clock.sleep(100)
    one, total = histogram(double.address), counter(double.address)
    one.begin_window("a")
    one._monitor.measurement_states["a"].t_ns -= 50_000_000_000
    one.end_window("a")
    spend(node, one, "a", 1)
    total.begin_window("b")
    total._monitor.measurement_states["b"].t_ns -= 50_000_000_000
    wait_for(lambda: len(told(caplog)) == 2, "both to be told of")
    assert all("left out" in one and "before what zeusd remembers" in one for one in told(caplog))
    wait_for(
        lambda: Series(pushed(double, "energy_histogram")).of(f"{GPU_J}_count") == [1, 1],
        "the other window",
    )
    node.clock.sleep(10)
    total.end_window("b")
    total.close()
    totals = Series(pushed(double, "energy_counter")).of(f"{GPU_J}_total")
    assert totals == [pytest.approx(10 * IDLE_W, rel=0.05)] * 2


# ------------------------------------------------------------------------------ how it is used


MAKE: dict[str, Make] = {"histogram": histogram, "counter": counter, "gauge": gauge}


@pytest.mark.parametrize("kind", MAKE)
def test_windows_are_those_of_zeus_monitor(node: VirtualNode, double: Double, kind: str) -> None:
    with MAKE[kind](double.address) as one:
        assert isinstance(one, Metric)
        one.begin_window("a")
        with pytest.raises(ValueError, match="Measurement window 'a' already exists"):
            one.begin_window("a")
        one.begin_window("b", sync_execution=False)
        one.end_window("a", sync_execution=False)
        with pytest.raises(ValueError, match="Measurement window 'a' does not exist"):
            one.end_window("a")
        one.end_window("b")
    with pytest.raises(RuntimeError, match="was closed; make a new one"):
        one.begin_window("a")
    with pytest.raises(RuntimeError, match="was closed; make a new one"):
        one.end_window("a")
    one.close()
    assert not one._thread.is_alive()


def test_the_framework_is_waited_for_unless_told_not_to(
    node: VirtualNode, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(
        "zeus.monitor.energy.synchronize", lambda *what: bool(waited.append(what)) or True
    )
    for one in (histogram(double.address), counter(double.address), gauge(double.address)):
        one.begin_window("a")
        one.end_window("a", sync_execution=False)
        assert waited == [("torch", [0, 1])]
        one.begin_window("a", sync_execution=False)
        one.end_window("a")
        assert len(waited) == 2
        waited.clear()


@pytest.mark.parametrize(
    "buckets", [[], [100, 50], [50, 50], [0, 1], [-1, 1], [math.nan], [1, math.inf]]
)
@pytest.mark.parametrize("name", ["gpu_bucket_range", "cpu_bucket_range", "dram_bucket_range"])
def test_wrong_buckets_are_errors_at_construction(name: str, buckets: list[float]) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be positive numbers of joules, each"):
        histogram("localhost:9091", **{name: buckets})


def test_other_wrong_arguments_are_errors_at_construction(node: VirtualNode) -> None:
    for url in ("", "ftp://gateway", "http://", "gateway:port", "http://gateway:99999"):
        with pytest.raises(ValueError, match="pushgateway_url must be the address"):
            histogram(url)
    with pytest.raises(ValueError, match="job must not be empty"):
        histogram("gateway:9091", "")
    for period_s in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="update_period must be a positive number of seconds"):
            gauge("gateway:9091", period_s=period_s)
    with pytest.raises(ValueError, match="no GPU 2"):
        EnergyCumulativeCounter([], [2], 1, "gateway:9091", "j")
    with pytest.raises(ValueError, match=r"gpu_indices=\[0\]"):
        EnergyHistogram([], 0, "gateway:9091", "j")
    assert next(_pushgateway._numbers["energy_histogram"]) == 1  # no name was spent on them


def test_without_prometheus_client_there_is_one_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for make in MAKE.values():
        with pytest.raises(ZeusBaseError, match=r'pip install "zeusd\[metrics\]"'):
            make("localhost:9091")


def test_the_module_is_imported_without_prometheus_client() -> None:
    source = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import zeus.metric; print(zeus.metric.PowerGauge.__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("PowerGauge\n", "")


# -------------------------------------------------------------------------------- fork and exit

TRAINING = """
import os, sys, time
from zeus import _node
from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, PowerGauge
from zeusd import embed
from zeusd.nodes import Node
from zeusd.devices.simulated import SimulatedBackend

address, state_dir = sys.argv[1:]
node = Node(SimulatedBackend("v100:setter_ms=0"), "simulated", lambda: None)
_node._client = embed.connect(node, state_dir=state_dir)
metrics = (
    EnergyHistogram([], None, address, "exit"),
    EnergyCumulativeCounter([], None, 1000, address, "exit"),
    PowerGauge(None, 1000, address, "exit"),
)
begun_s = time.monotonic()
for one in metrics:
    one.begin_window("ended")
    one.begin_window("running")
time.sleep(0.2)
for one in metrics:
    one.end_window("ended")
took_s = time.monotonic() - begun_s  # a busy machine sleeps longer
if os.fork() == 0:
    metrics[0].begin_window("mine")
    metrics[0].end_window("mine")
    metrics[1].end_window("running")
    metrics[2].close()
    sys.exit()
assert os.wait()[1] == 0
print(took_s, flush=True)  # the child has ended
sys.stdin.readline()
"""


@dataclass
class Ended:
    """A process that trained, forked and ended."""

    double: Double
    window_s: float
    asked_before_the_end: int
    returncode: int
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    double = Double()
    folder = str(tmp_path_factory.mktemp("state"))
    with script(TRAINING, double.address, folder, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        window_s = float(process.stdout.readline())
        asked = double.asked
        _, errors = process.communicate("\n", timeout=30)
    yield Ended(double, window_s, asked, process.returncode, errors)
    double.close()


def test_what_runs_when_the_process_ends_is_pushed_once(ended: Ended) -> None:
    assert ended.returncode == 0
    kinds = sorted(path.split("metric/")[1].split("/")[0] for path, _ in ended.double.pushes)
    assert kinds == ["energy_counter", "energy_histogram", "power_gauge"]
    observed = Series(pushed(ended.double, "energy_histogram"))
    assert observed.of(f"{GPU_J}_count", window="ended") == [1]
    assert observed.of(f"{GPU_J}_count", window="running") == []
    counted = Series(pushed(ended.double, "energy_counter"))
    (of_ended_j,) = counted.of(f"{GPU_J}_total", window="ended")
    assert of_ended_j == pytest.approx(ended.window_s * IDLE_W, rel=0.5)
    assert counted.of(f"{GPU_J}_total", window="running") > [of_ended_j]
    power = Series(pushed(ended.double, "power_gauge"))
    for window in ("ended", "running"):
        assert power.of(POWER_W, window=window) == [pytest.approx(IDLE_W, abs=2)]


def test_a_child_pushes_nothing_of_its_parent(ended: Ended) -> None:
    assert ended.asked_before_the_end == 0
    assert "Traceback" not in ended.errors
    assert ended.errors.count("does nothing in its child") == 2
    assert '"mine"' not in pushed(ended.double, "energy_histogram")


def test_a_hanging_gateway_does_not_keep_the_process(double: Double, tmp_path: Path) -> None:
    double.does = "hang"
    source = "import zeus.metric; zeus.metric.CLOSE_S = 0.3\n" + TRAINING
    with script(source, double.address, str(tmp_path), stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        wait_for(lambda: double.asked == 3, "the last pushes")
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read().count("was not pushed within 0.3 s") == 3
    assert not double.pushes

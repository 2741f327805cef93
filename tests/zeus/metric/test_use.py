"""Metrics as a training script uses them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.zeus.gateway import Double
from tests.zeus.metric.metrics import counter, gauge, histogram, threads
from tests.zeus.node import VirtualNode
from zeus import _pushgateway
from zeus.exceptions import ZeusBaseError
from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, Metric

Make = Callable[..., Any]


MAKE: dict[str, Make] = {"histogram": histogram, "counter": counter, "gauge": gauge}


@pytest.mark.parametrize("kind", MAKE)
def test_windows_are_those_of_zeus_monitor(node: VirtualNode, double: Double, kind: str) -> None:
    others = threads()  # of earlier tests
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
    assert threads() <= others


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
    assert next(_pushgateway.numbers["energy_histogram"]) == 1  # no name was spent on them


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

"""The behavior of a metric when its process forks and ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import TIMEOUT_S, script, wait_for
from tests.zeus.gateway import Double, Series
from tests.zeus.metric.metrics import GPU_J, IDLE_W, POWER_W, pushed

TRAINING = """
import os, sys, time
from zeus import _node, metric
from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, PowerGauge
from zeus.monitor import lookup
from zeus_ipc.circuit import bounded
from zeusd import embed
from zeusd.nodes import OpenedNode
from zeusd.devices.simulated import SimulatedBackend

address, state_dir = sys.argv[1:]
node = OpenedNode(SimulatedBackend("v100:setter_ms=0"), "simulated", lambda: None)
_node._client = embed.connect(node, state_dir=state_dir)
metric.PUSH_EVERY_S = 1000
metric.CLOSE_S = 60
lookup.bounded = lambda: bounded(60)  # however busy the machine
metrics = (
    EnergyHistogram([], None, address, "exit"),
    EnergyCumulativeCounter([], None, 1000, address, "exit"),
    PowerGauge(None, 1000, address, "exit"),
)
begun_s = time.monotonic()
for one in metrics:
    one.begin_window("ended")
    one.begin_window("running")
all_begun_s = time.monotonic()
time.sleep(0.2)
slept_s = time.monotonic()
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
print(slept_s - all_begun_s, took_s, flush=True)  # the child has ended
sys.stdin.readline()
"""


@dataclass
class Ended:
    """A process that trained, forked and ended."""

    double: Double
    window_s: tuple[float, float]
    """It took between these."""
    asked_before_the_end: int
    returncode: int
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    double = Double()
    folder = str(tmp_path_factory.mktemp("state"))
    with script(TRAINING, double.address, folder, stderr=subprocess.PIPE) as process:
        least_s, most_s = map(float, process.stdout.readline().split())
        asked = double.asked
        _, errors = process.communicate("\n", timeout=TIMEOUT_S)
    yield Ended(double, (least_s, most_s), asked, process.returncode, errors)
    double.close()


def test_windows_open_when_the_process_ends_are_pushed_once(ended: Ended) -> None:
    assert ended.returncode == 0
    kinds = sorted(path.split("metric/")[1].split("/")[0] for path, _ in ended.double.pushes)
    assert kinds == ["energy_counter", "energy_histogram", "power_gauge"]
    observed = Series(pushed(ended.double, "energy_histogram"))
    assert observed.of(f"{GPU_J}_count", window="ended") == [1]
    assert observed.of(f"{GPU_J}_count", window="running") == []
    counted = Series(pushed(ended.double, "energy_counter"))
    (of_ended_j,) = counted.of(f"{GPU_J}_total", window="ended")
    least_s, most_s = ended.window_s
    assert 0.5 * least_s * IDLE_W < of_ended_j < 1.5 * most_s * IDLE_W
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
    source = TRAINING.replace("CLOSE_S = 60", "CLOSE_S = 3")
    with script(source, double.address, str(tmp_path), stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdin.close()
        wait_for(lambda: double.asked == 3, "the last pushes")
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr.read().count("was not pushed within 3 s") == 3
    assert not double.pushes

"""Monitors, callbacks and optimizers in what is copied, and in other processes."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import TIMEOUT_S, running_daemon
from tests.zeus.node import VirtualNode
from tests.zeus.test_odd_gpus import A100
from zeus import _node
from zeus.device import get_gpus
from zeus.measure import EnergyCallback
from zeus.monitor import PowerMonitor, TemperatureMonitor, ZeusMonitor
from zeus.monitor.carbon import CarbonEmissionMonitor, ElectricityMapsClient
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint


def by_pickle(whole: Any) -> Any:
    return pickle.loads(pickle.dumps(whole))


COPIES = [copy.copy, copy.deepcopy, by_pickle]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(
    "make",
    [
        lambda monitor: monitor,
        lambda monitor: EnergyCallback(monitor, log_every=3),
        lambda monitor: GlobalPowerLimitOptimizer(monitor, MaxSlowdownConstraint(1.1), pl_step=50),
        lambda monitor: PowerMonitor([0], 0.5),
        lambda monitor: TemperatureMonitor([0]),
        lambda monitor: CarbonEmissionMonitor(ElectricityMapsClient((52.5, 13.4), token="x"), [0]),
    ],
    ids=["energy", "callback", "optimizer", "power", "temperature", "carbon"],
)
def test_a_copy_is_made_from_the_arguments(
    node: VirtualNode, make: Callable[[ZeusMonitor], Any], copied: Callable[[Any], Any]
) -> None:
    original = make(ZeusMonitor(gpu_indices=[0], cpu_indices=[]))
    threads = {*threading.enumerate()}
    found = copied(original)
    assert isinstance(found, type(original))
    assert {*threading.enumerate()} <= threads, "it costs nothing until it is used"
    again = copied(found)
    close = getattr(original, "close", lambda: None)
    close()
    for one in (found, again):
        monitor = getattr(one, "zeus_monitor", getattr(one, "monitor", one))
        assert monitor.gpu_indices == [0]
        assert type(one) is type(original)
    if isinstance(found, GlobalPowerLimitOptimizer):
        assert found.power_limits == original.power_limits
    if isinstance(found, EnergyCallback):
        assert found._log_every == 3


def test_a_copy_measures_and_its_original_too(node: VirtualNode) -> None:
    original = EnergyCallback(ZeusMonitor(), print_summary=False)
    found = copy.deepcopy([original, original.monitor, original])
    assert found[0] is found[2]
    for callback in (original, found[0]):
        with callback:
            for _ in callback.steps(range(3)):
                time.sleep(0.01)
        assert callback.summary.steps == 3
    assert found[0].monitor is found[1], "what was shared is shared"
    assert found[0].monitor is not original.monitor


def test_a_copy_that_cannot_be_used_says_why_each_time(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = copy.deepcopy(ZeusMonitor(gpu_indices=[0]))
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        for _ in range(2):
            with pytest.raises(ValueError, match="hides all GPUs"):
                found.begin_window("step")
    assert found.gpu_indices == [0]


def test_what_cannot_be_sent_says_so_in_one_sentence(node: VirtualNode) -> None:
    callback = EnergyCallback(ZeusMonitor(), log=threading.Thread(target=print).start)
    with pytest.raises(
        TypeError,
        match=r"^EnergyCallback cannot be sent to another process with its argument log, method; "
        "create it there: cannot pickle",
    ):
        pickle.dumps(callback)
    assert copy.deepcopy(callback).monitor.gpu_indices == [0], "a copy here shares it"
    for one in (get_gpus(), get_gpus()[0]):
        for copied in COPIES:
            with pytest.raises(TypeError, match=r"GPUs? belongs to the process that created it: "):
                copied(one)


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with running_daemon("--simulate", "2xv100:setter_ms=0", gpus=2) as running:
        yield running.socket


def measured(callback: EnergyCallback, optimizer: GlobalPowerLimitOptimizer, answers: Any) -> None:
    """Another process trains with what it got."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with callback, optimizer:
            for _ in callback.steps(optimizer.steps(range(5))):
                time.sleep(0.01)
        summary = callback.summary
    assert summary is not None
    same = callback.monitor is optimizer.monitor
    answers.put((summary.steps, summary.energy, same, optimizer.power_limits))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@_node.use(None)
def test_another_process_trains_with_them(
    method: str, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", socket)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monitor = ZeusMonitor()
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    optimizer = GlobalPowerLimitOptimizer(monitor)
    optimizer.close()
    process = context.Process(
        target=measured, args=(EnergyCallback(monitor), optimizer, answers), daemon=True
    )
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    steps, energy, same, limits = answers.get()
    assert (steps, same, limits) == (5, True, optimizer.power_limits)
    assert energy > 0


FORKS = """
import json, multiprocessing, os, sys, time, warnings
from zeus.monitor import ZeusMonitor

warnings.filterwarnings("error", module="__main__")
# Python's own, of this program's forks: a monitor without zeusd samples in a thread.
warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
monitor = ZeusMonitor()

def measured(_=None):
    with monitor.window("step") as window:
        time.sleep(0.2)
    return window.time, window.total_energy

found = []
# A process that gets no CPU reads a counter late: not in each of so many rounds.
for _ in range(10):
    reads, writes = os.pipe()
    found.append([measured()])
    if not os.fork():
        os.write(writes, json.dumps([measured(), measured()]).encode())
        os._exit(0)
    found[-1] += json.loads(os.read(reads, 1000))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found[-1] += pool.map(measured, range(2))
    if all(any(abs(j / s - 200) < 20 for s, j in rounds) for rounds in zip(*found)):
        break
json.dump(found, sys.stdout)
"""


def test_without_a_daemon_a_child_of_fork_measures_its_first_window(tmp_path: Path) -> None:
    double = NvmlDouble(tmp_path, [A100 | {"load_mw": 200_000}])
    env = os.environ | double.env
    env["LD_LIBRARY_PATH"] = str(Path(double.library).parent)
    env["ZEUSD_STATE_DIR"] = str(tmp_path / "state")
    env.pop("ZEUSD_SOCK_PATH", None)
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    ran = subprocess.run([sys.executable, "-c", FORKS], env=env, check=True, **options)
    for rounds in zip(*json.loads(ran.stdout), strict=True):
        assert any(joules == pytest.approx(200 * seconds, rel=0.1) for seconds, joules in rounds)
    assert ran.stderr == "", "no warning, and no message about zeusd"

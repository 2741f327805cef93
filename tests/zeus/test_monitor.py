from __future__ import annotations

import copy
import csv
import dataclasses
import itertools
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import for_users, in_a_notebook
from tests.zeus.node import VirtualNode
from zeus import _node
from zeus.exceptions import ZeusdError, ZeusGPUInitError, ZeusGPULostError
from zeus.monitor import Measurement, ZeusMonitor
from zeus_ipc.errors import RequestTimeout
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend
from zeusd.devices.simulated.workloads import ScriptedWorkload
from zeusd.nodes import OpenedNode

OpenNode = Callable[[str], VirtualNode]


def torch_device(kind: str, index: int | None) -> Any:
    """Stands for a `torch.device`, without importing torch."""
    return type("device", (), {"type": kind, "index": index})()


def use_torch(monkeypatch: pytest.MonkeyPatch, synchronize: Callable[[int], None]) -> None:
    """Stands for a torch that computes on GPU 0."""
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        memory_reserved=lambda index: 0,
        synchronize=synchronize,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


@pytest.fixture
def node(virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> VirtualNode:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return virtual_node("2xv100:setter_ms=0")


def test_a_window_has_the_time_and_the_energy_of_each_gpu(node: VirtualNode) -> None:
    monitor = node.monitor()
    before_j = [node.nvml.true_energy_j(gpu) for gpu in (0, 1)]
    monitor.begin_window("epoch")
    node.nvml.open_work([0], "model/compute").run(500)
    measurement = monitor.end_window("epoch")
    assert measurement.time == pytest.approx(50, rel=0.2)
    for gpu in (0, 1):
        truth_j = node.nvml.true_energy_j(gpu) - before_j[gpu]
        assert measurement.gpu_energy[gpu] == pytest.approx(truth_j, rel=0.01)
    assert measurement.total_energy == sum(measurement.gpu_energy.values())
    assert measurement.cpu_energy is None


def test_windows_overlap_and_nest_and_cross_threads(node: VirtualNode) -> None:
    monitor = node.monitor(gpu_indices=[1])
    monitor.begin_window("outer")
    node.clock.sleep(1)
    threading.Thread(target=monitor.begin_window, args=("inner",)).run()
    node.clock.sleep(2)
    outer = monitor.end_window("outer")
    node.clock.sleep(3)
    inner = monitor.end_window("inner")
    assert (outer.time, inner.time) == (pytest.approx(3), pytest.approx(5))
    assert set(outer.gpu_energy) == {1}


def test_wrong_keys_are_reported_in_the_known_words(node: VirtualNode) -> None:
    monitor = node.monitor()
    monitor.begin_window("a")
    with pytest.raises(ValueError, match="Measurement window 'a' already exists"):
        monitor.begin_window("a")
    node.clock.sleep(5)
    monitor.begin_window("a", restart=True)
    node.clock.sleep(1)
    assert monitor.end_window("a").time == pytest.approx(1)
    with pytest.raises(ValueError, match="Measurement window 'a' does not exist"):
        monitor.end_window("a")
    monitor.begin_window("a")
    monitor.reset_windows()
    with pytest.raises(ValueError, match="does not exist"):
        monitor.end_window("a")


def test_a_cancelled_window_is_all_zero_and_not_logged(node: VirtualNode, tmp_path: Path) -> None:
    monitor = node.monitor(log_file=tmp_path / "log.csv")
    monitor.begin_window("a")
    node.clock.sleep(1)
    assert monitor.end_window("a", cancel=True) == Measurement(0.0, {0: 0.0, 1: 0.0})
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1


def test_the_context_manager_repeats_and_nests(node: VirtualNode) -> None:
    monitor = node.monitor()
    with monitor.window("step") as outer:
        node.clock.sleep(1)
        with monitor.window("step") as inner:
            node.clock.sleep(2)
        with pytest.raises(RuntimeError, match="after its block"):
            _ = outer.time
    assert (outer.time, inner.time) == (pytest.approx(3), pytest.approx(2))
    assert outer.total_energy == pytest.approx(sum(outer.gpu_energy.values()))
    assert outer.total_energy > inner.total_energy > 0


def test_a_window_measures_blocks_and_functions_and_nothing_else(node: VirtualNode) -> None:
    monitor = node.monitor()
    window = monitor.window("step")
    assert repr(window) == "Window('step', not begun)"
    with pytest.raises(RuntimeError, match=r"read it after its block, `with monitor\.window\('ste"):
        _ = window.total_energy
    with window:
        node.clock.sleep(1)
    assert window.time == pytest.approx(1)

    @monitor.window("recursion")
    def work(depth: int) -> int:
        node.clock.sleep(1)
        return depth and 1 + work(depth - 1)

    assert work(3) == 3


def test_exceptions_of_the_block_are_raised(node: VirtualNode) -> None:
    monitor = node.monitor()
    with pytest.raises(KeyError), monitor.window("step") as window:
        node.clock.sleep(1)
        raise KeyError
    assert window.time == pytest.approx(1)


def test_an_energy_that_cannot_be_known_is_nan_with_one_warning(node: VirtualNode) -> None:
    monitor = node.monitor()
    with monitor.window("step") as window:
        node.clock.sleep(1)
        node.nvml.lose(0)
        node.clock.sleep(1)
    assert window.time == pytest.approx(2)
    with pytest.warns(UserWarning, match="energy of windows is nan until it can be known") as told:
        assert math.isnan(window.total_energy)
        assert math.isnan(window.uncertainty)
    assert len(for_users(told)) == 1
    assert not window.known
    energies = window.gpu_energy
    assert math.isnan(energies[0])
    assert energies[1] == pytest.approx(2 * 26, rel=0.05)  # the other GPU's is known
    node.nvml.clear_faults()
    node.clock.sleep(3)
    assert window.known
    assert window.total_energy > 0


def test_a_strict_monitor_raises_what_cannot_be_measured(node: VirtualNode) -> None:
    monitor = node.monitor(strict=True)
    before_j = node.nvml.true_energy_j(0)
    with monitor.window("step") as window:
        node.clock.sleep(1)
        node.nvml.lose(0)
        node.clock.sleep(1)
    truth_j = node.nvml.true_energy_j(0) - before_j
    with pytest.raises(ZeusGPULostError):
        _ = window.total_energy
    assert not window.known
    node.nvml.clear_faults()
    node.clock.sleep(3)
    assert window.gpu_energy[0] == pytest.approx(truth_j, rel=0.01)


def test_the_time_limited_delays_no_read(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor()
    asked: list[bool] = []
    real = node.client.windows

    def windows(*args: Any, **options: Any) -> Any:
        if args[1]:
            asked.append(options.get("limited", False))
        return real(*args, **options)

    monkeypatch.setattr(node.client, "windows", windows)
    monitor.begin_window("a")
    monitor.begin_window("b")
    node.clock.sleep(1)
    a, b = monitor.end_window("a"), monitor.end_window("b")
    assert not monitor.available(a, limited=True)
    assert b.total_energy > 0
    assert asked == [False]
    assert a.settled
    assert a.limited_so_far is None
    monitor.begin_window("c")
    node.clock.sleep(1)
    c = monitor.end_window("c")
    assert not monitor.available(c, limited=True)
    node.clock.sleep(1)
    assert monitor.available(c)
    assert asked == [False, True]
    assert c.limited_so_far is not None
    assert c.limited_so_far[0]["power"] == 0


def test_a_window_over_a_reload_of_the_driver_has_the_energy_of_both_sides(
    node: VirtualNode,
) -> None:
    monitor = node.monitor()
    monitor.begin_window("a")
    node.clock.sleep(2)
    node.nvml.reload_driver()
    node.clock.sleep(3)
    measurement = monitor.end_window("a")
    for joules in measurement.gpu_energy.values():
        assert joules == pytest.approx(5 * 26, rel=0.02)  # idle without a context


def test_a_window_shorter_than_an_update_period_is_measured(node: VirtualNode) -> None:
    monitor = node.monitor()
    node.clock.sleep(1)
    monitor.begin_window("a")
    node.clock.sleep(0.002)
    measurement = monitor.end_window("a")
    for joules in measurement.gpu_energy.values():
        assert joules / measurement.time == pytest.approx(26, abs=1)
    assert 0 < measurement.uncertainty < measurement.total_energy


@pytest.mark.parametrize("device", ["v100", "a40"])
def test_a_step_of_20_ms_on_an_idle_gpu_has_its_own_energy(
    virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    node = virtual_node(f"{device}:setter_ms=0")
    use_torch(monkeypatch, lambda index: None)
    monitor = node.monitor()
    load = ScriptedWorkload(0.0)
    work = node.nvml.open_work([0], load)
    idle_w = node.nvml.specs[0].model.idle_w[1]
    load.draw_w = idle_w
    work.launch(1e6)
    errors, counted = [], []
    for _ in range(20):
        node.clock.sleep(0.437)
        before_j = node.nvml.true_energy_j(0)
        first_mj = node.nvml.sensors(0).energy_mj
        load.draw_w = 240.0
        monitor.begin_window("step")
        work.refresh()
        node.clock.sleep(0.020)
        load.draw_w = idle_w
        work.refresh()
        measurement = monitor.end_window("step")
        truth_j = node.nvml.true_energy_j(0) - before_j
        last_mj = node.nvml.sensors(0).energy_mj
        assert first_mj is not None
        assert last_mj is not None
        counted.append(abs((last_mj - first_mj) / 1000 - truth_j) / truth_j)
        node.clock.sleep(0.3)
        errors.append(abs(measurement.total_energy - truth_j) / truth_j)
        assert abs(measurement.total_energy - truth_j) <= measurement.uncertainty
    assert sum(errors) / len(errors) < 0.05
    assert sum(counted) / len(counted) > 0.15  # the energy from the counter at both ends


def test_a_gpu_without_a_counter_is_integrated_and_constant_power_is_not_zero(
    virtual_node: OpenNode,
) -> None:
    node = virtual_node("p100:setter_ms=0")
    monitor = node.monitor()
    before_j = node.nvml.true_energy_j(0)
    monitor.begin_window("a")
    node.clock.sleep(10)
    measurement = monitor.end_window("a")
    truth_j = node.nvml.true_energy_j(0) - before_j
    assert measurement.gpu_energy[0] == pytest.approx(truth_j, rel=0.02)


def test_windows_ended_long_ago_are_looked_up_together(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor()
    asked: list[int] = []
    real = node.client.windows
    monkeypatch.setattr(
        node.client,
        "windows",
        lambda sources, windows: (asked.append(len(windows)), real(sources, windows))[1],
    )
    measurements = []
    for _ in range(30):
        monitor.begin_window("step")
        node.clock.sleep(0.1)
        measurements.append(monitor.end_window("step"))
    assert asked == []  # begin and end asked nothing of anybody
    with monitor.window("forgotten"):
        node.clock.sleep(0.2)
    total_j = sum(measurement.total_energy for measurement in measurements)
    assert asked == [30]
    assert total_j == pytest.approx(2 * 26 * 3, rel=0.02)


def test_a_window_that_nobody_reads_delays_nobody(node: VirtualNode) -> None:
    """The node's time passes only while a read waits."""
    monitor = node.monitor()
    with monitor.window("read") as read:
        node.clock.sleep(1)
    with monitor.window("step") as unread:
        node.clock.sleep(0.3)
    now_ns = node.clock()
    assert read.total_energy > 0
    assert node.clock() == now_ns
    assert not unread.measurement.settled
    assert unread.total_energy > 0
    assert now_ns < node.clock() < now_ns + 150_000_000, "its own update"


def test_a_read_that_waits_is_no_part_of_the_work_around_it(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where windows are divided by reads, these first wait for work that the GPU still does."""
    waits: list[None] = []
    monkeypatch.setattr("zeus.monitor.energy.synchronize", lambda *_: waits.append(None) or False)
    monitor = node.monitor()

    def measured() -> list[Measurement]:
        with monitor.window("whole", sync_execution=False) as whole:
            node.clock.sleep(1)
            with monitor.window("step", sync_execution=False) as step:
                node.clock.sleep(1)
            before_ns = node.clock()
            assert step.total_energy > 0
            read_s.append((node.clock() - before_ns) / 1e9)
            node.clock.sleep(1)
        return monitor.between_reads(whole.measurement)

    read_s: list[float] = []
    for asked in (0, 1):  # nobody has asked for the first
        waits.clear()
        parts = measured()
        assert len(waits) == asked
        assert [one.time for one in parts] == [pytest.approx(2), pytest.approx(1)]
        assert read_s[-1] > 0
        assert sum(one.total_energy for one in parts) == pytest.approx(2 * 26 * 3, rel=0.05)
    with monitor.window("whole") as whole:
        node.clock.sleep(1)
    assert monitor.between_reads(whole.measurement) == [whole.measurement]


def test_what_is_available_is_read_without_asking_anybody(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor()
    with monitor.window("a") as window:
        node.clock.sleep(1)
    assert not monitor.available(window.measurement)
    node.clock.sleep(0.2)
    assert monitor.available(window.measurement)
    monkeypatch.setattr(node.client, "windows", None)
    assert window.total_energy == pytest.approx(52, rel=0.02)


def test_only_one_read_waits_for_a_node_that_does_not_answer(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor()
    measurements = []
    for _ in range(20):
        with monitor.window("step") as window:
            node.clock.sleep(0.1)
        measurements.append(window.measurement)
    asked: list[None] = []
    reads = [lambda m: m.total_energy, lambda m: m.known, lambda m: m.gpu_uncertainty]

    def gone(*args: object) -> None:
        asked.append(None)
        raise RequestTimeout("zeusd did not answer")

    node.lookup.wake = lambda: None  # the thread has not retried yet
    with monkeypatch.context() as away, pytest.warns(UserWarning, match="not answer") as told:
        away.setattr(node.client, "windows", gone)
        for measurement in measurements:
            for read in reads:
                read(measurement)
            monitor.available(measurement)
    assert len(asked) == len(for_users(told)) == 1
    assert math.isnan(measurements[0].total_energy)
    node.lookup.round(node.clock())
    assert sum(one.total_energy for one in measurements) == pytest.approx(2 * 26 * 2, rel=0.02)


def test_what_a_read_made_known_is_reported_at_once(node: VirtualNode) -> None:
    """Not with the next window, or when the thread looks again."""
    monitor, known = node.monitor(), []
    with monitor.window("step") as window:
        node.clock.sleep(0.1)
    monitor.when_known(window.measurement, known.append)
    assert window.total_energy > 0
    assert known == [window.measurement]


def test_a_short_failure_of_a_gpu_is_only_a_delay(node: VirtualNode) -> None:
    """The counter includes it: what nobody has read meanwhile is known later."""
    monitor = node.monitor()
    with monitor.window("a") as window:
        node.clock.sleep(1)
        node.nvml.lose(0)
        node.clock.sleep(1)
    node.clock.sleep(0.2)
    assert not monitor.available(window.measurement)
    node.nvml.clear_faults()
    node.clock.sleep(1.2)
    assert monitor.available(window.measurement)
    assert window.total_energy == pytest.approx(2 * 26 * 2, rel=0.02)


def test_a_gpu_that_is_lost_makes_energies_unknown_and_not_late(node: VirtualNode) -> None:
    monitor = node.monitor()
    node.clock.sleep(1)
    node.nvml.lose(0)
    with monitor.window("a") as window:
        node.clock.sleep(5)
    now_ns = node.clock()
    with pytest.warns(UserWarning, match="nan until it can be known.*fallen off the bus"):
        energies = [window.gpu_energy for _ in range(20)]
    assert node.clock() < now_ns + 150_000_000, "the other's update, and none of its own"
    assert all(math.isnan(one[0]) for one in energies)
    node.clock.sleep(3)
    assert monitor.available(window.measurement)
    assert window.measurement.so_far[1] == pytest.approx(5 * 26, rel=0.02)


def test_of_a_gpu_that_is_lost_only_one_reader_asks(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor(gpu_indices=[0])
    node.clock.sleep(1)
    node.nvml.lose(0)
    node.clock.sleep(5)
    windows, asked = node.client.windows, []
    monkeypatch.setattr(
        node.client, "windows", lambda *given: asked.append(given) or windows(*given)
    )
    node.lookup.wake = lambda: None  # the thread has not retried yet
    with pytest.warns(UserWarning, match="fallen off the bus") as told:
        for _ in range(20):
            with monitor.window("step") as window:
                node.clock.sleep(0.1)
            assert math.isnan(window.total_energy)
    assert len(asked) == len(for_users(told)) == 1
    node.nvml.clear_faults()
    node.clock.sleep(3)
    assert not window.known
    node.lookup.round(node.clock())
    assert window.known


def test_an_open_window_can_be_estimated_and_stays_open(node: VirtualNode) -> None:
    monitor = node.monitor()
    monitor.begin_window("a")
    node.clock.sleep(2)
    early = monitor.estimate("a")
    assert (early.time, early.total_energy) == (pytest.approx(2), pytest.approx(104, rel=0.01))
    node.clock.sleep(2)
    assert monitor.end_window("a").total_energy == pytest.approx(208, rel=0.03)
    with pytest.raises(ValueError, match="does not exist"):
        monitor.estimate("a")


def test_energies_older_than_the_history_are_reported(node: VirtualNode) -> None:
    node.clock.sleep(100)
    monitor = node.monitor(strict=True)
    monitor.begin_window("a")
    monitor.measurement_states["a"].t_ns -= 50_000_000_000
    with pytest.raises(ZeusdError, match="before what zeusd remembers"):
        _ = monitor.end_window("a").total_energy


def test_the_log_quotes_names_and_keeps_the_known_header(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.csv"
    monitor = node.monitor(log_file=path)
    for key in ("plain", 'with,comma and "quotes"'):
        with monitor.window(key):
            node.clock.sleep(1)
    monitor.flush()
    with path.open(newline="") as file:
        header, first, second = csv.reader(file)
    assert header == ["start_time", "window_name", "elapsed_time", "gpu0_energy", "gpu1_energy"]
    epoch_s = node.clock() / 1e9 - 2 + time.time() - time.monotonic()
    assert float(first[0]) == pytest.approx(epoch_s, abs=60)
    assert float(second[0]) == pytest.approx(float(first[0]) + 1)
    assert first[1] == "plain"
    assert second[1] == 'with,comma and "quotes"'
    assert float(second[2]) == pytest.approx(1)
    assert float(second[3]) > 0


def test_the_log_of_a_node_that_went_away_neither_grows_nor_ends(
    node: VirtualNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeus.monitor.lookup.MAX_PENDING", 5)
    path = tmp_path / "log.csv"
    monitor = node.monitor(log_file=path)

    def gone(*args: object) -> None:
        raise RequestTimeout("zeusd did not answer")

    with monkeypatch.context() as away:
        away.setattr(node.client, "windows", gone)
        for number in range(12):
            with monitor.window(str(number)):
                node.clock.sleep(0.1)
        node.lookup.round(node.clock())
        assert [line.split(",")[1] for line in path.read_text().splitlines()[1:]] == list("0123456")
    node.clock.sleep(2)
    node.lookup.round(node.clock())
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [row[1] for row in rows] == [str(number) for number in range(12)]
    assert [row[3] == "nan" for row in rows] == [number < 7 for number in range(12)]


def test_two_processes_do_not_write_one_log(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    monitor = node.monitor(log_file=path)
    source = (
        "import sys, warnings; from zeus.monitor import Measurement\n"
        "from zeus.monitor.log import MeasurementLog\n"
        "warnings.simplefilter('ignore')\n"
        "log = MeasurementLog(sys.argv[1], [0]); log.write('x', 0.0, Measurement(1.0, {0: 2.0}))\n"
    )
    subprocess.run([sys.executable, "-c", source, str(path)], check=True, cwd=os.getcwd())
    with monitor.window("mine"):
        node.clock.sleep(1)
    monitor.flush()
    assert [line.split(",")[1] for line in path.read_text().splitlines()] == [
        "window_name",
        "mine",
    ]
    (other,) = tmp_path.glob("log.*.csv")
    assert ",x,1.0,2.0" in other.read_text()


def test_the_log_of_a_cell_that_runs_again_begins_again(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for key in ("first", "second", "third"):
        with warnings.catch_warnings(record=True) as warned:
            monitor = node.monitor(log_file=path)
        assert [str(one.message).partition("; ")[0] for one in for_users(warned)] == (
            [] if key == "first" else [f"{path} is overwritten"]
        )
        with monitor.window(key):
            node.clock.sleep(1)
        monitor.flush()
        assert [line.split(",")[1] for line in path.read_text().splitlines()] == [
            "window_name",
            key,
        ]
    assert [*tmp_path.glob("*.csv")] == [path]


def test_the_log_may_be_no_file(node: VirtualNode) -> None:
    monitor = node.monitor(log_file="/dev/null")
    with monitor.window("step"):
        node.clock.sleep(1)
    monitor.flush()


def test_wrong_arguments_are_errors_at_construction(node: VirtualNode) -> None:
    with pytest.raises(ValueError, match="There is no GPU 2: this process sees 2 GPUs"):
        node.monitor(gpu_indices=[2])
    with pytest.raises(ValueError, match="twice"):
        node.monitor(gpu_indices=[0, 0])
    with pytest.raises(ValueError, match="sync_execution_with"):
        node.monitor(sync_execution_with="numpy")
    assert node.monitor(gpu_indices=[]).gpu_indices == []
    (index,) = node.monitor(gpu_indices=[np.int64(0)]).gpu_indices
    assert type(index) is int, "a key that JSON takes"


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (0, r"give gpu_indices=\[0\]"),
        ("0", r"a list of indices such as \[0, 1\]"),
        (["1"], "'1' is text: give 1"),
        (["a"], "'a' is text"),
        ([0.0], "of type float"),
        ([True], "of type bool"),
        (torch_device("cuda", 1), r"torch\.device: give gpu_indices=\[1\]"),
        (torch_device("cuda", None), r"give gpu_indices=\[torch\.cuda\.current_device\(\)\]"),
        ([torch_device("cuda", 1)], "a torch.device: give 1"),
    ],
)
def test_indices_of_another_type_are_refused_with_what_to_give(
    node: VirtualNode, given: Any, instead: str
) -> None:
    with pytest.raises(ValueError, match=instead) as raised:
        node.monitor(gpu_indices=given)
    assert isinstance(raised.value, TypeError)


def test_a_cpu_that_cannot_be_measured_is_left_out_with_a_warning(node: VirtualNode) -> None:
    words = r"CPU 0, 3 cannot be measured here \(CPUs that can be: none\).*cpu_indices=\[\]"
    with pytest.warns(UserWarning, match=words) as seen:
        monitor = node.monitor(cpu_indices=[0, 3])
    assert len(for_users(seen)) == 1
    assert monitor.cpu_indices == []
    monitor.begin_window("a")
    assert monitor.end_window("a").cpu_energy is None


def test_without_gpus_and_daemon_a_monitor_measures_time_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unreachable() -> None:
        raise ZeusGPUInitError("no zeusd runs here; NVML was not found", 12)

    monkeypatch.setattr(_node, "get_client", unreachable)
    with pytest.warns(UserWarning, match="No GPU is measured: No zeusd runs here") as seen:
        monitor = ZeusMonitor(log_file=tmp_path / "log.csv")
    assert len(for_users(seen)) == 1
    assert for_users(seen)[0].filename == __file__
    monitor.begin_window("a")
    measurement = monitor.end_window("a")
    assert (measurement.gpu_energy, measurement.total_energy) == ({}, 0)
    assert (len(monitor.gpus), len(monitor.cpus)) == (0, 0)
    with pytest.raises(ValueError, match="No GPUs available"):
        ZeusMonitor(gpu_indices=[0])


def test_a_driver_that_fails_is_an_error_and_not_a_node_without_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise ZeusGPUInitError("nvmlInit: Driver/library version mismatch", 18)

    monkeypatch.setattr(_node, "get_client", fails)
    with pytest.raises(ZeusGPUInitError, match="mismatch"):
        ZeusMonitor()


def test_a_measurement_prints_its_energy_and_is_like_a_dataclass(node: VirtualNode) -> None:
    monitor = node.monitor(gpu_indices=[1])
    with monitor.window("step") as window:
        assert repr(window) == "Window('step', open)"
        assert "step" in in_a_notebook(window)
        node.clock.sleep(2)
    node.clock.sleep(1)
    measurement = window.measurement
    assert repr(measurement).startswith("Measurement(time=2.0, gpu_energy={1: ")
    assert repr(window) == repr(measurement).replace("Measurement", "Window", 1)
    energy_j = measurement.gpu_energy[1]
    fields = dataclasses.asdict(measurement)
    assert fields == vars(measurement)
    assert (fields["time"], fields["gpu_energy"], fields["soc_energy"]) == (2, {1: energy_j}, None)
    fields["gpu_energy"][1] = 0.0
    assert measurement.gpu_energy[1] == energy_j, "asdict copies"
    longer = dataclasses.replace(measurement, time=4.0)
    assert (longer.time, longer.gpu_energy) == (4.0, measurement.gpu_energy)
    assert longer.uncertainty == measurement.uncertainty > 0
    assert longer.limited == measurement.limited
    assert set(longer.limited or ()) == {1}
    for same in (
        pickle.loads(pickle.dumps(measurement)),
        copy.copy(measurement),
        copy.deepcopy(measurement),
    ):
        assert same == measurement
        assert same.uncertainty == measurement.uncertainty
    assert f"<td>GPU 1</td><td>{energy_j:.1f}</td>" in in_a_notebook(measurement)


def test_a_measurement_shows_and_counts_cpus_and_memory() -> None:
    one = Measurement(2.0, {1: 10.0}, {0: 5.0}, {0: 1.0}, gpu_uncertainty={1: 0.5})
    assert repr(one) == (
        "Measurement(time=2.0, gpu_energy={1: 10.0}, cpu_energy={0: 5.0}, dram_energy={0: 1.0}, "
        "soc_energy=None)"
    )
    cells = re.findall("<t[dh]>([^<]*)</t[dh]>", in_a_notebook(one))
    assert cells == [
        *("", "energy (J)", "± (J)", "mean power (W)"),
        *("2.000 s", "", "", ""),
        *("GPU 1", "10.0", "0.5", "5.0"),
        *("CPU 0", "5.0", "", "2.5"),
        *("DRAM 0", "1.0", "", "0.5"),
    ]
    assert one.known
    assert one != Measurement(2.0, {1: 10.0}, {0: 5.0}, {0: 2.0})
    assert not Measurement(2.0, {1: 10.0}, {0: math.nan}).known
    assert not Measurement(2.0, {1: 10.0}, {0: 5.0}, {0: math.nan}).known


def test_a_measurement_whose_energy_is_not_known_prints_why(node: VirtualNode) -> None:
    monitor = node.monitor(gpu_indices=[0])
    with monitor.window("step") as window:
        node.nvml.lose(0)
        node.clock.sleep(2)
    assert repr(window.measurement).startswith("Measurement(time=2.0, ")
    assert re.search("energy unknown: |nan", repr(window.measurement))
    assert re.search("fallen off the bus|nan", in_a_notebook(window.measurement))


def test_the_framework_is_waited_for_before_the_clock_is_read(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    def wait(index: int) -> None:
        waited.append(index)
        node.clock.sleep(1)  # the tail of the work

    use_torch(monkeypatch, wait)
    monitor = node.monitor()
    monitor.begin_window("a", sync_execution=False)
    node.clock.sleep(1)
    assert monitor.end_window("a").time == pytest.approx(2)
    assert waited == [0]  # GPU 1 has no context in this process, and gets none


def test_without_a_daemon_the_sampler_runs_here_and_streams(tmp_path: Path) -> None:
    node = OpenedNode(SimulatedBackend("2xv100:setter_ms=0"), "simulated", lambda: None)
    client = embed.connect(node, state_dir=str(tmp_path))
    try:
        first, second = (gpu.uuid for gpu in client.node().gpus)
        with client.stream(first) as stream:
            with client.stream(first) as another:
                assert next(iter(another)).gpu == first
            samples = list(itertools.islice(stream, 30))
        assert {sample.gpu for sample in samples} == {first}
        numbers = [sample.number for sample in samples]
        assert numbers == list(range(numbers[0], numbers[0] + 30))
        # Only requested devices are sampled.
        begun_ns = samples[0].t_ns
        assert client.timeline(first)
        assert client.windows(second)[second].begins_ns > begun_ns
    finally:
        client.close()

from __future__ import annotations

import csv
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode
from zeus.exceptions import ZeusGPULostError
from zeus.monitor import Measurement

OpenNode = Callable[[str], VirtualNode]


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


def test_wrong_keys_are_told_in_the_known_words(node: VirtualNode) -> None:
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


def test_what_the_block_raises_passes_through(node: VirtualNode) -> None:
    monitor = node.monitor()
    with pytest.raises(KeyError), monitor.window("step") as window:
        node.clock.sleep(1)
        raise KeyError
    assert window.time == pytest.approx(1)


def test_a_block_that_cannot_be_measured_runs_all_the_same(node: VirtualNode) -> None:
    monitor = node.monitor()
    ran = False
    with pytest.warns(UserWarning, match="could not be measured"), monitor.window("step") as window:
        node.nvml.lose(0)
        ran = True
    assert ran
    with pytest.raises(ZeusGPULostError):
        _ = window.time


def test_a_window_whose_end_cannot_be_read_can_be_ended_again(node: VirtualNode) -> None:
    monitor = node.monitor()
    monitor.begin_window("a")
    node.clock.sleep(2)
    node.nvml.lose(0)
    with pytest.raises(ZeusGPULostError):
        monitor.end_window("a")
    node.nvml.clear_faults()
    assert monitor.end_window("a").time == pytest.approx(2)


def test_a_counter_that_goes_back_never_gives_negative_energy(node: VirtualNode) -> None:
    monitor = node.monitor()
    monitor.begin_window("a")
    node.clock.sleep(2)
    node.nvml.reload_driver()
    node.clock.sleep(3)
    with pytest.warns(UserWarning, match="went back"):
        measurement = monitor.end_window("a")
    assert all(0 <= joules < 5 * 40 for joules in measurement.gpu_energy.values())


def test_a_window_shorter_than_a_tick(node: VirtualNode) -> None:
    monitor, approximate = node.monitor(), node.monitor(approx_instant_energy=True)
    node.nvml.sensors(0)
    monitor.begin_window("a")
    with pytest.warns(UserWarning, match="measured as zero"):
        assert monitor.end_window("a").total_energy == 0
    approximate.begin_window("a")
    node.clock.sleep(1e-6)  # no tick of this node falls into it: its phase is seeded
    measurement = approximate.end_window("a")
    for joules in measurement.gpu_energy.values():
        assert joules / measurement.time == pytest.approx(26, abs=2)


def test_a_gpu_without_a_counter_is_integrated_and_constant_power_is_not_zero(
    virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from zeus.monitor import source

    node = virtual_node("p100:setter_ms=0")
    monkeypatch.setattr(
        source,
        "time",
        types.SimpleNamespace(monotonic=lambda: node.clock() / 1e9, sleep=time.sleep),
    )
    monitor = node.monitor()
    before_j = node.nvml.true_energy_j(0)
    monitor.begin_window("a")
    for _ in range(200):
        node.clock.sleep(0.05)
        monitor._source.energy_j()
    measurement = monitor.end_window("a")
    truth_j = node.nvml.true_energy_j(0) - before_j
    assert measurement.gpu_energy[0] == pytest.approx(truth_j, rel=0.02)


def test_the_log_quotes_names_and_keeps_the_known_header(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.csv"
    monitor = node.monitor(log_file=path)
    for key in ("plain", 'with,comma and "quotes"'):
        with monitor.window(key):
            node.clock.sleep(1)
    with path.open(newline="") as file:
        header, first, second = csv.reader(file)
    assert header == ["start_time", "window_name", "elapsed_time", "gpu0_energy", "gpu1_energy"]
    assert first[1] == "plain"
    assert second[1] == 'with,comma and "quotes"'
    assert float(second[2]) == pytest.approx(1)
    assert float(second[3]) > 0


def test_two_processes_do_not_write_one_log(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    monitor = node.monitor(log_file=path)
    source = (
        "import sys, warnings; from zeus.monitor.log import MeasurementLog\n"
        "warnings.simplefilter('ignore')\n"
        "log = MeasurementLog(sys.argv[1], [0]); log.write('x', 0.0, 1.0, {0: 2.0})\n"
    )
    subprocess.run([sys.executable, "-c", source, str(path)], check=True, cwd=os.getcwd())
    with monitor.window("mine"):
        node.clock.sleep(1)
    assert [line.split(",")[1] for line in path.read_text().splitlines()] == [
        "window_name",
        "mine",
    ]
    (other,) = tmp_path.glob("log.*.csv")
    assert ",x,1.0,2.0" in other.read_text()


def test_wrong_arguments_are_errors_at_construction(node: VirtualNode) -> None:
    with pytest.raises(ValueError, match="no GPU 2"):
        node.monitor(gpu_indices=[2])
    with pytest.raises(ValueError, match="twice"):
        node.monitor(gpu_indices=[0, 0])
    with pytest.raises(RuntimeError, match=r"cpu_indices=\[\]"):
        node.monitor(cpu_indices=[0])
    with pytest.raises(ValueError, match="sync_execution_with"):
        node.monitor(sync_execution_with="numpy")
    assert node.monitor(gpu_indices=[]).gpu_indices == []


def test_no_visible_gpu_is_an_error_and_not_zero_joules(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="No GPUs available"):
        node.monitor()


def test_the_framework_is_waited_for_before_the_clock_is_read(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    def wait(index: int) -> None:
        waited.append(index)
        node.clock.sleep(1)  # the tail of the work

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        memory_reserved=lambda index: 0,
        synchronize=wait,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monitor = node.monitor()
    monitor.begin_window("a", sync_execution=False)
    node.clock.sleep(1)
    assert monitor.end_window("a").time == pytest.approx(2)
    assert waited == [0]  # GPU 1 has no context in this process, and gets none


def test_constant_time_ends_are_read_in_one_message(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = node.monitor()
    asked: list[list[str]] = []
    real = node.client.energy
    monkeypatch.setattr(
        node.client, "energy", lambda gpus: (asked.append(list(gpus)), real(gpus))[1]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor.begin_window("a")
        monitor.end_window("a")
    assert [len(gpus) for gpus in asked] == [2, 2]

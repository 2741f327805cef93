from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support import running_daemon, wait_for
from zeus import _node
from zeus.monitor import ZeusMonitor
from zeus_ipc.errors import UnknownGpu
from zeusd.energy.history import SIZE, History
from zeusd.runtime.powercap import PERIOD_NS, ZoneSource, find_packages

RANGE = 262_143_328_850


def zone(path: Path, name: str, energy_uj: int, *, range_uj: int = RANGE) -> Path:
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two packages, of which the second has no memory domain, in Linux's layout."""
    root = tmp_path / "powercap"
    first = zone(root / "intel-rapl:0", "package-1", 500)
    zone(first / "intel-rapl:0:0", "core", 10)
    zone(root / "intel-rapl:1", "package-0", 1_000)
    zone(root / "intel-rapl:1" / "intel-rapl:1:0", "uncore", 10)
    zone(root / "intel-rapl:1" / "intel-rapl:1:1", "dram", 70)
    zone(root / "intel-rapl:2", "psys", 1)
    zone(root / "dtpm", "package-9", 1)
    return root


def add(path: Path, energy_uj: int) -> None:
    file = path / "energy_uj"
    aside = path / "new"
    aside.write_text(str((int(file.read_text()) + energy_uj) % RANGE))
    aside.rename(file)


def test_packages_are_found_by_name_and_psys_is_none(tree: Path) -> None:
    packages = find_packages(str(tree))
    assert [(one.info.index, one.info.name, one.info.dram) for one in packages] == [
        (0, "package-0", True),
        (1, "package-1", False),
    ]
    assert packages[0].zone.path.name == "intel-rapl:1"
    assert find_packages(str(tree / "nothing")) == []


def test_unreadable_counters_are_left_out(tree: Path) -> None:
    (tree / "intel-rapl:0" / "energy_uj").unlink()
    (tree / "intel-rapl:0" / "energy_uj").mkdir()
    assert [one.info.name for one in find_packages(str(tree))] == ["package-0"]


class Sampled:
    """A zone, and a clock that moves by a period for each reading."""

    def __init__(self, path: Path) -> None:
        self.now_ns = 10**12
        self.path = path
        found = find_packages(str(path.parent))
        (package,) = [one for one in found if one.zone.path == path]
        self.history = History(memoryview(bytearray(SIZE)))
        self.zone = package.zone
        self.source = ZoneSource(self.zone, self.history, lambda: self.now_ns)

    def read(self, grown_uj: int) -> None:
        add(self.path, grown_uj)
        self.now_ns += PERIOD_NS
        self.source.read(False)

    def energy_uj(self) -> int:
        return self.history.energy_uj[self.history.ticks.end - 1]


def test_a_counter_that_wraps_around_continues(tree: Path) -> None:
    sampled = Sampled(tree / "intel-rapl:1")
    (tree / "intel-rapl:1" / "energy_uj").write_text(str(RANGE - 7_000_000))
    sampled.read(0)
    for _ in range(6):
        sampled.read(5_000_000)
    assert sampled.energy_uj() == 30_000_000
    assert sampled.history.power_mw[sampled.history.ticks.end - 1] == 100_000


def test_a_counter_that_was_reset_adds_and_removes_no_energy(tree: Path) -> None:
    sampled = Sampled(tree / "intel-rapl:1")
    (tree / "intel-rapl:1" / "energy_uj").write_text(str(RANGE // 2))
    sampled.read(0)
    sampled.read(1_000_000)
    (tree / "intel-rapl:1" / "energy_uj").write_text("0")
    sampled.read(0)
    sampled.read(2_000_000)
    assert sampled.energy_uj() == 3_000_000


def test_energy_between_two_readings_counts_also_over_a_wrap(tree: Path) -> None:
    first = Sampled(tree / "intel-rapl:1")
    (tree / "intel-rapl:1" / "energy_uj").write_text(str(RANGE - 2_000_000))
    first.read(0)
    first.read(1_000_000)
    add(tree / "intel-rapl:1", 50_000_000)
    first.now_ns += 1_000_000_000
    again = ZoneSource(first.zone, first.history, lambda: first.now_ns)
    again.read(False)
    assert first.energy_uj() == 51_000_000


def test_a_zone_that_vanishes_is_tried_again_calmly(tree: Path) -> None:
    sampled = Sampled(tree / "intel-rapl:1")
    sampled.read(1_000)
    os.rename(tree / "intel-rapl:1" / "energy_uj", tree / "gone")
    sampled.now_ns += PERIOD_NS
    assert sampled.source.read(False) is None
    assert isinstance(sampled.source.failure, OSError)
    assert sampled.source.next_read_ns - sampled.now_ns > 10 * PERIOD_NS
    os.rename(tree / "gone", tree / "intel-rapl:1" / "energy_uj")
    sampled.read(1_000)
    assert sampled.source.failure is None


def test_cpu_and_memory_energy_through_the_daemon(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "zeusd.toml"
    config.write_text(f'[energy]\npowercap = "{tree}"\n')
    with running_daemon("--simulate", "v100", "--config", str(config), gpus=1) as daemon:
        with daemon.client() as client, _node.use(client):
            monitor = ZeusMonitor()
            assert monitor.cpu_indices == [0, 1]
            monitor.begin_window("a")
            begun_ns = time.monotonic_ns()
            names = ("cpu:0", "cpu:1", "dram:0")

            def sampled_since(t_ns: int) -> bool:
                return all(client.timeline(name, start_ns=t_ns) for name in names)

            wait_for(lambda: sampled_since(begun_ns), "samples inside the window")
            add(tree / "intel-rapl:1", 3_000_000)
            add(tree / "intel-rapl:1" / "intel-rapl:1:1", 2_000_000)
            add(tree / "intel-rapl:0", 1_000_000)
            added_ns = time.monotonic_ns()
            wait_for(lambda: sampled_since(added_ns), "samples of what was added")
            measurement = monitor.end_window("a")
            assert measurement.cpu_energy == {0: pytest.approx(3.0), 1: pytest.approx(1.0)}
            assert measurement.dram_energy == {0: pytest.approx(2.0)}
            assert set(measurement.gpu_energy) == {0}
            assert ZeusMonitor(cpu_indices=[]).begin_window("b") is None
            only_gpus = ZeusMonitor(cpu_indices=[])
            with only_gpus.window("c") as window:
                pass
            assert window.measurement.cpu_energy is None
            with pytest.warns(UserWarning, match=r"CPU 2 .*0, 1.*cpu_indices=\[\]"):
                assert ZeusMonitor(cpu_indices=[2]).cpu_indices == []
            with pytest.raises(UnknownGpu, match="dram:0"):
                client.windows("dram:1")


def test_a_site_may_keep_cpu_energy_to_itself(tree: Path, tmp_path: Path) -> None:
    config = tmp_path / "zeusd.toml"
    config.write_text(f'[energy]\ncpu = false\npowercap = "{tree}"\n')
    with running_daemon("--simulate", "v100", "--config", str(config), gpus=1) as daemon:
        with daemon.client() as client:
            assert client.node().cpus == []
            with pytest.raises(UnknownGpu):
                client.windows("cpu:0")

"""Power meters of Grace CPUs in hwmon, and superchips."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import configuration, running_daemon, wait_for
from zeus_ipc import Client
from zeus_ipc.replies import CpuInfo, WindowEnergies
from zeusd.energy.history import SIZE, History
from zeusd.runtime.power_sources import (
    PERIOD_NS,
    RETRY_NS,
    PowerMeter,
    PowerSource,
    find_power_meters,
    module_power_mw,
)


def meter(root: Path, number: int, label: str, watts: float, inside: str = "") -> Path:
    """A meter in the layout of `acpi_power_meter`: beside the device's files, or under `device`."""
    place = root / f"hwmon{number}" / inside
    place.mkdir(parents=True)
    (root / f"hwmon{number}" / "name").write_text("power_meter\n")
    (place / "power1_oem_info").write_text(f"{label}\n")
    (place / "power1_average").write_text(f"{round(watts * 1e6)}\n")
    return place


@pytest.fixture
def grace(tmp_path: Path) -> Path:
    """Two Grace sockets, the first with its files where older kernels have them."""
    root = tmp_path / "hwmon"
    meter(root, 0, "Module Power Socket 0", 464, "device")
    meter(root, 1, "CPU Power Socket 0", 60, "device")
    meter(root, 2, "Grace Power Socket 0", 97, "device")
    meter(root, 3, "SysIO Power Socket 0", 12, "device")
    second = meter(root, 10, "Grace Power Socket 1", 95)
    (second / "power1_average_interval").write_text("700\n")
    (root / "hwmon4").mkdir()
    (root / "hwmon4" / "name").write_text("nvme\n")
    return root


def test_a_socket_is_one_meter_and_its_rails_are_none(grace: Path) -> None:
    found = find_power_meters(str(grace))
    assert [(one.info.index, one.info.name, one.info.dram) for one in found] == [
        (0, "Grace Power Socket 0", False),
        (1, "Grace Power Socket 1", False),
    ]
    assert [one.read_mw() for one in found] == [97_000, 95_000]
    assert [one.period_ns for one in found] == [PERIOD_NS, 700_000_000]
    assert find_power_meters(str(grace / "nothing")) == []


def test_without_the_sockets_meter_the_widest_one_counts(tmp_path: Path) -> None:
    meter(tmp_path, 0, "CPU Power Socket 0", 60)
    meter(tmp_path, 1, "Total Power in uW socket 1", 80)
    meter(tmp_path, 2, "CPU Power Socket 1", 55)
    names = [one.info.name for one in find_power_meters(str(tmp_path))]
    assert names == ["CPU Power Socket 0", "Total Power in uW socket 1"]


def test_a_firmwares_text_is_no_reason_not_to_start(grace: Path) -> None:
    (grace / "hwmon9").mkdir()
    (grace / "hwmon9" / "power1_oem_info").write_bytes(b"\xff\xfe meter")
    assert find_power_meters(str(grace))


def test_power_is_integrated_and_a_meter_that_fails_is_tried_again() -> None:
    now_ns, power_mw = 10**12, 100_000
    failing = False

    def read_mw() -> int:
        if failing:
            raise OSError("gone")
        return power_mw

    history = History(memoryview(bytearray(SIZE)))
    source = PowerSource(read_mw, history, clock_ns=lambda: now_ns)
    source.read(False)
    for power_mw in (100_000, 200_000, 200_000):  # noqa: B007 - read_mw reads it
        now_ns = source.next_read_ns
        source.read(False)
    edge, _ = history.last() or (None, None)
    assert edge.energy_uj == (100_000 + 150_000 + 200_000) * PERIOD_NS // 1_000_000
    failing = True
    now_ns = source.next_read_ns
    assert source.read(False) is None
    assert str(source.failure) == "gone"
    assert source.next_read_ns == now_ns + RETRY_NS
    failing = False
    now_ns = source.next_read_ns
    again = PowerSource(read_mw, history, clock_ns=lambda: now_ns)  # zeusd was started again
    assert again.read(False) is not None
    assert (history.last() or (edge,))[0].energy_uj > edge.energy_uj


@pytest.mark.parametrize("odd_uw", [-1_000_000, 0xFFFFFFFF * 1_000_000])
def test_a_power_that_is_none_adds_and_removes_no_energy(tmp_path: Path, odd_uw: int) -> None:
    """ACPI has all ones for a power that is not known."""
    now_ns, file = 10**12, tmp_path / "power1_average"
    meter = PowerMeter(CpuInfo(index=0, name="CPU", dram=False), file, PERIOD_NS)
    history = History(memoryview(bytearray(SIZE)))
    source = PowerSource(meter.read_mw, history, clock_ns=lambda: now_ns)
    begin_ns = now_ns
    for uw in (100_000_000, 100_000_000, odd_uw, 100_000_000):
        now_ns = source.next_read_ns
        file.write_text(f"{uw}\n")
        assert (source.read(False) is None) == (uw == odd_uw)
    edge, _ = history.last() or (None, None)
    assert edge.energy_uj == 100_000 * (now_ns - begin_ns) // 1_000_000


def test_a_modules_power_is_the_mean_of_what_its_gpus_read_lately() -> None:
    gpus = [SimpleNamespace(module_reading=one) for one in (None, (1, 470), (2, 460), (0, 9))]
    assert module_power_mw(gpus, lambda: 2 * 10**9 + 1) == 465
    with pytest.raises(OSError, match="no GPU of this superchip has reported its power"):
        module_power_mw(gpus, lambda: 2 * 10**9 + 3)


def known_well(client: Client, gpu: str) -> tuple[int, int, WindowEnergies] | None:
    """A second and its window, if its energy is known to 1.5 J, one standard deviation."""
    begin_ns = time.monotonic_ns()
    time.sleep(1.0)  # the measured time
    end_ns = time.monotonic_ns()
    found = client.windows(gpu, [(begin_ns, end_ns, False)])[gpu]
    uncertainty_uj = found.uncertainty_uj[0]
    known = uncertainty_uj is not None and uncertainty_uj < 1_500_000
    return (begin_ns, end_ns, found) if known else None


def test_a_superchip_is_counted_once_and_its_cpu_where_there_is_no_rapl(
    grace: Path, tmp_path: Path
) -> None:
    config = configuration(tmp_path, f'[energy]\npowercap = "{tmp_path}/none"\nhwmon = "{grace}"\n')
    with running_daemon("--simulate", "4xgb200,gh200", *config, gpus=5) as daemon:
        with daemon.client() as client:
            node = client.node()
            assert [gpu.module for gpu in node.gpus] == [0, 0, 1, 1, 2]
            assert [cpu.name for cpu in node.cpus] == [
                "Grace Power Socket 0",
                "Grace Power Socket 1",
            ]
            gpus = [gpu.uuid for gpu in node.gpus]
            names = [*gpus, "module:0", "module:1", "module:2", "cpu:0"]
            wait_for(
                lambda: {one.source for one in client.metrics().sources} >= set(names),
                "a sample of each source",
            )
            begin_ns = time.monotonic_ns()
            time.sleep(1.5)  # the measured time
            end_ns = time.monotonic_ns()
            found = client.windows(names, [(begin_ns, end_ns, False)])
            for name, watts in zip(names, [*[166] * 4, 91, 464, 464, 173, 97], strict=True):
                energy_uj, error_uj = found[name].energy_uj[0], found[name].uncertainty_uj[0]
                expected_uj = watts * (end_ns - begin_ns) / 1e3
                # 2 % are noise; the uncertainty covers late samples of a busy machine.
                assert energy_uj == pytest.approx(expected_uj, rel=0.02, abs=2 * error_uj), name
            state = client.state(gpus)[gpus[0]]
            assert state.power_mw == pytest.approx(166_000, abs=3_000)
            assert state.memory_power_mw == pytest.approx(31_500, abs=1_000)
            assert state.module_power_mw == pytest.approx(464_000, abs=6_000)
            verdicts = [*["gpu"] * 4, "module"]
            wait_for(
                lambda: [one.energy_scope for one in client.state(gpus).values()] == verdicts,
                "the verdicts",
            )
            assert client.energy(gpus[4])[gpus[4]].scope == "module"
            begin_ns, end_ns, found = wait_for(
                lambda: known_well(client, gpus[4]), "a second that a busy machine sampled in time"
            )
            assert (found.energy_uj[0] or 0) / (end_ns - begin_ns) * 1e3 == pytest.approx(91, abs=3)
            # Power that stands in for the counter covers a part of each update.
            covered = [*[None] * 4, 25_000_000]
            samples: dict[str, int | None] = {}
            with client.stream(gpus) as stream:
                while len(samples) < 5:
                    sample = next(stream)
                    samples[sample.gpu] = sample.seen_ns
            assert [samples[gpu] for gpu in gpus] == covered

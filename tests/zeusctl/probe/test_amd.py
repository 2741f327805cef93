"""The probe on AMD's GPUs: on the C stand-in for libamd_smi, and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_amdsmi.double import NEVER, AmdSmiDouble
from zeusctl.probe.backend import AmdDriver, is_amd
from zeusctl.probe.driver import NoDriverError
from zeusctl.probe.page import lines
from zeusctl.probe.run import ProbeTiming, probe
from zeusctl.probe.simulated import ProbedSimulation


def test_a_probe_reads_an_amd_gpu_and_sets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = AmdSmiDouble(tmp_path, [{}, {"energy_absent": 1}], privilege=NEVER)
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    driver = AmdDriver(double.library, str(double.sysfs))
    try:
        report = probe(driver, ProbeTiming(seconds=1, alone_seconds=0.5, calls=2), stand_in=True)
    finally:
        driver.close()
    counted, uncounted = report.gpus
    assert counted.name == "AMD Instinct MI300X"
    assert report.software.driver == "6.12.12"
    assert counted.power_limits is not None
    assert counted.power_limits.largest_w == 750
    assert {"power_instant_mw", "energy_counter_mj"} <= counted.sensors.keys()
    assert "energy_counter_mj" not in uncounted.sensors
    assert counted.sensors["power_instant_mw"].mean == 140_000
    assert double.calls() == []
    assert any("MI300X" in line for line in lines(report))


def test_a_simulated_amd_node_can_be_probed() -> None:
    driver = ProbedSimulation("mi300x")
    report = probe(driver, ProbeTiming(seconds=4, calls=1), load_on=None)
    assert report.gpus[0].name == "AMD Instinct MI300X"
    assert report.gpus[0].sensors["power_instant_mw"].mean == 140_000


def test_which_vendor_is_probed(tmp_path: Path) -> None:
    assert is_amd("/opt/rocm/lib/libamd_smi.so")
    assert not is_amd("libnvidia-ml.so.1", str(tmp_path))
    bus = tmp_path / "bus/pci/devices"
    for address, vendor, kind in (("0000:05:00.0", "0x1002", "0x120000"),):
        (bus / address).mkdir(parents=True)
        (bus / address / "vendor").write_text(f"{vendor}\n")
        (bus / address / "class").write_text(f"{kind}\n")
    assert is_amd(None, str(tmp_path))
    (bus / "0000:07:00.0").mkdir()
    (bus / "0000:07:00.0/vendor").write_text("0x10de\n")
    (bus / "0000:07:00.0/class").write_text("0x030200\n")
    assert not is_amd(None, str(tmp_path))


def test_without_the_driver_a_probe_says_so_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoDriverError, match="load the amdgpu driver") as caught:
        AmdDriver(None, str(tmp_path))
    assert "\n" not in str(caught.value)

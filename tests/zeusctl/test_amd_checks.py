"""The doctor's first lines on a machine with AMD GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.fake_amdsmi.double import AmdSmiDouble
from tests.zeusd.devices.test_vendors import AMD, NVIDIA, bus
from zeusctl.machine_checks import amd_checks, gpus_are_amds, vendors_check


def test_it_finds_the_vendor_that_zeusd_manages(tmp_path: Path) -> None:
    assert not gpus_are_amds(str(tmp_path))
    assert gpus_are_amds(str(bus(tmp_path, AMD)))
    assert list(vendors_check(str(tmp_path))) == []
    assert not gpus_are_amds(str(bus(tmp_path, AMD, NVIDIA)))
    (both,) = vendors_check(str(tmp_path))
    assert (both.state, "[amd]" in both.remedy) == ("note", True)


def test_it_says_what_is_there(tmp_path: Path) -> None:
    double = AmdSmiDouble(tmp_path)
    driver, library = amd_checks(str(double.sysfs), ("/nowhere/libamd_smi.so", double.library))
    assert (driver.state, driver.found) == ("ok", "amdgpu 6.12.12 is loaded")
    assert (library.state, library.found) == ("ok", f"{double.library} can be loaded")


def test_it_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    driver, library = amd_checks(str(tmp_path), ("/nowhere/libamd_smi.so",))
    assert driver.state == library.state == "fault"
    assert "modprobe amdgpu" in driver.remedy
    assert "[amd]" in library.remedy

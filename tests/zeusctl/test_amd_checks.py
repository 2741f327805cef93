"""The doctor's first lines on machines of either vendor."""

from __future__ import annotations

from pathlib import Path

from tests.fake_amdsmi.double import AmdSmiDouble
from tests.zeusd.devices.test_vendors import AMD, NVIDIA, bus
from zeusctl.machine_checks import hardware_checks

ABSENT = ("/nowhere/lib.so",)


def test_it_finds_the_vendor_that_zeusd_manages(tmp_path: Path) -> None:
    def found() -> list[str]:
        return [one.found for one in hardware_checks(str(tmp_path), str(tmp_path), ABSENT)]

    assert found()[0] == "the NVIDIA driver is not loaded"
    bus(tmp_path, AMD)
    assert found()[0] == "the amdgpu driver is not loaded"
    bus(tmp_path, AMD, NVIDIA)
    both, driver, _ = hardware_checks(str(tmp_path), str(tmp_path), ABSENT)
    assert (both.state, "[amd]" in both.remedy) == ("note", True)
    assert driver.found == "the NVIDIA driver is not loaded"


def test_it_says_what_is_there(tmp_path: Path) -> None:
    double = AmdSmiDouble(tmp_path)
    libraries = (*ABSENT, double.library)
    sysfs = str(bus(double.sysfs, AMD))
    driver, library = hardware_checks(sysfs, libraries=libraries)
    assert (driver.state, driver.found) == ("ok", "amdgpu 6.12.12 is loaded")
    assert (library.state, library.found) == ("ok", f"{double.library} can be loaded")
    nvidias = tmp_path / "driver" / "nvidia"
    nvidias.mkdir(parents=True)
    (nvidias / "version").write_text("NVRM version: NVIDIA UNIX 570.1\nGCC version: 13\n")
    driver, _ = hardware_checks(str(tmp_path / "none"), str(tmp_path), ABSENT)
    assert (driver.state, driver.found) == ("ok", "NVIDIA UNIX 570.1")


def test_it_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    driver, library = hardware_checks(str(bus(tmp_path, AMD)), libraries=ABSENT)
    assert driver.state == library.state == "fault"
    assert "modprobe amdgpu" in driver.remedy
    assert "[amd]" in library.remedy
    assert library.found.startswith("/nowhere/lib.so cannot be loaded (")
    driver, library = hardware_checks(str(tmp_path / "none"), str(tmp_path), ABSENT)
    assert "modprobe nvidia" in driver.remedy
    assert "NVIDIA toolkit" in library.remedy

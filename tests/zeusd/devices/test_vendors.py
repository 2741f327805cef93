"""Which vendor's GPUs are managed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.fake_amdsmi.double import AmdSmiDouble
from zeusd.devices.nvml import backend
from zeusd.devices.port import DeviceError
from zeusd.devices.vendors import FoundBackend, Options
from zeusd.nodes import real_node

NvmlBackend = backend.NvmlBackend


@pytest.fixture(autouse=True)
def no_nvidia_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have loaded a libnvidia-ml, which the linker would find."""
    missing = "/nowhere/libnvidia-ml.so.1"
    monkeypatch.setattr(
        backend, "NvmlBackend", lambda library, sysfs: NvmlBackend(library or missing, sysfs)
    )


NVIDIA, AMD = ("0x10de", "0x030200"), ("0x1002", "0x120000")
ON_BOARD = ("0x1002", "0x030000")


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, kind) in enumerate(devices):
        device = folder / f"bus/pci/devices/0000:{number:02x}:00.0"
        device.mkdir(parents=True, exist_ok=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    return folder


def refused(options: Options) -> tuple[str, FoundBackend]:
    found = FoundBackend(options)
    with pytest.raises(DeviceError) as caught:
        found.init()
    return str(caught.value), found


def test_a_machine_without_gpus_is_reported_in_one_sentence(tmp_path: Path) -> None:
    text, found = refused(Options(sysfs=str(tmp_path)))
    assert text.startswith("nvmlInit")
    assert text.endswith("; there is no AMD Instinct GPU either")
    assert "\n" not in text
    assert found.driver["vendor"] == "nvidia"


@pytest.mark.parametrize(
    ("devices", "vendor"),
    [
        ((NVIDIA,), "nvidia"),
        ((NVIDIA, ON_BOARD), "nvidia"),
        ((ON_BOARD,), "nvidia"),
        ((AMD, AMD), "amd"),
        ((("0x1002", "0x038000"), ("0x8086", "0x060000")), "amd"),
    ],
)
def test_the_gpus_on_the_bus_decide(
    tmp_path: Path, devices: tuple[tuple[str, str], ...], vendor: str
) -> None:
    text, found = refused(Options(sysfs=str(bus(tmp_path, *devices))))
    assert found.driver["vendor"] == vendor
    if vendor == "amd":
        assert "the amdgpu driver is not loaded" in text
        assert found.driver["module"] == f"{tmp_path}/module/amdgpu"


def test_of_two_vendors_one_is_managed_and_that_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = FoundBackend(Options(sysfs=str(bus(tmp_path, NVIDIA, AMD))))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(DeviceError, match="nvmlInit"):
                found.init()
    (said,) = caplog.messages
    assert "leaves AMD's alone; to manage AMD's instead, set library under [amd]" in said


def test_a_library_that_is_named_decides(tmp_path: Path) -> None:
    sysfs = str(bus(tmp_path, NVIDIA, AMD))
    (tmp_path / "module/amdgpu").mkdir(parents=True)
    text, _ = refused(Options(amd_library="/nowhere/libamd_smi.so", sysfs=sysfs))
    assert "cannot load /nowhere/libamd_smi.so" in text
    text, _ = refused(Options(nvidia_library="/nowhere/nvml.so", sysfs=sysfs))
    assert "cannot load /nowhere/nvml.so" in text
    assert "AMD" not in text


def test_gpus_that_come_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double = AmdSmiDouble(tmp_path)
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zeusd.devices.amd.library.CANDIDATES", (double.library,))
    node = real_node(options=Options(sysfs=str(double.sysfs)))
    with pytest.raises(DeviceError, match="no AMD Instinct GPU either"):
        node.nvml.init()
    bus(double.sysfs, ("0x8086", "0x060000"), AMD)
    node.nvml.init()
    assert node.nvml.name(node.nvml.device_handle(0)) == "AMD Instinct MI300X"
    assert node.driver == {
        "vendor": "amd",
        "library": None,
        "module": str(double.sysfs / "module/amdgpu"),
        "sysfs": str(double.sysfs),
        "simulated": False,
    }
    assert node.driver_id().startswith("6.12.12/")
    node.nvml.shutdown()

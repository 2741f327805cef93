"""The wrapper over the real nvidia-ml-py, on the C stand-in for the driver's library."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pynvml
import pytest

from tests.fake_nvml.double import NvmlDouble, build, forget_library
from tests.support import TIMEOUT_S, wait_for
from tests.zeusd.devices.opening import Opener, code_of, news
from zeus_ipc.controls import Control
from zeusd.devices.nvml.backend import NvmlBackend
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import DeviceError, PowerLimitRange
from zeusd.runtime.devices import Inspector, inspect_gpu


def test_all_getters(open_nvml: Opener) -> None:
    nvml, double = open_nvml({}, {"architecture": 7, "name": b"NVIDIA A40", "has_average": 1})
    assert nvml.device_count() == 2
    assert nvml.driver_version() == "595.58.03"
    gpu = nvml.device_handle(1)
    assert nvml.uuid(gpu) == double.uuid(1)
    assert nvml.name(gpu) == "NVIDIA A40"
    assert nvml.pci_address(gpu) == "00000000:08:00.0"
    assert nvml.architecture(gpu) == 7
    assert nvml.memory_mib(gpu) == 16384
    assert nvml.mig_enabled(gpu) is False
    assert nvml.mig_enabled(nvml.device_handle(0)) is False  # NVML: not supported
    assert nvml.power_limits(gpu) == PowerLimitRange(100_000, 250_000, 250_000)
    assert nvml.power_limit_mw(gpu) == nvml.enforced_power_limit_mw(gpu) == 250_000
    double.node.gpus[1].board_limit_mw = 180_000
    assert nvml.power_limit_mw(gpu) == 250_000
    assert nvml.enforced_power_limit_mw(gpu) == 180_000
    assert nvml.supported_memory_clocks(gpu) == [877]
    clocks = nvml.supported_gpu_clocks(gpu, 877)
    assert (len(clocks), clocks[0], clocks[-1]) == (84, 1380, 135)
    assert nvml.gpu_clock_mhz(gpu) == 1380
    assert nvml.memory_clock_mhz(gpu) == 877
    assert nvml.persistence_mode(gpu) is False
    assert nvml.temperature_c(gpu) == 42
    assert nvml.throttle_reasons(gpu) == 4
    double.node.gpus[1].utilization = 87
    double.node.gpus[1].memory_used_mib = 700
    assert nvml.utilization_percent(gpu) == 87
    assert nvml.memory_used_mib(gpu) == 700


def test_a_limit_of_zero_with_success_is_no_restore_target(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"limit_mw": 0})
    inspector = Inspector(nvml, 0)
    facts = news(inspector)
    assert Control.POWER_LIMIT not in facts.values
    assert "power_limit" not in facts.info.controls
    double.node.gpus[0].limit_mw = 250_000
    facts = news(inspector)
    assert facts.values[Control.POWER_LIMIT] == (250_000,)


def test_setters_reach_the_driver_with_their_arguments(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    nvml.set_power_limit(gpu, 200_000)
    nvml.set_gpu_clocks(gpu, 600, 900)
    nvml.set_memory_clocks(gpu, 405, 877)
    nvml.set_persistence_mode(gpu, True)
    nvml.reset_gpu_clocks(gpu)
    nvml.reset_memory_clocks(gpu)
    assert [(call.symbol, call.arguments, call.result) for call in double.calls()] == [
        ("nvmlDeviceSetPowerManagementLimit", (200_000, 0), 0),
        ("nvmlDeviceSetGpuLockedClocks", (600, 900), 0),
        ("nvmlDeviceSetMemoryLockedClocks", (405, 877), 0),
        ("nvmlDeviceSetPersistenceMode", (1, 0), 0),
        ("nvmlDeviceResetGpuLockedClocks", (0, 0), 0),
        ("nvmlDeviceResetMemoryLockedClocks", (0, 0), 0),
    ]
    assert nvml.power_limit_mw(gpu) == 200_000
    assert nvml.persistence_mode(gpu) is True


def test_invalid_arguments_keep_nvmls_code(open_nvml: Opener) -> None:
    nvml, _ = open_nvml()
    gpu = nvml.device_handle(0)
    assert code_of(nvml.set_power_limit, gpu, 99_000) == Return.INVALID_ARGUMENT
    assert code_of(nvml.set_gpu_clocks, gpu, 900, 600) == Return.INVALID_ARGUMENT
    assert code_of(nvml.device_handle, 9) == Return.INVALID_ARGUMENT
    assert code_of(nvml.supported_gpu_clocks, gpu, 1) == Return.NOT_FOUND


def test_invalid_handles_are_refused_and_not_followed(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    for address in (None, 8, ctypes.addressof(ctypes.c_int())):
        handle = ctypes.c_void_p(address)
        assert code_of(nvml.power_limit_mw, handle) == Return.INVALID_ARGUMENT
        assert code_of(nvml.set_power_limit, handle, 200_000) == Return.INVALID_ARGUMENT
    assert {(call.gpu, call.result) for call in double.calls()} == {(-1, Return.INVALID_ARGUMENT)}


def test_errors_have_nvmls_numbers() -> None:
    numbers = {name: number for name, number in vars(Return).items() if name.isupper()}
    assert numbers.pop("SUCCESS") == pynvml.NVML_SUCCESS
    assert numbers == {name: getattr(pynvml, f"NVML_ERROR_{name}") for name in numbers}


def test_an_error_names_the_call_and_nvmls_code(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "nvmlDeviceGetPowerManagementLimit", Return.UNKNOWN)
    with pytest.raises(DeviceError) as caught:
        nvml.power_limit_mw(gpu)
    assert (caught.value.code, caught.value.call) == (999, "nvmlDeviceGetPowerManagementLimit")
    assert "NVML 999" in str(caught.value)


def test_names_that_come_as_bytes_become_text(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    for call in ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion"):
        text = getattr(pynvml, call)
        monkeypatch.setattr(pynvml, call, lambda *args, text=text: text(*args).encode())
    assert nvml.name(gpu) == "Tesla V100-PCIE-16GB"
    assert nvml.uuid(gpu) == double.uuid(0)
    assert nvml.driver_version() == "595.58.03"


@pytest.mark.parametrize(
    ("text", "name"),
    [("Tesla® V100".encode("latin-1"), "Tesla\ufffd V100"), (b"V\x1b[2J1\n0\t0 ", "V?[2J1?0?0")],
)
def test_an_odd_name_harms_neither_zeusd_nor_a_terminal(
    open_nvml: Opener, text: bytes, name: str
) -> None:
    nvml, double = open_nvml()
    double.node.gpus[0].name = text
    assert inspect_gpu(nvml, 0)[0].info.name == name


def test_older_drivers_functions_are_used_where_newer_are_missing(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"load_mw": 400_000})
    gpu = nvml.device_handle(0)
    for symbol in (
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetArchitecture",
    ):
        double.inject(0, symbol, Return.FUNCTION_NOT_FOUND)
    assert nvml.temperature_c(gpu) == 41
    assert nvml.throttle_reasons(gpu) == 4
    assert nvml.architecture(gpu) == 5


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [(60, 4), (70, 5), (75, 6), (80, 7), (86, 7), (89, 8), (90, 9), (100, 10), (120, 10)],
)
def test_an_architecture_the_driver_cannot_name_follows_from_the_capability(
    open_nvml: Opener, capability: int, architecture: int
) -> None:
    nvml, _ = open_nvml({"architecture": 0xFFFFFFFF, "capability": capability})
    assert nvml.architecture(nvml.device_handle(0)) == architecture


def test_an_architecture_that_nothing_names_is_not_supported(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"architecture": 0xFFFFFFFF, "capability": 990})
    assert code_of(nvml.architecture, nvml.device_handle(0)) == Return.NOT_SUPPORTED


def test_a_call_stuck_on_one_gpu_delays_no_other(open_nvml: Opener) -> None:
    nvml, double = open_nvml({}, {})
    gpu, other = nvml.device_handle(0), nvml.device_handle(1)
    double.inject(0, "nvmlDeviceSetPowerManagementLimit", delay_ms=600_000, count=1)
    thread = threading.Thread(target=nvml.set_power_limit, args=(gpu, 200_000), daemon=True)
    thread.start()
    try:
        wait_for(lambda: double.node.faults[0].count == 0, "the call to be stuck")
        nvml.set_power_limit(other, 150_000)
        assert nvml.power_limit_mw(gpu) == 250_000  # nor the reads of this one
        assert thread.is_alive()
    finally:
        double.clear_faults()
        thread.join(TIMEOUT_S)
    assert [(call.gpu, call.result) for call in double.calls()] == [(1, 0), (0, 0)]


def test_a_missing_library_and_an_absent_driver_have_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = NvmlBackend(str(tmp_path / "none.so"))
    assert code_of(nvml.init) == Return.LIBRARY_NOT_FOUND
    assert code_of(NvmlBackend().device_count) == Return.UNINITIALIZED
    monkeypatch.delenv("NVML_DOUBLE_STATE", raising=False)
    copy = tmp_path / "libnvidia-ml.so.1"
    copy.write_bytes(build().read_bytes())
    assert code_of(NvmlBackend(str(copy)).init) == Return.DRIVER_NOT_LOADED
    forget_library()


def test_an_invalid_library_is_not_found_and_the_loaded_one_stays(
    open_nvml: Opener, tmp_path: Path
) -> None:
    nvml, _ = open_nvml()
    text = tmp_path / "text.so"
    text.write_text("not a library")
    assert code_of(NvmlBackend(str(text)).init) == Return.LIBRARY_NOT_FOUND
    assert nvml.device_count() == 1  # the one in use stays in use


def test_a_named_library_takes_the_place_of_one_in_use(
    open_nvml: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml, _ = open_nvml({})
    assert nvml.device_count() == 1
    (tmp_path / "second").mkdir()
    second = NvmlDouble(tmp_path / "second", ({}, {}))
    for name, value in second.env.items():
        monkeypatch.setenv(name, value)
    copy = tmp_path / "second" / "libnvidia-ml.so.1"
    copy.write_bytes(Path(second.library).read_bytes())
    other = NvmlBackend(str(copy))
    other.init()
    assert other.device_count() == 2

"""The wrapper over the real nvidia-ml-py, on the C stand-in for the driver's library."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import ALWAYS, NEVER, NvmlDouble, build, mask_of
from tests.support import TIMEOUT_S, as_nobody, script, wait_for
from zeus_ipc.controls import Control
from zeusd.devices.nvml.backend import NvmlBackend
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import DeviceError, GpuProcess, PowerLimits
from zeusd.runtime.devices import Inspector

Opener = Callable[..., tuple[NvmlBackend, NvmlDouble]]
nvml_double = fixtures.nvml_double

OPEN_ONE = (
    "import ctypes, json, sys, threading\n"
    "lib = ctypes.CDLL(sys.argv[1]); gpu = ctypes.c_void_p(); mw = ctypes.c_uint()\n"
    "lib.nvmlInit_v2(); lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))\n"
)
"""Opens the first GPU without nvidia-ml-py: another user may not be able to read that."""

LOOKED_UP = (
    "nvmlInit_v2",
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlErrorString",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetHandleBySerial",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetSamples",
    "nvmlDeviceGetPowerManagementMode",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceSetPowerManagementLimit",
    "nvmlDeviceSetPowerManagementLimit_v2",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetClock",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetApplicationsClock",
    "nvmlDeviceGetSupportedMemoryClocks",
    "nvmlDeviceGetSupportedGraphicsClocks",
    "nvmlDeviceSetGpuLockedClocks",
    "nvmlDeviceResetGpuLockedClocks",
    "nvmlDeviceSetMemoryLockedClocks",
    "nvmlDeviceResetMemoryLockedClocks",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetViolationStatus",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceSetPersistenceMode",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetPowerState",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetDisplayMode",
    "nvmlDeviceGetDriverModel",
    "nvmlDeviceGetDriverModel_v2",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetMigDeviceHandleByIndex",
)
"""What clients of NVML look up: nvidia-ml-py, nvml-wrapper, nvitop."""


@pytest.fixture
def open_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens a double in this process. The library maps its state once, so it is loaded afresh."""
    opened: list[NvmlBackend] = []

    def open_double(*gpus: dict[str, Any], **options: Any) -> tuple[NvmlBackend, NvmlDouble]:
        options.setdefault("privilege", ALWAYS)
        double = NvmlDouble(tmp_path, gpus or ({},), **options)
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        copy = tmp_path / "libnvidia-ml.so.1"
        copy.write_bytes(Path(double.library).read_bytes())
        nvml = NvmlBackend(str(copy))
        nvml.init()
        opened.append(nvml)
        return nvml, double

    yield open_double
    for nvml in opened:
        nvml.shutdown()
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def code_of(call: Callable[..., Any], *args: Any) -> int:
    with pytest.raises(DeviceError) as caught:
        call(*args)
    return caught.value.code


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
    assert nvml.power_limits(gpu) == PowerLimits(100_000, 250_000, 250_000)
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


def test_a_refused_set_is_an_error_and_changes_nothing(open_nvml: Opener) -> None:
    nvml, double = open_nvml(privilege=NEVER)
    gpu = nvml.device_handle(0)
    for call, arguments in (
        (nvml.set_power_limit, (200_000,)),
        (nvml.set_gpu_clocks, (600, 900)),
        (nvml.reset_gpu_clocks, ()),
        (nvml.set_memory_clocks, (405, 877)),
        (nvml.reset_memory_clocks, ()),
        (nvml.set_persistence_mode, (True,)),
    ):
        assert code_of(call, gpu, *arguments) == Return.NO_PERMISSION
    assert double.limit_mw(0) == 250_000
    assert nvml.persistence_mode(gpu) is False


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


def test_an_error_names_the_call_and_nvmls_code(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "nvmlDeviceGetPowerManagementLimit", Return.UNKNOWN)
    with pytest.raises(DeviceError) as caught:
        nvml.power_limit_mw(gpu)
    assert (caught.value.code, caught.value.call) == (999, "nvmlDeviceGetPowerManagementLimit")
    assert "NVML 999" in str(caught.value)


def test_init_nests(open_nvml: Opener) -> None:
    nvml, _ = open_nvml()
    nvml.init()
    nvml.shutdown()
    gpu = nvml.device_handle(0)
    assert nvml.power_limit_mw(gpu) == 250_000
    nvml.shutdown()
    assert code_of(nvml.power_limit_mw, gpu) == Return.UNINITIALIZED
    assert code_of(nvml.shutdown) == Return.UNINITIALIZED
    nvml.init()  # for the fixture to undo


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


def test_mig_is_told(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"architecture": 8, "mig": 1})
    assert nvml.mig_enabled(nvml.device_handle(0)) is True


def test_the_counter_moves_by_whole_ticks_and_as_much_as_was_drawn(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"tick_ms": 20, "load_mw": 400_000})
    gpu = nvml.device_handle(0)
    tick_mj = 250_000 * 20 // 1000  # held down by the limit
    seen = [nvml.sensors(gpu)]

    def several_ticks() -> bool:
        seen.append(nvml.sensors(gpu))
        return len({reading.energy_mj for reading in seen}) > 5

    wait_for(several_ticks, "the counter to move")
    counts = sorted({reading.energy_mj for reading in seen if reading.energy_mj is not None})
    assert len(counts) > 5
    for before, after in itertools.pairwise(counts):
        ticks = round((after - before) / tick_mj)
        assert ticks >= 1
        assert after - before == ticks * tick_mj
    powers = {reading.power_instant_mw for reading in seen}
    assert len(powers) > 1  # no meter stands still
    assert all(power == pytest.approx(250_000, abs=10) for power in powers)


def test_less_is_counted_from_the_moment_of_a_lower_limit_on(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"tick_ms": 1, "load_mw": 250_000})
    gpu = nvml.device_handle(0)
    gpus = double.node.gpus
    wait_for(lambda: (nvml.sensors(gpu).energy_mj or 0) > 10_000, "ten joules")
    before_ns = time.monotonic_ns()
    double.set_outside(0, 100_000)
    assert gpus[0].updated_ns > before_ns - 1_000
    assert gpus[0].energy_nj * 1e3 / (gpus[0].updated_ns - gpus[0].start_ns) == 250_000
    start_ns, start_nj = gpus[0].updated_ns, gpus[0].energy_nj
    wait_for(lambda: (nvml.sensors(gpu).energy_mj or 0) > start_nj / 1e6 + 5_000, "five joules")
    drawn_mw = (gpus[0].energy_nj - start_nj) * 1e3 / (gpus[0].updated_ns - start_ns)
    assert drawn_mw == 100_000
    assert nvml.power_limit_mw(gpu) == 100_000
    assert nvml.throttle_reasons(gpu) == 4
    double.set_load(0, 60_000)
    assert nvml.throttle_reasons(gpu) == 0
    assert double.calls() == []


def test_fields_that_a_gpu_lacks_are_none_and_soon_no_longer_asked_for(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"has_energy": 0})
    gpu = nvml.device_handle(0)
    for _ in range(10):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is None
        assert sensors.power_average_mw is None
        assert sensors.memory_power_average_mw is None  # NVML: success, with zero
        assert sensors.power_instant_mw is not None
    (plan,) = nvml._plans.values()
    assert plan.fields == [(186, 0)]


def test_a_gpu_without_a_module_is_soon_no_longer_asked_for_it(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"has_average": 1, "memory_power_mw": 41_000})
    gpu = nvml.device_handle(0)
    for _ in range(4):
        assert nvml.sensors(gpu).module_power_mw is None
    assert nvml.module(gpu) is None
    (plan,) = nvml._plans.values()
    assert sorted(plan.fields) == [(83, 0), (185, 0), (185, 2), (186, 0)]


def test_a_memory_power_that_is_measured_is_told(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"memory_power_mw": 41_000})
    assert nvml.sensors(nvml.device_handle(0)).memory_power_average_mw == 41_000


def test_a_gpu_that_serves_no_field_is_asked_call_by_call(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"has_energy": 0})
    gpu = nvml.device_handle(0)
    for symbol in ("field.186.0", "field.186.1", "field.185.0", "field.185.1"):
        double.inject(0, symbol, Return.INVALID_ARGUMENT)  # a driver older than the field
    for _ in range(5):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is None
        assert sensors.power_instant_mw == pytest.approx(220_000, abs=10)
    (plan,) = nvml._plans.values()
    assert plan.fields == []


def test_power_comes_from_a_call_where_only_energy_is_a_field(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    for symbol in ("field.186.0", "field.186.1"):
        double.inject(0, symbol, Return.NOT_SUPPORTED)
    for _ in range(5):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is not None
        assert sensors.power_instant_mw == pytest.approx(220_000, abs=10)


def test_mishaps_never_cost_a_field(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "field.83.0", Return.UNKNOWN)
    for _ in range(10):
        assert nvml.sensors(gpu).energy_mj is None
    double.clear_faults()
    assert nvml.sensors(gpu).energy_mj is not None


def test_a_reading_in_which_every_field_met_with_a_mishap_is_an_error(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    for field in (83, 185, 186):
        for scope in (0, 1, 2):
            double.inject(0, f"field.{field}.{scope}", Return.TIMEOUT)
    assert code_of(nvml.sensors, nvml.device_handle(0)) == Return.TIMEOUT


def test_a_gpu_lost_in_one_field_is_lost(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    double.inject(0, "field.186.0", Return.GPU_IS_LOST)
    assert code_of(nvml.sensors, nvml.device_handle(0)) == Return.GPU_IS_LOST


def test_what_a_gpu_lacks_is_learnt_anew_after_a_driver_reload(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"has_energy": 0})
    gpu = nvml.device_handle(0)
    for _ in range(5):
        assert nvml.sensors(gpu).energy_mj is None
    nvml.shutdown()
    double.node.gpus[0].has_energy = 1
    nvml.init()
    assert nvml.sensors(nvml.device_handle(0)).energy_mj is not None


def test_a_field_that_fails_now_and_then_is_not_given_up(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    assert nvml.sensors(gpu).energy_mj is not None
    double.node.gpus[0].has_energy = 0  # polled too fast, say
    for _ in range(10):
        assert nvml.sensors(gpu).energy_mj is None
    double.node.gpus[0].has_energy = 1
    assert nvml.sensors(gpu).energy_mj is not None


def test_the_power_of_a_module_is_never_given_as_the_gpus(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"module_only": 1, "has_average": 1})
    gpu = nvml.device_handle(0)
    for _ in range(5):
        sensors = nvml.sensors(gpu)
        assert sensors.power_instant_mw is None
        assert sensors.power_average_mw is None
        assert sensors.module_power_mw == pytest.approx(220_000, abs=10)
    (plan,) = nvml._plans.values()
    assert sorted(plan.fields) == [(83, 0), (186, 1)]


def test_gpus_of_a_superchip_are_paired_by_their_numa_node(
    open_nvml: Opener, tmp_path: Path
) -> None:
    nvml, double = open_nvml(*[{"module_mw": 467_200}] * 2, {"module_mw": 459_800}, {})
    nvml._sysfs = str(tmp_path)
    for index, node in enumerate((0, 0, 1, 1)):
        device = tmp_path / "bus/pci/devices" / f"0000:{7 + index:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    gpus = [nvml.device_handle(index) for index in range(4)]
    assert [nvml.module(gpu) for gpu in gpus] == [0, 0, 1, None]
    sensors = nvml.sensors(gpus[0])
    assert sensors.module_power_mw == 467_200
    assert sensors.power_instant_mw == pytest.approx(220_000, abs=10)
    double.node.gpus[2].module_mw = 0  # success with zero is no reading
    (tmp_path / "bus/pci/devices/0000:07:00.0/numa_node").write_text("-1\n")
    assert [nvml.module(gpu) for gpu in gpus] == [None, 0, None, None]


def test_a_driver_without_field_values_is_asked_call_by_call(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "nvmlDeviceGetFieldValues", Return.FUNCTION_NOT_FOUND, count=1)
    for _ in range(2):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is not None
        assert sensors.power_instant_mw is not None
    (plan,) = nvml._plans.values()
    assert plan.batch is False


def test_field_values_that_fail_now_and_then_are_not_given_up(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"memory_power_mw": 41_000})
    gpu = nvml.device_handle(0)
    assert nvml.sensors(gpu).memory_power_average_mw == 41_000
    double.inject(0, "nvmlDeviceGetFieldValues", Return.NOT_SUPPORTED)
    for _ in range(5):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is not None
        assert sensors.memory_power_average_mw is None
    double.clear_faults()
    assert nvml.sensors(gpu).memory_power_average_mw == 41_000


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


def test_a_lost_gpu_is_lost_in_every_call(open_nvml: Opener) -> None:
    nvml, double = open_nvml({}, {})
    gpu, other = nvml.device_handle(0), nvml.device_handle(1)
    double.inject(0, "*", Return.GPU_IS_LOST)
    for call in (nvml.sensors, nvml.power_limit_mw, nvml.temperature_c, nvml.mig_enabled):
        assert code_of(call, gpu) == Return.GPU_IS_LOST
    assert nvml.power_limit_mw(other) == 250_000
    double.clear_faults()
    assert nvml.power_limit_mw(gpu) == 250_000


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
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def test_what_is_no_library_is_not_found_and_the_next_one_loads(
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


def test_the_double_is_found_by_its_name_and_has_what_clients_look_up() -> None:
    library = build()
    names = subprocess.run(
        [
            sys.executable,
            "-c",
            "import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL('libnvidia-ml.so.1')",
            str(library),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert names.returncode == 0, names.stderr  # the second finds the first by its SONAME
    assert (library.parent / "libnvidia-ml.so").resolve() == library.resolve()
    loaded = ctypes.CDLL(str(library))
    assert [name for name in LOOKED_UP if not hasattr(loaded, name)] == []


def test_processes_share_the_state_and_the_record_is_in_order(
    nvml_double: fixtures.MakeDouble,
) -> None:
    double = nvml_double(privilege=ALWAYS)
    source = OPEN_ONE + (
        "first = int(sys.argv[2])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "def work(offset):\n"
        "    for mw in range(first + offset, first + offset + 500):\n"
        "        assert lib.nvmlDeviceSetPowerManagementLimit(gpu, mw) == 0\n"
        "threads = [threading.Thread(target=work, args=(500 * i,)) for i in range(2)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    environment = {**os.environ, **double.env}
    firsts = (110_000, 120_000)
    workers = [script(source, double.library, str(f), env=environment) for f in firsts]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == 0

    calls = double.calls()
    assert len(calls) == 2000
    assert {call.pid for call in calls} == {worker.pid for worker in workers}
    assert [call.t_ns for call in calls] == sorted(call.t_ns for call in calls)
    for first in (110_000, 110_500, 120_000, 120_500):
        written = [c.arguments[0] for c in calls if first <= c.arguments[0] < first + 500]
        assert written == list(range(first, first + 500))
    assert double.limit_mw(0) == calls[-1].arguments[0]  # the last recorded is the one in force

    read = script(
        OPEN_ONE
        + "lib.nvmlDeviceGetPowerManagementLimit(gpu, ctypes.byref(mw)); print(mw.value)\n",
        double.library,
        env=environment,
    )
    assert int(read.communicate(timeout=TIMEOUT_S)[0]) == double.limit_mw(0)


def test_a_setter_waits_for_another_process_that_holds_the_state(
    nvml_double: fixtures.MakeDouble,
) -> None:
    double = nvml_double(privilege=ALWAYS)
    inode = double.state_path.stat().st_ino
    source = OPEN_ONE + (
        "print('ready', flush=True); sys.stdin.readline()\n"
        "assert lib.nvmlDeviceSetPowerManagementLimit(gpu, 200000) == 0\n"
    )
    worker = script(source, double.library, env={**os.environ, **double.env})
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"

    def blocked() -> bool:
        locks = Path("/proc/locks").read_text().splitlines()
        return any("->" in lock and f":{inode} " in lock for lock in locks)

    with double.locked():
        worker.stdin.write("go\n")
        worker.stdin.flush()
        wait_for(lambda: blocked() or worker.poll() is not None, "the setter to wait or to end")
        assert blocked()
        assert double.limit_mw(0) == 250_000
    worker.communicate(timeout=TIMEOUT_S)
    assert worker.returncode == 0
    assert double.limit_mw(0) == 200_000


@pytest.mark.needs("two users")
def test_an_ordinary_user_reads_and_may_not_set(nvml_double: fixtures.MakeDouble) -> None:
    source = OPEN_ONE + (
        "codes = [lib.nvmlDeviceGetPowerManagementLimit(gpu, ctypes.byref(mw)),\n"
        "         lib.nvmlDeviceSetPowerManagementLimit(gpu, 200000),\n"
        "         lib.nvmlDeviceSetGpuLockedClocks(gpu, 600, 900),\n"
        "         lib.nvmlDeviceResetGpuLockedClocks(gpu),\n"
        "         lib.nvmlDeviceSetPersistenceMode(gpu, 1)]\n"
        "print(json.dumps([codes, mw.value]))\n"
    )
    double = nvml_double()
    environment = {**os.environ, **double.env}
    user = script(source, double.library, env=environment, **as_nobody())
    codes, limit_mw = json.loads(user.communicate(timeout=TIMEOUT_S)[0])
    assert codes == [0, *[Return.NO_PERMISSION] * 4]
    assert limit_mw == double.limit_mw(0) == 250_000
    assert {(call.uid, call.result) for call in double.calls()} == {(65534, Return.NO_PERMISSION)}
    assert double.node.gpus[0].persistence == 0

    root = script(source, double.library, env=environment)
    assert json.loads(root.communicate(timeout=TIMEOUT_S)[0]) == [[0] * 5, 250_000]
    assert double.limit_mw(0) == 200_000


MIB = 1024 * 1024


def test_processes_are_listed_once_whatever_they_do(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    assert nvml.processes(gpu) == []
    double.computes(0, 4242)
    assert nvml.processes(gpu) == [GpuProcess(4242, MIB, compute=True)]
    double.draws(0, 17)
    assert nvml.processes(gpu) == [
        GpuProcess(17, 3 * MIB, compute=False),
        GpuProcess(4242, MIB, compute=True),
    ]
    double.draws(0, 4242)
    assert nvml.processes(gpu) == [GpuProcess(4242, 3 * MIB, compute=True)]


def test_a_driver_that_cannot_list_what_draws_names_what_computes(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.computes(0, 4242)
    double.inject(0, "nvmlDeviceGetGraphicsRunningProcesses_v3", Return.NOT_SUPPORTED)
    assert [process.pid for process in nvml.processes(gpu)] == [4242]
    double.inject(0, "nvmlDeviceGetComputeRunningProcesses_v3", Return.GPU_IS_LOST)
    assert code_of(nvml.processes, gpu) == Return.GPU_IS_LOST


def test_processes_of_a_split_gpu_name_their_instance(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"architecture": 9, "mig": 1, "instance": 7, "compute_pid": 4242})
    gpu = nvml.device_handle(0)
    assert nvml.processes(gpu) == [GpuProcess(4242, MIB, True, 7, 0)]
    assert code_of(nvml.utilization_percent, gpu) == Return.NOT_SUPPORTED


def test_each_process_has_a_sample_of_its_own_use(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"compute_pid": 4242, "second_pid": 4343})
    gpu = nvml.device_handle(0)
    assert nvml.process_utilization(gpu, 0) == []  # NOT_FOUND is an answer
    double.uses(0, compute_percent=70, second_percent=20, use_age_us=400_000)
    before_us = time.time_ns() // 1000
    first, second = nvml.process_utilization(gpu, 0)
    assert (first.pid, first.sm_percent, second.pid, second.sm_percent) == (4242, 70, 4343, 20)
    assert first.t_us - second.t_us == 400_000
    assert first.t_us >= before_us - 400_000
    assert [one.pid for one in nvml.process_utilization(gpu, second.t_us + 200_000)] == [4242]
    double.inject(0, "nvmlDeviceGetProcessUtilization", Return.GPU_IS_LOST)
    assert code_of(nvml.process_utilization, gpu, 0) == Return.GPU_IS_LOST


@pytest.mark.parametrize("architecture", [7, 9], ids=["Ampere", "Hopper"])
def test_mig_devices_have_sizes_and_from_hopper_on_a_use(
    open_nvml: Opener, architecture: int
) -> None:
    nvml, double = open_nvml({"architecture": architecture, "mig": 1, "mig_slices_1": 3})
    gpu = nvml.device_handle(0)
    double.uses(0, mig_percent_1=40)
    (first,) = nvml.mig_instances(gpu, measure=True)
    assert (first.gpu_instance, first.compute_instance) == (7, 0)
    assert (first.slices, first.of, first.sm_percent) == (3, 7, None)
    assert first.uuid.startswith("MIG-")
    double.uses(0, mig_slices_2=4, mig_percent_2=90)
    both = nvml.mig_instances(gpu, measure=True)
    measured = architecture == 9
    assert [one.sm_percent for one in both] == [40.0 if measured else None, None]
    assert [one.sm_percent for one in nvml.mig_instances(gpu, measure=True)] == (
        [40.0, 90.0] if measured else [None, None]
    )
    double.uses(0, mig_slices_1=0)  # reconfigured, while the other goes on
    assert {one.sm_percent for one in nvml.mig_instances(gpu)} == {None}
    (left,) = nvml.mig_instances(gpu, measure=True)
    assert (left.uuid, left.sm_percent) == (both[1].uuid, 90.0 if measured else None)
    assert code_of(nvml.process_utilization, gpu, 0) == Return.NOT_SUPPORTED


def test_a_gpu_that_is_not_split_has_no_mig_devices(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"architecture": 9})
    assert nvml.mig_instances(nvml.device_handle(0)) == []


# ----------------------------------------------------------------------------------- profiles

GB200 = {"architecture": 10, "profiles_valid": mask_of(0, 1, 2, 3, 5, 6, 7, 13)}
_PROFILE_CALL = "nvmlDeviceWorkloadPowerProfile"


@pytest.mark.parametrize("shift", [0, 20])
def test_profiles_are_told_with_what_they_conflict_with(open_nvml: Opener, shift: int) -> None:
    """The table's places are not the profiles' numbers."""
    nvml, _ = open_nvml(GB200 | {"profile_shift": shift})
    gpu = nvml.device_handle(0)
    assert nvml.offers(gpu, Control.POWER_PROFILE)
    found = {one.profile: one for one in nvml.power_profiles(gpu)}
    assert sorted(found) == [0, 1, 2, 3, 5, 6, 7, 13]
    assert (found[6].priority, found[6].conflicts) == (6, (7,))
    assert found[5].conflicts == ()
    nvml.write_control(gpu, Control.POWER_PROFILE, (1, 6, 7))
    assert nvml.read_control(gpu, Control.POWER_PROFILE) == (1, 6, 7)
    assert nvml.enforced_power_profiles(gpu) == (1, 6)


@pytest.mark.parametrize(
    ("old", "calls"),
    [
        (0, [("UpdateProfiles_v1", 1), ("UpdateProfiles_v1", 0), ("UpdateProfiles_v1", 1)]),
        (
            1,
            [
                ("SetRequestedProfiles", 1),
                ("ClearRequestedProfiles", 0),
                ("SetRequestedProfiles", 1),
            ],
        ),
    ],
)
def test_profiles_are_set_and_cleared_and_never_overwritten(
    open_nvml: Opener, old: int, calls: list[tuple[str, int]]
) -> None:
    nvml, double = open_nvml(GB200 | {"profiles_old": old})
    gpu = nvml.device_handle(0)
    double.request_outside(0, 13)
    nvml.write_control(gpu, Control.POWER_PROFILE, (1, 13))
    nvml.write_control(gpu, Control.POWER_PROFILE, (7, 13))
    assert double.profiles(0) == {7, 13}
    made = [(one.symbol.removeprefix(_PROFILE_CALL), one.arguments) for one in double.calls()]
    masks = [mask_of(1), mask_of(1), mask_of(7)]
    assert made == [(name, (op, mask)) for (name, op), mask in zip(calls, masks, strict=True)]


@pytest.mark.parametrize(
    "changes", [{"architecture": 9, "profiles_valid": 3}, {"architecture": 10}]
)
def test_gpus_without_profiles_are_not_asked_again_and_again(
    open_nvml: Opener, changes: dict[str, Any]
) -> None:
    nvml, _ = open_nvml(changes)
    inspector = Inspector(nvml, 0)
    for _ in range(4):
        inspector.look()
    assert inspector.settled
    facts, _ = Inspector(nvml, 0).look() or (None, None)
    assert facts is not None
    assert "power_profile" not in facts.info.controls
    error = code_of(nvml.read_control, nvml.device_handle(0), Control.POWER_PROFILE)
    assert error == Return.NOT_SUPPORTED


def test_profiles_need_privilege_and_a_gpu_that_has_them(open_nvml: Opener) -> None:
    nvml, double = open_nvml(GB200, privilege=NEVER)
    gpu = nvml.device_handle(0)
    assert code_of(nvml.write_control, gpu, Control.POWER_PROFILE, (1,)) == Return.NO_PERMISSION
    double.node.privilege = ALWAYS
    assert code_of(nvml.write_control, gpu, Control.POWER_PROFILE, (9,)) == Return.INVALID_ARGUMENT
    assert double.profiles(0) == set()

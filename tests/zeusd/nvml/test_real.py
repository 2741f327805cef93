"""The wrapper over the real nvidia-ml-py, on the C stand-in for the driver's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fake_nvml.double import ALWAYS, NEVER, NvmlDouble, build
from tests.support import as_nobody, public_directory, wait_for
from zeusd.nvml.api import NvmlError, PowerLimits, Return
from zeusd.nvml.real import RealNvml

Opener = Callable[..., tuple[RealNvml, NvmlDouble]]


@pytest.fixture
def open_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens a double in this process. The library maps its state once, so it is loaded afresh."""
    opened: list[RealNvml] = []

    def open_double(*gpus: dict[str, Any], **options: Any) -> tuple[RealNvml, NvmlDouble]:
        options.setdefault("privilege", ALWAYS)
        double = NvmlDouble(tmp_path, gpus or ({},), **options)
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        copy = tmp_path / "libnvidia-ml.so.1"
        copy.write_bytes(Path(double.library).read_bytes())
        nvml = RealNvml(str(copy))
        nvml.init()
        opened.append(nvml)
        return nvml, double

    yield open_double
    for nvml in opened:
        nvml.shutdown()
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def code_of(call: Callable[..., Any], *args: Any) -> int:
    with pytest.raises(NvmlError) as caught:
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


def test_the_counter_ticks_and_follows_power(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"tick_ms": 20, "load_mw": 400_000})
    gpu = nvml.device_handle(0)
    first = nvml.sensors(gpu)
    assert first.energy_mj is not None
    later = wait_for(
        lambda: (now := nvml.sensors(gpu)).t_ns > first.t_ns + 500_000_000 and now, "half a second"
    )
    watts = (later.energy_mj - first.energy_mj) / ((later.t_ns - first.t_ns) / 1e6)
    assert watts == pytest.approx(250, rel=0.1)  # held down by the limit
    assert later.power_instant_mw == pytest.approx(250_000, abs=10)


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


def test_a_field_that_fails_now_and_then_is_not_given_up(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    assert nvml.sensors(gpu).energy_mj is not None
    double.node.gpus[0].has_energy = 0  # polled too fast, say
    for _ in range(10):
        assert nvml.sensors(gpu).energy_mj is None
    double.node.gpus[0].has_energy = 1
    assert nvml.sensors(gpu).energy_mj is not None


def test_power_that_only_the_module_has_is_found(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"module_only": 1, "has_average": 1})
    gpu = nvml.device_handle(0)
    for _ in range(4):
        sensors = nvml.sensors(gpu)
    assert sensors.power_instant_mw is not None
    assert sensors.power_average_mw is not None


def test_a_driver_without_field_values_is_asked_call_by_call(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    double.inject(0, "nvmlDeviceGetFieldValues", Return.FUNCTION_NOT_FOUND)
    sensors = nvml.sensors(nvml.device_handle(0))
    assert sensors.energy_mj is not None
    assert sensors.power_instant_mw is not None


def test_older_drivers_functions_are_used_where_newer_are_missing(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    for symbol in (
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetArchitecture",
    ):
        double.inject(0, symbol, Return.FUNCTION_NOT_FOUND)
    assert nvml.temperature_c(gpu) == 41
    assert nvml.architecture(gpu) == 5


def test_a_lost_gpu_is_lost_in_every_call(open_nvml: Opener) -> None:
    nvml, double = open_nvml({}, {})
    gpu, other = nvml.device_handle(0), nvml.device_handle(1)
    double.inject(0, "*", Return.GPU_IS_LOST)
    for call in (nvml.sensors, nvml.power_limit_mw, nvml.temperature_c, nvml.mig_enabled):
        assert code_of(call, gpu) == Return.GPU_IS_LOST
    assert nvml.power_limit_mw(other) == 250_000
    double.clear_faults()
    assert nvml.power_limit_mw(gpu) == 250_000


def test_another_thread_runs_while_a_call_is_stuck(open_nvml: Opener) -> None:
    import threading

    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "nvmlDeviceSetPowerManagementLimit", delay_ms=500, count=1)
    thread = threading.Thread(target=nvml.set_power_limit, args=(gpu, 200_000))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 50


def test_a_missing_library_and_an_absent_driver_have_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = RealNvml(str(tmp_path / "none.so"))
    assert code_of(nvml.init) == Return.LIBRARY_NOT_FOUND
    assert code_of(RealNvml().device_count) == Return.UNINITIALIZED
    monkeypatch.delenv("NVML_DOUBLE_STATE", raising=False)
    copy = tmp_path / "libnvidia-ml.so.1"
    copy.write_bytes(build().read_bytes())
    assert code_of(RealNvml(str(copy)).init) == Return.DRIVER_NOT_LOADED
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as another user")
def test_an_ordinary_user_reads_and_may_not_set() -> None:
    source = (
        "import ctypes, json, sys\n"
        "lib = ctypes.CDLL(sys.argv[1]); gpu = ctypes.c_void_p(); mw = ctypes.c_uint()\n"
        "lib.nvmlInit_v2(); lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))\n"
        "codes = [lib.nvmlDeviceGetPowerManagementLimit(gpu, ctypes.byref(mw)),\n"
        "         lib.nvmlDeviceSetPowerManagementLimit(gpu, 200000)]\n"
        "print(json.dumps([codes, mw.value]))\n"
    )
    with public_directory() as directory:
        double = NvmlDouble(directory)
        ran = subprocess.run(
            [sys.executable, "-c", source, double.library],
            env={**os.environ, **double.env},
            capture_output=True,
            text=True,
            check=True,
            **as_nobody(),
        )
        assert json.loads(ran.stdout) == [[0, Return.NO_PERMISSION], 250_000]
        (call,) = double.calls()
        assert (call.uid, call.result) == (65534, Return.NO_PERMISSION)
        assert double.limit_mw(0) == 250_000

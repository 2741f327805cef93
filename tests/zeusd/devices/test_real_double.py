"""The C stand-in for the driver's library, as other processes and users see it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import ALWAYS, build
from tests.support import TIMEOUT_S, as_nobody, script, wait_for
from zeusd.devices.nvml.codes import Return

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
    "nvmlDeviceGetVbiosVersion",
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

"""The C stand-in for the driver's library, as other processes and users see it."""

from __future__ import annotations

import json
import os

import pytest

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import ALWAYS
from tests.support import TIMEOUT_S, as_nobody, script
from zeusd.devices.nvml.codes import Return

nvml_double = fixtures.nvml_double
OPEN_ONE = (
    "import ctypes, json, sys, threading\n"
    "lib = ctypes.CDLL(sys.argv[1]); gpu = ctypes.c_void_p(); mw = ctypes.c_uint()\n"
    "lib.nvmlInit_v2(); lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))\n"
)
"""Opens the first GPU without nvidia-ml-py: another user may not be able to read that."""


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
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
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

"""The C stand-in for the driver's library, as other processes and users see it."""

from __future__ import annotations

import json
import os

import pytest

from tests.fake_nvml import fixtures
from tests.support import TIMEOUT_S, as_nobody, script
from zeusd.devices.nvml.codes import Return

nvml_double = fixtures.nvml_double
OPEN_ONE = (
    "import ctypes, json, sys, threading\n"
    "lib = ctypes.CDLL(sys.argv[1]); gpu = ctypes.c_void_p(); mw = ctypes.c_uint()\n"
    "lib.nvmlInit_v2(); lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))\n"
)
"""Opens the first GPU without nvidia-ml-py: another user may not be able to read that."""


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

"""What happens when a holder, or zeusd itself, is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zeus_ipc.controls import Control
from zeus_ipc.errors import ZeusIpcError
from zeusctl.exercise.report import Condition, ControlValues

if TYPE_CHECKING:
    from zeus_ipc import Client
    from zeus_ipc.replies import GpuInfo

WITHIN_S = 30.0
"""How long a restore, or zeusd's return, may take."""

_LOOK_S = 0.01


def kill_holder(client: Client, socket: str, gpu: GpuInfo, found: ControlValues) -> Condition:
    """SIGKILL to a process that holds a power limit: zeusd restores it.

    Args:
        client: Of this process, which holds nothing on this GPU.
        socket: The daemon's.
        gpu: Which.
        found: What it held before.
    """
    assert gpu.power_limit_min_mw is not None
    what = f"the power limit of GPU {gpu.index} is restored when its holder is killed"
    watts = gpu.power_limit_min_mw / 1000
    command = [sys.executable, "-m", "zeusctl", "--socket", socket]
    command += ["set", str(gpu.index), "-p", f"{watts:g}"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as holder:
        try:
            if not _wait(lambda: _value(client, gpu, holder.pid) is not None):
                return Condition(what, False, f"the holder set nothing within {WITHIN_S:g} s")
        finally:
            holder.kill()
            begin_s = time.monotonic()

    def restored() -> bool:
        gone = not any(lease.gpu == gpu.uuid for lease in client.leases())
        return gone and client.state(gpu.uuid)[gpu.uuid].power_limit_mw == found.power_limit_mw

    done = _wait(restored)
    took_ms = (time.monotonic() - begin_s) * 1000
    text = f"restored after {took_ms:.0f} ms" if done else f"not restored within {WITHIN_S:g} s"
    return Condition(what, done, text)


def kill_daemon(client: Client, gpu: GpuInfo, pid: int) -> Condition:
    """SIGKILL to zeusd while this process holds a limit: it returns, and the lease with it.

    Args:
        client: Of this process.
        gpu: Which GPU's limit to hold.
        pid: Zeusd's; something else must start it again.
    """
    assert gpu.power_limit_min_mw is not None
    what = "a killed zeusd returns, and live holders keep their leases"
    wanted = client.set(gpu.uuid, Control.POWER_LIMIT, [gpu.power_limit_min_mw])[gpu.uuid]
    os.kill(pid, signal.SIGKILL)
    begin_s = time.monotonic()
    done = _wait(lambda: _value(client, gpu, os.getpid()) == wanted)
    took_ms = (time.monotonic() - begin_s) * 1000
    limit = client.state(gpu.uuid)[gpu.uuid].power_limit_mw if done else None
    client.release(gpu.uuid)
    if not done:
        return Condition(what, False, f"the lease was not back within {WITHIN_S:g} s")
    return Condition(what, [limit] == wanted, f"the lease was back after {took_ms:.0f} ms")


def _value(client: Client, gpu: GpuInfo, pid: int) -> list[int] | None:
    """Returns the value under a process's lease on the power limit."""
    for lease in client.leases():
        if lease.gpu == gpu.uuid and lease.pid == pid and lease.control is Control.POWER_LIMIT:
            return lease.value
    return None


def _wait(condition: Callable[[], bool]) -> bool:
    """Whether a condition became true in time; zeusd may be down meanwhile."""
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        try:
            if condition():
                return True
        except ZeusIpcError:
            pass
        time.sleep(_LOOK_S)
    return False

"""A daemon on the recording NVML library, and processes that hold leases of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    ALL_MAY,
    RunningDaemon,
    as_nobody,
    configuration,
    public_directory,
    running_daemon,
    script,
)

LIMIT = 250_000
SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"
QUICK_LEASES = "[lease]\nttl_s = 2\nttl_min_s = 0.5\n"


HOLDER = """
import os, sys
from zeus_ipc import Client

client = Client(sys.argv[1], timeout_s=30)
gpus = [gpu.uuid for gpu in client.node().gpus]
client.set_power_limit(gpus, 150_000)
print("holding", flush=True)
"""
"""What each holder begins with. At its end, its limits are restored."""

STAYING = HOLDER + "sys.stdin.read()\n"
"""A holder that stays until it is killed, or this test ends."""


class Site:
    """zeusd on the C library, as this test's user, with a rule that lets everybody."""

    def __init__(self, stack: contextlib.ExitStack, gpus: int, text: str, *options: str) -> None:
        self.directory = stack.enter_context(public_directory())
        privilege = 0 if os.getuid() == 0 else 1
        self.double = NvmlDouble(self.directory, [{}] * gpus, privilege=privilege)
        self.daemon: RunningDaemon = stack.enter_context(
            running_daemon(
                *("--nvml-library", self.double.library, "--socket-mode", "0666"),
                *configuration(self.directory, text + ALL_MAY),
                *options,
                gpus=gpus,
                env=self.double.env,
                directory=self.directory,
            )
        )
        self.gpus = gpus

    def limits(self) -> list[int]:
        return [self.double.limit_mw(gpu) for gpu in range(self.gpus)]

    def restored(self) -> bool:
        return self.limits() == [LIMIT] * self.gpus

    def holder(self, source: str = STAYING, **options: Any) -> subprocess.Popen[str]:
        """A process of an ordinary user that holds the power limit of every GPU at 150 W."""
        holder = script(source, self.daemon.socket, **{**as_nobody(), **options})
        assert holder.stdout.readline() == "holding\n"
        assert self.limits() == [150_000] * self.gpus
        return holder


WAKING = """
from zeus_ipc import errors
for line in sys.stdin:
    try:
        if line == "acquire\\n":
            client.acquire(gpus, ["power_limit"])
        else:
            client.set_power_limit(gpus[0], int(line))
        print("done", flush=True)
    except errors.ZeusIpcError as error:
        print(error.code, flush=True)
"""


def tell(holder: subprocess.Popen[str], line: str) -> str:
    holder.stdin.write(line + "\n")
    holder.stdin.flush()
    return holder.stdout.readline().strip()

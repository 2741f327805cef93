"""A holder that ends, in any way, has its limits restored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support import RunningDaemon, as_nobody, running_daemon, script, wait_for

HOLDER = """
import os, sys
from zeus_ipc import Client

client = Client(sys.argv[1])
gpus = [gpu.uuid for gpu in client.node().gpus]
client.set_power_limit(gpus, 150_000)
client.set_gpu_clocks(gpus[0], 600, 900)
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:  # a data loader's worker: keeps the socket open and lives on
        sys.stdin.read()
        os._exit(0)
print("holding", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", "--socket-mode", "0666", gpus=2) as running:
        yield running


def restored(daemon: RunningDaemon) -> bool:
    with daemon.client() as client:
        states = client.state([gpu.uuid for gpu in client.node().gpus]).values()
        return not client.leases() and all(
            state.power_limit_mw == 250_000 and state.locked_gpu_clocks_mhz is None
            for state in states
        )


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_holder(daemon: RunningDaemon, workers: int, number: int) -> None:
    holder = script(HOLDER, daemon.socket, str(workers), **as_nobody())
    assert holder.stdout.readline() == "holding\n"
    assert not restored(daemon)
    holder.send_signal(number)
    holder.wait()
    wait_for(lambda: restored(daemon), "everything to be back")
    records = daemon.wait_for_records("restore", 1)
    assert {record["reason"] for record in records} == {"holder_gone"}
    holder.stdin.close()  # only now do the workers end


def test_a_holder_that_became_a_zombie(daemon: RunningDaemon) -> None:
    holder = script(HOLDER, daemon.socket, "0")
    assert holder.stdout.readline() == "holding\n"
    os.kill(holder.pid, signal.SIGKILL)
    wait_for(lambda: restored(daemon), "everything to be back although nobody reaped it")
    holder.wait()


def test_os_exit_and_a_crash(daemon: RunningDaemon) -> None:
    for ending in ("os._exit(3)", "os.abort()"):
        source = HOLDER.replace("sys.stdin.readline()", ending)
        holder = script(source, daemon.socket, "0")
        holder.wait()
        wait_for(lambda: restored(daemon), "everything to be back")


def test_a_descendants_lease_is_its_own(daemon: RunningDaemon) -> None:
    parent = script(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1], '0'])\n"
        "child.wait()",
        daemon.socket,
        HOLDER,
    )
    wait_for(lambda: not restored(daemon) and len(daemon.records("set")) == 3, "the sets")
    parent.kill()  # the child keeps running and keeps its lease
    parent.wait()
    assert not restored(daemon)
    parent.stdin.close()
    wait_for(lambda: restored(daemon), "everything to be back when the child ends")

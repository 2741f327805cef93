"""Every way in which a process loses its leases, on real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import (
    TIMEOUT_S,
    ending,
    script,
    wait_for,
)
from tests.system.sites import HOLDER, LIMIT, SET_LIMIT, STAYING, WAKING, Site, tell


def test_a_stopped_process_loses_its_leases_and_learns_it_when_it_continues(site: Site) -> None:
    with ending(site.holder(HOLDER + WAKING)) as holder:
        assert tell(holder, "160000") == "done"
        holder.send_signal(signal.SIGSTOP)
        wait_for(site.restored, "the limits to be back")
        (record,) = [
            one
            for one in site.daemon.wait_for_records("restore", 2)
            if one["gpu"].endswith("0" * 12) and one["gpu"].startswith("GPU-00000000")
        ]
        assert record["reason"] == "expired"
        writes = len(site.double.calls(SET_LIMIT))
        holder.send_signal(signal.SIGCONT)
        assert tell(holder, "160000") == "lease_expired"
        assert tell(holder, "160000") == "lease_expired"
        time.sleep(1.5)  # time in which zeusd could set it again
        assert len(site.double.calls(SET_LIMIT)) == writes
        assert tell(holder, "acquire") == "done"
        assert tell(holder, "160000") == "done"
        assert site.limits() == [160_000, LIMIT]


def test_a_process_stuck_in_c_code_with_the_gil_loses_its_leases(site: Site) -> None:
    """libzmq's own thread keeps running in it, which is not a heartbeat."""
    stuck = HOLDER + "import ctypes\nctypes.PyDLL(None).sleep(60)\n"
    with ending(site.holder(stuck)):
        wait_for(site.restored, "the limits to be back")
        restores = site.daemon.wait_for_records("restore", 2)
        assert {one["reason"] for one in restores} == {"expired"}


def test_a_process_that_works_keeps_its_leases_regardless_of_its_main_thread(site: Site) -> None:
    busy = HOLDER + "import time\nend = time.time() + 3\nwhile time.time() < end: pass\n"
    with ending(site.holder(busy + "print('over', flush=True)\nsys.stdin.read()")) as holder:
        assert holder.stdout.readline() == "over\n"
        assert site.limits() == [150_000] * 2
        assert site.daemon.records("lease_expired") == []


def test_a_process_whose_progress_ends_loses_its_leases(site: Site) -> None:
    stalled = HOLDER.replace("timeout_s=30", "timeout_s=30, stall_timeout_s=0.5")
    with ending(site.holder(stalled + "import threading\nthreading.Event().wait()")):
        wait_for(site.restored, "the limits to be back")
    patient = stalled.replace("stall_timeout_s=0.5", "stall_timeout_s=2")
    going_on = "import time\nfor _ in range(40): client.progress(); time.sleep(0.1)\n"
    with ending(site.holder(patient + going_on + "print('over', flush=True)")) as holder:
        assert holder.stdout.readline() == "over\n"
        assert len(site.daemon.records("lease_expired")) == 2


def test_exec_ends_the_leases_although_the_process_lives_on(site: Site) -> None:
    source = HOLDER + "os.execv('/bin/sleep', ['sleep', '60'])\n"
    with ending(site.holder(source)) as holder:
        wait_for(site.restored, "the limits to be back")
        # The kernel closes the sockets before it gives the process its new name.
        wait_for(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", "the name")
        assert holder.poll() is None


@pytest.mark.parametrize(
    "ending_",
    ["client.close()", "sys.exit(0)", "raise RuntimeError('boom')", "os._exit(3)", "os.abort()"],
)
def test_every_end_of_a_client_ends_its_leases_at_once(site: Site, ending_: str) -> None:
    # It ends on request: the limits are checked before.
    source = HOLDER + f"sys.stdin.readline()\n{ending_}\nsys.stdin.read()\n"
    with ending(site.holder(source, stderr=subprocess.DEVNULL)) as holder:
        holder.stdin.write("\n")
        holder.stdin.flush()
        wait_for(site.restored, "the limits to be back")
        reasons = {one["reason"] for one in site.daemon.wait_for_records("restore", 2)}
        assert reasons <= {"goodbye", "holder_gone"}
        if ending_ == "client.close()":
            assert reasons == {"goodbye"}


def test_a_lease_is_its_process_and_not_its_shell(site: Site) -> None:
    """A lease is not bound to a session, a terminal or a parent that keeps running."""
    shell = script(
        "import subprocess, sys\n"
        "tool = subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]], "
        "stdin=subprocess.PIPE)\n"
        "print(tool.pid, flush=True)\n"
        "sys.stdin.read()",
        site.daemon.socket,
        STAYING,
        start_new_session=True,
    )
    with ending(shell):
        tool = int(shell.stdout.readline())
        wait_for(lambda: site.limits() == [150_000] * 2, "the tool to set")
        os.kill(tool, signal.SIGKILL)
        wait_for(site.restored, "the limits to be back")
        assert shell.poll() is None


PID_REUSE = """
import os, signal, subprocess, sys, time
socket = sys.argv[1]
holder = subprocess.Popen([sys.executable, "-c", sys.argv[2], socket], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True)
assert holder.stdout.readline() == "holding\\n"
pid = holder.pid
holder.kill()
holder.wait()
for _ in range(200):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(pid - 1))
    again = subprocess.Popen([sys.executable, "-c", sys.argv[3], socket, str(pid)])
    if again.pid == pid:
        break
    again.kill()
    again.wait()
else:
    sys.exit("the pid was not to be had again")
sys.exit(again.wait())
"""


HEIR = """
import sys, time
from zeus_ipc import Client
client = Client(sys.argv[1], timeout_s=30)
assert client.heartbeat() == 0, "it inherited a lease"
end = time.monotonic() + 20
while [lease for lease in client.leases() if lease.pid == int(sys.argv[2])]:
    assert time.monotonic() < end, "the dead holder's lease lives on in its heir's name"
"""


@pytest.mark.needs("namespaces")
def test_a_process_that_reuses_the_pid_of_a_dead_holder_gets_no_lease(site: Site) -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*namespace, sys.executable, "-c", PID_REUSE, site.daemon.socket]
    done = subprocess.run([*command, STAYING, HEIR], timeout=TIMEOUT_S)
    assert done.returncode == 0
    wait_for(site.restored, "the limits to be back")

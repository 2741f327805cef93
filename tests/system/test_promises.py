"""What zeusd promises, on real processes, real signals and the recording NVML library."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    ALL_MAY,
    NOBODY,
    RunningDaemon,
    as_nobody,
    configuration,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from zeus_ipc import errors
from zeusd.records import replay
from zeusd.restore import boot_id

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

    def holder(self, source: str = HOLDER, **options: Any) -> subprocess.Popen[str]:
        """A process of an ordinary user that holds the power limit of every GPU at 150 W."""
        holder = script(source, self.daemon.socket, **{**as_nobody(), **options})
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        assert self.limits() == [150_000] * self.gpus
        return holder


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(stack, 2, QUICK_LEASES)


@contextlib.contextmanager
def ending(holder: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield holder
    finally:
        with contextlib.suppress(ProcessLookupError):
            holder.send_signal(signal.SIGCONT)
        holder.kill()
        holder.wait()


# ------------------------------------------------------------------------------------ letting go


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
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write(line + "\n")
    holder.stdin.flush()
    return holder.stdout.readline().strip()


def test_a_stopped_process_loses_its_leases_and_is_told_when_it_wakes(site: Site) -> None:
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
        time.sleep(1.5)  # nothing is re-applied behind anybody's back, however long one waits
        assert len(site.double.calls(SET_LIMIT)) == writes
        assert tell(holder, "acquire") == "done"
        assert tell(holder, "160000") == "done"
        assert site.limits() == [160_000, LIMIT]


def test_a_process_stuck_in_c_code_with_the_gil_loses_its_leases(site: Site) -> None:
    """libzmq's own thread lives on in it: that is no heartbeat."""
    stuck = HOLDER + "import ctypes\nctypes.PyDLL(None).sleep(60)\n"
    with ending(site.holder(stuck)):
        wait_for(site.restored, "the limits to be back")
        restores = site.daemon.wait_for_records("restore", 2)
        assert {one["reason"] for one in restores} == {"expired"}


def test_a_process_that_works_keeps_its_leases_whatever_its_main_thread_does(site: Site) -> None:
    busy = HOLDER + "import time\nend = time.time() + 4\nwhile time.time() < end: pass\n"
    with ending(site.holder(busy + "print('over', flush=True)\nsys.stdin.read()")) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "over\n"
        assert site.limits() == [150_000] * 2
        assert site.daemon.records("lease_expired") == []


def test_a_process_whose_progress_ends_loses_its_leases(site: Site) -> None:
    stalled = HOLDER.replace("timeout_s=30", "timeout_s=30, stall_timeout_s=0.5")
    with ending(site.holder(stalled + "import threading\nthreading.Event().wait()")):
        wait_for(site.restored, "the limits to be back")
    going_on = "import time\nfor _ in range(40): client.progress(); time.sleep(0.1)\n"
    with ending(site.holder(stalled + going_on + "print('over', flush=True)")) as holder:
        assert holder.stdout is not None
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
    # It ends when it is told to: the limits are looked at before.
    source = HOLDER + f"sys.stdin.readline()\n{ending_}\nsys.stdin.read()\n"
    with ending(site.holder(source, stderr=subprocess.DEVNULL)) as holder:
        assert holder.stdin is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        wait_for(site.restored, "the limits to be back")
        reasons = {one["reason"] for one in site.daemon.wait_for_records("restore", 2)}
        assert reasons <= {"goodbye", "holder_gone"}
        if ending_ == "client.close()":
            assert reasons == {"goodbye"}


def test_a_lease_is_its_process_and_not_its_shell(site: Site) -> None:
    """Nothing is bound to a session, a terminal or a parent that lives on."""
    shell = script(
        "import subprocess, sys\n"
        "tool = subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]], "
        "stdin=subprocess.PIPE)\n"
        "print(tool.pid, flush=True)\n"
        "sys.stdin.read()",
        site.daemon.socket,
        HOLDER + "sys.stdin.read()\n",
        start_new_session=True,
    )
    with ending(shell):
        assert shell.stdout is not None
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
def test_who_gets_the_pid_of_a_dead_holder_gets_no_lease(site: Site) -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*namespace, sys.executable, "-c", PID_REUSE, site.daemon.socket]
    done = subprocess.run([*command, HOLDER + "sys.stdin.read()", HEIR], timeout=60)
    assert done.returncode == 0
    wait_for(site.restored, "the limits to be back")


# ------------------------------------------------------------------------- what restore means


def test_the_baseline_is_what_was_found_and_no_lease_redefines_it(site: Site) -> None:
    site.double.set_outside(0, 220_000)
    with site.daemon.client() as client:
        uuid = site.double.uuid(0)
        for watts in (200, 180, 150):
            client.set_power_limit(uuid, watts * 1000)
            client.release()
            assert site.limits()[0] == 220_000
        client.set_power_limit(uuid, 200_000)
        client.set_power_limit(uuid, 150_000)
    wait_for(lambda: site.limits()[0] == 220_000, "the cap to be back")


@pytest.mark.parametrize("code", [15, 10, 4])
def test_a_gpu_that_cannot_be_restored_delays_no_other_and_is_retried(code: int) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, 8, "")
        with ending(site.holder()) as holder:
            site.double.inject(3, SET_LIMIT, code)
            holder.kill()
            others = [LIMIT] * 3 + [150_000] + [LIMIT] * 4
            wait_for(lambda: site.limits() == others, "the other seven to be back")
            with site.daemon.client() as client:
                wait_for(lambda: site.daemon.records("restore_failed"), "the failure to be told")
                wait_for(lambda: len(client.leases()) == 1, "the other seven leases to end")
                (lease,) = client.leases()
                assert (lease.gpu, lease.restoring) == (site.double.uuid(3), True)
                with pytest.raises(errors.RestorePending):
                    client.set_power_limit(site.double.uuid(3), 200_000)
                client.set_power_limit(site.double.uuid(4), 200_000)
                client.release()
            site.double.clear_faults()
            wait_for(site.restored, "the last one to be back")


def test_a_wedged_gpu_delays_no_other_and_no_expiry() -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, 4, QUICK_LEASES)
        with ending(site.holder()) as holder:
            site.double.inject(0, "*", delay_ms=60_000)
            holder.send_signal(signal.SIGSTOP)  # its leases expire while GPU 0 is stuck
            others = [150_000, LIMIT, LIMIT, LIMIT]
            wait_for(lambda: site.limits() == others, "the other three to be back")
            with site.daemon.client() as client:
                client.set_power_limit(site.double.uuid(1), 200_000)
                client.release()
            site.double.clear_faults()
            wait_for(site.restored, "the stuck one to be back")


def test_the_requested_limit_comes_back_and_not_the_enforced_one() -> None:
    """A board may enforce less than software asked for; that is not the site's wish."""
    with contextlib.ExitStack() as stack:
        site = Site(stack, 1, "")
        site.double._set(0, "board_limit_mw", 180_000)
        with site.daemon.client() as client:
            uuid = site.double.uuid(0)
            state = client.state(uuid)[uuid]
            assert (state.power_limit_mw, state.enforced_power_limit_mw) == (LIMIT, 180_000)
            client.set_power_limit(uuid, 150_000)
        wait_for(site.restored, "the requested limit to be back")


def test_limits_that_a_driver_update_lowered_become_the_nearest(site: Site) -> None:
    with ending(site.holder()) as holder:
        site.double.set_limits(0, 100_000, 220_000)
        holder.kill()
        wait_for(lambda: site.limits() == [220_000, LIMIT], "the nearest legal limit")
        wait_for(lambda: site.daemon.records("restore_clamped"), "the record")


def test_gpus_are_who_they_are_and_not_where_they_are(site: Site) -> None:
    with ending(site.holder()) as holder:
        site.daemon.kill()
        first, second = site.double.node.gpus[0], site.double.node.gpus[1]
        first.uuid, second.uuid = second.uuid, first.uuid  # as after a change of slots
        first.limit_mw = 140_000
        holder.kill()
        site.daemon.start_again()
        # 140 W is not what zeusd wrote to the GPU that is now first: someone else did.
        wait_for(lambda: site.limits() == [140_000, LIMIT], "the other one to be back")
        site.daemon.wait_until_serving(2)
        assert site.limits() == [140_000, LIMIT]


def test_someone_elses_change_stays_and_clocks_come_back_all_the_same(site: Site) -> None:
    with site.daemon.client() as client:
        uuid = site.double.uuid(0)
        client.set_power_limit(uuid, 150_000)
        answer = client.acquire(uuid, ["gpu_clocks"])
        assert answer[uuid]["gpu_clocks"].source == "unreadable"
        client.set_gpu_clocks(uuid, 600, 900)
        site.double.set_outside(0, 180_000)
    wait_for(lambda: not site.double.node.gpus[0].lock_max, "the clocks to be unlocked")
    wait_for(lambda: site.daemon.records("outside_change"), "the record")
    assert site.limits()[0] == 180_000


def test_clocks_go_back_before_and_persistence_mode_after_the_power_limit(site: Site) -> None:
    """The order is fixed: without persistence a driver may forget what is not back yet."""
    with site.daemon.client() as client:
        uuid = site.double.uuid(0)
        client.set_persistence_mode(uuid, True)
        client.set_power_limit(uuid, 150_000)
        client.set_gpu_clocks(uuid, 600, 900)
        before = len(site.double.calls())
        client.release()
        symbols = [call.symbol for call in site.double.calls()[before:]]
    assert symbols == ["nvmlDeviceResetGpuLockedClocks", SET_LIMIT, "nvmlDeviceSetPersistenceMode"]


# ----------------------------------------------------------------------------- zeusd's own life


CRASHES = {
    # What is replaced by a function that kills zeusd, before or after it did its work.
    "before the journal's write": ("zeusd.runtime.journal.Journal._append", "before"),
    "between write and sync": ("os.fdatasync", "before"),
    "after the journal": ("zeusd.runtime.journal.Journal._append", "after"),
    "before the device": ("zeusd.devices.nvml.backend.NvmlBackend.write_control", "before"),
    "after the device": ("zeusd.devices.nvml.backend.NvmlBackend.write_control", "after"),
    "before the answer": ("zeusd.server.server.Server.reply", "before"),
    "after the answer": ("zeusd.server.server.Server.reply", "after"),
    "before the compaction's rename": ("os.rename", "before"),
    "after the compaction's rename": ("os.rename", "after"),
}

CRASHING = """
import importlib, os, signal, sys
where, when, flag, *arguments = sys.argv[1:]
module, _, name = where.rpartition(".")
try:
    owner = importlib.import_module(module)
except ImportError:
    module, _, kind = module.rpartition(".")
    owner = getattr(importlib.import_module(module), kind)
real = getattr(owner, name)
def crashing(*args, **kwargs):
    armed = os.path.exists(flag)
    if armed and when == "before":
        os.unlink(flag)
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args, **kwargs)
    if armed:
        os.unlink(flag)
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, crashing)
import zeusd.runtime.journal
journal = zeusd.runtime.journal.Journal
journal._rewrite_if_grown = journal._rewrite
sys.argv = ["zeusd", *arguments]
from zeusd.cli import main
main()
"""


@pytest.mark.parametrize("place", list(CRASHES))
@pytest.mark.parametrize("holder_dies", [True, False])
def test_zeusd_killed_at_any_instant_leaves_a_value_that_somebody_answers_for(
    place: str, holder_dies: bool
) -> None:
    """The device holds the baseline or what a living lease asked for, and never anything else."""
    where, when = CRASHES[place]
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}], privilege=0 if os.getuid() == 0 else 1)
        flag = directory / "crash"
        options = ["--nvml-library", double.library, "--socket-mode", "0666"]
        options += configuration(directory)
        daemon = RunningDaemon(
            directory,
            *options,
            env=double.env,
            program=["-c", CRASHING, where, when, str(flag)],
        )
        try:
            daemon.wait_until_serving(1)
            setting = HOLDER + "client.set_power_limit(gpus, int(sys.stdin.readline()))\n"
            setting += "print('set', flush=True)\nsys.stdin.read()\n"
            holder = script(setting, daemon.socket, **as_nobody())
            with ending(holder):
                assert holder.stdout is not None
                assert holder.stdin is not None
                assert holder.stdout.readline() == "holding\n"
                flag.touch()
                holder.stdin.write("120000\n")
                holder.stdin.flush()
                assert daemon.process.wait(30) == -signal.SIGKILL
                assert double.limit_mw(0) in (150_000, 120_000)
                if holder_dies:
                    holder.kill()
                daemon.start_again()
                if holder_dies:
                    wait_for(lambda: double.limit_mw(0) == LIMIT, "the baseline to be back")
                else:
                    assert holder.stdout.readline() == "set\n", "its request is asked again"
                    assert double.limit_mw(0) == 120_000
                    holder.kill()
                    wait_for(lambda: double.limit_mw(0) == LIMIT, "the baseline to be back")
        finally:
            daemon.stop()


def test_nobody_hears_of_a_node_without_gpus_while_zeusd_starts_again(site: Site) -> None:
    with site.daemon.client(timeout_s=30) as client:
        uuid = site.double.uuid(0)
        client.set_power_limit(uuid, 200_000)
        site.daemon.kill()
        site.double.inject(0, "nvmlDeviceGetName", count=1, delay_ms=1500)  # it takes its time
        site.daemon.start_again()
        client.set_power_limit(uuid, 190_000)
        assert len(client.node().gpus) == 2


def test_another_load_of_the_driver_voids_what_was_owed() -> None:
    """Limits do not survive it: what the journal says is not in force, and nothing is written."""
    with contextlib.ExitStack() as stack:
        module = stack.enter_context(public_directory()) / "nvidia"
        module.mkdir()
        (module / "version").write_text("580.95\n")
        site = Site(stack, 2, f'[nvml]\nmodule = "{module}"\n')
        with ending(site.holder(HOLDER + WAKING)) as holder:
            site.daemon.kill()
            module.rename(module.with_name("old"))
            module.mkdir()  # as sysfs does: the same name, another inode
            (module / "version").write_text("580.95\n")
            for gpu in range(2):
                site.double.set_outside(gpu, 240_000)  # what the driver comes up with
            writes = len(site.double.calls())
            site.daemon.start_again()
            assert tell(holder, "160000") == "lease_expired"
            assert site.limits() == [240_000, 240_000]
            assert len(site.double.calls()) == writes
            assert tell(holder, "acquire") == "done"
            assert tell(holder, "160000") == "done"
            holder.kill()
            wait_for(lambda: site.limits() == [240_000, 240_000], "the new baseline")
            assert site.daemon.records("driver_changed")


def test_a_gpu_that_is_missing_at_the_start_is_restored_when_it_comes(site: Site) -> None:
    with ending(site.holder(HOLDER + "sys.stdin.read()")) as holder:
        site.daemon.kill()
        configuration(site.directory, "[nvml]\nretry_s = 0.1\n" + ALL_MAY)
        handle = "nvmlDeviceGetHandleByIndex_v2"
        site.double.inject(1, handle, 15)
        site.daemon.start_again()
        site.daemon.wait_until_serving(1)
        assert site.daemon.records("gpu_unusable")[-1]["index"] == 1
        assert site.limits() == [150_000, 150_000]
        site.double.clear_faults()
        site.daemon.wait_until_serving(2)
        with site.daemon.client() as client:
            assert {lease.pid for lease in client.leases()} == {holder.pid}, "its lease lives on"
        holder.kill()
        wait_for(site.restored, "the limits to be back")


LEFTOVERS = ("socket", "link at the socket's lock", "half a journal", "foreign state", "old boot")


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_zeusd_starts_over_leftovers_of_every_kind(leftover: str) -> None:
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}], privilege=0 if os.getuid() == 0 else 1)
        state = directory / "state"
        precious = directory / "precious"
        precious.write_text("precious")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        debt = {"gpu": double.uuid(0), "control": "power_limit", "pid": 999_999, "cookie": 1}
        debt |= {"uid": 0, "client": "", "since_ns": 1, "target": [120_000], "values": [[250_000]]}
        record = json.dumps([f"debt/{double.uuid(0)}/power_limit", debt])
        if leftover == "socket":
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(str(directory / "zeusd.sock"))
        elif leftover == "half a journal":
            state.mkdir(mode=0o700)
            header = json.dumps({"format": 1, "boot": boot})
            (state / "journal").write_text(f"{header}\n{record[: len(record) // 2]}")
            (state / "journal").chmod(0o600)
        elif leftover == "foreign state":
            state.mkdir(mode=0o777)
            state.chmod(0o777)
            header = json.dumps({"format": 1, "boot": boot})
            (state / "journal").write_text(f"{header}\n{record}\n")
        elif leftover == "old boot":
            state.mkdir(mode=0o700)
            header = json.dumps({"format": 1, "boot": "another"})
            (state / "journal").write_text(f"{header}\n{record}\n")
            (state / "journal").chmod(0o600)
        else:
            state.mkdir(mode=0o700)
            (state / "journal.lock").symlink_to(precious)
        with running_daemon(
            *("--nvml-library", double.library),
            gpus=1,
            env=double.env,
            directory=directory,
        ):
            assert double.calls() == [], "nothing of it may be acted upon"
        assert precious.read_text() == "precious"


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system that is soon full."""
    small = directory / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "tmpfs", str(small)]
    subprocess.run(mount, check=True)
    try:
        yield small
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.needs("namespaces")
def test_a_full_disk_changes_nothing_and_says_so(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        small = stack.enter_context(small_disk(directory))
        double = NvmlDouble(directory, [{}], privilege=0)
        with running_daemon(
            *("--nvml-library", double.library, "--state-dir", str(small / "state")),
            gpus=1,
            env=double.env,
            directory=directory,
        ) as daemon:
            with daemon.client() as client:
                (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free))
                uuid = double.uuid(0)
                with pytest.raises(errors.JournalFailed, match="free space"):
                    for watts in range(100, 200):
                        client.set_power_limit(uuid, watts * 1000)
                (small / "filler").unlink()
                client.set_power_limit(uuid, 140_000)
                assert double.limit_mw(0) == 140_000
            wait_for(lambda: double.limit_mw(0) == LIMIT, "the limit to be back")


@pytest.mark.needs("namespaces")
def test_a_full_disk_delays_no_restore_whose_record_is_there(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        small = stack.enter_context(small_disk(directory))
        double = NvmlDouble(directory, [{}], privilege=0)
        with running_daemon(
            *("--nvml-library", double.library, "--state-dir", str(small / "state")),
            gpus=1,
            env=double.env,
            directory=directory,
        ) as daemon:
            with daemon.client() as client:
                uuid = double.uuid(0)
                client.set_gpu_clocks(uuid, 600, 900)
                client.set_power_limit(uuid, 140_000)
                (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free))
                with pytest.raises(errors.JournalFailed, match="free space"):
                    for watts in range(100, 200):
                        client.set_power_limit(uuid, watts * 1000)
                client.set_gpu_clocks(uuid, 700, 700)  # a lease whose record says enough
            wait_for(lambda: double.limit_mw(0) == LIMIT, "the limit to be back")
            reset = "nvmlDeviceResetGpuLockedClocks"
            wait_for(lambda: reset in [call.symbol for call in double.calls()], "the clocks")
            journal, boot = small / "state" / "journal", boot_id()
            (small / "filler").unlink()
            wait_for(
                lambda: (
                    not any(
                        key.startswith("debt/")
                        for key in replay(journal.read_bytes(), boot).entries
                    )
                ),
                "the journal to say so",
            )


# --------------------------------------------------------------------------- who may do what


SPOOFER = """
import json, os, sys
import msgpack, zmq
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVTIMEO, 10_000)
dealer.connect("ipc://" + sys.argv[1])
claims = {"uid": 0, "gid": 0, "pid": 1, "user": "root", "groups": [0], "CapEff": "000001ffffffffff"}
message = {"v": 1, "id": 1, "op": "set_power_limit", "gpus": [sys.argv[2]],
           "power_limit_mw": 150_000, "client": "root", **claims}
dealer.send(msgpack.packb(message))
reply = msgpack.unpackb(dealer.recv())
print(json.dumps([os.getuid(), reply["result"]["gpus"][sys.argv[2]]["error"]["code"]]))
"""


@pytest.mark.needs("two users", "namespaces", "user namespaces")
@pytest.mark.parametrize("wrapper", [[], ["unshare", "--user", "--map-root-user"]])
def test_nothing_a_client_says_makes_it_another_user(wrapper: list[str]) -> None:
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}])
        with running_daemon(
            *("--nvml-library", double.library, "--socket-mode", "0666"),
            gpus=1,
            env=double.env,
            directory=directory,
        ) as daemon:
            done = subprocess.run(
                [*wrapper, sys.executable, "-c", SPOOFER, daemon.socket, double.uuid(0)],
                capture_output=True,
                text=True,
                **as_nobody(),
            )
            assert done.returncode == 0, done.stderr
            uid, code = json.loads(done.stdout)
            assert uid == (0 if wrapper else NOBODY), "in its own namespace it believes to be root"
            assert code == "permission_denied"
            assert double.calls() == []
            (refusal,) = daemon.records("refused")
            assert refusal["uid"] == NOBODY
            with daemon.client() as root:
                root.set_power_limit(double.uuid(0), 150_000)  # root of the host administers
            namespace = ["unshare", "--pid", "--fork", "--kill-child"]
            done = subprocess.run(
                [*namespace, sys.executable, "-c", SPOOFER, daemon.socket, double.uuid(0)],
                capture_output=True,
                text=True,
            )
            assert json.loads(done.stdout) == [0, "permission_denied"], "root in a container"


@pytest.mark.needs("two users")
def test_only_who_computes_may_control_where_the_site_asks_for_that() -> None:
    text = "[access]\nrequire_compute_process = true\nroot = 'never'\n"
    with contextlib.ExitStack() as stack:
        site = Site(stack, 1, text)
        source = HOLDER.replace("gpus, 150_000", "gpus[0], 150_000")
        refused = script(source, site.daemon.socket, stderr=subprocess.PIPE, **as_nobody())
        _, error = refused.communicate(timeout=30)
        assert "only while one of the user's processes computes on it" in error
        with ending(subprocess.Popen(["sleep", "60"], text=True, **as_nobody())) as computing:
            site.double.computes(0, computing.pid)
            with ending(site.holder(source + "sys.stdin.read()")):
                assert site.limits() == [150_000]

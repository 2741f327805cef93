"""zeusd is killed and restarted: over leftovers, on a changed node, with a full disk."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    ALL_MAY,
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    configuration,
    ending,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from tests.system.sites import HOLDER, LIMIT, WAKING, Site, tell
from zeus_ipc import Client, errors
from zeusd.identity import boot_id
from zeusd.records import replay

CRASHES = {
    # Replaced by a function that kills zeusd, before or after it did its work.
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
def test_zeusd_killed_at_any_instant_leaves_a_value_that_the_journal_covers(
    place: str, holder_dies: bool
) -> None:
    """The device holds the initial value or a running lease's value, and nothing else."""
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
                assert holder.stdout.readline() == "holding\n"
                flag.touch()
                holder.stdin.write("120000\n")
                holder.stdin.flush()
                assert daemon.process.wait(TIMEOUT_S) == -signal.SIGKILL
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


def ask_through_kills(daemon: RunningDaemon, kills: int, threads: int) -> float:
    """Kills and restarts zeusd while threads share a client, each time when all were answered.

    Returns:
        The longest request, seconds.
    """
    done, longest_s, failures = [0] * threads, [0.0] * threads, list[Exception]()
    ended = threading.Event()
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]

        def work(number: int) -> None:
            calls: list[Callable[[], object]] = [
                client.heartbeat,
                lambda: client.state(uuids),
                lambda: client.set_power_limit(uuids, 150_000),
                lambda: client.set_power_limit(uuids, 160_000, block=False),
                client.leases,
            ]
            while not ended.is_set():
                begun_s = time.monotonic()
                try:
                    calls[(done[number] + number) % len(calls)]()
                except Exception as error:
                    failures.append(error)
                longest_s[number] = max(longest_s[number], time.monotonic() - begun_s)
                done[number] += 1

        def answered(before: list[int]) -> bool:
            return all(map(operator.lt, before, done)) or bool(failures)

        with ThreadPoolExecutor(threads) as pool:
            working = [pool.submit(work, number) for number in range(threads)]
            try:
                for _ in range(kills):
                    before = [*done]
                    wait_for(lambda before=before: answered(before), "all threads to be answered")
                    daemon.kill()
                    daemon.start_again()
                before = [*done]
                wait_for(lambda: answered(before), "all threads to be answered")
            finally:
                ended.set()
            for one in working:
                one.result()
    assert failures == []
    return max(longest_s)


def test_threads_share_a_client_through_restarts() -> None:
    with public_directory() as directory:
        simulated = ("--simulate", "2xv100-pcie:setter_ms=0", *configuration(directory))
        with running_daemon(*simulated, gpus=2, directory=directory) as daemon:
            ask_through_kills(daemon, kills=3, threads=8)


def test_no_client_gets_an_empty_node_while_zeusd_restarts(site: Site) -> None:
    with site.daemon.client(timeout_s=30) as client:
        uuid = site.double.uuid(0)
        client.set_power_limit(uuid, 200_000)
        site.daemon.kill()
        site.double.inject(0, "nvmlDeviceGetName", count=1, delay_ms=1500)  # it takes its time
        site.daemon.start_again()
        client.set_power_limit(uuid, 190_000)
        assert len(client.node().gpus) == 2


def test_another_load_of_the_driver_invalidates_pending_restores() -> None:
    """Limits do not survive it: the journal's values are not in force, and nothing is written."""
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
            site.daemon.wait_for_records("driver_changed")


def test_a_gpu_that_is_missing_at_the_start_is_restored_when_it_comes(site: Site) -> None:
    with ending(site.holder()) as holder:
        site.daemon.kill()
        configuration(site.directory, "[nvml]\nretry_s = 0.1\n" + ALL_MAY)
        handle = "nvmlDeviceGetHandleByIndex_v2"
        site.double.inject(1, handle, 15)
        site.daemon.start_again()
        site.daemon.wait_until_serving(1)
        assert site.daemon.wait_for_records("gpu_unusable")[-1]["index"] == 1
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
        debt = {"gpu": double.uuid(0), "control": "power_limit", "holder": [999_999, 1]}
        debt |= {"uid": 0, "client": "", "since_ns": 1, "target": [120_000], "values": [[250_000]]}
        record = json.dumps([f"pending/{double.uuid(0)}/power_limit", debt])
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


@contextlib.contextmanager
def on_a_small_disk() -> Iterator[tuple[NvmlDouble, RunningDaemon, Path]]:
    """A driver, a zeusd, and the file system of its journal, which is soon full."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        small = stack.enter_context(small_disk(directory))
        double = NvmlDouble(directory, [{}], privilege=0)
        options = ["--nvml-library", double.library, "--state-dir", str(small / "state")]
        daemon = running_daemon(*options, gpus=1, env=double.env, directory=directory)
        yield double, stack.enter_context(daemon), small


def fill(small: Path, client: Client, uuid: str) -> None:
    """Nothing more can be written, and sets report it once the journal has used its reserve."""
    (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free))
    with pytest.raises(errors.JournalFailed, match="free space"):
        for watts in range(100, 200):
            client.set_power_limit(uuid, watts * 1000)


@pytest.mark.needs("namespaces")
def test_a_full_disk_changes_nothing_and_is_reported(site: Site) -> None:
    with on_a_small_disk() as (double, daemon, small):
        with daemon.client() as client:
            uuid = double.uuid(0)
            fill(small, client, uuid)
            (small / "filler").unlink()
            client.set_power_limit(uuid, 140_000)
            assert double.limit_mw(0) == 140_000
        wait_for(lambda: double.limit_mw(0) == LIMIT, "the limit to be back")


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("orderly", [False, True])
def test_a_zeusd_that_starts_on_a_full_disk_restores(
    site: Site, read_only: bool, orderly: bool
) -> None:
    """What is on disk already needs no disk."""
    with on_a_small_disk() as (double, daemon, small):
        setting = HOLDER + "client.set_gpu_clocks(gpus, 600, 900)\n"
        setting += "print('set', flush=True)\nsys.stdin.read()\n"
        with ending(script(setting, daemon.socket)) as holder:
            assert holder.stdout.readline() == "holding\n"
            assert holder.stdout.readline() == "set\n"
            (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free))
            if read_only:
                subprocess.run(["mount", "-o", "remount,ro", str(small)], check=False)
            if orderly:
                daemon.process.send_signal(signal.SIGUSR1)
                daemon.process.wait(TIMEOUT_S)
            else:
                daemon.kill()
            daemon.start_again()
            daemon.wait_until_serving(1)
            holder.kill()
            wait_for(lambda: double.limit_mw(0) == LIMIT, "the limit to be back")
            reset = "nvmlDeviceResetGpuLockedClocks"
            wait_for(lambda: reset in [call.symbol for call in double.calls()], "the clocks")


@pytest.mark.needs("namespaces")
def test_a_full_disk_delays_no_restore_whose_record_is_there(site: Site) -> None:
    with on_a_small_disk() as (double, daemon, small):
        with daemon.client() as client:
            uuid = double.uuid(0)
            client.set_gpu_clocks(uuid, 600, 900)
            client.set_power_limit(uuid, 140_000)
            fill(small, client, uuid)
            client.set_gpu_clocks(uuid, 700, 700)  # a lease whose record says enough
        wait_for(lambda: double.limit_mw(0) == LIMIT, "the limit to be back")
        reset = "nvmlDeviceResetGpuLockedClocks"
        wait_for(lambda: reset in [call.symbol for call in double.calls()], "the clocks")
        journal, boot = small / "state" / "journal", boot_id()
        (small / "filler").unlink()
        wait_for(
            lambda: (
                not any(
                    key.startswith("pending/") for key in replay(journal.read_bytes(), boot).entries
                )
            ),
            "the journal to say so",
        )

"""`zeusd restore` (`zeusd.restore`): pending restores without a zeusd."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    RunningDaemon,
    as_nobody,
    public_directory,
    running_daemon,
    wait_for,
)
from tests.zeusd.killed import holding, installed, run_helper
from zeusd.identity import boot_id, driver_id
from zeusd.records import Entry, header, record, replay

LIMIT = 250_000
CLOCKS = "nvmlDeviceResetGpuLockedClocks"
SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1])
gpus = [gpu.uuid for gpu in client.node().gpus]
client.set_power_limit(gpus, 150_000)
client.set_gpu_clocks(gpus[0], 600, 900)
print("holding", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="session")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("libexec"))


class Wreck:
    """What a killed zeusd leaves: its journal, and the GPUs."""

    def __init__(self, double: NvmlDouble, state_dir: Path, helper: Path) -> None:
        self.double = double
        self.state_dir = state_dir
        self.journal = state_dir / "journal"
        self.helper = helper

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """The helper as the units run it: isolated, without site-packages."""
        return self.python("-I", "-S", str(self.helper), *options)

    def python(self, *command: str) -> subprocess.CompletedProcess[str]:
        return run_helper(*command, state_dir=self.state_dir, env=self.double.env)

    def entries(self) -> dict[str, Entry]:
        return replay(self.journal.read_bytes(), boot_id()).entries

    def written(self, since: int = 0) -> list[tuple[str, int, int]]:
        calls = self.double.calls()[since:]
        return sorted((call.symbol, call.gpu, call.arguments[0]) for call in calls)

    def limits(self) -> list[int]:
        return [self.double.limit_mw(gpu) for gpu in range(2)]


def double_in(directory: Path) -> NvmlDouble:
    return NvmlDouble(directory, [{}, {}], privilege=0 if os.getuid() == 0 else 1)


class Held(Wreck):
    """A zeusd and a process that holds everything: neither is killed yet."""

    def __init__(
        self, daemon: RunningDaemon, holder: subprocess.Popen[str], *left: NvmlDouble | Path
    ) -> None:
        super().__init__(*left)
        self.daemon = daemon
        self.holder = holder

    def kill(self) -> None:
        self.daemon.kill()
        self.holder.kill()
        self.holder.wait()


@contextlib.contextmanager
def all_held(helper: Path) -> Iterator[Held]:
    with public_directory() as directory:
        double = double_in(directory)
        options = ("--nvml-library", double.library)
        with (
            running_daemon(*options, gpus=2, env=double.env, directory=directory) as daemon,
            holding(HOLDER, daemon) as holder,
        ):
            yield Held(daemon, holder, double, daemon.state_dir, helper)


@pytest.fixture
def held(helper: Path) -> Iterator[Held]:
    with all_held(helper) as found:
        yield found


@pytest.fixture(scope="module")
def files(helper: Path) -> tuple[bytes, bytes]:
    """The journal of a wreck, and the state of its GPUs."""
    with all_held(helper) as found:
        found.kill()
        return found.journal.read_bytes(), found.double.state_path.read_bytes()


@pytest.fixture
def wreck(helper: Path, files: tuple[bytes, bytes]) -> Iterator[Wreck]:
    with public_directory() as directory:
        double = double_in(directory)
        journal, gpus = files
        with double.state_path.open("r+b") as state:  # which is mapped
            state.write(gpus)
        found = Wreck(double, directory / "state", helper)
        found.state_dir.mkdir(mode=0o700)
        found.journal.touch(mode=0o600)
        found.journal.write_bytes(journal)
        yield found


BACK = [(CLOCKS, 0, 0), (SET_LIMIT, 0, LIMIT), (SET_LIMIT, 1, LIMIT)]


def test_it_needs_nothing_but_the_standard_library(helper: Path) -> None:
    files = [*helper.parent.rglob("*.py")]
    own = {".".join(file.relative_to(helper.parent).with_suffix("").parts) for file in files}
    own |= {name.removesuffix(".__init__") for name in own}
    assert {"zeusd-restore", "zeusd.records", "zeusd.restore_rule", "zeus_ipc.controls"} <= own
    imported = set()
    for file in files:
        tree = ast.parse(file.read_text())
        for_types = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for one in node.body
            for part in ast.walk(one)
        }
        for node in {*ast.walk(tree)} - for_types:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
    assert {name.split(".")[0] for name in imported - own} <= set(sys.stdlib_module_names)


def test_it_restores_what_dead_processes_held_and_nothing_twice(wreck: Wreck) -> None:
    with wreck.journal.open("ab") as file:
        file.write(b'{"no": "record"}\n["pending/half')  # as when zeusd is killed
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]
    assert wreck.written() == BACK
    again = wreck.run()
    assert again.returncode == 0
    assert "no pending restores" in again.stderr
    assert wreck.written() == BACK


def test_it_keeps_what_running_processes_hold_unless_all_is_requested(held: Held) -> None:
    since = len(held.double.calls())
    done = held.run("--all")
    assert done.returncode == 0
    assert "restores by itself" in done.stderr, "a zeusd runs"
    held.daemon.kill()
    assert held.run().returncode == 0
    assert held.limits() == [150_000, 150_000]
    dry = held.run("--all", "--dry-run")
    assert (dry.returncode, dry.stderr.count("would be restored to")) == (0, 3)
    assert held.written(since) == []
    assert held.run("--all").returncode == 0
    assert held.limits() == [LIMIT, LIMIT]
    # The next zeusd informs the running holder that it lost its leases.
    held.daemon.start_again()
    held.daemon.wait_until_serving(2)
    assert sum(key.startswith("loss/") for key in held.entries()) == 3


def test_ceilings_bound_restores_and_fall_to_their_fallback_without_a_zeusd(held: Held) -> None:
    """They were set after the lease that is restored; its holder had less than they allow."""
    until_ns = [_boot_ns() + 3600 * 10**9, _boot_ns() + 10**9 // 2]
    with held.daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        for gpu, end_ns in zip(gpus, until_ns, strict=True):
            client.set_ceiling(gpu, "fleet", 220_000, until_boot_ns=end_ns, fallback_mw=160_000)
    held.kill()
    wait_for(lambda: _boot_ns() > until_ns[1], "the deadline to pass")
    assert held.run().returncode == 0
    assert held.limits() == [220_000, 160_000]
    # It may be killed, or the driver come late; the next zeusd must know whose value it finds.
    held.double.inject(0, SET_LIMIT, 999)
    assert held.run("--all").returncode == 1
    said = held.entries()
    assert [160_000] in said[f"pending/{gpus[0]}/power_limit"]["doubts"]
    assert said[f"ceiling/{gpus[0]}/power_limit/fleet"]["value"] == [160_000]
    held.double.clear_faults()
    assert held.run("--all").returncode == 0
    assert held.limits() == [160_000, 160_000]
    assert "no pending restores" in held.run("--all").stderr
    held.daemon.start_again()
    held.daemon.wait_until_serving(2)
    with held.daemon.client() as client:
        assert {gpu.power_limit_highest_mw for gpu in client.node().gpus} == {160_000}
        client.set_ceiling(gpus, "fleet", None)
        assert held.limits() == [LIMIT, LIMIT]


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def test_after_a_stop_that_was_cut_short_everything_is_restored(held: Held) -> None:
    held.double.inject(1, SET_LIMIT, 15)
    held.daemon.process.terminate()
    held.daemon.wait_for_records("restore_failed")
    held.daemon.kill()
    held.double.clear_faults()
    assert held.run().returncode == 0
    assert held.limits() == [LIMIT, LIMIT]


def test_a_failing_gpu_is_reported_kept_in_the_journal_and_restored_later(wreck: Wreck) -> None:
    wreck.double.inject(0, SET_LIMIT, 15)
    done = wreck.run()
    assert done.returncode == 1
    assert "run this again" in done.stderr
    assert wreck.limits() == [150_000, LIMIT]
    wreck.double.clear_faults()
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]


def test_a_stuck_gpu_delays_no_other(wreck: Wreck) -> None:
    wreck.double.inject(0, SET_LIMIT, delay_ms=60_000)
    code = (
        "import os, runpy, sys; helper = runpy.run_path(sys.argv[1], run_name='helper'); "
        "names = helper['restore'].__globals__; each_gpu = names['_each_gpu']; "
        "names['_each_gpu'] = lambda pending, restore_one, _: each_gpu(pending, restore_one, 2.0); "
        "os._exit(helper['main'](sys.argv[2:]))"
    )
    assert wreck.python("-I", "-S", "-c", code, str(wreck.helper)).returncode == 1
    assert wreck.limits() == [150_000, LIMIT]


def test_a_value_set_by_someone_else_stays_and_limits_that_shrank_become_the_nearest(
    wreck: Wreck,
) -> None:
    wreck.double.set_outside(0, 200_000)
    wreck.double.set_limits(1, 100_000, 220_000)
    assert wreck.run().returncode == 0
    assert wreck.limits() == [200_000, 220_000]


def write_journal(path: Path, boot: str, entries: dict[str, Entry]) -> None:
    records = [record(boot, key, entry) for key, entry in entries.items()]
    path.write_bytes(b"".join([header(boot), *records]))


def test_another_boot_and_another_driver_invalidate_the_journal(wreck: Wreck) -> None:
    entries = wreck.entries()
    write_journal(wreck.journal, "another-boot", entries)
    assert wreck.run("--all").returncode == 0
    assert entries["driver"]["id"] == driver_id()
    entries["driver"]["id"] = "another-driver"
    write_journal(wreck.journal, boot_id(), entries)
    done = wreck.run("--all")
    assert done.returncode == 0
    assert "reloaded" in done.stderr
    assert wreck.written() == []


@pytest.mark.parametrize(
    "kind", [pytest.param("foreign", marks=pytest.mark.needs("root")), "link", "writable", "fifo"]
)
def test_a_journal_that_cannot_be_trusted_is_not_acted_upon(wreck: Wreck, kind: str) -> None:
    path = wreck.journal
    if kind == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif kind == "fifo":
        for one in (path, path.with_name("journal.lock")):
            one.unlink(missing_ok=True)
            os.mkfifo(one)
    elif kind == "writable":
        path.chmod(0o666)
    else:
        os.chown(path, 65534, 65534)
    done = wreck.run("--all")
    assert done.returncode == 1
    assert "left unchanged" in done.stderr
    assert wreck.written() == []


def test_the_command_is_the_same_helper(wreck: Wreck) -> None:
    done = wreck.python("-m", "zeusd", "restore")
    assert done.returncode == 0, done.stderr
    assert wreck.limits() == [LIMIT, LIMIT]


@pytest.mark.needs("two users")
def test_a_user_who_may_not_read_the_journal_gets_an_error() -> None:
    with public_directory() as folder:
        private = folder / "state"
        private.mkdir(mode=0o700)
        (private / "journal").write_bytes(header("boot"))
        helper = installed(folder)
        helper.chmod(0o644)
        told = subprocess.run(
            ["/usr/bin/python3", "-I", "-S", str(helper), "--dry-run", "--state-dir", str(private)],
            capture_output=True,
            text=True,
            **as_nobody(),
        )
    assert told.returncode == 1
    assert "permission denied); run this as root" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr

"""`zeusd restore`: pending restores without a zeusd."""

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
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from zeusd.identity import boot_id, driver_id
from zeusd.records import Entry, header, record, replay

INSTALL = Path(__file__).resolve().parents[2] / "packaging" / "helper"
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
    """The helper as it is installed."""
    folder = tmp_path_factory.mktemp("libexec")
    subprocess.run([INSTALL, folder], check=True)
    return folder / "zeusd-restore.py"


class Wreck:
    """A zeusd that was killed while a process held everything, and its journal."""

    def __init__(
        self, directory: Path, daemon: RunningDaemon, double: NvmlDouble, helper: Path
    ) -> None:
        self.directory = directory
        self.helper = helper
        self.daemon = daemon
        self.double = double
        self.holder = script(HOLDER, daemon.socket)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "holding\n"

    def kill(self, holder: bool = True) -> None:
        self.daemon.kill()
        if holder:
            self.holder.kill()
            self.holder.wait()
        self.calls = len(self.double.calls())

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """The helper as the units run it: isolated, without site-packages."""
        return subprocess.run(
            [
                *(sys.executable, "-I", "-S", str(self.helper)),
                *("--state-dir", str(self.daemon.state_dir), *options),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, **self.double.env},
            timeout=TIMEOUT_S,
        )

    def written(self) -> list[tuple[str, int, int]]:
        calls = self.double.calls()[self.calls :]
        return sorted((call.symbol, call.gpu, call.arguments[0]) for call in calls)

    def limits(self) -> list[int]:
        return [self.double.limit_mw(gpu) for gpu in range(2)]


@pytest.fixture
def wreck(helper: Path) -> Iterator[Wreck]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        double = NvmlDouble(directory, [{}, {}], privilege=0 if os.getuid() == 0 else 1)
        daemon = stack.enter_context(
            running_daemon(
                *("--nvml-library", double.library),
                gpus=2,
                env=double.env,
                directory=directory,
            )
        )
        wreck = Wreck(directory, daemon, double, helper)
        yield wreck
        wreck.holder.kill()
        wreck.holder.wait()


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
    wreck.kill()
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]
    assert wreck.written() == BACK
    again = wreck.run()
    assert again.returncode == 0
    assert "no pending restores" in again.stderr
    assert wreck.written() == BACK


def test_it_does_nothing_while_a_zeusd_runs(wreck: Wreck) -> None:
    wreck.calls = len(wreck.double.calls())
    done = wreck.run("--all")
    assert done.returncode == 0
    assert "restores by itself" in done.stderr
    assert wreck.written() == []


def test_it_keeps_leases_of_running_processes_unless_all_are_requested(wreck: Wreck) -> None:
    wreck.kill(holder=False)
    assert wreck.run().returncode == 0
    assert wreck.limits() == [150_000, 150_000]
    assert "would be restored" in wreck.run("--all", "--dry-run").stderr
    assert wreck.written() == []
    assert wreck.run("--all").returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]
    # The next zeusd informs the running holder that it lost its leases.
    wreck.daemon.start_again()
    wreck.daemon.wait_until_serving(2)
    lost = [key for key in journal(wreck) if key.startswith("loss/")]
    assert len(lost) == 3


@pytest.mark.parametrize("seconds", [3600.0, 0.5])
def test_ceilings_bound_restores_and_fall_to_their_fallback_without_a_zeusd(
    wreck: Wreck, seconds: float
) -> None:
    """They were set after the lease that is restored; its holder had less than they allow."""
    with wreck.daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        until_ns = _boot_ns() + int(seconds * 1e9)
        client.set_ceiling(gpus, "fleet", 220_000, until_boot_ns=until_ns, fallback_mw=160_000)
    wreck.kill()
    wait_for(lambda: seconds > 1 or _boot_ns() > until_ns, "the deadline to pass")
    assert wreck.run().returncode == 0
    assert wreck.limits() == 2 * [220_000 if seconds > 1 else 160_000]
    assert wreck.run("--all").returncode == 0
    assert wreck.limits() == [160_000, 160_000]
    assert "no pending restores" in wreck.run("--all").stderr
    wreck.daemon.start_again()
    wreck.daemon.wait_until_serving(2)
    with wreck.daemon.client() as client:
        assert {gpu.power_limit_highest_mw for gpu in client.node().gpus} == {160_000}
        client.set_ceiling(gpus, "fleet", None)
        assert wreck.limits() == [LIMIT, LIMIT]


def test_what_it_writes_is_in_the_journal_before(wreck: Wreck) -> None:
    """It may be killed, or the driver come late; the next zeusd must know whose value it finds."""
    with wreck.daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        until_ns = _boot_ns() + 60_000_000_000
        client.set_ceiling(gpus, "fleet", 220_000, until_boot_ns=until_ns, fallback_mw=160_000)
    wreck.kill()
    wreck.double.inject(0, SET_LIMIT, 999)
    assert wreck.run("--all").returncode == 1
    said = replay((wreck.daemon.state_dir / "journal").read_bytes(), boot_id()).entries
    assert [160_000] in said[f"pending/{gpus[0]}/power_limit"]["doubts"]
    assert said[f"ceiling/{gpus[0]}/power_limit/fleet"]["value"] == [160_000]


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def journal(wreck: Wreck) -> list[str]:
    data = (wreck.daemon.state_dir / "journal").read_bytes()
    return [*replay(data, boot_id()).entries]


def test_after_a_stop_that_was_cut_short_everything_is_restored(wreck: Wreck) -> None:
    wreck.double.inject(1, SET_LIMIT, 15)
    wreck.daemon.process.terminate()
    wait_for(lambda: wreck.daemon.records("restore_failed"), "the stop to meet its obstacle")
    wreck.kill(holder=False)
    wreck.double.clear_faults()
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]


def test_a_failing_gpu_is_reported_kept_in_the_journal_and_restored_later(wreck: Wreck) -> None:
    wreck.kill()
    wreck.double.inject(0, SET_LIMIT, 15)
    done = wreck.run()
    assert done.returncode == 1
    assert "run this again" in done.stderr
    assert wreck.limits() == [150_000, LIMIT]
    wreck.double.clear_faults()
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]


def test_a_stuck_gpu_delays_no_other(wreck: Wreck) -> None:
    wreck.kill()
    wreck.double.inject(0, SET_LIMIT, delay_ms=60_000)
    code = (
        "import os, runpy, sys; helper = runpy.run_path(sys.argv[1], run_name='helper'); "
        "names = helper['restore'].__globals__; each_gpu = names['_each_gpu']; "
        "names['_each_gpu'] = lambda pending, restore_one, _: each_gpu(pending, restore_one, 2.0); "
        "os._exit(helper['main'](sys.argv[2:]))"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c", code, str(wreck.helper)),
            *("--state-dir", str(wreck.daemon.state_dir)),
        ],
        env={**os.environ, **wreck.double.env},
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert wreck.limits() == [150_000, LIMIT]


def test_a_value_set_by_someone_else_is_not_touched(wreck: Wreck) -> None:
    wreck.kill()
    wreck.double.set_outside(0, 200_000)
    assert wreck.run().returncode == 0
    assert wreck.limits() == [200_000, LIMIT]


def test_limits_that_shrank_become_the_nearest(wreck: Wreck) -> None:
    wreck.kill()
    wreck.double.set_limits(1, 100_000, 220_000)
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, 220_000]


def write_journal(path: Path, boot: str, entries: dict[str, Entry]) -> None:
    records = [record(boot, key, entry) for key, entry in entries.items()]
    path.write_bytes(b"".join([header(boot), *records]))


def test_another_boot_and_another_driver_invalidate_the_journal(wreck: Wreck) -> None:
    wreck.kill()
    path = wreck.daemon.state_dir / "journal"
    entries = replay(path.read_bytes(), boot_id()).entries
    write_journal(path, "another-boot", entries)
    assert wreck.run("--all").returncode == 0
    assert entries["driver"]["id"] == driver_id()
    entries["driver"]["id"] = "another-driver"
    write_journal(path, boot_id(), entries)
    done = wreck.run("--all")
    assert done.returncode == 0
    assert "reloaded" in done.stderr
    assert wreck.written() == []


def test_a_partial_record_and_garbage_do_not_stop_it(wreck: Wreck) -> None:
    wreck.kill()
    with (wreck.daemon.state_dir / "journal").open("ab") as file:
        file.write(b'{"no": "record"}\n["pending/half')
    assert wreck.run().returncode == 0
    assert wreck.limits() == [LIMIT, LIMIT]
    wreck.daemon.start_again()
    wreck.daemon.wait_until_serving(2)
    assert wreck.written() == BACK


@pytest.mark.parametrize(
    "kind", [pytest.param("foreign", marks=pytest.mark.needs("root")), "link", "writable", "fifo"]
)
def test_a_journal_that_cannot_be_trusted_is_not_acted_upon(wreck: Wreck, kind: str) -> None:
    wreck.kill()
    path = wreck.daemon.state_dir / "journal"
    if kind == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif kind == "fifo":
        for one in (path, path.with_name("journal.lock")):
            one.unlink()
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
    wreck.kill()
    done = subprocess.run(
        [sys.executable, "-m", "zeusd", "restore", "--state-dir", str(wreck.daemon.state_dir)],
        env={**os.environ, **wreck.double.env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert wreck.limits() == [LIMIT, LIMIT]


@pytest.mark.needs("two users")
def test_a_user_who_may_not_read_the_journal_gets_an_error() -> None:
    with public_directory() as folder:
        private = folder / "state"
        private.mkdir(mode=0o700)
        (private / "journal").write_bytes(header("boot"))
        subprocess.run([INSTALL, folder], check=True)
        helper = folder / "zeusd-restore.py"
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

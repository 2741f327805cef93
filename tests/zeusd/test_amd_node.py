"""zeusd on the C stand-in for libamd_smi: what a job and a crash write to the driver.

The tests share one zeusd, which the last one kills.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_amdsmi.double import (
    ALWAYS,
    AUTO,
    BY_EUID,
    GRAPHICS,
    MAX,
    MEMORY,
    MIN,
    AmdSmiDouble,
)
from tests.support import RunningDaemon, public_directory, running_daemon, script, wait_for
from tests.zeusd.test_restore import INSTALL

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1])
gpus = [gpu.uuid for gpu in client.node().gpus]
client.set_power_limit(gpus, 400_000)
client.set_memory_clocks(gpus[0], 1000, 1000)
client.set_gpu_clocks(gpus[0], 900, 900)
print("holding", flush=True)
sys.stdin.readline()
"""

SET = [
    ("set_power_cap", (400_000_000, 0, 0)),
    ("set_power_cap", (400_000_000, 0, 0)),
    ("set_gpu_clk_limit", (MEMORY, MAX, 1000)),
    ("set_gpu_clk_limit", (GRAPHICS, MAX, 900)),
    ("set_gpu_clk_limit", (GRAPHICS, MIN, 899)),
]

BACK = [
    ("set_gpu_perf_level", (AUTO, 0, 0)),
    ("set_gpu_clk_limit", (MEMORY, MAX, 1000)),  # whose own restore is next
    ("set_gpu_perf_level", (AUTO, 0, 0)),
    ("set_power_cap", (750_000_000, 0, 0)),
    ("set_power_cap", (750_000_000, 0, 0)),
]


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[RunningDaemon, AmdSmiDouble]]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        privilege = BY_EUID if os.geteuid() == 0 else ALWAYS
        double = AmdSmiDouble(directory, [{}, {}], privilege=privilege)
        config = directory / "zeusd.toml"
        config.write_text(f'[amd]\nlibrary = "{double.library}"\nsysfs = "{double.sysfs}"\n')
        daemon = stack.enter_context(
            running_daemon("--config", str(config), gpus=2, env=double.env, directory=directory)
        )
        yield daemon, double


def state(double: AmdSmiDouble) -> list[tuple[int, int, int, int]]:
    gpus = [double.node.gpus[index] for index in range(2)]
    return [(gpu.cap_uw, gpu.sclk_low, gpu.sclk_high, gpu.mclk_high) for gpu in gpus]


UNTOUCHED = [(750_000_000, 132, 2100, 1300)] * 2


def test_a_killed_job_causes_exactly_the_writes_that_restore_its_gpus(
    node: tuple[RunningDaemon, AmdSmiDouble],
) -> None:
    daemon, double = node
    before = len(double.written())
    with script(HOLDER, daemon.socket) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        assert double.written()[before:] == SET
        holder.kill()
        holder.wait()
    wait_for(lambda: state(double) == UNTOUCHED, "everything to be restored")
    daemon.wait_for_records("restore", 4)
    assert sorted(double.written()[before + len(SET) :]) == sorted(BACK)


def test_the_helper_restores_what_a_killed_zeusd_left(
    node: tuple[RunningDaemon, AmdSmiDouble], tmp_path: Path
) -> None:
    daemon, double = node
    before = len(double.written())
    subprocess.run([INSTALL, tmp_path], check=True)
    with script(HOLDER, daemon.socket) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        daemon.kill()
        holder.kill()
        holder.wait()
    command = [sys.executable, "-I", "-S", str(tmp_path / "zeusd-restore.py")]
    done = subprocess.run(
        [*command, "--state-dir", str(daemon.state_dir)],
        capture_output=True,
        text=True,
        env={**os.environ, **double.env},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "restored to 750 W" in done.stderr
    assert state(double) == UNTOUCHED
    assert sorted(double.written()[before + len(SET) :]) == sorted(
        [
            ("set_gpu_perf_level", (AUTO, 0, 0)),  # the memory clock's lease is the older one
            ("set_gpu_clk_limit", (GRAPHICS, MAX, 900)),
            ("set_gpu_clk_limit", (GRAPHICS, MIN, 899)),
            ("set_gpu_perf_level", (AUTO, 0, 0)),
            ("set_power_cap", (750_000_000, 0, 0)),
            ("set_power_cap", (750_000_000, 0, 0)),
        ]
    )

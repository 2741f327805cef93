"""The scripts that Slurm is given, by their effect."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.support import (
    TIMEOUT_S,
    RunningDaemon,
    configuration,
    running_daemon,
    script,
    wait_for,
    zeusctl_line,
)
from zeus_common.simulation import SimulatedNode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

HOLD = """
import os, sys
from zeus_ipc import Client
for path in sys.argv[3:]:
    open(path + "/cgroup.procs", "w").write(str(os.getpid()))
client = Client(sys.argv[1])
client.set_power_limit(client.node().gpus[int(sys.argv[2])].uuid, 150_000)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie:setter_ms=0", gpus=2) as running:
        yield running


@contextlib.contextmanager
def control_group(name: str) -> Iterator[Path]:
    """A control group as slurmd makes them, in whichever hierarchy this machine has."""
    needs.require("root", "control groups")
    folders = [needs.control_groups() / "zeusd-test"]
    for part in name.split("/"):
        folders.append(folders[-1] / part)
    for folder in folders:
        folder.mkdir(exist_ok=True)
    try:
        yield folders[-1]
    finally:
        for folder in reversed(folders):
            with contextlib.suppress(OSError):
                folder.rmdir()


def run_hook(daemon: RunningDaemon, name: str, tmp_path: Path, **env: str) -> Any:
    """A Slurm script as slurmd runs it: root, and hardly an environment."""
    for program, line in {
        "zeusctl": zeusctl_line(),
        "squeue": "",  # the controller: this job asks for no clocks
        "timeout": 'shift; exec "$@"',  # a busy machine may take longer
    }.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / program).chmod(0o755)
    return subprocess.run(
        [str(EXAMPLES / "slurm" / name)],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "ZEUSD_SOCK_PATH": daemon.socket, **env},
    )


def limits(daemon: RunningDaemon) -> list[float]:
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]
        return [(state.power_limit_mw or 0) / 1000 for state in client.state(uuids).values()]


def test_the_epilog_releases_what_its_job_holds_and_nothing_else(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    with (
        control_group("slurm/uid_0/job_4711/step_0") as group,
        script(HOLD, daemon.socket, "0", str(group)) as job,
        script(HOLD, daemon.socket, "1") as other,
    ):
        for process in (job, other):
            assert process.stdout.readline() == "held\n"
        assert limits(daemon) == [150, 150]
        with daemon.client() as client:
            assert {lease.job for lease in client.leases()} == {"4711", None}
        assert run_hook(daemon, "epilog.sh", tmp_path, SLURM_JOB_ID="4712").returncode == 0
        assert limits(daemon) == [150, 150]
        done = run_hook(daemon, "epilog.sh", tmp_path, SLURM_JOB_ID="4711")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert limits(daemon) == [250, 150]
        assert run_hook(daemon, "epilog.sh", tmp_path, SLURM_JOB_ID="4711").returncode == 0
        for process in (job, other):
            process.communicate("\n", timeout=TIMEOUT_S)
    wait_for(lambda: limits(daemon) == [250, 250], "everything to be back")


def test_the_epilog_also_releases_what_a_sluid_names(daemon: RunningDaemon, tmp_path: Path) -> None:
    """As from Slurm 26.05 on, whose control groups have no `job_N`."""
    with (
        control_group("slurmstepd.scope/sEKNKTV3WPV500/step_0") as group,
        script(HOLD, daemon.socket, "0", str(group)) as job,
    ):
        assert job.stdout.readline() == "held\n"
        with daemon.client() as client:
            assert [lease.job for lease in client.leases()] == ["sEKNKTV3WPV500"]
        names = {"SLURM_JOB_ID": "4713", "SLURM_JOB_SLUID": "sEKNKTV3WPV500"}
        done = run_hook(daemon, "epilog.sh", tmp_path, **names)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert limits(daemon) == [250, 250]
        job.communicate("\n", timeout=TIMEOUT_S)


def test_the_prolog_gives_a_job_gpus_at_the_site_limit(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        path = client.node().simulated
    assert path is not None
    simulated = SimulatedNode(path)
    for gpu in range(2):
        simulated.set_outside(gpu, 120_000)
    done = run_hook(daemon, "prolog.sh", tmp_path, SLURM_JOB_ID="1", SLURM_JOB_GPUS="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert limits(daemon) == [120, 250]
    assert run_hook(daemon, "prolog.sh", tmp_path, SLURM_JOB_ID="1").returncode == 0
    assert limits(daemon) == [120, 250]
    with daemon.client() as client:
        client.restore()


def test_a_job_is_charged_from_its_prolog_to_its_epilog(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "4714", "SLURM_JOB_UID": "0", "SLURM_JOB_GPUS": "1"}
    options = configuration(tmp_path, f'[accounting]\ndirectory = "{tmp_path}"\n')
    with running_daemon("--simulate", "2xv100-pcie", *options, gpus=2) as daemon:
        done = run_hook(daemon, "prolog.sh", tmp_path, **job)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        with daemon.client() as client:
            ledger = client.metrics().ledger
            assert ledger is not None
            held = [(one.gpu, one.kind, one.name) for one in ledger.held]
            assert held == [(client.node().gpus[1].uuid, "job", "4714")]
        done = run_hook(daemon, "epilog.sh", tmp_path, **job)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("job 4714")
        with daemon.client() as client:
            ledger = client.metrics().ledger
            assert ledger is not None
            assert ledger.held == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "prolog.sh",
            "zeusd prolog: job 7, GPUs 0: energy is not charged (3), not reset (3): no zeusd ",
        ),
        (
            "epilog.sh",
            "zeusd epilog: job 7, GPUs 0: still charged to it (3), "
            "leases of 7 are not released (3): no zeusd ",
        ),
    ],
)
def test_no_hook_ever_drains_a_node(
    daemon: RunningDaemon, tmp_path: Path, name: str, problem: str
) -> None:
    """Every problem is reported in slurmd's log, once, and the exit code is 0."""
    nowhere = {"ZEUSD_SOCK_PATH": str(tmp_path / "none"), "SLURM_JOB_ID": "7"}
    done = run_hook(daemon, name, tmp_path, SLURM_JOB_GPUS="0", **nowhere)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(problem)

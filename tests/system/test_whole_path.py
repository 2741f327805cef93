"""The main job, end to end: root daemon, real nvidia-ml-py, a C library, an unprivileged job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    ALL_MAY,
    NOBODY,
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    configuration,
    public_directory,
    running_daemon,
    script,
    wait_for,
)

SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"

JOB = """
import json, os, sys, time, warnings
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import Energy, GlobalPowerLimitOptimizer

monitor = ZeusMonitor()
optimizer = GlobalPowerLimitOptimizer(
    monitor, Energy(), warmup_steps=2, profile_steps=5, pl_step=50, profile_path=sys.argv[1],
    search="exhaustive",
)
optimizer.on_epoch_begin()
for step in range(400):
    optimizer.on_step_begin()
    time.sleep(0.05)  # its work draws 220 W if it may, and takes as long at any limit
    optimizer.on_step_end()
    if type(optimizer.state).__name__ == "Done":
        break
optimizer.on_epoch_end()
print(json.dumps({
    "state": type(optimizer.state).__name__,
    "optimal_mw": getattr(optimizer.state, "optimal_power_limit", None),
    "measured": [[one.power_limit, one.energy] for one in optimizer.measurements],
    "uid": os.getuid(),
}), flush=True)
sys.stdin.readline()
"""
HELD = JOB.replace("time.sleep(0.05)", "time.sleep(0.05) if step != 10 else sys.stdin.readline()")
"""It waits while it tries the second limit, 200 W."""


def chosen_mw(told: dict[str, Any]) -> int:
    """Of least energy, by what the job measured: 100 W, unless the machine delayed its steps."""
    assert [watts for watts, _ in told["measured"]] == [250, 200, 150, 100]
    limit_w, _ = min(told["measured"], key=lambda one: float(one[1]))
    return int(1000 * limit_w)


def tried(choice_mw: int) -> list[int]:
    """What is written. The highest is tried first: it holds already, so nothing to write."""
    last = 100_000
    return [200_000, 150_000, last, *([choice_mw] if choice_mw != last else [])]


def restores(choice_mw: int) -> list[tuple[str, int]]:
    """What goes back at the end, in any order. The highest limit is the initial one."""
    limit = [] if choice_mw == 250_000 else [(SET_LIMIT, 250_000)]
    return [("nvmlDeviceSetPersistenceMode", 0), *limit]


@pytest.fixture
def node() -> Iterator[tuple[RunningDaemon, NvmlDouble, Path]]:
    """zeusd on the C library with two GPUs, as this test's user; only root may set there."""
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}, {}], privilege=0 if os.getuid() == 0 else 1)
        with running_daemon(
            *("--nvml-library", double.library, "--socket-mode", "0666"),
            *configuration(directory),
            gpus=2,
            env=double.env,
            directory=directory,
        ) as daemon:
            yield daemon, double, directory


def job(
    daemon: RunningDaemon, directory: Path, source: str = JOB, gpus: str = "0"
) -> subprocess.Popen[str]:
    """The training job, as an ordinary user if this test may become one."""
    writable = directory / "job"
    writable.mkdir(exist_ok=True)
    writable.chmod(0o777)
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket, "CUDA_VISIBLE_DEVICES": gpus}
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return script(source, str(writable / "profile.json"), env=env, cwd=writable, **as_nobody())


def test_an_unprivileged_job_finds_its_limit_and_every_write_is_recorded(
    node: tuple[RunningDaemon, NvmlDouble, Path],
) -> None:
    daemon, double, directory = node
    training = job(daemon, directory)
    told = json.loads(training.stdout.readline())
    assert told["state"] == "Done"
    assert told["optimal_mw"] == chosen_mw(told)
    limits = tried(chosen_mw(told))
    assert told["uid"] == (NOBODY if os.getuid() == 0 else os.getuid())
    assert double.limit_mw(0) == chosen_mw(told)
    training.stdin.close()
    assert training.wait(TIMEOUT_S) == 0
    back = restores(chosen_mw(told))
    wait_for(lambda: len(double.calls()) >= 1 + len(limits) + len(back), "all to be back")
    assert double.limit_mw(0) == 250_000

    calls = double.calls()
    written = [(call.symbol, call.arguments[0]) for call in calls]
    assert written[: -len(back)] == [
        ("nvmlDeviceSetPersistenceMode", 1),
        *((SET_LIMIT, limit) for limit in limits),
    ]
    assert sorted(written[-len(back) :]) == back
    assert {call.gpu for call in calls} == {0}
    assert {call.result for call in calls} == {0}
    assert {(call.pid, call.uid) for call in calls} == {(daemon.process.pid, os.getuid())}
    assert double.limit_mw(1) == 250_000
    profile = json.loads((directory / "job" / "profile.json").read_text())
    assert [one["power_limit"] for one in profile["measurements"]] == [250, 200, 150, 100]


def test_killing_the_job_restores_the_limit_although_its_workers_keep_running(
    node: tuple[RunningDaemon, NvmlDouble, Path],
) -> None:
    daemon, double, directory = node
    source = JOB.replace(
        "print(json",
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        sys.stdin.read(); os._exit(0)\n"
        "print(json",
    )
    training = job(daemon, directory, source)
    told = json.loads(training.stdout.readline())
    assert double.limit_mw(0) == chosen_mw(told)
    training.send_signal(signal.SIGKILL)
    training.wait()
    wait_for(lambda: double.limit_mw(0) == 250_000, "the limit to be back")
    training.stdin.close()


def test_a_job_that_makes_no_more_steps_loses_its_limit(
    node: tuple[RunningDaemon, NvmlDouble, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads keep running, as beside a collective that never ends."""
    daemon, double, directory = node
    monkeypatch.setenv("ZEUS_STALL_TIMEOUT_S", "2")
    configuration(directory, ALL_MAY + "[lease]\nttl_s = 2\nttl_min_s = 0.5\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.records("reloaded"), "the shorter leases")
    training = job(daemon, directory)
    told = json.loads(training.stdout.readline())
    assert told["state"] == "Done"  # and it keeps running
    wait_for(lambda: double.limit_mw(0) == 250_000, "the limit to be back")
    assert training.poll() is None
    records = daemon.wait_for_records("restore", len(restores(chosen_mw(told))))
    assert {one["reason"] for one in records} == {"expired"}
    training.kill()
    training.wait()


def test_killing_the_job_while_it_profiles(node: tuple[RunningDaemon, NvmlDouble, Path]) -> None:
    daemon, double, directory = node
    training = job(daemon, directory, HELD)
    wait_for(lambda: double.limit_mw(0) == 200_000, "the second limit to be tried")
    training.kill()
    training.wait()
    wait_for(lambda: double.limit_mw(0) == 250_000, "the limit to be back")
    wait_for(lambda: double.node.gpus[0].persistence == 0, "persistence mode to be back")


def test_without_permission_training_continues_with_one_warning() -> None:
    with public_directory() as directory:
        double = NvmlDouble(directory, privilege=2)
        with running_daemon(
            *("--nvml-library", double.library, "--socket-mode", "0666"),
            *configuration(directory),
            gpus=1,
            env=double.env,
            directory=directory,
        ) as daemon:
            source = JOB.replace(
                "monitor = ", "warnings.simplefilter('always')\nmonitor = "
            ).replace('"uid": os.getuid(),', '"disabled": optimizer.disabled,')
            writable = directory / "job"
            writable.mkdir(mode=0o777)
            ran = subprocess.run(
                [sys.executable, "-c", source, str(writable / "profile.json")],
                env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket},
                cwd=writable,
                input="\n",
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["disabled"] is True
    assert told["state"] == "Done"
    assert ran.stderr.count("The power limit optimizer stopped") == 1
    assert "CAP_SYS_ADMIN" in ran.stderr


def test_losing_the_daemon_permanently_does_not_end_training(
    node: tuple[RunningDaemon, NvmlDouble, Path],
) -> None:
    daemon, double, directory = node
    training = job(daemon, directory, HELD.replace("range(400)", "range(60)"))
    wait_for(lambda: double.limit_mw(0) == 200_000, "the second limit to be tried")
    daemon.stop()
    assert double.limit_mw(0) == 250_000
    training.stdin.write("\n")
    training.stdin.flush()
    said = json.loads(training.stdout.readline())
    assert (said["state"], said["optimal_mw"]) == ("Ready", None), "it would search on"
    training.stdin.close()
    assert training.wait(TIMEOUT_S) == 0


def test_a_driver_that_comes_late_is_found(tmp_path: Path) -> None:
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}, {}])
        double.node.init_code = 9
        config = tmp_path / "zeusd.toml"
        config.write_text("[nvml]\nretry_s = 0.05\n")
        with running_daemon(
            *("--nvml-library", double.library, "--config", str(config)),
            env=double.env,
            directory=directory,
        ) as daemon:
            assert wait_for(lambda: daemon.records("no_driver"), "a record")[0]["device_code"] == 9
            double.node.init_code = 0
            daemon.wait_until_serving(gpus=2)
            assert len(daemon.records("no_driver")) == 1


def test_in_process_without_a_daemon(tmp_path: Path) -> None:
    """Root without zeusd: the same core runs in the job, and puts the limit back at its end."""
    with public_directory() as directory:
        double = NvmlDouble(directory, privilege=1)
        source = "import pynvml, ctypes, sys\npynvml.nvmlLib = ctypes.CDLL(sys.argv[2])\n" + JOB
        env = {name: value for name, value in os.environ.items() if name != "ZEUSD_SOCK_PATH"}
        ran = subprocess.run(
            [sys.executable, "-c", source, str(tmp_path / "profile.json"), double.library],
            env={**env, **double.env, "ZEUSD_STATE_DIR": str(tmp_path / "state")},
            input="\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert ran.returncode == 0, ran.stderr
        told = json.loads(ran.stdout)
        assert told["optimal_mw"] == chosen_mw(told)
        written = [call.arguments[0] for call in double.calls(SET_LIMIT)]
        choice_mw = chosen_mw(told)
        back = [mw for symbol, mw in restores(choice_mw) if symbol == SET_LIMIT]
        assert written == [*tried(choice_mw), *back]
        assert double.limit_mw(0) == 250_000
        assert not list((tmp_path / "state").iterdir())


def test_settings_of_a_job_killed_in_process_are_restored_by_the_next(tmp_path: Path) -> None:
    with public_directory() as directory:
        double = NvmlDouble(directory, privilege=1)
        env = {name: value for name, value in os.environ.items() if name != "ZEUSD_SOCK_PATH"}
        env = {**env, **double.env, "ZEUSD_STATE_DIR": str(tmp_path / "state")}
        load = "import pynvml, ctypes, sys\npynvml.nvmlLib = ctypes.CDLL(sys.argv[1])\n"
        killed = script(
            load + "from zeus.device import get_gpus\n"
            "get_gpus().set_power_management_limit(0, 120_000)\n"
            "print('set', flush=True); sys.stdin.read()",
            double.library,
            env=env,
        )
        assert killed.stdout.readline() == "set\n"
        killed.kill()
        killed.wait()
        assert double.limit_mw(0) == 120_000
        subprocess.run(
            [
                *(sys.executable, "-c"),
                load + "from zeus.device import get_gpus; print(len(get_gpus()))",
                double.library,
            ],
            env=env,
            check=True,
            timeout=TIMEOUT_S,
        )
        assert double.limit_mw(0) == 250_000

"""Workload power profiles on the C stand-in for libnvidia-ml: the writes of a lease and a crash.

The tests share one zeusd, which the last one kills.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_nvml.double import ALWAYS, BY_EUID, NvmlDouble, mask_of
from tests.support import RunningDaemon, public_directory, running_daemon, wait_for, zeusctl_line
from tests.zeusd.killed import holding, installed, run_helper
from zeus_ipc.errors import LeaseHeld
from zeusctl.cli import main

GB200 = {"architecture": 10, "profiles_valid": mask_of(0, 1, 2, 3, 5, 6, 7, 13)}

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1])
gpus = [gpu.uuid for gpu in client.node().gpus]
client.set(gpus, "power_profile", [1, 7])
print("holding", flush=True)
sys.stdin.readline()
"""

UPDATE = "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1"
CLEAR, SET = 0, 1


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[RunningDaemon, NvmlDouble]]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        privilege = BY_EUID if os.geteuid() == 0 else ALWAYS
        double = NvmlDouble(directory, [GB200, GB200], privilege=privilege)
        options = ("--nvml-library", double.library)
        daemon = stack.enter_context(
            running_daemon(*options, gpus=2, env=double.env, directory=directory)
        )
        yield daemon, double


def written(double: NvmlDouble, gpu: int, since: int) -> list[tuple[int, int]]:
    calls = double.calls()[since:]
    assert {call.symbol for call in calls} <= {UPDATE}
    return [call.arguments for call in calls if call.gpu == gpu]


def test_a_killed_holders_profiles_are_cleared_and_nobody_elses(
    node: tuple[RunningDaemon, NvmlDouble],
) -> None:
    daemon, double = node
    double.request_outside(0, 13)
    double.request_outside(1, 1)  # the holder requests it, too
    before = len(double.calls())
    with holding(HOLDER, daemon), daemon.client() as client:
        assert [double.profiles(gpu) for gpu in range(2)] == [{1, 7, 13}, {1, 7}]
        uuid = client.node().gpus[0].uuid
        assert [one.name for one in client.node().gpus[0].power_profiles][:2] == ["max-p", "max-q"]
        state = client.state(uuid)[uuid]
        assert state.controls["power_profile"] == [1, 7, 13]
        assert state.enforced_power_profiles == [1, 7, 13]
        with pytest.raises(LeaseHeld, match="ask for both together"):
            client.set_power_limit(uuid, 200_000)
        double.request_outside(0, 1, 6, 7)  # someone clears 13, and requests 6, which 7 loses to
        wait_for(lambda: client.state(uuid)[uuid].enforced_power_profiles == [1, 6], "the loser")
    wait_for(lambda: double.profiles(0) == {6} and double.profiles(1) == {1}, "the restore")
    assert written(double, 0, before) == [(SET, mask_of(1, 7)), (CLEAR, mask_of(1, 7))]
    assert written(double, 1, before) == [(SET, mask_of(7)), (CLEAR, mask_of(7))]


def test_zeusctl_sets_profiles_by_name_and_shows_what_is_enforced(
    node: tuple[RunningDaemon, NvmlDouble],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon, double = node
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    double.request_outside(0, 6)
    inner = ["sh", "-c", zeusctl_line(), "sh", "show", "0"]
    with pytest.raises(SystemExit) as ended:
        main(["set", "0", "--power-profile", "llm-training,max-q", "--", *inner])
    said = capfd.readouterr()
    assert ended.value.code == 0, said.err
    assert "GPU 0: power_profile max-q, llm-inference, llm-training" in said.err
    assert "profiles requested  max-q, llm-inference, llm-training" in said.out
    assert "profiles enforced   max-q, llm-inference\n" in said.out
    assert double.profiles(0) == {6}
    with pytest.raises(SystemExit) as ended:
        main(["set", "0", "-p", "200", "--power-profile", "max-q", "--", "true"])
    assert ended.value.code != 0
    assert "beside power_limit, which is leased" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["set", "0", "-p", "200", "--power-profile", "max-q", "--together", "--", "true"])
    assert ended.value.code == 0
    assert (double.profiles(0), double.limit_mw(0)) == ({6}, 250_000)


@pytest.mark.parametrize("old", [0, 1])
def test_without_a_daemon_the_helper_clears_profiles_of_dead_processes(
    tmp_path: Path, old: int
) -> None:
    with public_directory() as directory:
        privilege = BY_EUID if os.geteuid() == 0 else ALWAYS
        gpus = [GB200 | {"profiles_old": old}] * 2
        double = NvmlDouble(directory, gpus, privilege=privilege)
        options = ("--nvml-library", double.library)
        with running_daemon(*options, gpus=2, env=double.env, directory=directory) as daemon:
            double.request_outside(0, 13)
            with holding(HOLDER, daemon):
                daemon.kill()
            double.request_outside(0, 1, 5, 7, 13)
            command = ("-I", "-S", str(installed(tmp_path)))
            done = run_helper(*command, state_dir=daemon.state_dir, env=double.env)
            assert done.returncode == 0, done.stderr
            assert "restored to balanced, hpc" in done.stderr
            assert [double.profiles(gpu) for gpu in range(2)] == [{5, 13}, set()]

"""`slurm` as GPUS: those of the job that a prolog or epilog is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import running_daemon, wait_for
from tests.zeusctl.conftest import Ctl, with_ledger
from zeus_common.simulation import SimulatedNode
from zeusctl.exits import Exit


def test_slurm_names_the_jobs_gpus(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [gpu["uuid"] for gpu in json.loads(ctl("gpus", "--json").out)["gpus"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuids[3]},{uuids[1]}")
    said = ctl("set", "slurm", "-p", "200", "--ceiling", "job:7", "--json")
    assert [one["gpu"] for one in json.loads(said.out)["settings"]] == [3, 1]
    assert ctl("reset", "slurm", "--ceiling", "job:7").code == 0


def test_gpu_freq_is_a_lease_of_clocks_on_each_of_the_jobs_gpus(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ("--simulate", "1xa100-sxm-80,2xa40")
    with running_daemon(*nodes, gpus=3) as daemon, daemon.client() as client:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        gpus = client.node().gpus
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{gpus[0].uuid},{gpus[2].uuid}")
        said = ctl("set", "slurm", "--gpu-freq", "gpu:high,memory=high", "--json", "--", "true")
        assert said.code == 0, said.err
        found = {
            (one["gpu"], one["control"]): one["value"] for one in json.loads(said.err)["settings"]
        }
        assert found == {
            (gpu.index, control): [mhz, mhz]
            for gpu in (gpus[0], gpus[2])
            for control, mhz in (
                ("gpu_clocks", gpu.gpu_clock_range_mhz[1]),
                ("memory_clocks", max(gpu.memory_clocks_mhz)),
            )
        }
        wait_for(lambda: not client.leases(), "the leases to end with the command")
        for other in ("--gpu-clocks", "--memory-clocks"):
            refused = ctl("set", "slurm", "--gpu-freq", "high", other, "900", "--", "true")
            assert (refused.code, f"{other} has no effect" in refused.err) == (Exit.USAGE, True)


def test_slurm_outside_of_a_job_is_reported(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    said = ctl("status", "slurm")
    assert (said.code, "SLURM_JOB_GPUS names no GPU" in said.err) == (Exit.USAGE, True)


def test_the_prolog_of_a_job_with_a_mig_device(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is charged its slices and its GPU is reset, but not limited for all its other jobs."""
    with (
        running_daemon("--simulate", "1xh100-sxm:mig=1g+3g", *with_ledger(tmp_path)) as daemon,
        daemon.client() as client,
    ):
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        (gpu,) = client.node().gpus
        small, _ = client.processes(gpu.uuid)[gpu.uuid].mig_devices
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "1", "CUDA_VISIBLE_DEVICES": small.uuid}
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        wait_for(lambda: client.timeline(gpu.uuid), "a history")
        assert ctl("allocate", "--slurm") == (0, "job 7 holds GPU 0\n", "")
        reset = ctl("reset", "slurm")
        assert (reset.code, reset.err) == (0, "")
        limited = ctl("set", "slurm", "-p", "300", "--ceiling", "job:7")
        assert limited.code == Exit.NOT_SUPPORTED
        assert "a MIG device has no power limit" in limited.err


def test_a_gpu_that_does_not_answer_delays_no_prolog_and_has_a_reason(
    ctl: Ctl, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = [gpu["uuid"] for gpu in json.loads(ctl("gpus", "--json").out)["gpus"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuids[1])
    monkeypatch.setenv("ZEUSCTL_TIMEOUT", "0.5")
    node.inject(1, "set_power_limit", latency_s=2.0)
    node.inject(1, "power_limit_mw", latency_s=2.0)
    said = ctl("reset", "slurm")
    assert said.code == Exit.UNAVAILABLE
    assert "GPU 1" in said.err
    assert "look at `nvidia-smi` and the kernel log" in said.err
    said = ctl("reset", "all")
    assert (said.code, said.out) == (Exit.UNAVAILABLE, "reset 9 controls on 3 GPUs\n")
    assert "GPU 1 did not answer" in said.err
    assert "GPU 1: did not answer before" in ctl("status").out

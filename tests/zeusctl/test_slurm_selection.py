"""`slurm` as GPUS: those of the job that a prolog or epilog is about."""

from __future__ import annotations

import json

import pytest

from tests.zeusctl.conftest import Ctl
from zeusctl.exits import Exit


def test_slurm_names_the_jobs_gpus(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [gpu["uuid"] for gpu in json.loads(ctl("gpus", "--json").out)["gpus"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuids[3]},{uuids[1]}")
    said = ctl("set", "slurm", "-p", "200", "--ceiling", "job:7", "--json")
    assert [one["gpu"] for one in json.loads(said.out)["settings"]] == [3, 1]
    assert ctl("reset", "slurm", "--ceiling", "job:7").code == 0


def test_slurm_outside_of_a_job_is_reported(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    said = ctl("status", "slurm")
    assert (said.code, "SLURM_JOB_GPUS names no GPU" in said.err) == (Exit.USAGE, True)

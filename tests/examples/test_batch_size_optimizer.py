"""examples/batch_size_optimizer: the commands of its README."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.programs import EXAMPLES, environment, run, torchrun, with_torch
from tests.support import TIMEOUT_S, RunningDaemon, ending, running_daemon, wait_for
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store
from zeus.optimizer.batch_size.trials import Trial

FOLDER = EXAMPLES / "batch_size_optimizer"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as running:
        yield running


@pytest.fixture
def env(daemon: RunningDaemon, tmp_path: Path) -> dict[str, str]:
    """Of the runs. The job's name is theirs."""
    found = environment(daemon.socket, ZEUS_JOB_ID="toy", XDG_CACHE_HOME=str(tmp_path / "cache"))
    for name in ("ZEUS_BSO_RUN_ID", "ZEUS_BSO_TOKEN", "ZEUS_SERVER_URL"):
        found.pop(name, None)
    return found


def trials(path: Path) -> tuple[Any, list[Trial]]:
    """The job, and its trials."""
    store = Store(path)
    record, found = store.job("toy")
    store.close()
    return record.spec, found


def reported(path: Path) -> int:
    """How many epochs of the job's trials were reported; 0 too where there is no job yet."""
    with contextlib.suppress(ZeusBSORuntimeError):
        return sum(trial.epochs for trial in trials(path)[1]) if path.exists() else 0
    return 0


def line(number: int, trial: Trial) -> str:
    """The last output of a run."""
    reached = "reached" if trial.converged else "not reached"
    return (
        f"trial {number}: batch size {trial.batch_size}, target {reached} in {trial.epochs} epochs"
    )


def test_recurrences_with_a_server(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    options = ("--server", "--recurrences", "2", "--seed", "3", "--folder", str(folder))
    ran = run(with_torch("recur.py", *options), FOLDER, env)
    assert ran.returncode == 0, ran.stderr
    _, found = trials(folder / "bso.db")
    assert len(found) == 2
    assert found[0].batch_size == 1024
    assert found[0].converged
    assert len({trial.batch_size for trial in found}) > 1
    assert all(trial.status == "ok" for trial in found)
    assert all(trial.time > 0 and trial.energy > 0 for trial in found)
    lines = re.findall(r"^trial .*", ran.stdout, re.MULTILINE)
    assert lines == [line(number, trial) for number, trial in enumerate(found, 1)]
    assert "best batch size" in ran.stdout


def test_two_gpus_train_with_one_size_and_stop_together(
    env: dict[str, str], tmp_path: Path
) -> None:
    ran = run(torchrun(2, "train.py", "--store", str(tmp_path / "bso.db")), FOLDER, env)
    assert ran.returncode == 0, ran.stderr
    spec, (trial,) = trials(tmp_path / "bso.db")
    assert (spec.number_of_gpus, spec.max_power) == (2, 500)
    assert trial.converged
    assert ran.stdout.splitlines()[-1] == line(1, trial)
    assert len(re.findall(r"^epoch ", ran.stdout, re.MULTILINE)) == trial.epochs


def test_a_run_that_is_stopped_continues(env: dict[str, str], tmp_path: Path) -> None:
    env["ZEUS_BSO_RUN_ID"] = "17"
    database, checkpoint = tmp_path / "bso.db", tmp_path / "toy.pt"
    command = with_torch("train.py", "--store", database, "--checkpoint", checkpoint)
    with ending(subprocess.Popen(command, cwd=FOLDER, env=env, stdout=subprocess.DEVNULL)) as first:
        # Its energy may be known later than its checkpoint is there.
        wait_for(
            lambda: first.poll() is not None or (checkpoint.exists() and reported(database)),
            "the first epoch",
        )
        first.send_signal(signal.SIGTERM)
        assert first.wait(TIMEOUT_S) == -signal.SIGTERM
    _, (trial,) = trials(database)
    assert trial.running
    before = trial.epochs
    assert before >= 1
    ran = run(command, FOLDER, env)
    assert ran.returncode == 0, ran.stderr
    _, (trial,) = trials(database)
    assert trial.converged
    assert trial.epochs > before
    assert ran.stdout.splitlines()[-1] == line(1, trial)
    first_epoch = int(ran.stdout.split()[1].rstrip(":"))
    assert 2 <= first_epoch <= before + 1


def test_errors_are_reported_in_one_sentence(env: dict[str, str], tmp_path: Path) -> None:
    store = str(tmp_path / "bso.db")
    ran = run(with_torch("train.py", "--store", store, "--eta", "2"), FOLDER, env)
    assert ran.returncode == 2
    assert "eta_knob" in ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert not os.listdir(tmp_path)

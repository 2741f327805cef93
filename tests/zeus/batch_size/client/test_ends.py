"""The store learns how a process ends, and the end itself is unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zeus.optimizer.batch_size.store import Store

ROOT = Path(__file__).parents[4]

Ended = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def ended(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Of each case of `ends` the process's wait status, and the trial's status."""
    path = tmp_path_factory.mktemp("ends") / "bso.db"
    shutil.copy(empty_database, path)
    env = {**os.environ, "XDG_CACHE_HOME": str(path.parent), "PYTHONWARNINGS": "ignore"}
    env.pop("ZEUS_BSO_RUN_ID", None)
    command = [sys.executable, "-m", "tests.zeus.batch_size.client.ends", str(path)]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    store = Store(path)
    found = {}
    for line in ran.stdout.splitlines():
        case, status = line.split()
        (trial,) = store.job(f"cifar-{case}")[1]
        found[case] = (int(status), trial.status)
        assert trial.epochs >= 1
    store.close()
    return found


@pytest.mark.parametrize(
    ("case", "code", "reason"),
    [
        ("returns", 0, "cancelled"),
        ("raises", 1, "failed"),
        ("memory", 1, "oom"),
        ("exits", 3, "cancelled"),
        ("terminated", -signal.SIGTERM, "cancelled"),
        ("hung_up", -signal.SIGHUP, "cancelled"),
        ("handled", 3, "cancelled"),
        ("handled_within", 3, "cancelled"),
        ("ignored", 0, "ok"),
        ("over", 1, "ok"),
        ("in_a_thread", 0, "cancelled"),
        ("worker", 0, "ok"),
        ("killed", -signal.SIGKILL, "running"),
        ("interrupted_with_a_name", -signal.SIGTERM, "running"),
    ],
)
def test_an_end(ended: Ended, case: str, code: int, reason: str) -> None:
    status, found = ended[case]
    assert os.waitstatus_to_exitcode(status) == code
    assert found == reason

"""The store learns how a process ends and why, and the end itself is unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zeus.optimizer.batch_size.endings import reason_of
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


# Classes of other libraries, by their names.
TorchOutOfMemory = type("OutOfMemoryError", (RuntimeError,), {})
Xla = type("XlaRuntimeError", (RuntimeError,), {})


def caused(outer: BaseException, inner: BaseException, *, hidden: bool = False) -> BaseException:
    """An error that was raised while another was handled, perhaps `from None`."""
    outer.__context__ = inner
    outer.__suppress_context__ = hidden
    return outer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (SystemExit(), "cancelled"),
        (SystemExit(0), "cancelled"),
        (SystemExit(1), "failed"),
        (SystemExit("no data"), "failed"),
        (ValueError("no data"), "failed"),
        (MemoryError(), "failed"),  # the host's: says nothing about the GPU's
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "failed"),
        (TorchOutOfMemory("Tried to allocate 20.00 MiB"), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), "oom"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "oom"),
        (Xla("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."), "oom"),
        (caused(ValueError("trainer failed"), TorchOutOfMemory()), "oom"),
        (caused(ValueError("trainer failed"), TorchOutOfMemory(), hidden=True), "failed"),
        (caused(KeyboardInterrupt(), TorchOutOfMemory()), "cancelled"),
    ],
    ids=repr,
)
def test_reasons(error: BaseException | None, reason: str) -> None:
    assert reason_of(error) == reason


def test_circular_error_chains() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert reason_of(first) == "failed"

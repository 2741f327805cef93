from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.batch_size.client.fakes import Between, FakeMonitor, job
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
from zeus.optimizer.batch_size.store import Store

Optimize = Callable[..., BatchSizeOptimizer]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, as making its tables takes longest."""
    path = tmp_path_factory.mktemp("store") / "bso.db"
    Store(path).close()
    return path


@pytest.fixture
def kept(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Between:
    """The trials, and the transport between them and the optimizers of `optimize`."""
    path = tmp_path / "bso.db"
    shutil.copy(empty_database, path)
    between = Between(path)
    monkeypatch.setattr("zeus.optimizer.batch_size.store.Store", between)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("ZEUS_BSO_RUN_ID", "ZEUS_BSO_TOKEN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return between


@pytest.fixture
def monitor() -> FakeMonitor:
    """One GPU."""
    return FakeMonitor()


@pytest.fixture
def optimize(kept: Between, monitor: Any) -> Iterator[Optimize]:
    """Makes the optimizer of another run: `optimize(beta_knob=3)`, or with what it takes itself."""
    made: list[BatchSizeOptimizer] = []

    def make(*, like: Any = None, **more: Any) -> BatchSizeOptimizer:
        spec = {name: more.pop(name) for name in list(more) if name in JobSpec.model_fields}
        options = {"store": kept.path, "wait_s": 0.0, **more}
        made.append(BatchSizeOptimizer(like or monitor, job=job(**spec), **options))
        return made[-1]

    yield make
    kept.fails = None
    for one in made:
        one.on_train_end()


@pytest.fixture
def begin(optimize: Optimize) -> Optimize:
    """The same, and asks for the run's batch size."""

    def make(**given: Any) -> BatchSizeOptimizer:
        optimizer = optimize(**given)
        optimizer.get_batch_size()
        return optimizer

    return make

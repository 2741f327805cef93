"""Fixtures for tests of several processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.zeus.power_limit.simulated_job import MakeJob, SimulatedJob, Store
from zeus.optimizer.power_limit import effects, ranks
from zeus.optimizer.power_limit import optimizer as product
from zeus.utils import framework


@pytest.fixture
def make_job(monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """Makes a make_job, and has this process take itself for whichever of its processes runs."""
    now: list[SimulatedJob] = []
    monkeypatch.setattr(framework, "world_size", lambda: now[-1].world)
    monkeypatch.setattr(framework, "rank", lambda: now[-1].current.rank * now[-1].met)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(
        framework, "notes", lambda prefix: framework.Notes(Store(now[-1]).within(prefix))
    )
    for module in (product, effects):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[-1].now_s))

    class Counting:
        def __next__(self) -> int:
            return next(now[-1].current)

    monkeypatch.setattr(ranks, "_parties", Counting())

    def make(world: int, **options: Any) -> SimulatedJob:
        now.append(SimulatedJob(world, **options))
        return now[-1]

    return make

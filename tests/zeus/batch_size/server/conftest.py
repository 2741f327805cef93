"""Both databases, and servers in the tests' own process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.postgresql import PostgreSQL, postgresql
from zeus.optimizer.batch_size.server.router import create_app
from zeus.optimizer.batch_size.server.settings import ServerSettings
from zeus.optimizer.batch_size.store import Store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette would rather have another HTTP client
    from fastapi.testclient import TestClient

Serve = Callable[..., TestClient]


class Clock:
    """A clock that does not advance.

    Attributes:
        now_s: What it shows.
    """

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="session")
def cluster() -> Iterator[PostgreSQL]:
    """A PostgreSQL for the worker; each test has its own database."""
    with postgresql() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store may keep its trials: both databases, one after the other."""
    if request.param == "sqlite":
        return str(tmp_path / "bso.db")
    cluster: PostgreSQL = request.getfixturevalue("cluster")
    return cluster.new_database()


@pytest.fixture
def clock() -> Clock:
    """The time, for the store."""
    return Clock()


@pytest.fixture
def store(database: str, clock: Clock) -> Iterator[Store]:
    """A store in each of them, with leases of a minute."""
    found = Store(database, lease_s=60.0, clock=clock)
    yield found
    found.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a server on SQLite: `serve(SETTING=..., ...)`."""
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> TestClient:
            given = {f"ZEUS_BSO_{name}": str(value) for name, value in settings.items()}
            given.setdefault("ZEUS_BSO_DATABASE_URL", str(tmp_path / "bso.db"))
            app = create_app(ServerSettings.from_env(given))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield start

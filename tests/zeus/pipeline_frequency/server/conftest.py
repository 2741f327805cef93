"""Servers in the tests' own process, for tests that need no separate one."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.pipeline_frequency.server.running import PLAN, frontier
from zeus.optimizer.pipeline_frequency.server.router import PFOServer, create_app
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette would rather have another HTTP client
    from fastapi.testclient import TestClient

Serve = Callable[..., TestClient]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a server: `serve({scheduler arguments} or None, SETTING=..., ...)`."""
    with contextlib.ExitStack() as stack:

        def start(args: dict[str, Any] | None = None, **settings: Any) -> TestClient:
            environment = {f"ZEUS_PFO_{name}": str(value) for name, value in settings.items()}
            environment.setdefault("ZEUS_PFO_DUMP_DIR", str(tmp_path / "dump"))
            if args is not None:
                environment["ZEUS_PFO_SCHEDULER_ARGS"] = json.dumps(args)
            app: PFOServer = create_app(PlanServerSettings.from_env(environment))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield start


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    """One plan's file."""
    path = tmp_path / "freqs_pipeline_00042.py"
    path.write_text(PLAN)
    return str(path)


@pytest.fixture
def http(serve: Serve, folder: str) -> TestClient:
    """A server of a frontier."""
    return serve({"solution_path": folder})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A frontier's folder."""
    frontier().write(tmp_path / "plans")
    return str(tmp_path / "plans")

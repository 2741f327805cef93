"""HTTP servers in their own processes, which can be killed and restarted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from tests.preloaded import Program, preloaded
from tests.support import TIMEOUT_S, free_port, stopped, wait_for


def environment(prefix: str, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of these tests, with these settings instead of any that begin with the prefix."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
    return {**kept, **{f"{prefix}{name}": value for name, value in (settings or {}).items()}}


IMPORTED = (
    *("uvicorn", "uvicorn.protocols.http.auto", "uvicorn.lifespan.on", "httpx"),
    *("fastapi.responses", "prometheus_client", "sqlalchemy.orm", "psycopg"),
    "zeus.optimizer.batch_size.server.views",
    "zeus.optimizer.batch_size.store",
    "zeus.optimizer.pipeline_frequency.server.job_manager",
    "zeus.utils.web",
)
"""Most of what the servers import. Their routers read the environment when they are imported."""


class ServerProcess:
    """A server that answers `GET /healthz`, as a process whose modules have been imported before.

    Args:
        directory: Where it runs and keeps what it keeps.
        arguments: What Python runs, without the port.
        env: Its environment.
    """

    def __init__(self, directory: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.directory = directory
        self.log_path = directory / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = arguments
        self._env = env
        self.process = self._spawn()
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, verify=False)

    def _spawn(self) -> Program:
        start, where = preloaded(*IMPORTED).start, self.directory
        command = [*self._arguments, "--port", str(self.port)]
        with self.log_path.open("ab") as log:
            return start(*command, cwd=where, env=self._env, stdout=log, stderr=log)

    def wait_until_serving(self) -> None:
        """Waits until it answers."""

        def answers() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            try:
                return self.http.get("/healthz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers, "the server to answer")

    def log(self) -> str:
        """All its output."""
        return self.log_path.read_text()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """The same once more, at the same port."""
        self.process = self._spawn()
        self.wait_until_serving()

    def stop(self) -> int:
        """SIGTERM, and waits for the end. Returns the exit code."""
        return stopped(self.process)

"""HTTP servers as processes of their own, killed and started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from tests.support import TIMEOUT_S, stopped, wait_for


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment(prefix: str, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of these tests, with these settings instead of any that begin with the prefix."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
    return {**kept, **{f"{prefix}{name}": value for name, value in (settings or {}).items()}}


class ServerProcess:
    """A server that answers `GET /healthz`, as a process of its own.

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
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, *self._arguments, "--port", str(self.port)]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self.directory,
            )

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
        """All it said."""
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

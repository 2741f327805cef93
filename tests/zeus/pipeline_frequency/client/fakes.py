"""A server that behaves as a test says, and torch.distributed without torch."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from tests.support import TIMEOUT_S


class Store:
    """A key-value store of torch.distributed's kind, or the part of one with a prefix."""

    def __init__(self, prefix: str = "", whole: Store | None = None) -> None:
        self.prefix, self.whole = prefix, whole or self
        self.notes: dict[str, bytes] = {}
        self.broken = False

    def _reached(self) -> dict[str, bytes]:
        if self.whole.broken:
            raise RuntimeError("connection reset")
        return self.whole.notes

    def set(self, key: str, value: bytes) -> None:
        self._reached()[self.prefix + key] = value

    def check(self, keys: list[str]) -> bool:
        return all(self.prefix + key in self._reached() for key in keys)

    def get(self, key: str) -> bytes:
        return self._reached()[self.prefix + key]


def fake_torch(store: Store | None) -> SimpleNamespace:
    """The functions of torch that are called, on a machine without CUDA."""
    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False),
        distributed=SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_world_size=lambda: 1,
            get_rank=lambda: 0,
            PrefixStore=lambda prefix, store: Store(f"{prefix}/", store),
            distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
        ),
    )


class FakeServer:
    """Serves schedules, and other answers that a test sets.

    Attributes:
        asked: Method, path and body of each request.
        schedule: What every rank gets; a plan by version.
        updates: The newest plan: version, first iteration and steps.
        failures: Status and detail that the next requests of a path get instead.
        known: Jobs that the server knows.
    """

    def __init__(self, port: int = 0) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.schedule: list[tuple[str, int]] = []
        self.version = 0
        self.at_iteration = 0
        self.note: str | None = None
        self.update: list[tuple[str, int]] = []
        self.failures: dict[str, list[tuple[int, Any]]] = {}
        self.known: set[str] = set()
        self.has_progress = True
        self.silent = threading.Event()
        self.guard = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def log_message(self, *args: Any) -> None:
                pass

            def _answer(self, method: str) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                if server.silent.is_set():
                    server.stopping.wait(TIMEOUT_S)
                status, content = server.answer(method, self.path, body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *args: Any) -> None:
                pass

        self.stopping = threading.Event()
        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        path = target.partition("?")[0]
        with self.guard:
            self.asked.append((method, target, body))
            name, _, job = path.lstrip("/").partition("/")
            waiting = self.failures.get(name)
            if waiting:
                return waiting.pop(0)
            if name == "register_job":
                job = f"job-{len(self.known)}"
                self.known.add(job)
                return 200, job
            if name == "progress" and not self.has_progress:
                return 404, {"detail": "Not Found"}
            if job not in self.known:
                return 404, {"detail": f"there is no job {job}"}
            if name == "schedule":
                rank = int(target.partition("rank=")[2].partition("&")[0])
                return 200, {"rank": rank, "frequencies": self.schedule, "version": self.version}
            if name == "progress":
                if isinstance(body, list):
                    return 200, [self._update(one) for one in body]
                return 200, self._update(body)
            return 200, None

    def _update(self, report: Any) -> Any:
        newest = report["version"] >= self.version
        return {
            "version": self.version,
            "at_iteration": self.at_iteration,
            "frequencies": None if newest else self.update or self.schedule,
            "note": self.note,
        }

    def of(self, name: str) -> list[Any]:
        """Bodies of the requests of a path."""
        with self.guard:
            return [body for _, path, body in self.asked if path.startswith(f"/{name}")]

    def stop(self) -> None:
        """Ends it."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

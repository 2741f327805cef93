"""HTTP interface of a service: one request's energy, sums, and metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from zeus.serving.accountant import Accountant
from zeus.serving.service import as_json

if TYPE_CHECKING:
    from zeus.serving.service import Service

TIMEOUT_S = 5.0
"""Time limit for a client; slower ones are disconnected."""


class Web:
    """A server in its own threads.

    `GET /energy/{request id}`: the energy of a finished request, 404 if it is not known (yet).
    `GET /totals`: sums of settled periods by engine. `GET /metrics`: for Prometheus.

    Args:
        address: Host and port.
        service: The service that owns the accountants.
        accountants: Accountants by engine.
        registry: A `prometheus_client.CollectorRegistry`; None: there are no metrics.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        service: Service,
        accountants: Mapping[str, Accountant],
        registry: Any = None,
    ) -> None:
        web = self
        self._service, self._accountants, self._registry = service, accountants, registry

        class Handler(BaseHTTPRequestHandler):
            timeout = TIMEOUT_S

            def do_GET(self) -> None:
                status, kind, body = web.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The address that it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, target: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path."""
        path = urlsplit(target).path
        json_type = "application/json"
        if path.startswith("/energy/"):
            wanted = unquote(path[len("/energy/") :])
            with self._service.guard:
                for engine, accountant in self._accountants.items():
                    row = accountant.energy(wanted)
                    if row is not None:
                        return 200, json_type, as_json(engine, row).encode()
            return (
                404,
                json_type,
                _error(
                    f"the energy of request {wanted!r} is not known; it is available about "
                    "two seconds after the request's end"
                ),
            )
        if path == "/totals":
            with self._service.guard:
                sums = {name: vars(one.totals) for name, one in self._accountants.items()}
            return 200, json_type, json.dumps(sums).encode()
        if path == "/metrics":
            if self._registry is None:
                return (
                    501,
                    json_type,
                    _error("metrics need prometheus_client: pip install 'zeusd[metrics]'"),
                )
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            with self._service.guard:
                return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        return 404, json_type, _error("the paths are /energy/{request id}, /totals and /metrics")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()

"""HTTP interface of a service: one request's energy, sums, and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from zeus.serving.accountant import Accountant
from zeus.serving.service import as_json
from zeus_ipc.http_guard import WebServer

if TYPE_CHECKING:
    from zeus.serving.service import Service


class Web(WebServer):
    """A server in its own threads.

    `GET /energy/{request id}`: the energy of a finished request, 404 if it is not known (yet).
    `GET /totals`: sums of settled periods by engine. `GET /metrics`: for Prometheus.

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
        self._service, self._accountants, self._registry = service, accountants, registry
        super().__init__(*address, self._respond)

    def _respond(self, wsgi: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = wsgi["PATH_INFO"].encode("latin-1").decode(errors="replace")
        status, kind, body = self.answer(path)
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        start_response(f"{status} {HTTPStatus(status).phrase}", headers)
        return [body]

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path, which is decoded."""
        json_type = "application/json"
        if path.startswith("/energy/"):
            wanted = path[len("/energy/") :]
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
                sums = {name: vars(one.ledger.totals) for name, one in self._accountants.items()}
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

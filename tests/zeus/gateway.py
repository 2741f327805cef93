"""A Prometheus push gateway in this process, which records pushes."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.parser import text_string_to_metric_families


class Series:
    """The content of a gateway."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for family in text_string_to_metric_families(text):
            self.types[family.name] = family.type
            self._samples += [(one.name, one.labels, one.value) for one in family.samples]

    def of(self, name: str, **labels: str) -> list[float]:
        return [
            value
            for found, having, value in self._samples
            if found == name and labels.items() <= having.items()
        ]

    def one(self, name: str, **labels: str) -> float | None:
        values = self.of(name, **labels)
        assert len(values) <= 1, (name, labels, values)
        return values[0] if values else None


class Double:
    """A push gateway that behaves as a test says.

    Attributes:
        does: `take`, `refuse`, or `hang` until it is told something else.
        pushes: Path and body of each push that it took.
        asked: How many came.
        authorizations: The headers `Authorization` that came.
    """

    def __init__(self, port: int = 0) -> None:
        self.does = "take"
        self.pushes: list[tuple[str, str]] = []
        self.asked = 0
        self.authorizations: list[str] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                double.asked += 1
                if "Authorization" in self.headers:
                    double.authorizations.append(self.headers["Authorization"])
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                while double.does == "hang":
                    time.sleep(0.01)
                if double.does == "take":
                    double.pushes.append((self.path, body))
                with contextlib.suppress(OSError):
                    self.send_response(200 if double.does == "take" else 507)
                    self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=partial(self._server.serve_forever, 0.01), daemon=True).start()

    def series(self) -> Series:
        """The content of the last push."""
        return Series(self.pushes[-1][1] if self.pushes else "")

    def close(self) -> None:
        self.does = "refuse"
        self._server.shutdown()
        self._server.server_close()

"""A web service in this process that answers as was recorded, or does not."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class RecordedService:
    """Answers by path, and records the requests.

    Attributes:
        answers: Status and JSON by path.
        asked: Path, query and headers of each request.
    """

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self.url = ""


@contextlib.contextmanager
def recorded_service(answers: dict[str, tuple[int, Any]]) -> Iterator[RecordedService]:
    service = RecordedService(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            service.asked.append((parts.path, query, dict(self.headers)))
            status, answer = service.answers.get(parts.path, (404, {"error": "not found"}))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

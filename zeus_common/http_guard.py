"""What each HTTP service checks before it answers: by what name it was reached, and how many wait.

A page of another site can reach a service of this machine or network by a name of its own domain,
which it lets point there (DNS rebinding): a browser then takes the service for a part of that site.
Standard library only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from zeus_ipc.overriding import override

HOSTS = "ZEUS_HTTP_HOSTS"
"""Environment variable with further names of a server, separated by commas; `*`: any."""

_PRIVATE = (".localhost", ".local", ".internal", ".svc", ".home.arpa", ".lan")
"""Ends of names that nobody can register."""

MOST_CONNECTIONS = 32
LEAST_S = 1.0
"""Where a new connection would be too many, one this old is ended, or any one of a host that has
more than the new one's."""

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def wrong_host(host: str, names: Iterable[str] = ()) -> str | None:
    """Why a request must not be answered that was sent to this host; None: it may be.

    Addresses, names without a dot and those of private networks are no names of other sites.

    Args:
        host: The header `Host`; empty: none, as only programs send.
        names: Further names of the server.
    """
    name = _name(host)
    given = {_name(one.strip()) for one in (*os.environ.get(HOSTS, "").split(","), *names)}
    if "." not in name or name.endswith(_PRIVATE) or not given.isdisjoint((name, "*")):
        return None
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name in _own_names():
            return None
    else:
        return None
    return (
        f"this server does not answer to the name {name:.100}; if it should, add the name to "
        f"{HOSTS} in its environment"
    )


def _name(host: str) -> str:
    """A host without its port."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


class _Handler(WSGIRequestHandler):
    # How long a server of this module waits for each part of a request, and for its reader.
    timeout = 5.0

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class WebServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application, with a bounded number of connections, each on its thread.

    Slow clients delay nobody: beyond the bound, the oldest connection of the host with most makes
    room.

    Args:
        host: The address to listen on.
        port: Its port; 0: any.
        app: The application.

    Raises:
        OSError: The address cannot be listened on.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: App) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, tuple[float, bytes]] = {}
        self._guard = threading.Lock()
        super().__init__((host, port), _Handler)
        self.set_app(self._answer)
        self._app = app
        threading.Thread(target=self.serve_forever, name="web", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self.shutdown()
        self.server_close()

    def _answer(self, wsgi: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        fault = wrong_host(wsgi.get("HTTP_HOST", ""))
        if fault is None:
            return self._app(wsgi, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [fault.encode()]

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        now_s, host = time.monotonic(), _host(client_address[0])
        with self._guard:
            if len(self._open) >= MOST_CONNECTIONS:
                counts = Counter(one for _, one in self._open.values())
                ((most, count),) = counts.most_common(1)
                oldest = next(one for one, (_, its) in self._open.items() if its == most)
                if count <= counts[host] + 1 and now_s - self._open[oldest][0] < LEAST_S:
                    self.shutdown_request(request)
                    return
                del self._open[oldest]
                _end(oldest)
            self._open[request] = now_s, host
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._guard:
                self._open.pop(request, None)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of clients that have disconnected."""


def _host(address: str) -> bytes:
    """The addresses that one host may have: this machine has all of 127.0.0.0/8, others a /64."""
    packed = ipaddress.ip_address(address.partition("%")[0]).packed
    return packed[:8] if len(packed) > 4 else packed[:1] if packed[0] == 127 else packed


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)

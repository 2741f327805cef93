"""No page of another site reaches a service, and no slow client keeps others from it."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.support import TIMEOUT_S, wait_for
from zeus_common import http_guard
from zeus_common.http_guard import HOSTS, MOST_CONNECTIONS, WebServer, wrong_host


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "localhost",
            "LOCALHOST:9850",
            "127.0.0.1",
            "127.0.0.1:80",
            "[::1]:9860",
            "[fe80::1]",
        ),
        *("10.1.2.3:9850", "zeus-bso", "zeus-bso:8000", "zeus.ml.svc:80", "node.local."),
        *("zeus.ml.svc.cluster.local", "page.localhost:1"),
    ],
)
def test_names_that_no_other_site_can_have_are_accepted(host: str) -> None:
    assert wrong_host(host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9850", "127.0.0.1.evil.example", "1.2.3", "local.example."],
)
def test_names_of_others_are_refused_unless_they_are_given(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = wrong_host(host)
    assert said is not None
    assert HOSTS in said
    monkeypatch.setenv(
        HOSTS, "gpu01.example, EVIL.example,127.0.0.1.evil.example,1.2.3,local.example"
    )
    assert wrong_host(host) is None
    monkeypatch.setenv(HOSTS, "*")
    assert wrong_host(host) is None


def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


@pytest.fixture
def server() -> Iterator[WebServer]:
    made = WebServer("127.0.0.1", 0, answer)
    yield made
    made.close()
    assert made.fileno() == -1, "the next one may listen there"


def get(server: WebServer, host: str = "localhost") -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host})) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_server_answers_by_its_names_only(server: WebServer) -> None:
    assert get(server) == (200, "/metrics")
    code, said = get(server, "rebound.example:9850")
    assert (code, HOSTS in said) == (403, True)


def test_slow_clients_hold_a_bounded_number_of_threads_and_delay_nobody(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "LEAST_S", 0.0)
    before = threading.active_count()
    slow = []
    for _ in range(10 * MOST_CONNECTIONS):
        one = socket.create_connection(("127.0.0.1", server.server_port))
        one.sendall(b"GET /metrics HTTP/1.1\r\n")
        slow.append(one)
    assert get(server) == (200, "/metrics")
    wait_for(lambda: threading.active_count() - before <= MOST_CONNECTIONS + 1, "the oldest to end")
    for one in slow:
        one.close()


def test_a_host_with_many_connections_refuses_those_of_others_nothing(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Young or old: a scrape of another host is answered."""
    monkeypatch.setattr(http_guard, "LEAST_S", 3600.0)
    held = [
        socket.create_connection(
            ("127.0.0.1", server.server_port), source_address=(f"127.0.{number}.9", 0)
        )
        for number in range(2 * MOST_CONNECTIONS)
    ]
    held[-1].settimeout(TIMEOUT_S)
    assert held[-1].recv(1) == b"", "its own are refused"
    monkeypatch.setattr(http_guard, "_host", lambda address: b"another")
    held.append(socket.create_connection(("127.0.0.1", server.server_port)))
    assert get(server) == (200, "/metrics")
    for one in held:
        one.close()


def test_a_new_client_never_ends_one_that_has_just_come(server: WebServer) -> None:
    held = [
        socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(MOST_CONNECTIONS)
    ]
    deadline = time.monotonic() + http_guard.LEAST_S / 2
    refused = socket.create_connection(("127.0.0.1", server.server_port))
    refused.settimeout(TIMEOUT_S)
    ended = refused.recv(1) == b""
    if time.monotonic() < deadline:  # not on a machine that stood still meanwhile
        assert ended
    for one in (*held, refused):
        one.close()

    def answers() -> bool:
        try:
            return get(server)[0] == 200
        except (ConnectionError, http.client.HTTPException):
            return False  # it has not seen yet that those have gone

    wait_for(answers, "room again")

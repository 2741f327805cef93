"""The base of the HTTP servers: who may ask is decided before a body is read."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
import json
from typing import Annotated, Any

import pytest
from fastapi import Request
from fastapi.routing import APIRoute

from zeus.utils import web


class Served(web.Application):
    most_bytes = 200_000

    def __init__(self) -> None:
        super().__init__("test")
        self.read = 0

        @self.post("/sum")
        async def total(numbers: Annotated[list[int], web.sent(list[int])]) -> int:
            return sum(numbers)

    def authorize(self, request: Request) -> None:
        web.of_this_site(request)
        web.check_token(request, ["secret"], "TOKEN")


def post(body: bytes, token: str = "secret", **headers: str) -> tuple[int, Any, int]:
    """The status, the reply, and how much of the body was read."""
    app, sent, chunks = (
        Served(),
        [],
        [body[start : start + 4096] for start in range(0, len(body), 4096)],
    )
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        chunk = chunks.pop(0) if chunks else b""
        read += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "localhost", "authorization": f"Bearer {token}", **headers}
    given.setdefault("content-type", "application/json")
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/sum",
        "query_string": b"",
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in given.items()
        ],
    }
    asyncio.run(app(scope, receive, send))
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(text), read


def test_nothing_is_read_of_a_request_that_may_not_ask() -> None:
    body = json.dumps([1] * 20_000).encode()
    assert post(body) == (200, 20_000, len(body))
    assert post(body, token="wrong")[0::2] == (401, 0)
    assert post(body, host="rebound.example:8000")[0::2] == (403, 0)
    too_large = {"detail": "a request has at most 200000 bytes"}
    assert post(body, content_length=str(10**30)) == (413, too_large, 0)
    assert post(body, content_length=str(200_000))[0] == 200
    assert post(b" " * 300_000)[0] == 413
    for site, status in (("same-origin", 200), ("same-site", 403), ("cross-site", 403)):
        assert post(body, sec_fetch_site=site)[0::2] == (status, len(body) * (status == 200))
    for origin, status in (("http://localhost", 200), ("http://localhost:81", 403), ("null", 403)):
        assert post(body, origin=origin)[0] == status


def test_a_page_runs_nothing_but_its_own_scripts() -> None:
    answer = web.page("zeus.optimizer.batch_size.server")
    policy = answer.headers["content-security-policy"]
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        _, _, rest = bytes(answer.body).partition(f"<{tag}>".encode())
        digest = hashlib.sha256(rest.partition(f"</{tag}>".encode())[0]).digest()
        assert f"{kind} 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src ")
    assert policy.endswith("; form-action 'none'; frame-ancestors 'none'")
    names = ("referrer-policy", "x-content-type-options", "cache-control")
    assert [answer.headers[name] for name in names] == ["no-referrer", "nosniff", "no-cache"]


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"[" * 900, b"[" + b"9" * 400 + b"]", b"[1", b"\xff", b'["\\ud800"]']
)
def test_a_body_beyond_a_bound_is_one_sentence(body: bytes) -> None:
    status, reply, _ = post(body)
    assert status == 422
    assert reply["detail"].startswith("the JSON in the body cannot be used: ")


@pytest.mark.parametrize("body", [b"[1, true]", b'[1, "2"]', b"[1, 2.0]", b"[1, null]"])
def test_only_a_whole_number_is_one(body: bytes) -> None:
    status, reply, _ = post(body)
    assert (status, reply["detail"]) == (422, "1: Input should be a valid integer")
    assert post(b"\xef\xbb\xbf[1, 2]")[:2] == (200, 3)
    several = post(b"[true, true, true, true]")[1]["detail"]
    assert several == "; ".join(f"{place}: Input should be a valid integer" for place in range(3))


def test_no_endpoint_reads_a_body_in_another_way() -> None:
    for module in ("batch_size", "pipeline_frequency"):
        app = importlib.import_module(f"zeus.optimizer.{module}.server.router").app
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        assert len(routes) > 5
        assert [route.path for route in routes if route.body_field is not None] == []

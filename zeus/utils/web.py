"""The base of the HTTP servers: limits, tokens, error messages, and their pages."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError

from zeus import __version__
from zeus.exceptions import ZeusBaseError
from zeus_ipc.wire import explain

MOST_BYTES = 32 * 2**20
"""Maximum size of a request."""

_TOO_LARGE = f"a request has at most {MOST_BYTES} bytes"

Settings = TypeVar("Settings")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Application(FastAPI):
    """A server, with the `page.html` of its package; nothing is opened before it starts to serve.

    It redirects nothing: behind a proxy it would redirect to an address without the proxy's prefix.

    Args:
        title: Its title.
        hosts: Other names, with port if it is not the usual one, by which browsers reach it.
        prefix: Prefix of its paths behind a proxy that keeps it.
        options: Other options of FastAPI.
    """

    def __init__(
        self, title: str, hosts: Collection[str] = (), prefix: str = "", **options: Any
    ) -> None:
        super().__init__(
            title=title,
            version=__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            **options,
        )
        self._prefix = prefix
        self.hosts = {host.lower() for host in hosts}

        @self.get("/")
        async def index() -> HTMLResponse:
            return page(type(self).__module__.rpartition(".")[0])

    async def opens(self) -> None:
        """Opens resources.

        Raises:
            ZeusBaseError: It cannot; the server exits with this message.
            ImportError: A package is not installed.
        """

    async def closes(self) -> None:
        """Closes resources."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles a request; also startup and shutdown, so that a failure is one message."""
        if scope["type"] == "lifespan":
            scope["app"] = self
            await self._live(receive, send)
            return
        scope["root_path"] = self._prefix or scope.get("root_path", "")
        path = scope.get("path", "").rstrip("/")
        if path not in ("", scope["root_path"]):
            scope["path"] = path
        if scope["type"] == "http" and not await _short_enough(scope, send):
            return
        await super().__call__(scope, _LimitedReceive(receive), send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if own_process():
            # uvicorn configures its own loggers only; if the root logger is configured, this does
            # nothing.
            logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        try:
            await self.opens()
        except (ZeusBaseError, ImportError) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.closes()
        await send({"type": "lifespan.shutdown.complete"})


def from_environment(read: Callable[[], Settings], server: str) -> Settings:
    """Returns a server's settings; exits with one line if they are wrong."""
    try:
        return read()
    except ZeusBaseError as error:
        sys.stderr.write(f"{server} server: {error.message}\n")
        # The exit code by which uvicorn's supervisor does not retry.
        raise SystemExit(3) from None


def own_process() -> bool:
    """Whether the process runs only this server."""
    return threading.current_thread() is threading.main_thread()


class _LimitedReceive:
    """Bounds the size of a request's body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> MutableMapping[str, Any]:
        """Returns the next message; see ASGI."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message


async def _short_enough(scope: Scope, send: Send) -> bool:
    """Whether a request's body may be read; refuses one that declares itself too long."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > MOST_BYTES:
            response = refusal(413, _TOO_LARGE)
            await response(scope, _nothing, send)
            return False
    return True


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def refusal(status: int, sentence: str) -> JSONResponse:
    """The response to a request that failed."""
    return JSONResponse({"detail": sentence}, status_code=status)


def fresh(content: Any) -> JSONResponse:
    """A response that may not be cached."""
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


def figures(text: bytes) -> PlainTextResponse:
    """Metrics in the text format of Prometheus."""
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def of_this_site(request: Request) -> None:
    """A dependency: refuses what a page of another site makes a browser send.

    Raises:
        HTTPException: It is such a request (403).
    """
    # Browsers send Sec-Fetch-Site to https and localhost only, and Origin anywhere.
    other = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
    origin = request.headers.get("origin")
    if origin is not None:
        host = request.headers.get("host", "").lower()
        other |= urlsplit(origin).netloc.lower() not in {host, *request.app.hosts}
    if other:
        raise HTTPException(403, "a page of another site may not change anything here")


def needs_json(request: Request) -> None:
    """A dependency: requires JSON with its content type.

    Raises:
        HTTPException: It is missing (415).
    """
    # Pages of other sites can make a browser send any other type without a preflight request.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "send JSON, and say so: Content-Type: application/json")


def check_token(request: Request, tokens: Collection[str], setting: str) -> None:
    """Requires one of the tokens.

    Args:
        request: The request.
        tokens: The valid tokens.
        setting: The server's environment variable for it.

    Raises:
        HTTPException: The request has none of them (401).
    """
    given = request.headers.get("authorization", "").encode()
    # Compare all of them, so that the time reveals nothing.
    if not sum(hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens):
        raise HTTPException(
            401,
            f"this server asks for a token ({setting}): send it as Authorization: Bearer TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )


def add_log(app: FastAPI, logger: logging.Logger) -> None:
    """Logs each request and its status."""

    @app.middleware("http")
    async def log(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        logger.debug("%s %s: %d", request.method, request.url.path, response.status_code)
        return response


def add_validation_errors(app: FastAPI) -> None:
    """Describes an invalid request in one sentence (422), not as a list."""

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(
        request: Request, error: RequestValidationError | ValidationError
    ) -> JSONResponse:
        faults = [explain(fault, "body", "query") for fault in error.errors()[:3]]
        return refusal(422, "; ".join(faults))


def page(package: str) -> HTMLResponse:
    """Serves a package's `page.html`, with the common style and script, under a policy that allows
    only these."""
    text, policy = _page(package)
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@lru_cache(maxsize=8)
def _page(package: str) -> tuple[str, str]:
    text = resources.files(package).joinpath("page.html").read_text(encoding="utf-8")
    for name in ("common.css", "common.js"):
        shared = (
            resources.files("zeus.utils")
            .joinpath("pages")
            .joinpath(name)
            .read_text(encoding="utf-8")
        )
        text = text.replace(f"/* {name} */\n", shared, 1)

    def hashes(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (hashlib.sha256(one.encode()).digest() for one in found)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {hashes('script')}; "
        f"style-src {hashes('style')}; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy

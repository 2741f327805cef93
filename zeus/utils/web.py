"""The base of the HTTP servers: limits, tokens, error messages, and their pages."""

from __future__ import annotations

import asyncio
import base64
import codecs
import hashlib
import hmac
import logging
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from pydantic import TypeAdapter, ValidationError

from zeus import __version__
from zeus.exceptions import ZeusBaseError
from zeus.utils.settings import HttpSettings
from zeus_common.http_guard import wrong_host
from zeus_common.text import explain
from zeus_ipc.parsing import Malformed, any_number, parse

Settings = TypeVar("Settings")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Application(FastAPI):
    """A server, with the `page.html` of its package; nothing is opened before it starts to serve.

    It redirects nothing: behind a proxy it would redirect to an address without the proxy's prefix.
    Whether a request may be answered is decided before its body is read.

    Attributes:
        most_bytes: Maximum size of a request.
    """

    most_bytes = 2**20

    def __init__(self, title: str, settings: HttpSettings | None = None, **options: Any) -> None:
        super().__init__(
            title=title,
            version=__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            **options,
        )
        self.common = settings = settings or HttpSettings()
        self.hosts = {host.lower() for host in settings.hosts}

        @self.get("/")
        async def index() -> HTMLResponse:
            return page(type(self).__module__.rpartition(".")[0])

        _add_validation_errors(self)
        if settings.log_level == "DEBUG":
            _add_log(self, logging.getLogger(type(self).__module__))

    def authorize(self, request: Request) -> None:
        """Authorizes a request by its method, path and headers: anyone may read, and change
        something with the token, if there is one.

        Raises:
            HTTPException: The request is refused.
        """
        if request.method not in ("GET", "HEAD"):
            of_this_site(request)
            if self.common.token:
                check_token(request, [self.common.token], f"{self.common.prefix}TOKEN")

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
        scope["app"] = self
        scope["root_path"] = self.common.root_path or scope.get("root_path", "")
        path = scope.get("path", "").rstrip("/")
        if path not in ("", scope["root_path"]):
            scope["path"] = path
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except HTTPException as error:
                response = refusal(error.status_code, error.detail, error.headers)
                await response(scope, receive, send)
                return
        await super().__call__(scope, _LimitedReceive(receive, self.most_bytes), send)

    def _check(self, request: Request) -> None:
        fault = wrong_host(request.headers.get("host", ""), self.hosts)
        if fault is not None:
            raise HTTPException(403, fault)
        self.authorize(request)
        size = request.headers.get("content-length", "")
        if size.isdecimal() and int(size[:20]) > self.most_bytes:
            raise _too_large(self.most_bytes)

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

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._bytes = 0

    async def __call__(self) -> MutableMapping[str, Any]:
        """Returns the next message; see ASGI."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most:
            raise _too_large(self._most)
        return message


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"a request has at most {most} bytes")


def sent(kind: Any, declared: Callable[[Request], None] | None = None) -> Any:
    """An endpoint's parameter: the JSON that a client sent. All bodies are read here, within
    bounds and strictly: neither a truth value nor a string is a number.

    Args:
        kind: Its type.
        declared: Checks its content type; `needs_json` by default.
    """
    adapter = TypeAdapter(kind)

    async def read(request: Request) -> Any:
        (declared or needs_json)(request)
        body = (await request.body()).removeprefix(codecs.BOM_UTF8)
        # A longer body is parsed on another thread, so that the others' requests go on.
        if len(body) > 64 * 2**10:
            return await asyncio.to_thread(_strictly, adapter, body)
        return _strictly(adapter, body)

    return Depends(read)


def _strictly(adapter: TypeAdapter[Any], body: bytes) -> Any:
    try:
        parse(body, sys.maxsize, any_number)  # the model has its own bounds for numbers
    except Malformed as error:
        raise HTTPException(422, f"the JSON in the body cannot be used: {error}") from None
    return adapter.validate_json(body, strict=True)


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to a request that failed."""
    return JSONResponse({"detail": sentence}, status_code=status, headers=headers)


def fresh(content: Any) -> JSONResponse:
    """A response that may not be cached."""
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


def figures(families: Collector) -> PlainTextResponse:
    """Metrics in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return PlainTextResponse(
        generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


def of_this_site(request: Request) -> None:
    """Refuses what a page of another site makes a browser send.

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
    """Requires JSON with its content type.

    Raises:
        HTTPException: It is missing (415).
    """
    # Pages of other sites can make a browser send any other type without a preflight request.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "send JSON, and say so: Content-Type: application/json")


def check_token(request: Request, tokens: Collection[str], setting: str) -> None:
    """Requires one of the tokens.

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


def _add_log(app: FastAPI, logger: logging.Logger) -> None:
    """Logs each request and its status."""

    @app.middleware("http")
    async def log(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        logger.debug("%s %s: %d", request.method, request.url.path, response.status_code)
        return response


def _add_validation_errors(app: FastAPI) -> None:
    """Describes an invalid request in one sentence (422), not as a list."""

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(
        request: Request, error: RequestValidationError | ValidationError
    ) -> JSONResponse:
        faults = [explain(fault, "query") for fault in error.errors()[:3]]
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
        elements = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (hashlib.sha256(element.encode()).digest() for element in elements)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {hashes('script')}; "
        f"style-src {hashes('style')}; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy

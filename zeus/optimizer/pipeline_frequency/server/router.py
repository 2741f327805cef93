"""The server's HTTP side: `uvicorn zeus.optimizer.pipeline_frequency.server.router:app`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib import resources
from types import FrameType
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError

from zeus import __version__
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency import common
from zeus.optimizer.pipeline_frequency.common import (
    Choice,
    Chosen,
    FrequencySchedule,
    JobInfo,
    OfflineProfilingResult,
    PlanUpdate,
    ProfilingResult,
    Progress,
    RankInfo,
    RankProfile,
)
from zeus.optimizer.pipeline_frequency.server import metrics, views
from zeus.optimizer.pipeline_frequency.server.job import Refused
from zeus.optimizer.pipeline_frequency.server.job_manager import JobManager
from zeus.optimizer.pipeline_frequency.server.settings import ServerSettings
from zeus.optimizer.pipeline_frequency.server.storage import Storage

logger = logging.getLogger(__name__)

MOST_BYTES = 32 * 2**20
"""A larger request is refused."""

_TOO_LARGE = f"a request has at most {MOST_BYTES} bytes"

_Scope = dict[str, Any]
_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class PFOServer(FastAPI):
    """The application; nothing is opened before it starts to serve.

    Args:
        settings: How it is set up.
    """

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(
            title="Pipeline frequency optimizer", version=__version__, docs_url=None, redoc_url=None
        )
        self.settings = settings
        self._manager: JobManager | None = None

    @property
    def manager(self) -> JobManager:
        """All jobs."""
        assert self._manager is not None, "the server has not started"
        return self._manager

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request; starts and stops the server, so that a failure is one sentence."""
        if scope["type"] == "lifespan":
            scope["app"] = self
            await self._live(receive, send)
        elif scope["type"] == "http" and not await _short_enough(scope, send):
            return
        else:
            await super().__call__(scope, _Limited(receive), send)

    async def _live(self, receive: _Receive, send: _Send) -> None:
        await receive()
        try:
            storage = Storage(self.settings.database_path)
            self._manager = JobManager(self.settings, storage)
            await self._manager.start()
        except PipelineFrequencyError as error:
            await send({"type": "lifespan.startup.failed", "message": error.message})
            return
        if threading.current_thread() is threading.main_thread():
            # The process is ours. uvicorn sets up its own loggers only; where somebody has set up
            # the root, this does nothing.
            logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            _before_stopping(self._manager.close)
        logger.info("scheduler %s", self.settings.scheduler.__name__)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._manager.stop()
        await send({"type": "lifespan.shutdown.complete"})


def _before_stopping(close: Callable[[], None]) -> None:
    """Calls something when the process is asked to end.

    uvicorn first waits for the requests that are open, and says that it stops only then; a request
    for a schedule may be open for minutes.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        if not callable(before):
            continue

        def handle(caught: int, frame: FrameType | None, before: Any = before) -> None:
            loop.call_soon_threadsafe(close)
            before(caught, frame)

        signal.signal(number, handle)


class _Limited:
    """Ends a body that goes on for ever."""

    def __init__(self, receive: _Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> dict[str, Any]:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message


async def _short_enough(scope: _Scope, send: _Send) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > MOST_BYTES:
            response = _error(413, _TOO_LARGE)
            await response(scope, _nothing, send)  # type: ignore[arg-type]
            return False
    return True


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def _error(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status_code=status)


def create_app(settings: ServerSettings) -> PFOServer:
    """The application for these settings."""
    logging.getLogger("zeus").setLevel(settings.log_level)
    app = PFOServer(settings)
    changing = [Depends(_is_json), Depends(_authorized)]

    @app.post(common.REGISTER_JOB_URL, dependencies=changing)
    async def register_job(job_info: JobInfo) -> str:
        return app.manager.register_job(job_info)

    @app.post(common.REGISTER_RANK_URL, dependencies=changing)
    async def register_rank(job_id: str, rank_info: RankInfo) -> None:
        app.manager.register_rank(job_id, rank_info)

    @app.get(common.GET_FREQUENCY_SCHEDULE_URL)
    async def schedule(
        job_id: str,
        rank: int,
        timeout_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    ) -> FrequencySchedule:
        return await app.manager.schedule(job_id, rank, timeout_s)

    @app.post(common.REPORT_PROFILING_RESULT_URL, dependencies=changing)
    async def result(job_id: str, profiling_result: ProfilingResult) -> None:
        app.manager.result(job_id, profiling_result)

    @app.post(common.REPORT_PROGRESS_URL, dependencies=changing)
    async def progress(job_id: str, report: Progress) -> PlanUpdate:
        return app.manager.progress(job_id, report)

    @app.post(common.REPORT_PROFILE_URL, dependencies=changing)
    async def profile(job_id: str, measured: RankProfile | OfflineProfilingResult) -> None:
        if isinstance(measured, OfflineProfilingResult):
            measured = measured.to_profile()
        app.manager.profile(job_id, measured)

    @app.post(common.CHOOSE_PLAN_URL, dependencies=changing)
    async def choose(job_id: str, choice: Choice) -> Chosen:
        return app.manager.choose(job_id, choice)

    _add_reading(app)
    _add_errors(app)
    if settings.log_level == "DEBUG":
        _add_log(app)
    return app


def _add_reading(app: PFOServer) -> None:
    @app.get("/jobs")
    async def jobs() -> JSONResponse:
        now_s = time.time()
        found = [views.summary(job, now_s) for job in app.manager.jobs.values()]
        found.sort(key=lambda one: -one["created_s"])
        return JSONResponse(found, headers={"Cache-Control": "no-store"})

    @app.get("/jobs/{job_id}")
    async def job(job_id: str) -> JSONResponse:
        found = views.detail(app.manager.job(job_id), time.time())
        return JSONResponse(found, headers={"Cache-Control": "no-store"})

    @app.get(common.GET_SERVER_INFO_URL)
    async def info() -> dict[str, Any]:
        return {
            "name": "zeusd pipeline frequency optimizer",
            "version": __version__,
            "scheduler": app.settings.scheduler.__name__,
            "report_interval_s": common.REPORT_INTERVAL_S,
            "register_timeout_s": app.settings.register_timeout,
            "token_required": bool(app.settings.token),
        }

    @app.get("/healthz")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "jobs": len(app.manager.jobs), "waiting": app.manager.waiting}

    @app.get("/metrics")
    async def figures() -> PlainTextResponse:
        return PlainTextResponse(
            metrics.text(app.manager.jobs), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/")
    async def page() -> HTMLResponse:
        text, policy = _page()
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }
        return HTMLResponse(text, headers=headers)


def _add_errors(app: PFOServer) -> None:
    @app.exception_handler(PipelineFrequencyError)
    async def refused(request: Request, error: PipelineFrequencyError) -> JSONResponse:
        return _error(error.status if isinstance(error, Refused) else 422, error.message)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(
        request: Request, error: RequestValidationError | ValidationError
    ) -> JSONResponse:
        return _error(422, _sentence(error.errors()))


def _add_log(app: PFOServer) -> None:
    @app.middleware("http")
    async def log(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        logger.debug("%s %s: %d", request.method, request.url.path, response.status_code)
        return response


def _is_json(request: Request) -> None:
    # A page of another site can make a browser send anything but this type without asking us.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "send JSON, and say so: Content-Type: application/json")


def _authorized(request: Request) -> None:
    token = request.app.settings.token
    given = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Refused(
            401,
            "this server asks for a token (ZEUS_PFO_TOKEN): send it as Authorization: Bearer TOKEN",
        )


def _sentence(errors: Any) -> str:
    """What is wrong with a request, the first three things; the reference has a list here."""
    found = []
    for error in list(errors)[:3]:
        where = ".".join(str(part) for part in error["loc"] if part not in ("body", "query"))
        message = str(error["msg"]).removeprefix("Value error, ")
        found.append(f"{where}: {message}" if where else message)
    return "; ".join(found)


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """The page, and a policy under which only its own script and style run."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

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


def _settings() -> ServerSettings:
    try:
        return ServerSettings.from_env()
    except PipelineFrequencyError as error:
        sys.stderr.write(f"pipeline frequency server: {error.message}\n")
        # What uvicorn's supervisor takes for a reason not to try again.
        raise SystemExit(3) from None


app = create_app(_settings())

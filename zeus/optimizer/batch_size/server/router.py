"""The server's HTTP interface: `uvicorn zeus.optimizer.batch_size.server.router:app`.

All state is in the database, so any number of workers may serve it. Endpoints are ordinary
functions, which FastAPI runs in threads: one that waits for the database does not block others.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import Header, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from zeus import __version__
from zeus.optimizer.batch_size.common import (
    BATCH_SIZE_URL,
    HEARTBEAT_URL,
    IDEMPOTENCY_HEADER,
    JOB_TRIALS_URL,
    JOBS_URL,
    RELEASE_URL,
    REPORT_URL,
    TRIALS_URL,
    CreatedJob,
    EndTrial,
    JobSpecFromClient,
    NewTrial,
    ReportResponse,
    TrainingResult,
    TrialId,
)
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.server.metrics import BatchSizeJobs
from zeus.optimizer.batch_size.server.settings import PREFIX, ServerSettings
from zeus.optimizer.batch_size.store import Store
from zeus.utils import web
from zeus_ipc.overriding import override

logger = logging.getLogger(__name__)

_OPEN = ("/", "/healthz", "/info", "/openapi.json")
"""Paths that tell nothing of jobs."""

_LOGGERS = ("zeus.optimizer.batch_size.server", "zeus.optimizer.batch_size.database")


class BSOServer(web.Application):
    """The application."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__("Batch size optimizer", settings)
        self.settings = settings
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The jobs and their trials."""
        assert self._store is not None, "the server has not started"
        return self._store

    @override
    def authorize(self, request: Request) -> None:
        path, settings = request.scope["path"], self.settings
        reads = request.method in ("GET", "HEAD") and not path.endswith(BATCH_SIZE_URL)
        if reads and path.removeprefix(request.scope.get("root_path", "")) in _OPEN:
            return
        if not reads:
            web.of_this_site(request)
        needed = settings.read_token if reads else settings.token
        if needed:
            tokens = {needed, settings.token or needed}
            web.check_token(request, tokens, f"{PREFIX}{'READ_TOKEN' if reads else 'TOKEN'}")

    @override
    async def opens(self) -> None:
        settings = self.settings
        self._store = Store(
            settings.database_url,
            lease_s=settings.lease_s,
            echo=settings.echo_sql,
            workers=settings.workers,
        )
        logger.info("database %s", self._store.name)

    @override
    async def closes(self) -> None:
        self.store.close()


def create_app(settings: ServerSettings) -> BSOServer:
    """Creates the application for these settings."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(settings.log_level)
    app = BSOServer(settings)
    _add_reference(app)
    _add_trials(app)
    _add_reading(app)
    _add_errors(app)
    return app


def _add_reference(app: BSOServer) -> None:
    """The endpoints of ml-energy/zeus's clients, with the statuses that they know."""

    @app.post(JOBS_URL)
    def register(
        spec: Annotated[JobSpecFromClient, web.sent(JobSpecFromClient, _is_json)],
        response: Response,
    ) -> CreatedJob:
        job, new = app.store.find_or_make(spec)
        response.status_code = 201 if new else 200
        return job

    @app.delete(JOBS_URL)
    def delete(job_id: str) -> None:
        app.store.delete(job_id)

    # A GET that creates a trial, as in ml-energy/zeus; proxies may repeat it. Ours is below.
    @app.get(BATCH_SIZE_URL, response_model_exclude={"key"})
    def batch_size(job_id: str) -> TrialId:
        with _unknown_is(400):
            begun = app.store.begin_trial(
                job_id, secrets.token_hex(16), lease_s=app.settings.reference_lease_s
            )
        return TrialId(**begun.model_dump(include=set(TrialId.model_fields)))

    @app.post(REPORT_URL)
    def report(
        result: Annotated[TrainingResult, web.sent(TrainingResult, _is_json)],
    ) -> ReportResponse:
        with _unknown_is(400):
            return app.store.report(result)

    @app.patch(TRIALS_URL)
    def end(trial: Annotated[EndTrial, web.sent(EndTrial, _is_json)]) -> None:
        app.store.end_trial(trial)


def _add_trials(app: BSOServer) -> None:
    @app.post(JOB_TRIALS_URL, status_code=201)
    def begin(
        job_id: str, key: Annotated[str | None, Header(alias=IDEMPOTENCY_HEADER)] = None
    ) -> NewTrial:
        return app.store.begin_trial(job_id, secrets.token_hex(16) if key is None else key)

    @app.post(HEARTBEAT_URL)
    def heartbeat(trial: Annotated[TrialId, web.sent(TrialId, _is_json)]) -> None:
        app.store.heartbeat(trial)

    @app.post(RELEASE_URL)
    def release(job_id: str) -> dict[str, list[int]]:
        return {"released": app.store.release(job_id)}


def _add_reading(app: BSOServer) -> None:
    @app.get(JOBS_URL)
    def jobs() -> JSONResponse:
        return web.fresh(app.store.summaries())

    @app.get(f"{JOBS_URL}/{{job_id}}")
    def job(job_id: str) -> JSONResponse:
        return web.fresh(app.store.details(job_id))

    @app.get("/metrics")
    def figures() -> PlainTextResponse:
        return web.figures(BatchSizeJobs(app.store.summaries()))

    @app.get("/healthz")
    def health() -> dict[str, Any]:
        return {"status": "ok", "jobs": app.store.count()}

    @app.get("/info")
    def info() -> dict[str, Any]:
        return {
            "name": "zeusd batch size optimizer",
            "version": __version__,
            "token_required": bool(app.settings.token),
            "read_token_required": bool(app.settings.read_token),
            "lease_s": app.settings.lease_s,
        }


def _add_errors(app: BSOServer) -> None:
    @app.exception_handler(ZeusBSORuntimeError)
    def refused(request: Request, error: ZeusBSORuntimeError) -> JSONResponse:
        if error.public != error.message:
            logger.error("%s", error.message)
        return web.refusal(error.status or 503, error.public)


@contextmanager
def _unknown_is(status: int) -> Iterator[None]:
    """Replies with this status to unknown jobs and trials."""
    try:
        yield
    except ZeusBSORuntimeError as error:
        if error.status != 404:
            raise
        raise ZeusBSORuntimeError(error.message, status) from None


def _is_json(request: Request) -> None:
    # ml-energy/zeus's clients send no content type. A page of another site can make a browser omit
    # it, too, but then the browser sends the page's origin, which is checked.
    if "content-type" in request.headers:
        web.needs_json(request)


app = create_app(web.from_environment(ServerSettings.from_env, "batch size"))

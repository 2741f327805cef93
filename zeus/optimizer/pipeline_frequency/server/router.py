"""The server's HTTP side: `uvicorn zeus.optimizer.pipeline_frequency.server.router:app`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from zeus import __version__
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency import common
from zeus.optimizer.pipeline_frequency.common import (
    Choice,
    FrequencySchedule,
    JobInfo,
    ProfilingResult,
    Progress,
    RankInfo,
    RankProfile,
)
from zeus.optimizer.pipeline_frequency.server import views
from zeus.optimizer.pipeline_frequency.server.job import JobRefused
from zeus.optimizer.pipeline_frequency.server.job_manager import JobManager
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings
from zeus.optimizer.pipeline_frequency.server.views import PipelineJobs
from zeus.utils import web
from zeus_ipc.overriding import override

logger = logging.getLogger(__name__)


class PFOServer(web.Application):
    """The application."""

    most_bytes = 32 * 2**20  # a profile of a long pipeline

    def __init__(self, settings: PlanServerSettings) -> None:
        super().__init__("Pipeline frequency optimizer", settings)
        self.settings = settings
        self._manager: JobManager | None = None

    @property
    def manager(self) -> JobManager:
        """All jobs."""
        assert self._manager is not None, "the server has not started"
        return self._manager

    @override
    async def opens(self) -> None:
        with contextlib.suppress(OSError):  # such as a parent that is not there, named below
            self.settings.dump_dir.mkdir(exist_ok=True)
        self._manager = JobManager(self.settings)
        await self._manager.start()
        if web.own_process():
            _before_stopping(self._manager.close)
        logger.info("scheduler %s", self.settings.scheduler.__name__)

    @override
    async def closes(self) -> None:
        await self.manager.stop()


def _before_stopping(close: Callable[[], None]) -> None:
    """Calls a function when the process is asked to end.

    uvicorn first waits for open requests and reports the stop only then; a request for a schedule
    may be open for minutes.
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


def create_app(settings: PlanServerSettings) -> PFOServer:
    """The application for these settings."""
    logging.getLogger("zeus").setLevel(settings.log_level)
    app = PFOServer(settings)

    @app.post(common.REGISTER_JOB_URL)
    async def register_job(job_info: Annotated[JobInfo, web.sent(JobInfo)]) -> str:
        return app.manager.register_job(job_info)

    @app.get(common.GET_FREQUENCY_SCHEDULE_URL)
    async def schedule(
        job_id: str,
        rank: int,
        timeout_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    ) -> FrequencySchedule:
        return await app.manager.schedule(job_id, rank, timeout_s)

    for url, kind, handler in (
        (common.REGISTER_RANK_URL, RankInfo, JobManager.register_rank),
        (common.REPORT_PROFILING_RESULT_URL, ProfilingResult, JobManager.result),
        (common.REPORT_PROFILE_URL, RankProfile, JobManager.profile),
        (common.CHOOSE_PLAN_URL, Choice, JobManager.choose),
    ):
        _add_message(app, url, kind, handler)
    _add_progress(app)
    _add_reading(app)

    @app.exception_handler(PipelineFrequencyError)
    async def refused(request: Request, error: PipelineFrequencyError) -> JSONResponse:
        return web.refusal(error.status if isinstance(error, JobRefused) else 422, error.message)

    return app


def _add_message(
    app: PFOServer, url: str, kind: type[BaseModel], handler: Callable[..., Any]
) -> None:
    """Handles a message about a job."""
    sent = web.sent(kind)

    @app.post(url, name=handler.__name__)
    async def receive(job_id: str, message: Any = sent) -> Any:
        return handler(app.manager, job_id, message)


def _add_progress(app: PFOServer) -> None:
    """Handles a rank's report. A plain route, because FastAPI's overhead is larger than the
    work."""

    async def progress(request: Request) -> Response:
        web.needs_json(request)
        report = Progress.model_validate_json(await request.body(), strict=True)
        update = app.manager.progress(request.path_params["job_id"], report)
        return Response(update.model_dump_json(), media_type="application/json")

    app.add_route(common.REPORT_PROGRESS_URL, progress, methods=["POST"])


def _add_reading(app: PFOServer) -> None:
    @app.get("/jobs")
    async def jobs() -> JSONResponse:
        now_s = time.time()
        summaries = [views.summary(job, now_s) for job in app.manager.jobs.values()]
        summaries.sort(key=lambda one: -one["created_s"])
        return web.fresh(summaries)

    @app.get("/jobs/{job_id}")
    async def job(job_id: str) -> JSONResponse:
        detail = views.detail(app.manager.job(job_id), time.time())
        return web.fresh(detail)

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
        return web.figures(PipelineJobs(app.manager.jobs))


app = create_app(web.from_environment(PlanServerSettings.from_env, "pipeline frequency"))

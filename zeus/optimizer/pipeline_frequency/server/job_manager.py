"""All jobs: handles requests, calls schedulers and the planner, and stores changes.

Everything runs on the server's event loop, except schedulers (threads) and the planner (a process).
Changes by a request are on disk before the reply; reports of progress are written once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from typing import Any

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import (
    Choice,
    Chosen,
    FrequencySchedule,
    JobInfo,
    PlanUpdate,
    ProfilingResult,
    Progress,
    RankInfo,
    RankProfile,
    new_job_id,
)
from zeus.optimizer.pipeline_frequency.placed_schedules import BY_NAME
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.server import drift, planning
from zeus.optimizer.pipeline_frequency.server.job import JobRefused, TrainingJob, ranks_in_words
from zeus.optimizer.pipeline_frequency.server.records import JobRecords
from zeus.optimizer.pipeline_frequency.server.scheduler import FrequencyScheduler, OnlineSolution
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
CLEANUP_S = 60.0


class JobManager:
    """The jobs; see the module."""

    def __init__(
        self, settings: PlanServerSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self._records = JobRecords(settings)
        self.clock = clock
        """Tells the seconds since the epoch."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard: set[str] = set()
        self._closing = False
        self.waiting = 0
        """Requests for a schedule that are open."""
        self.jobs = self._records.load(clock())

    # ------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Continues pending work, and starts the periodic work."""
        self._spawn(self._look_after())
        for job in self.jobs.values():
            self._spawn(self._advance(job))
            if job.frontier is None and job.planning_error is None:
                self._plan_if_profiled(job)

    def close(self) -> None:
        """Refuses clients that wait for a schedule, because the server is about to stop."""
        self._closing = True
        for job in self.jobs.values():
            job.notify()

    async def stop(self) -> None:
        """Stops running work, and writes remaining state."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flush()
        self._records.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the server failed", exc_info=task.exception())

    async def _look_after(self) -> None:
        cleaned_s = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            with contextlib.suppress(PipelineFrequencyError):  # logged there
                self._flush()
                idle_s = self.settings.max_job_idle_time
                if time.monotonic() - cleaned_s >= min(CLEANUP_S, idle_s / 4):
                    cleaned_s = time.monotonic()
                    self._forget_idle(cleaned_s - idle_s)

    def _forget_idle(self, before_s: float) -> None:
        for job_id, job in list(self.jobs.items()):
            if job.idle_from_s < before_s:
                logger.info("forgetting job %s: nothing was heard of it for too long", job_id)
                self._records.forget(job_id)
                del self.jobs[job_id]
                job.notify()

    # ------------------------------------------------------------------------------------- requests

    def job(self, job_id: str) -> TrainingJob:
        """Raises Refused if the job does not exist."""
        job = self.jobs.get(job_id)
        if job is None:
            raise JobRefused(
                404,
                f"there is no job {job_id[:200]}; it never was, or was forgotten after "
                f"{self.settings.max_job_idle_time:g} s without a word: register it again",
            )
        return job

    def register_job(self, info: JobInfo) -> str:
        """Registers a job. Returns its id."""
        if info.job_id:
            raise JobRefused(422, "job_id is given by the server; leave it empty")
        if info.schedule is not None and info.schedule not in BY_NAME:
            raise JobRefused(
                422,
                f"there is no schedule {info.schedule!r}; there are {', '.join(BY_NAME)}",
            )
        if len(self.jobs) >= self.settings.max_jobs:
            raise JobRefused(
                503,
                f"this server has {len(self.jobs)} jobs, and takes no more (ZEUS_PFO_MAX_JOBS); "
                "idle ones go after ZEUS_PFO_MAX_JOB_IDLE_TIME",
            )
        now_s = self.clock()
        name = self.settings.scheduler.__name__
        job_id = new_job_id(info, name, datetime.fromtimestamp(now_s))
        job = TrainingJob(info.model_copy(update={"job_id": job_id}), now_s)
        self._records.put(job)
        self.jobs[job_id] = job
        logger.info("job %s registered", job_id)
        return job_id

    def register_rank(self, job_id: str, rank: RankInfo) -> None:
        """Registers a rank of a job; may be repeated."""
        job = self._hear(job_id)
        if not job.check_rank(rank):
            return
        self._records.put(job, ("rank", rank.rank, rank))
        job.register(rank)
        if job.complete:
            logger.info("job %s: all %d ranks are there", job_id, job.info.world_size)
            self._records.dump_ranks(job)
            self._spawn(self._advance(job))

    async def schedule(
        self, job_id: str, rank: int, timeout_s: float | None = None
    ) -> FrequencySchedule:
        """The schedule of a rank; waits for it, up to a time limit."""
        job = self._hear(job_id)
        job.known_rank(rank)
        wait_s = self.settings.register_timeout
        if timeout_s is not None:
            wait_s = min(wait_s, timeout_s)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            job = self.job(job_id)
            if job.failure is not None:
                raise job.failure
            schedule = job.schedule(rank)
            if schedule is not None:
                return schedule
            if self._closing:
                raise JobRefused(503, "the server is stopping; try again in a moment")
            self.waiting += 1
            try:
                await asyncio.wait_for(job.changed.wait(), end - loop.time())
            except asyncio.TimeoutError:
                raise JobRefused(504, _what_is_missing(job, wait_s)) from None
            finally:
                self.waiting -= 1

    def result(self, job_id: str, result: ProfilingResult) -> None:
        """Handles a rank's measurements under its schedule."""
        job = self._hear(job_id)
        job.known_rank(result.rank)
        if job.round < 0 or not job.schedules:
            if job.frontier is not None:
                return  # not needed: this scheduler leaves the choice to the server
            raise JobRefused(409, "there is no schedule yet that this could be a result of")
        self._records.put_result(job, result)
        job.results[result.rank] = result
        if len(job.results) == job.info.world_size:
            self._spawn(self._advance(job))

    def progress(self, job_id: str, report: Progress) -> PlanUpdate:
        """Handles the progress of a rank; returns its schedule.

        Raises:
            Refused: The rank is not known.
        """
        job = self._hear(job_id)
        update, changed = job.report(report, self.clock())
        if changed:
            self._records.put(job)
            plans = [one.plan for one in job.in_force]
            slowdowns = [round(one, 3) for one in job.slowdowns]
            logger.info(
                "job %s: pipelines are late by %s, and get plans %s", job_id, slowdowns, plans
            )
        paces = job.drifted()
        if paces is not None and not (job.planning or job.replanning):
            job.replanning = True
            self._spawn(self._replan(job, paces))
        return update

    def choose(self, job_id: str, choice: Choice) -> Chosen:
        """Handles a choice."""
        job = self._hear(job_id)
        chosen = job.choose(choice, self.clock())
        self._records.put(job)
        logger.info("job %s: %s asked for", job_id, choice.model_dump(exclude_none=True))
        return chosen

    def profile(self, job_id: str, profile: RankProfile) -> None:
        """Handles a rank's profile; planning starts after the last one."""
        job = self._hear(job_id)
        job.check_profile(profile)
        if not issubclass(self.settings.scheduler, OnlineSolution):
            raise JobRefused(
                409,
                f"this server runs {self.settings.scheduler.__name__}; it plans from profiles when "
                "it is started without a solution_path (OnlineSolution)",
            )
        if job.profiles.get(profile.rank) == profile:
            return
        self._records.put(job, ("profile", profile.rank, profile))
        job.profiles[profile.rank] = profile
        self._plan_if_profiled(job)

    # ----------------------------------------------------------------------------------- scheduling

    async def _advance(self, job: TrainingJob) -> None:
        """Gets schedules from the scheduler when they are needed."""
        async with job.lock:
            if not self._has(job) or not job.complete or job.frontier is not None or job.failure:
                return
            measured = len(job.results) == job.info.world_size
            if job.schedules and not measured:
                return
            try:
                scheduler = await self._scheduler(job)
                if scheduler.frontier is not None:
                    self._take_frontier(job, scheduler.frontier, scheduler.choice)
                else:
                    results = job.results
                    job.take_schedules(await asyncio.to_thread(_next, scheduler, results))
                    self._records.put_round(job)
                    self._records.dump_round(job, results)
            except Exception as error:  # the scheduler may be anybody's
                job.failure = self._refusal(error)
                logger.error("job %s: %s", job.info.job_id, job.failure.message, exc_info=error)
        job.notify()

    async def _scheduler(self, job: TrainingJob) -> FrequencyScheduler:
        """The job's scheduler; created, and brought to its earlier state, if there is none."""
        if job.scheduler is None:
            ranks = [job.ranks[rank] for rank in sorted(job.ranks)]

            def make() -> FrequencyScheduler:
                made = self.settings.scheduler(
                    job.info, ranks, self.settings, **self.settings.scheduler_args
                )
                for number in range(job.round):
                    made.next_schedule()
                    _next(made, job.past[number])
                return made

            try:
                job.scheduler = await asyncio.to_thread(make)
            except Exception as error:  # the scheduler may be anybody's
                raise self._refusal(error) from error
            job.past.clear()
        return job.scheduler

    # ------------------------------------------------------------------------------------- planning

    def _plan_if_profiled(self, job: TrainingJob) -> None:
        if job.complete and len(job.profiles) == job.info.world_size:
            job.planning += 1
            self._spawn(self._plan(job))

    async def _plan(self, job: TrainingJob) -> None:
        """Plans from the newest profiles."""
        job_id, started_s = job.info.job_id, time.monotonic()
        try:
            async with job.lock:
                if not self._has(job):
                    return  # dropped meanwhile
                scheduler = await self._scheduler(job)
                assert isinstance(scheduler, OnlineSolution)
                profiles = [job.profiles[rank] for rank in sorted(job.profiles)]
                problem = planning.problem_of(job.info, profiles, scheduler.p2p_power_w)
                frontier = await planning.frontier_of(problem, scheduler.points)
                self._take_frontier(job, frontier, scheduler.choice)
            took_s = time.monotonic() - started_s
            logger.info("job %s: %d plans in %.1f s", job_id, len(frontier.plans), took_s)
            rows = [row for one in profiles for row in one.rows]
            await asyncio.to_thread(self._records.dump_plans, job_id, rows, frontier)
        except PipelineFrequencyError as error:
            job.planning_error = error.message
            logger.error("job %s: %s", job_id, error.message)
            with contextlib.suppress(PipelineFrequencyError):
                if self._has(job):
                    self._records.put(job)
        finally:
            job.planning -= 1
            job.notify()

    async def _replan(self, job: TrainingJob, paces: dict[drift.Kind, float]) -> None:
        """Plans a job again with the present times of its instructions."""
        job_id, before = job.info.job_id, job.frontier
        assert before is not None
        assert before.problem is not None
        words = drift.in_words(paces)
        try:
            points = self.settings.scheduler_args.get("points")
            problem = drift.scaled(before.problem, paces)
            frontier = await planning.frontier_of(problem, points)
            if not self._has(job) or job.frontier is not before:
                return  # dropped, or planned from new profiles
            job.take_replanned(frontier, self.clock())
            self._records.put(job, ("frontier", 0, job.frontier))
            logger.info("job %s: planned again, as times have changed (%s)", job_id, words)
        except PipelineFrequencyError as error:
            logger.warning("job %s: not planned again (%s): %s", job_id, words, error.message)
        finally:
            job.replanning = False

    def _has(self, job: TrainingJob) -> bool:
        """Whether a job was not dropped meanwhile."""
        return self.jobs.get(job.info.job_id) is job

    def _take_frontier(self, job: TrainingJob, frontier: Frontier, initial: Choice) -> None:
        if not self._has(job):
            return  # dropped meanwhile
        job.take_frontier(frontier, initial, self.clock())
        self._records.put(job, ("frontier", 0, job.frontier))

    def _hear(self, job_id: str) -> TrainingJob:
        job = self.job(job_id)
        job.heard_s, job.idle_from_s = self.clock(), time.monotonic()
        self._heard.add(job_id)
        return job

    def _flush(self) -> None:
        if self._heard:
            heard = self._heard & self.jobs.keys()
            self._records.put_progress(self.jobs[job_id] for job_id in heard)
            self._heard.clear()

    def _refusal(self, error: Exception) -> JobRefused:
        """The scheduler's error for clients; a ValueError is the request's fault, as in
        ml-energy/zeus."""
        if isinstance(error, JobRefused):
            return error
        if isinstance(error, PipelineFrequencyError):
            return JobRefused(400, error.message)
        status, name = (
            400 if isinstance(error, ValueError) else 500,
            self.settings.scheduler.__name__,
        )
        return JobRefused(status, f"the scheduler {name} failed ({type(error).__name__}: {error})")


def _next(
    scheduler: FrequencyScheduler, results: Mapping[int, ProfilingResult]
) -> list[FrequencySchedule]:
    if results:
        scheduler.observe([results[rank] for rank in sorted(results)])
    return scheduler.next_schedule()


def _what_is_missing(job: TrainingJob, waited_s: float) -> str:
    waited = f"after {waited_s:g} s"
    missing = job.missing(job.ranks)
    if missing:
        return (
            f"{waited} {ranks_in_words(missing)} of {job.info.world_size} had not registered; see "
            "whether they run, and try again"
        )
    if job.schedules:
        missing = job.missing(job.results)
        if missing:
            return f"{waited} {ranks_in_words(missing)} had not sent results of the last schedule"
    return f"{waited} the scheduler had not given a schedule; try again"

"""The records of jobs that outlive the server, and files about them for people to read."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import (
    FrequencySchedule,
    ProfilingResult,
    RankInfo,
    RankProfile,
)
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.profile import Row, write_profile
from zeus.optimizer.pipeline_frequency.server.job import RankProgress, Refused, TrainingJob
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings
from zeus.optimizer.pipeline_frequency.server.storage import Record, Storage
from zeus.utils.atomic import write_text

logger = logging.getLogger(__name__)

Rounds: TypeAlias = dict[int, dict[int, ProfilingResult]]
"""Results of the scheduler's past rounds, by round and rank."""


class JobRecords:
    """Writes what has changed of jobs. Every `put` raises Refused if it cannot be written."""

    def __init__(self, storage: Storage, settings: PlanServerSettings) -> None:
        self._storage = storage
        self._settings = settings

    def load(self, now_s: float) -> tuple[dict[str, TrainingJob], dict[str, Rounds]]:
        """All jobs by id, and their past rounds. A job that cannot be restored is left out."""
        records: dict[str, dict[str, dict[int, Any]]] = {}
        for job_id, kind, key, body in self._storage.all():
            records.setdefault(job_id, {}).setdefault(kind, {})[key] = body
        jobs: dict[str, TrainingJob] = {}
        past: dict[str, Rounds] = {}
        for job_id, kinds in records.items():
            try:
                jobs[job_id], past[job_id] = _restored(kinds, now_s)
            except (PipelineFrequencyError, ValueError, KeyError, TypeError) as error:
                logger.warning("job %s cannot be restored and is left out: %s", job_id, error)
        return jobs, past

    def put_state(self, job: TrainingJob) -> None:
        """The job's own state."""
        self._put([_state(job)])

    def put_rank(self, job_id: str, rank: RankInfo) -> None:
        """A rank that has registered."""
        self._put([(job_id, "rank", rank.rank, rank.model_dump())])

    def put_profile(self, job_id: str, profile: RankProfile) -> None:
        """A rank's profile."""
        self._put([(job_id, "profile", profile.rank, profile.model_dump())])

    def put_result(self, job: TrainingJob, result: ProfilingResult) -> None:
        """A rank's result in the present round."""
        key = job.round * job.info.world_size + result.rank
        self._put([(job.info.job_id, "result", key, result.model_dump())])

    def put_round(self, job: TrainingJob) -> None:
        """The schedules of the present round."""
        bodies = [job.schedules[rank].model_dump() for rank in sorted(job.schedules)]
        self._put([(job.info.job_id, "round", job.round, bodies), _state(job)])

    def put_frontier(self, job: TrainingJob, frontier: Frontier) -> None:
        """The job's plans, and its state."""
        self._put([(job.info.job_id, "frontier", 0, frontier.to_json()), _state(job)])

    def put_progress(self, reported: Iterable[TrainingJob], heard: Iterable[TrainingJob]) -> None:
        """Progress of jobs that have reported, and states of jobs that sent something."""
        # One record for a job: a row for each rank would be most of the server's work.
        records: list[Record] = [
            (
                job.info.job_id,
                "progress",
                0,
                [[rank, [*vars(one).values()]] for rank, one in job.progress.items()],
            )
            for job in reported
        ]
        records += map(_state, heard)
        if records:
            self._put(records)

    def forget(self, job_id: str) -> None:
        """Deletes a job's records. Raises Refused if that is not possible."""
        self._write(partial(self._storage.forget, job_id))

    def close(self) -> None:
        """Lets another server use the file."""
        self._storage.close()

    def _put(self, records: list[Record]) -> None:
        self._write(partial(self._storage.put, records))

    def _write(self, what: Callable[[], None]) -> None:
        try:
            what()
        except (sqlite3.Error, OSError) as error:
            logger.error("the state cannot be written: %s", error)
            raise Refused(
                503,
                f"the server cannot write its state to {self._settings.database_path} ({error}); "
                "see to its disk and send this again",
            ) from None

    # --------------------------------------------------------------------------------- for people

    def dump_ranks(self, job: TrainingJob) -> None:
        """The ranks, as they registered."""
        self._dump(job, "ranks", [job.ranks[rank].model_dump() for rank in sorted(job.ranks)])

    def dump_round(self, job: TrainingJob, number: int, results: list[ProfilingResult]) -> None:
        """The results of a round, if there are any, and the schedules of the next."""
        if results:
            self._dump(job, f"{number}.prof", [result.model_dump() for result in results])
        bodies = [
            job.schedules[rank].model_dump(include={"rank", "frequencies"})
            for rank in sorted(job.schedules)
        ]
        self._dump(job, f"{job.round}.sched", bodies)

    def dump_plans(self, job_id: str, rows: list[Row], frontier: Frontier) -> None:
        """Profile and plans; another server can be started with them."""
        folder = self._settings.dump_dir / job_id
        try:
            folder.mkdir(exist_ok=True)
            write_profile(rows, folder / "profile.csv")
            frontier.write(folder)
        except OSError as error:
            logger.warning("the plans cannot be written to %s: %s", folder, error)

    def _dump(self, job: TrainingJob, name: str, bodies: list[dict[str, Any]]) -> None:
        if not self._settings.dump_data:
            return
        job_id = job.info.job_id
        try:
            path = Path(self._settings.dump_dir, job_id, f"{name}.json")
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(bodies))
        except OSError as error:
            logger.warning("job %s: %s.json cannot be written: %s", job_id, name, error)


def _state(job: TrainingJob) -> Record:
    return job.info.job_id, "job", 0, job.state()


def _restored(kinds: dict[str, dict[int, Any]], now_s: float) -> tuple[TrainingJob, Rounds]:
    job = TrainingJob.restored(kinds["job"][0], now_s)
    for body in kinds.get("rank", {}).values():
        job.ranks[body["rank"]] = RankInfo.model_validate(body)
    for rank, values in kinds.get("progress", {}).get(0, []):
        job.progress[rank] = RankProgress(*values)
    for rank, body in kinds.get("profile", {}).items():
        job.profiles[rank] = RankProfile.model_validate(body)
    if "frontier" in kinds:
        job.frontier = Frontier.from_json(kinds["frontier"][0])
    past: Rounds = {}
    for key, body in kinds.get("result", {}).items():
        number, rank = divmod(key, job.info.world_size)
        past.setdefault(number, {})[rank] = ProfilingResult.model_validate(body)
    if job.round >= 0:
        job.results = past.pop(job.round, {})
        bodies = kinds["round"][job.round]
        job.schedules = {one["rank"]: FrequencySchedule.model_validate(one) for one in bodies}
    return job, past

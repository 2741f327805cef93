"""What outlives the server: records of jobs in one SQLite file, and files for people to read.

A record has its kind (`rank`, `profile`, ...), a key within the kind, and an object as JSON. It
survives a kill of the process once `put` returns. Only one process uses the file at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json
from sqlalchemy import (
    URL,
    Column,
    Connection,
    Integer,
    MetaData,
    StaticPool,
    Table,
    Text,
    delete,
    insert,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import (
    FrequencySchedule,
    ProfilingResult,
    RankInfo,
    RankProfile,
)
from zeus.optimizer.pipeline_frequency.plans import FRONTIER, Frontier
from zeus.optimizer.pipeline_frequency.profile import ProfileMeasurement, write_profile
from zeus.optimizer.pipeline_frequency.server.job import (
    JobRefused,
    JobState,
    RankProgress,
    TrainingJob,
)
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings
from zeus.utils.database import cause_of, sqlite_engine, transaction
from zeus_common.atomic import write_text

logger = logging.getLogger(__name__)

FORMAT = 1

_metadata = MetaData()
_records = Table(
    "records",
    _metadata,
    Column("job_id", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("key", Integer, primary_key=True),
    Column("body", Text, nullable=False),
    sqlite_with_rowid=False,
)

_KINDS: dict[str, TypeAdapter[Any]] = {
    "job": TypeAdapter(JobState),
    "rank": TypeAdapter(RankInfo),
    "profile": TypeAdapter(RankProfile),
    "result": TypeAdapter(ProfilingResult),
    "round": TypeAdapter(list[FrequencySchedule]),
    "frontier": FRONTIER,
    "progress": TypeAdapter(dict[int, RankProgress]),
}

Record: TypeAlias = tuple[str, int, Any]
"""Kind, key, object."""


class JobRecords:
    """The file, open and locked. Every `put` raises JobRefused if it cannot be written.

    Raises:
        PipelineFrequencyError: It cannot be used, or another server has it.
    """

    def __init__(self, settings: PlanServerSettings) -> None:
        self._settings = settings
        path = settings.database_path
        with ExitStack() as opening, _usable(path):
            if path != ":memory:":
                opening.enter_context(_locked(path))
            # One connection, of whichever thread: no other process uses the file.
            self._engine = sqlite_engine(
                URL.create("sqlite", database=path),
                "NORMAL",
                poolclass=StaticPool,
                connect_args={"check_same_thread": False},
            )
            opening.callback(self._engine.dispose)
            with transaction(self._engine, writes=True) as database:
                version = database.exec_driver_sql("PRAGMA user_version").scalar_one()
                if version not in (0, FORMAT):
                    raise PipelineFrequencyError(
                        f"{path} was written by another release (format {version}, not {FORMAT}); "
                        "name another file in ZEUS_PFO_DATABASE"
                    )
                _metadata.create_all(database)
                database.exec_driver_sql(f"PRAGMA user_version={FORMAT}")
            self._open = opening.pop_all()

    def load(self, now_s: float) -> dict[str, TrainingJob]:
        """All jobs by id. A job that cannot be restored is left out.

        Raises:
            PipelineFrequencyError: The file is damaged.
        """
        by_job: dict[str, dict[str, dict[int, str]]] = {}
        path = self._settings.database_path
        with _usable(path), transaction(self._engine, writes=False) as database:
            for job_id, kind, key, body in database.execute(select(_records)):
                by_job.setdefault(job_id, {}).setdefault(kind, {})[key] = body
        jobs: dict[str, TrainingJob] = {}
        for job_id, texts in by_job.items():
            try:
                kinds = {
                    kind: {key: _KINDS[kind].validate_json(bodies[key]) for key in sorted(bodies)}
                    for kind, bodies in texts.items()
                }
                jobs[job_id] = TrainingJob.restored(kinds, now_s)
            except (PipelineFrequencyError, ValueError, KeyError) as error:
                logger.warning("job %s cannot be restored and is left out: %s", job_id, error)
        return jobs

    def put(self, job: TrainingJob, *records: Record) -> None:
        """Writes records of a job, and its own state."""
        self._put([(job, records)])

    def put_progress(self, jobs: Iterable[TrainingJob]) -> None:
        """The jobs' states, and their ranks' progress."""
        # One record for a job: a row for each rank would be most of the server's work.
        self._put([(job, [("progress", 0, job.progress)]) for job in jobs])

    def put_result(self, job: TrainingJob, result: ProfilingResult) -> None:
        """A rank's result in the present round."""
        self.put(job, ("result", job.round * job.info.world_size + result.rank, result))

    def put_round(self, job: TrainingJob) -> None:
        """The schedules of the present round."""
        self.put(job, ("round", job.round, list(job.schedules.values())))

    def forget(self, job_id: str) -> None:
        """Deletes a job's records. Raises JobRefused if that is not possible."""
        with self._writing() as database:
            database.execute(delete(_records).where(_records.c.job_id == job_id))

    def close(self) -> None:
        """Unlocks the file for another server."""
        self._open.close()

    def _put(self, of_jobs: Iterable[tuple[TrainingJob, Sequence[Record]]]) -> None:
        rows = [
            {
                "job_id": job.info.job_id,
                "kind": kind,
                "key": key,
                "body": _KINDS[kind].dump_json(body).decode(),
            }
            for job, records in of_jobs
            for kind, key, body in (("job", 0, JobState.model_validate(job)), *records)
        ]
        if rows:
            with self._writing() as database:
                database.execute(insert(_records).prefix_with("OR REPLACE"), rows)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        try:
            with transaction(self._engine, writes=True) as database:
                yield database
        except (SQLAlchemyError, OSError) as error:
            logger.error("the state cannot be written: %s", cause_of(error))
            raise JobRefused(
                503,
                f"the server cannot write its state to {self._settings.database_path} "
                f"({cause_of(error)}); see to its disk and send this again",
            ) from None

    # --------------------------------------------------------------------------------- for people

    def dump_ranks(self, job: TrainingJob) -> None:
        """The ranks, as they registered."""
        self._dump(job, "ranks", job.ranks)

    def dump_round(self, job: TrainingJob, results: Mapping[int, ProfilingResult]) -> None:
        """The results of the last round, if there was one, and the schedules of this one."""
        if results:
            self._dump(job, f"{job.round - 1}.prof", results)
        self._dump(job, f"{job.round}.sched", job.schedules)

    def dump_plans(self, job_id: str, rows: list[ProfileMeasurement], frontier: Frontier) -> None:
        """Profile and plans; another server can be started with them."""

        def write(folder: Path) -> None:
            write_profile(rows, folder / "profile.csv")
            frontier.write(folder)

        self._write_in_folder(job_id, write)

    def _dump(self, job: TrainingJob, name: str, of_ranks: Mapping[int, BaseModel]) -> None:
        if self._settings.dump_data:
            bodies = [of_ranks[rank].model_dump(exclude={"version"}) for rank in sorted(of_ranks)]
            self._write_in_folder(
                job.info.job_id,
                lambda folder: write_text(folder / f"{name}.json", to_json(bodies).decode()),
            )

    def _write_in_folder(self, job_id: str, write: Callable[[Path], None]) -> None:
        folder = self._settings.dump_dir / job_id
        try:
            folder.mkdir(exist_ok=True)
            write(folder)
        except OSError as error:
            logger.warning("files of job %s cannot be written: %s", job_id, error)


@contextmanager
def _usable(path: str) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        raise PipelineFrequencyError(
            f"the database {path} cannot be used ({cause_of(error)}); name another file in "
            "ZEUS_PFO_DATABASE"
        ) from None


def _locked(path: str) -> IO[bytes]:
    # Next to the database: SQLite has its own locks on that file, and closing any descriptor of a
    # file drops them. The kernel releases this one when the process ends.
    lock = os.fdopen(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise PipelineFrequencyError(
            f"another server process has {path}; run one server with one worker (no --workers), or "
            "name another file in ZEUS_PFO_DATABASE"
        ) from None
    return lock

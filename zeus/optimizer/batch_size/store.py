"""Jobs and their trials in a database: the `Trials` of a local file, and of the server.

    store = Store("bso.db")
    store.register(spec)
    trial = store.begin_trial(spec.job_id, key)

`trials` and `choosing` decide; this module reads their input and writes their result, in one
transaction that locks the job. So any number of threads, processes and, with PostgreSQL, machines
may share a database, and a killed process leaves no partial changes.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

try:
    from sqlalchemy import Connection, delete, func, insert, select, update
except ImportError:
    raise ImportError("keeping trials needs sqlalchemy: pip install 'zeusd[bso-server]'") from None

from pydantic import ValidationError

from zeus.optimizer.batch_size.cache import MOST_JOBS, KnownJob
from zeus.optimizer.batch_size.choosing import Known, policy_of
from zeus.optimizer.batch_size.common import (
    CreatedJob,
    EndTrial,
    GpuConfig,
    JobSpecFromClient,
    NewTrial,
    ReportResponse,
    TrainingResult,
    TrialId,
    Trials,
)
from zeus.optimizer.batch_size.database import Database, T
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.rows import (
    Writing,
    add_job,
    find_job,
    find_trial,
    generation_of,
    job_of,
    no_job,
    summed,
    trial_of,
    trials_of,
)
from zeus.optimizer.batch_size.server import views
from zeus.optimizer.batch_size.tables import generations, jobs, trials
from zeus.optimizer.batch_size.trials import JobRecord, Trial, alive, ended, lost, reported
from zeus.policy.knowledge import Knowledge, by_nearness, nearest
from zeus_ipc.overriding import override

LEASE_S = 600.0
"""A trial is lost after this time without a message; clients send heartbeats."""

_KEY = 200

_RELATIVES = 8
"""Maximum number of jobs of a family to read knowledge from."""


class Store(Trials):
    """The trials of jobs, in a database. Safe for use by several threads and processes.

    Args:
        url_or_path: A SQLite file's path, or a URL: `postgresql://...`, `sqlite:///...`.
        lease_s: A trial is lost after this time without a message, s; None for never.
        clock: Returns the time, s since 1970.
        echo: Whether SQL statements are logged.
        workers: Number of processes that share PostgreSQL's connections.

    Raises:
        ZeusBSOConfigError: The URL is wrong.
        ZeusBSORuntimeError: The database cannot be used.
    """

    def __init__(
        self,
        url_or_path: str | Path,
        *,
        lease_s: float | None = LEASE_S,
        clock: Callable[[], float] = time.time,
        echo: bool = False,
        workers: int = 1,
    ) -> None:
        self._database = Database(url_or_path, echo=echo, workers=workers)
        self._lease_s = lease_s
        self._clock = clock
        self._known = lru_cache(MOST_JOBS)(KnownJob)

    @property
    def name(self) -> str:
        """The database's path or URL, without its password."""
        return self._database.name

    # ------------------------------------------------------------------------ what jobs ask

    @override
    def register(self, spec: JobSpecFromClient) -> CreatedJob:
        return self.find_or_make(spec)[0]

    def find_or_make(self, spec: JobSpecFromClient) -> tuple[CreatedJob, bool]:
        """Like `register`; also returns whether the job is new."""
        asked = CreatedJob.model_validate({**spec.model_dump(), **spec.naming()})
        policy_of(asked)
        created = self._database.read(lambda connection: _named(connection, asked))
        seed = secrets.randbits(63) if created.mab_seed is None else created.mab_seed
        now_s = self._clock()
        known = self._of_family(created)

        def work(connection: Connection) -> tuple[CreatedJob, bool] | None:
            job = find_job(connection, created.job_id, lock=True)
            if job is not None:
                if _named(connection, asked) != created:
                    return None  # it was meanwhile registered on other GPUs
                _same(job.spec, created)
                return job.spec, False
            begun = generation_of(connection)
            add_job(connection, JobRecord(created, seed, now_s, begun, knowledge=known))
            return created, True

        return self._database.write(work) or self.find_or_make(spec)

    def begin_trial(
        self, job_id: str, key: str, *, lease_s: float | Literal["usual"] | None = "usual"
    ) -> NewTrial:
        """See `Trials`."""
        if not 1 <= len(key) <= _KEY:
            raise ZeusBSORuntimeError(f"a key has 1 to {_KEY} characters", 422)
        lease = self._lease_s if lease_s == "usual" else lease_s
        given = (trials.c.job_id == job_id) & (trials.c.key == key)
        known = self._known(job_id)
        with known.locked():
            attempts = itertools.count()

            def work(connection: Connection) -> NewTrial | ZeusBSORuntimeError:
                if next(attempts):
                    known.forget()  # it may have what a failed transaction would have written
                writing = self._open(connection, job_id)
                job, now_s = writing.job, writing.now_s
                row = connection.execute(select(trials).where(given)).one_or_none()
                if row is not None:
                    # A repeated request keeps the trial alive.
                    again = alive(trial_of(row), now_s)
                    writing.change(trial_of(row), again)
                    writing.close()
                    return _new(job_id, key, again, known.now(connection, job).best)
                # Read from the database: a heartbeat is no change that the cache knows of.
                writing.mark_lost(trials_of(connection, job_id, "running"))
                now = known.now(connection, replace(job, changes=writing.next_change - 1))
                number = job.trials + 1
                try:
                    start = now.choose(number)
                except ZeusBSORuntimeError as error:  # lost trials may have excluded the last size
                    writing.close()
                    return error
                bound = start.cost_bound if math.isfinite(start.cost_bound) else None
                begun = Trial(number, start.batch_size, now_s, now_s, lease, bound)
                writing.add(begun, key)
                writing.close(trials=number)
                return _new(job_id, key, begun, now.best)

            begun = self._database.write(work)
        if isinstance(begun, ZeusBSORuntimeError):
            raise begun
        return begun

    @override
    def report(self, result: TrainingResult) -> ReportResponse:
        return self._change(
            result,
            lambda before, now: reported(now.job, before, result, now.now_s, now.next_change),
        )

    @override
    def heartbeat(self, trial: TrialId) -> None:
        self._change(trial, lambda before, now: (alive(before, now.now_s), None))

    @override
    def end_trial(self, end: EndTrial) -> None:
        self._change(
            end,
            lambda before, now: (ended(before, end.reason, now.now_s, now.next_change), None),
        )

    @override
    def close(self) -> None:
        self._database.close()

    # -------------------------------------------------------------------- what operators ask

    def adopt(self, spec: CreatedJob, imported: Sequence[Trial]) -> bool:
        """Imports a job with its trials; running ones get a lease from now.

        Returns:
            False if there is a job of this name, and nothing was changed.
        """
        seed = secrets.randbits(63) if spec.mab_seed is None else spec.mab_seed
        ends = sorted(imported, key=lambda one: (one.ended_s or math.inf, one.number))

        def work(connection: Connection) -> bool:
            if find_job(connection, spec.job_id, lock=True) is not None:
                return False
            now_s = self._clock()
            last = max((one.number for one in imported), default=generation_of(connection))
            writing = add_job(connection, JobRecord(spec, seed, now_s, trials=last))
            for one in ends:
                kept = (
                    replace(one, heard_s=now_s, lease_s=self._lease_s)
                    if one.running
                    else replace(one, end_order=writing.next_change)
                )
                writing.add(kept, f"taken over {one.number}")
            writing.close()
            return True

        return self._database.write(work)

    def delete(self, job_id: str) -> None:
        """Deletes a job and its trials.

        Raises:
            ZeusBSORuntimeError: There is no such job (404).
        """

        def work(connection: Connection) -> None:
            self._open(connection, job_id)
            connection.execute(delete(jobs).where(jobs.c.job_id == job_id))

        self._database.write(work)

    def restored(self) -> int:
        """Begins a generation, after the database was restored from a backup: trials begun since
        that backup are gone, but their runs may go on, so their numbers are not given again.

        Returns:
            The number above which trials are numbered now: the time, ms since 1970.
        """

        def work(connection: Connection) -> int:
            number = max(int(1000 * self._clock()), generation_of(connection) + 1)
            connection.execute(insert(generations).values(number=number))
            below = jobs.c.trials < number
            connection.execute(update(jobs).where(below).values(trials=number))
            return number

        return self._database.write(work)

    def release(self, job_id: str) -> list[int]:
        """Makes excluded sizes available again, once their problem is fixed.

        Returns:
            The sizes.

        Raises:
            ZeusBSORuntimeError: There is no such job (404).
        """

        def work(connection: Connection) -> list[int]:
            writing = self._open(connection, job_id)
            sizes = list(Known(writing.job, trials_of(connection, job_id)).excluded)
            if sizes:
                writing.close(released=writing.next_change, changes=writing.next_change)
            return sizes

        return self._database.write(work)

    def job(self, job_id: str) -> tuple[JobRecord, list[Trial]]:
        """A job and its trials.

        Raises:
            ZeusBSORuntimeError: There is no such job (404).
        """
        now_s = self._clock()

        def work(connection: Connection) -> tuple[JobRecord, list[Trial]]:
            job = find_job(connection, job_id)
            if job is None:
                raise no_job(job_id)
            return job, _now(trials_of(connection, job_id), now_s)

        return self._database.read(work)

    def summaries(self) -> list[dict[str, Any]]:
        """The reply to `GET /jobs`: all jobs, in the order in which they were registered."""
        now_s = self._clock()
        records = self._database.read(lambda connection: summed(connection, now_s))
        return [views.summary(job, groups, now_s) for job, groups in records]

    def details(self, job_id: str) -> dict[str, Any]:
        """The reply to `GET /jobs/{job_id}`.

        Raises:
            ZeusBSORuntimeError: There is no such job (404).
        """
        return views.detail(*self.job(job_id), self._clock())

    def count(self) -> int:
        """The number of jobs: a check that the database can be read."""

        def work(connection: Connection) -> int:
            return connection.execute(select(func.count()).select_from(jobs)).scalar_one()

        return self._database.read(work)

    # --------------------------------------------------------------------------------- inside

    def _of_family(self, spec: CreatedJob) -> Knowledge | None:
        """Returns the knowledge of the most similar job of this family and policy: with the same
        GPU model, the same power limits, the most trials."""
        if spec.family is None:
            return None
        of_family = (jobs.c.family == spec.family) & (jobs.c.job_id != spec.job_id)
        query = select(jobs).where(of_family).order_by(jobs.c.trials.desc(), jobs.c.job_id)
        found_jobs = self._database.read(lambda connection: connection.execute(query).all())
        records = [one for one in map(job_of, found_jobs) if one.spec.policy == spec.policy]
        records.sort(key=lambda one: by_nearness(one.spec.place, spec.place, one.trials))
        for record in records[:_RELATIVES]:
            knowledge = Known(record, self.job(record.job_id)[1]).knowledge()
            if knowledge is not None:
                return nearest([replace(knowledge, place=record.spec.place)], spec.place)
        return None

    def _change(self, which: TrialId, change: Callable[[Trial, Writing], tuple[Trial, T]]) -> T:
        def work(connection: Connection) -> T:
            writing = self._open(connection, which.job_id)
            before = find_trial(connection, which)
            after, answer = change(before, writing)
            if after != before:
                writing.change(before, after)
                writing.close()
            return answer

        return self._database.write(work)

    def _open(self, connection: Connection, job_id: str) -> Writing:
        job = find_job(connection, job_id, lock=True)
        if job is None:
            raise no_job(job_id)
        # Only now, so that a transaction that waited for the lock writes a later time.
        return Writing(connection, job, self._clock())


_PLACE = tuple(GpuConfig.model_fields)

_NO_NAME = re.compile(r"[\x00-\x1f/?#]")
"""A character that no job's name has."""

_AFTER_ALL = 2**62
"""A number above those of all changes."""


def _now(recorded: list[Trial], now_s: float) -> list[Trial]:
    """Returns trials in their present state; lost ones are recorded when the next trial begins."""
    gone = {one.number: ended(one, "lost", now_s, _AFTER_ALL) for one in lost(recorded, now_s)}
    return [gone.get(trial.number, trial) for trial in recorded]


def _new(job_id: str, key: str, trial: Trial, best: int | None) -> NewTrial:
    return NewTrial(
        **asdict(trial),  # what it has by the same name
        job_id=job_id,
        key=key,
        trial_number=trial.number,
        best_batch_size=best,
        reason=None if trial.status == "running" else trial.status,
        current_epoch=trial.epochs,
    )


def _named(connection: Connection, spec: CreatedJob) -> CreatedJob:
    """Returns a job of a family with the name for its GPUs and power limits."""
    job = None if spec.family is None else find_job(connection, spec.job_id)
    if job is None or job.spec.family != spec.family or not _differ(job.spec, spec, _PLACE):
        return spec
    name = f"{spec.job_id} on {spec.number_of_gpus} x {_NO_NAME.sub(' ', spec.gpu_model)}"
    if spec.power_limits is not None:
        low, high = spec.power_limits
        name += f", {low:g} to {high:g} W"
    try:
        return CreatedJob.model_validate({**spec.model_dump(), "job_id": name})
    except ValidationError:
        raise ZeusBSORuntimeError(f"job_id {spec.job_id} is too long; shorten it", 422) from None


def _differ(job: CreatedJob, given: CreatedJob, names: Iterable[str]) -> list[str]:
    here, there = job.model_dump(include=set(names)), given.model_dump(include=set(names))
    if None in (job.power_limits, given.power_limits):  # without known limits it may be the same
        here["power_limits"] = there["power_limits"] = None
    return [name for name in names if here[name] != there[name]]


def _same(job: CreatedJob, given: CreatedJob) -> None:
    differ = _differ(job, given, CreatedJob.model_fields)
    here, there = job.model_dump(), given.model_dump()
    if differ:
        said = ", ".join(f"{name} {here[name]!r} and not {there[name]!r}" for name in differ[:3])
        raise ZeusBSORuntimeError(
            f"job {job.job_id} is registered with {said}; take another job_id, or delete the job "
            "first",
            409,
        )

"""Jobs and trials as rows of the tables, read and written inside a transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Connection, Row, case, func, insert, select, update

from zeus.optimizer.batch_size.common import CreatedJob, TrialId
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.tables import generations, jobs, trials
from zeus.optimizer.batch_size.trials import JobRecord, Status, Trial, ended, lost
from zeus.policy.knowledge import Knowledge


class Writing:
    """A job locked by a transaction.

    Attributes:
        next_change: Number of the next change of one of its trials.
    """

    def __init__(self, connection: Connection, job: JobRecord, now_s: float) -> None:
        self._connection = connection
        self.job = job
        self.now_s = now_s
        self.next_change = job.changes + 1

    def add(self, trial: Trial, key: str) -> None:
        """Adds a trial."""
        values = {"job_id": self.job.job_id, "key": key, **asdict(trial)}
        self._connection.execute(insert(trials).values(**values))
        self.next_change += 1

    def change(self, before: Trial, after: Trial) -> None:
        """Updates a trial."""
        which = (trials.c.job_id == self.job.job_id) & (trials.c.number == after.number)
        self._connection.execute(update(trials).where(which).values(**asdict(after)))
        # Who has seen a trial need not read it again after a heartbeat.
        self.next_change += replace(before, heard_s=after.heard_s) != after

    def mark_lost(self, earlier: Iterable[Trial]) -> None:
        """Ends the trials whose lease has expired."""
        for trial in lost(earlier, self.now_s):
            self.change(trial, ended(trial, "lost", self.now_s, self.next_change))

    def close(self, **values: int) -> None:
        """Updates the job's counters."""
        values = {"changes": self.next_change - 1, **values}
        which = jobs.c.job_id == self.job.job_id
        self._connection.execute(update(jobs).where(which).values(**values))


_OF_TRIAL = tuple(field.name for field in fields(Trial))


def trial_of(row: Row[Any]) -> Trial:
    """A trial from its row."""
    return Trial(**{name: row._mapping[name] for name in _OF_TRIAL})


def job_of(row: Row[Any]) -> JobRecord:
    """A job from its row."""
    return JobRecord(
        spec=CreatedJob.model_validate_json(row.spec),
        seed=int(row.seed),
        created_s=row.created_s,
        trials=row.trials,
        changes=row.changes,
        released=row.released,
        knowledge=None if row.knowledge is None else Knowledge.from_json(row.knowledge),
    )


def add_job(connection: Connection, job: JobRecord) -> Writing:
    """Registers a job."""
    connection.execute(
        insert(jobs).values(
            job_id=job.job_id,
            spec=job.spec.model_dump_json(),
            seed=str(job.seed),
            created_s=job.created_s,
            trials=job.trials,
            changes=job.changes,
            released=job.released,
            family=job.spec.family,
            knowledge=None if job.knowledge is None else job.knowledge.to_json(),
        )
    )
    return Writing(connection, job, job.created_s)


def find_job(connection: Connection, job_id: str, *, lock: bool = False) -> JobRecord | None:
    """Reads a job; None if there is none."""
    query = select(jobs).where(jobs.c.job_id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else job_of(row)


def trials_of(connection: Connection, job_id: str, status: Status | None = None) -> list[Trial]:
    """A job's trials, by their numbers; all, or those with a status."""
    of_job = select(trials).where(trials.c.job_id == job_id).order_by(trials.c.number)
    if status is not None:
        of_job = of_job.where(trials.c.status == status)
    return [trial_of(row) for row in connection.execute(of_job)]


def find_trial(connection: Connection, which: TrialId) -> Trial:
    """A trial.

    Raises:
        ZeusBSORuntimeError: The job has none of this number and batch size (404), or it is another
            run's (409).
    """
    query = select(trials).where(
        (trials.c.job_id == which.job_id)
        & (trials.c.number == which.trial_number)
        & (trials.c.batch_size == which.batch_size)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise ZeusBSORuntimeError(
            f"job {which.job_id} has no trial {which.trial_number} of batch size "
            f"{which.batch_size}",
            404,
        )
    if which.key not in (None, row.key):
        raise ZeusBSORuntimeError(
            f"trial {which.trial_number} of job {which.job_id} is another run's, as the database "
            "was restored from a backup without yours; this run does not count",
            409,
        )
    return trial_of(row)


def summed(connection: Connection, now_s: float) -> list[tuple[JobRecord, list[Row[Any]]]]:
    """All jobs, in the order in which they were registered, each with groups of its trials: of
    those of a batch size and an end the number, the sums, and when the last was heard."""
    # As in `trials.lost`.
    gone = (trials.c.status == "running") & (trials.c.heard_s + trials.c.lease_s < now_s)
    now = select(trials, case((gone, "lost"), else_=trials.c.status).label("now")).subquery()
    group = (now.c.job_id, now.c.batch_size, now.c.now.label("status"), now.c.converged)
    sums = select(
        *group,
        func.count().label("trials"),
        func.max(now.c.heard_s).label("heard_s"),
        func.sum(now.c.time).label("time"),
        func.sum(now.c.energy).label("energy"),
    ).group_by(now.c.job_id, now.c.batch_size, now.c.now, now.c.converged)
    order = select(jobs).order_by(jobs.c.created_s, jobs.c.job_id)
    groups: dict[str, list[Row[Any]]] = {}
    records = [job_of(row) for row in connection.execute(order)]
    for row in connection.execute(sums):
        groups.setdefault(row.job_id, []).append(row)
    return [(job, groups.get(job.job_id, [])) for job in records]


def generation_of(connection: Connection) -> int:
    """The number above which trials are numbered."""
    return int(connection.execute(select(func.max(generations.c.number))).scalar() or 0)


def no_job(job_id: str) -> ZeusBSORuntimeError:
    """Returns the error for an unknown job."""
    return ZeusBSORuntimeError(f"there is no job {job_id}; register it first", 404)

"""Jobs, trials and events as rows of the tables, read and written inside a transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sqlalchemy import Connection, Row, case, func, insert, select, update

from zeus.optimizer.batch_size.common import CreatedJob, TrialId
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.overview import Overview, TrialGroup
from zeus.optimizer.batch_size.tables import events, generations, jobs, trials
from zeus.optimizer.batch_size.trials import JobRecord, Trial, ended, lost
from zeus.policy.knowledge import Knowledge

EventKind = Literal["registered", "begun", "report", "ended", "lost", "back", "released"]


@dataclass(frozen=True)
class Event:
    """An event of a job.

    Attributes:
        body: Details: the content of a report, the reason of an end.
    """

    number: int
    trial_number: int | None
    at_s: float
    kind: str
    body: dict[str, Any]


class Writing:
    """A job locked by a transaction."""

    def __init__(self, connection: Connection, job: JobRecord, now_s: float) -> None:
        self._connection = connection
        self.job = job
        self.now_s = now_s
        self.next_event = job.events + 1

    def tell(self, kind: EventKind, trial_number: int | None = None, **body: Any) -> Writing:
        """Records an event."""
        self._connection.execute(
            insert(events).values(
                job_id=self.job.job_id,
                number=self.next_event,
                trial_number=trial_number,
                at_s=self.now_s,
                kind=kind,
                body=json.dumps(body),
            )
        )
        self.next_event += 1
        return self

    def record_status(self, before: Trial, after: Trial) -> None:
        """Records that a trial has ended, or is running again."""
        if before.status == after.status:
            return
        if after.running:
            self.tell("back", after.number)
        elif after.status == "lost":
            self.tell("lost", after.number)
        else:
            said = {"reason": after.status, "converged": after.converged}
            self.tell("ended", after.number, **said)

    def mark_lost(self, found: Iterable[Trial]) -> list[Trial]:
        """Ends the trials whose lease has expired."""
        marked = []
        for trial in lost(found, self.now_s):
            after = ended(trial, "lost", self.now_s, self.next_event)
            self.record_status(trial, after)
            self.save(after)
            marked.append(after)
        return marked

    def save(self, trial: Trial) -> None:
        """Updates a trial."""
        which = (trials.c.job_id == self.job.job_id) & (trials.c.number == trial.number)
        self._connection.execute(update(trials).where(which).values(**asdict(trial)))

    def change(self, before: Trial, after: Trial) -> None:
        """Updates a trial and the job's counters."""
        self.record_status(before, after)
        self.save(after)
        self.close()

    def close(self, **values: int) -> None:
        """Updates the job's counters."""
        values["events"] = self.next_event - 1
        which = jobs.c.job_id == self.job.job_id
        self._connection.execute(update(jobs).where(which).values(**values))


_OF_TRIAL = tuple(field.name for field in fields(Trial))
_OF_GROUP = tuple(field.name for field in fields(TrialGroup))


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
        events=row.events,
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
            events=job.events,
            released=job.released,
            family=job.spec.family,
            knowledge=None if job.knowledge is None else job.knowledge.to_json(),
        )
    )
    return Writing(connection, job, job.created_s).tell("registered")


def find_job(connection: Connection, job_id: str, *, lock: bool = False) -> JobRecord | None:
    """Reads a job; None if there is none."""
    query = select(jobs).where(jobs.c.job_id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else job_of(row)


def trials_of(connection: Connection, job_id: str) -> list[Trial]:
    """A job's trials, by their numbers."""
    of_job = select(trials).where(trials.c.job_id == job_id).order_by(trials.c.number)
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


def overviews_of(connection: Connection, now_s: float, job_id: str | None = None) -> list[Overview]:
    """All jobs, in the order in which they were registered, and sums of their trials."""
    # As in `trials.lost`.
    gone = (trials.c.status == "running") & (trials.c.heard_s + trials.c.lease_s < now_s)
    all_now = select(trials, case((gone, "lost"), else_=trials.c.status).label("now"))
    order = select(jobs).order_by(jobs.c.created_s, jobs.c.job_id)
    if job_id is not None:
        all_now = all_now.where(trials.c.job_id == job_id)
        order = order.where(jobs.c.job_id == job_id)
    now = all_now.subquery()
    sums = select(
        now.c.job_id,
        now.c.batch_size,
        now.c.now.label("status"),
        now.c.converged,
        func.count().label("trials"),
        func.max(now.c.heard_s).label("heard_s"),
        func.sum(now.c.time).label("time"),
        func.sum(now.c.energy).label("energy"),
    ).group_by(now.c.job_id, now.c.batch_size, now.c.now, now.c.converged)
    records = [job_of(row) for row in connection.execute(order)]
    groups: dict[str, list[TrialGroup]] = {}
    for row in connection.execute(sums):
        values = {name: row._mapping[name] for name in _OF_GROUP}
        groups.setdefault(row.job_id, []).append(TrialGroup(**values))
    return [Overview(job, tuple(groups.get(job.job_id, ()))) for job in records]


def events_of(connection: Connection, job_id: str) -> list[Event]:
    """Returns all events of a job, in order; empty for an unknown job."""
    of_job = select(events).where(events.c.job_id == job_id).order_by(events.c.number)
    return [
        Event(row.number, row.trial_number, row.at_s, row.kind, json.loads(row.body))
        for row in connection.execute(of_job)
    ]


def generation_of(connection: Connection) -> int:
    """The number above which trials are numbered."""
    return int(connection.execute(select(func.max(generations.c.number))).scalar() or 0)


def no_job(job_id: str) -> ZeusBSORuntimeError:
    """Returns the error for an unknown job."""
    return ZeusBSORuntimeError(f"there is no job {job_id}; register it first", 404)

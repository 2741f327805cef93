"""Jobs and trials as rows of the tables, read and written inside a transaction."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from sqlite3 import Connection, Row
from typing import Any, NamedTuple

from zeus.optimizer.batch_size.choosing import Known
from zeus.optimizer.batch_size.common import CreatedJob, TrialId
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import JobRecord, Status, Trial, ended, lost
from zeus.policy.knowledge import Knowledge


def insert(connection: Connection, table: str, values: dict[str, Any]) -> None:
    """Adds a row to a table."""
    names = ", ".join(f":{name}" for name in values)
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({names})", values)


def _update(connection: Connection, table: str, values: dict[str, Any], *keys: str) -> None:
    """Changes the row of a table that has these keys."""
    new = ", ".join(f"{name} = :{name}" for name in values if name not in keys)
    which = " AND ".join(f"{name} = :{name}" for name in keys)
    connection.execute(f"UPDATE {table} SET {new} WHERE {which}", values)


class Writing:
    """A job in a transaction that writes.

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
        insert(self._connection, "trials", values)
        self.next_change += 1

    def change(self, before: Trial, after: Trial) -> None:
        """Updates a trial."""
        values = {"job_id": self.job.job_id, **asdict(after)}
        _update(self._connection, "trials", values, "job_id", "number")
        # Who has seen a trial need not read it again after a heartbeat.
        self.next_change += replace(before, heard_s=after.heard_s) != after

    def mark_lost(self, found: Iterable[Trial]) -> None:
        """Ends the trials whose lease has expired."""
        for trial in lost(found, self.now_s):
            self.change(trial, ended(trial, "lost", self.now_s, self.next_change))

    def close(self, **values: int) -> None:
        """Updates the job's counters."""
        values = {"changes": self.next_change - 1, **values}
        _update(self._connection, "jobs", {"job_id": self.job.job_id, **values}, "job_id")


_OF_TRIAL = tuple(field.name for field in fields(Trial))


def trial_of(row: Row) -> Trial:
    """A trial from its row."""
    values = {name: row[name] for name in _OF_TRIAL}
    values |= {name: bool(values[name]) for name in ("converged", "stopped_by_cost")}
    return Trial(**values)


def job_of(row: Row) -> JobRecord:
    """A job from its row."""
    return JobRecord(
        spec=CreatedJob.model_validate_json(row["spec"]),
        seed=int(row["seed"]),
        created_s=row["created_s"],
        trials=row["trials"],
        changes=row["changes"],
        released=row["released"],
        knowledge=None if row["knowledge"] is None else Knowledge.from_json(row["knowledge"]),
    )


def add_job(connection: Connection, job: JobRecord) -> Writing:
    """Registers a job."""
    values = {
        "job_id": job.job_id,
        "spec": job.spec.model_dump_json(),
        "seed": str(job.seed),
        "created_s": job.created_s,
        "trials": job.trials,
        "changes": job.changes,
        "released": job.released,
        "family": job.spec.family,
        "knowledge": None if job.knowledge is None else job.knowledge.to_json(),
    }
    insert(connection, "jobs", values)
    return Writing(connection, job, job.created_s)


def find_job(connection: Connection, job_id: str) -> JobRecord | None:
    """Reads a job; None if there is none."""
    row = connection.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    return None if row is None else job_of(row)


def trials_of(connection: Connection, job_id: str, status: Status | None = None) -> list[Trial]:
    """A job's trials, by their numbers; all, or those with a status."""
    of_status = "" if status is None else "AND status = :status"
    query = f"SELECT * FROM trials WHERE job_id = :job_id {of_status} ORDER BY number"
    values = {"job_id": job_id, "status": status}
    return [trial_of(row) for row in connection.execute(query, values)]


def find_trial(connection: Connection, which: TrialId) -> Trial:
    """A trial.

    Raises:
        ZeusBSORuntimeError: The job has none of this number and batch size (404), or it is another
            run's (409).
    """
    query = "SELECT * FROM trials WHERE job_id = ? AND number = ? AND batch_size = ?"
    values = which.job_id, which.trial_number, which.batch_size
    row = connection.execute(query, values).fetchone()
    if row is None:
        raise ZeusBSORuntimeError(
            f"job {which.job_id} has no trial {which.trial_number} of batch size "
            f"{which.batch_size}",
            404,
        )
    if which.key not in (None, row["key"]):
        raise ZeusBSORuntimeError(
            f"trial {which.trial_number} of job {which.job_id} is another run's, as the database "
            "was restored from a backup without yours; this run does not count",
            409,
        )
    return trial_of(row)


class TrialGroup(NamedTuple):
    """Trials of a batch size that ended in the same way: their number and sums, and when the last
    was heard."""

    job_id: str
    batch_size: int
    status: Status
    converged: bool
    trials: int
    heard_s: float
    time: float
    energy: float


# `lost` as in `trials.lost`.
_SUMMED = """
SELECT job_id, batch_size,
    CASE WHEN status = 'running' AND heard_s + lease_s < ? THEN 'lost' ELSE status END AS now,
    converged, count(*), max(heard_s), sum(time), sum(energy)
FROM trials GROUP BY job_id, batch_size, now, converged
"""


def summed(connection: Connection, now_s: float) -> list[tuple[JobRecord, list[TrialGroup]]]:
    """All jobs, in the order in which they were registered, each with groups of its trials."""
    groups: dict[str, list[TrialGroup]] = {}
    for row in connection.execute(_SUMMED, (now_s,)):
        groups.setdefault(row["job_id"], []).append(TrialGroup(*row))
    found = connection.execute("SELECT * FROM jobs ORDER BY created_s, job_id")
    return [(job, groups.get(job.job_id, [])) for job in map(job_of, found)]


def generation_of(connection: Connection) -> int:
    """The number above which trials are numbered."""
    return int(connection.execute("SELECT max(number) FROM generations").fetchone()[0] or 0)


def no_job(job_id: str) -> ZeusBSORuntimeError:
    """Returns the error for an unknown job."""
    return ZeusBSORuntimeError(f"there is no job {job_id}; register it first", 404)


# ------------------------------------------------------------------------------------- a cache

MOST_JOBS = 200
"""So many jobs are kept in each process, the most recently used."""

_CHANGED = """
SELECT * FROM trials WHERE job_id = ? AND end_order > ?
UNION SELECT * FROM trials WHERE job_id = ? AND number > ?
UNION SELECT * FROM trials WHERE job_id = ? AND status = 'running'
"""


class KnownJob:
    """The knowledge about one job between requests: a decision reads only the trials that have
    changed since the last one.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._lock = threading.Lock()
        self._known: Known | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other threads out; forgets everything after an error."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._known = None
                raise

    def now(self, connection: Connection, job: JobRecord) -> Known:
        """Returns the knowledge as of this transaction."""
        known = self._known
        if known is None or not _same(known.job, job):
            known = self._known = Known(job)
        if known.job.changes != job.changes or not known.last_trial:
            of_job = self._job_id
            values = of_job, known.job.changes, of_job, known.last_trial, of_job
            known.update(job, map(trial_of, connection.execute(_CHANGED, values)))
        return known


def _same(known: JobRecord, job: JobRecord) -> bool:
    """Whether it is the same job, not one that was deleted and registered again."""
    same = (known.seed, known.created_s) == (job.seed, job.created_s)
    return same and known.changes <= job.changes

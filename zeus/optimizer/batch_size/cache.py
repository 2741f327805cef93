"""A cache of knowledge about jobs between requests. Each process has its own.

A decision reads only the trials that have changed since the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, or_, select

from zeus.optimizer.batch_size.choosing import Known
from zeus.optimizer.batch_size.rows import trial_of
from zeus.optimizer.batch_size.tables import trials
from zeus.optimizer.batch_size.trials import JobRecord

MOST_JOBS = 200
"""So many jobs are kept, the most recently used."""


class KnownJob:
    """The knowledge about one job."""

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
                self.forget()
                raise

    def forget(self) -> None:
        """Reads everything again."""
        self._known = None

    def now(self, connection: Connection, job: JobRecord) -> Known:
        """Returns the knowledge as of this transaction."""
        known = self._known
        if known is None or not _same(known.job, job):
            known = self._known = Known(job)
        if known.job.changes != job.changes or not known.last_trial:
            changed = or_(
                trials.c.end_order > known.job.changes,
                trials.c.number > known.last_trial,
                trials.c.status == "running",
            )
            query = select(trials).where((trials.c.job_id == self._job_id) & changed)
            known.update(job, [trial_of(row) for row in connection.execute(query)])
        return known


def _same(known: JobRecord, job: JobRecord) -> bool:
    """Whether it is the same job, not one that was deleted and registered again."""
    same = (known.seed, known.created_s) == (job.seed, job.created_s)
    return same and known.changes <= job.changes

"""A cache of knowledge about jobs between requests. Each process has its own.

A decision reads only the trials that have changed since the last one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, or_, select

from zeus.optimizer.batch_size.choosing import Known
from zeus.optimizer.batch_size.rows import trial_of
from zeus.optimizer.batch_size.tables import trials
from zeus.optimizer.batch_size.trials import JobRecord

MOST_JOBS = 200


class KnownJobs:
    """The most recently used jobs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, KnownJob] = OrderedDict()

    @contextmanager
    def of(self, job_id: str) -> Iterator[KnownJob]:
        """Locks a job for this thread; drops it after an error."""
        with self._lock:
            entry = self._entries.setdefault(job_id, KnownJob())
            self._entries.move_to_end(job_id)
            while len(self._entries) > MOST_JOBS:
                self._entries.popitem(last=False)
        with entry.lock:
            try:
                yield entry
            except BaseException:
                entry.known = None
                raise


class KnownJob:
    """A job locked by one thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: Known | None = None

    def now(self, connection: Connection, job: JobRecord) -> Known:
        """Returns the knowledge about it as of this transaction."""
        known = self.known
        if known is None or not _same(known.job, job):
            known = self.known = Known(job)
        if known.job.changes != job.changes or not known.last_trial:
            since = or_(
                trials.c.end_order > known.job.changes,
                trials.c.number > known.last_trial,
                trials.c.status == "running",
            )
            if not known.last_trial:
                since = trials.c.number > 0
            changed = select(trials).where((trials.c.job_id == job.job_id) & since)
            known.update(job, [trial_of(row) for row in connection.execute(changed)])
        return known


def _same(known: JobRecord, job: JobRecord) -> bool:
    """Whether it is the same job, not one that was deleted and registered again."""
    same = (known.seed, known.created_s) == (job.seed, job.created_s)
    return same and known.changes <= job.changes

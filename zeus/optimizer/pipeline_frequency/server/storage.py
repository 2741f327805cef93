"""Persistent state of the server, in one SQLite file.

Each fact about a job is a record: its kind (`rank`, `profile`, ...), a key within the kind, and
JSON. A record survives a kill of the process once `put` returns. Only one process uses the file at
a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable
from typing import Any

from zeus.exceptions import PipelineFrequencyError

FORMAT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    job_id TEXT NOT NULL, kind TEXT NOT NULL, key INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (job_id, kind, key)
) WITHOUT ROWID
"""

Record = tuple[str, str, int, Any]
"""job id, kind, key, JSON-compatible data"""


class Storage:
    """The file, open and locked.

    Raises:
        PipelineFrequencyError: It cannot be used, or another server has it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: int | None = None
        try:
            if path != ":memory:":
                self._lock = _lock(path)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise PipelineFrequencyError(
                    f"{path} was written by another release (format {version}, not {FORMAT}); name "
                    "another file in ZEUS_PFO_DATABASE"
                )
            # In this mode a commit survives the process without fsync, but not a crash of the
            # machine.
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(_TABLES)
            self._connection.execute(f"PRAGMA user_version={FORMAT}")
        except (sqlite3.Error, OSError) as error:
            self._unlock()
            raise PipelineFrequencyError(
                f"the database {path} cannot be used ({error}); name another file in "
                "ZEUS_PFO_DATABASE"
            ) from None
        except PipelineFrequencyError:
            self._unlock()
            raise

    def put(self, records: Iterable[Record]) -> None:
        """Writes records, all or none; one with the same id, kind and key is replaced."""
        rows = [(job, kind, key, json.dumps(body)) for job, kind, key, body in records]
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany("REPLACE INTO records VALUES (?, ?, ?, ?)", rows)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def all(self) -> list[Record]:
        """Every record, grouped by job, and sorted by key within a kind."""
        rows = self._connection.execute(
            "SELECT job_id, kind, key, body FROM records ORDER BY job_id, kind, key"
        )
        return [(job, kind, key, json.loads(body)) for job, kind, key, body in rows]

    def forget(self, job_id: str) -> None:
        """Removes a job's records."""
        self._connection.execute("DELETE FROM records WHERE job_id = ?", (job_id,))

    def close(self) -> None:
        """Unlocks the file for another server."""
        self._connection.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: str) -> int:
    # Next to the database: SQLite has its own locks on that file, and closing any descriptor of a
    # file drops them. The kernel releases this one when the process ends.
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise PipelineFrequencyError(
            f"another server process has {path}; run one server with one worker (no --workers), or "
            "name another file in ZEUS_PFO_DATABASE"
        ) from None
    return lock

"""Records of `ZeusMaster`, so that it can be killed at any moment and resume. `runs.jsonl` in a
job's folder has a line for each event: the job, the start of a run, its end, an excluded size, and
the end of the job. Incomplete lines are ignored. A writer holds a lock on the
file, which ends with its process.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from zeus_ipc.parsing import any_number, parse

RECORDS = "runs.jsonl"


class Records:
    """The file, open and locked.

    Raises:
        BlockingIOError: Another process writes it.
        OSError: It cannot be written.

    Attributes:
        job: The job's arguments; None in a new file.
    """

    def __init__(self, folder: str | Path) -> None:
        # Kept open, as its lock is the run's lock.
        self._file = open(Path(folder, RECORDS), "a+", encoding="utf-8")  # noqa: SIM115 - `close` closes it
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise
        self.job: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self._file.seek(0)
        for line in self._file.readlines():
            try:
                row = parse(line, decode=any_number)
                kind = row["kind"]
            except (ValueError, KeyError, TypeError):
                continue  # cut off when its writer was killed
            if kind == "job":
                self.job = {name: value for name, value in row.items() if name != "kind"}
            else:
                self.rows.append(row)
        self.over = any(row["kind"] == "over" for row in self.rows)

    def add(self, kind: str, **row: Any) -> None:
        """Appends a record; it is on the disk when this returns.

        Raises:
            OSError: It cannot be written.
        """
        # On a line of its own, even after a truncated one.
        start = "" if self._ends_whole() else "\n"
        self._file.write(start + json.dumps({"kind": kind, **row}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _ends_whole(self) -> bool:
        size = os.fstat(self._file.fileno()).st_size
        return size == 0 or os.pread(self._file.fileno(), 1, size - 1) == b"\n"

    def close(self) -> None:
        """Releases the file for other processes."""
        self._file.close()


def unfinished(log_base: str, prefix: str, job: dict[str, Any]) -> tuple[str, Records] | None:
    """Finds the newest folder of a job with the same arguments that is not complete.

    Returns:
        The folder and its records; None if there is none, or another process has it.
    """
    folders = [path.parent for path in Path(log_base).glob(f"*/{RECORDS}")]
    mine = [path for path in folders if path.name.startswith(prefix)]
    for folder in sorted(mine, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            records = Records(folder)
        except OSError:
            continue
        if records.job == job and not records.over:
            return str(folder), records
        records.close()
    return None

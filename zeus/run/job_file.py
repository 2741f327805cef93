"""`job.json` in a job's folder: what the job began with, and whether it is over. With it and the
results of its runs, `ZeusMaster` can be killed at any moment and resume.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from zeus.policy.knowledge import Knowledge
from zeus_ipc.parsing import any_number, parse

JOB = "job.json"


class JobFile:
    """The file, open and locked. The lock ends with its process.

    Raises:
        BlockingIOError: Another process trains the job.
        OSError: It cannot be written.

    Attributes:
        arguments: The job's arguments; None in a new file.
        knowledge: What was known of the job when it began, if anything.
        over: Whether there is nothing left to train.
    """

    def __init__(self, folder: str | Path) -> None:
        # Kept open, as its lock is the job's lock.
        self._file = open(Path(folder, JOB), "a+", encoding="utf-8")  # noqa: SIM115 - `close` closes it
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise
        self.arguments: dict[str, Any] | None = None
        self.knowledge: Knowledge | None = None
        self.over = False
        self._file.seek(0)
        try:
            content = parse(self._file.read(), decode=any_number)
            known = content["knowledge"]
            self.knowledge = None if known is None else Knowledge.from_json(known)
            self.arguments, self.over = content["arguments"], content["over"]
        except (ValueError, KeyError, TypeError):
            pass  # new, or cut off when its writer was killed: nothing had begun, or all was over

    def write(self, arguments: dict[str, Any], knowledge: Knowledge | None, over: bool) -> None:
        """Writes all of it.

        Raises:
            OSError: It cannot be written.
        """
        known = None if knowledge is None else knowledge.to_json()
        content = {"arguments": arguments, "knowledge": known, "over": over}
        self._file.truncate(0)  # not replaced, as the lock is this file's
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Releases the job for other processes."""
        self._file.close()


def unfinished(log_base: str, prefix: str, arguments: dict[str, Any]) -> tuple[str, JobFile] | None:
    """Finds the newest folder of a job with the same arguments that is not complete.

    Returns:
        The folder and its file; None if there is none, or another process has it.
    """
    folders = [path.parent for path in Path(log_base).glob(f"*/{JOB}")]
    mine = [path for path in folders if path.name.startswith(prefix)]
    for folder in sorted(mine, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            file = JobFile(folder)
        except OSError:
            continue
        if file.arguments == arguments and not file.over:
            return str(folder), file
        file.close()
    return None

"""Records of `ZeusMaster`, so that it can be killed at any moment and resume. `runs.jsonl` in a
job's folder has a line for each event: the job, the start of a run, its process, its end, an
excluded size, and the end of the job. Incomplete lines are ignored. A writer holds a lock on the
file, which ends with its process.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zeus.analyze import HistoryEntry
from zeus.policy.interface import Run
from zeus.policy.knowledge import Knowledge
from zeus.run.settings import JOB_ID, LOG_DIR

RECORDS = "runs.jsonl"


@dataclass(frozen=True)
class Script:
    """A process, identified even if its pid is reused.

    Attributes:
        pid: Its number.
        started: When it started, clock ticks since the machine's start.
        boot: Id of the boot.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Script | None:
        """Returns the process with this pid; None if there is none, or it has ended."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return None
        # The name, in parentheses, may have anything in it.
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else cls(pid, int(fields[18]), boot)

    @classmethod
    def with_settings(cls, log_dir: str, job_id: str) -> Script | None:
        """Finds the oldest process that `ZeusMaster` started for a run, by its environment, in case
        `ZeusMaster` was killed before it recorded it."""
        asked = {f"{LOG_DIR}={log_dir}".encode(), f"{JOB_ID}={job_id}".encode()}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                given = set(path.read_bytes().split(b"\0"))
            except OSError:  # it has ended, or is another user's
                continue
            script = cls.of(int(path.parent.name)) if asked <= given else None
            if script is not None:
                found.append(script)
        return min(found, key=lambda one: one.started, default=None)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return Script.of(self.pid) == self


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        run: The run as reported to the policy.
        entry: Its entry in the history; None if its script had no result.
    """

    run: Run
    entry: HistoryEntry | None


@dataclass(frozen=True)
class LeftOut:
    """A batch size was too large for the GPU's memory.

    Attributes:
        batch_size: The size.
    """

    batch_size: int


@dataclass(frozen=True)
class Begun:
    """The start of a run.

    Attributes:
        batch_size: Its batch size.
        began_s: When, s since 1970.
        eta_knob: The eta of its cost; None: the job's.
        cost_bound: Cost at which it is stopped, J; None for never.
    """

    batch_size: int
    began_s: float = 0.0
    eta_knob: float | None = None
    cost_bound: float | None = None

    @property
    def chosen(self) -> tuple[int, float] | None:
        """Batch size, and eta if it differs from the job's."""
        return None if self.eta_knob is None else (self.batch_size, self.eta_knob)


@dataclass
class JobProgress:
    """The progress of a job.

    Attributes:
        ended: Its runs and excluded sizes, in order.
        begun: The starts of these, and of the run whose end is not recorded.
        script: The process of a run that has begun and whose end is not recorded.
        in_flight: Whether there is such a run.
        knowledge: What was known from another GPU when the job began.
        over: Whether the job is complete.
    """

    ended: list[Ended | LeftOut] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    script: Script | None = None
    in_flight: bool = False
    knowledge: Knowledge | None = None
    over: bool = False


class Records:
    """The file, open and locked.

    Args:
        folder: The job's folder.

    Raises:
        BlockingIOError: Another process writes it.
        OSError: It cannot be written.

    Attributes:
        job: The job's arguments; None in a new file.
        progress: Its progress when the file was opened.
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
        self.progress = JobProgress()
        self._file.seek(0)
        for line in self._file.readlines():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            row = json.loads(line)
            kind = row.pop("kind")
        except (ValueError, KeyError, AttributeError):
            return  # cut off when its writer was killed
        now = self.progress
        if kind == "job":
            self.job = row
        elif kind == "begun":
            # A run that began and was killed may have been restarted.
            known = {field.name: row[field.name] for field in fields(Begun) if field.name in row}
            begun = Begun(**known)
            now.begun[len(now.ended) :] = [begun]
            now.in_flight, now.script = True, None
        elif kind == "started":
            now.script = Script(**row)
        elif kind == "ended":
            entry = None if row["entry"] is None else HistoryEntry(**row["entry"])
            now.ended.append(Ended(Run(**row["run"]), entry))
            now.in_flight, now.script = False, None
        elif kind == "left out":
            now.ended.append(LeftOut(row["batch_size"]))
            now.in_flight, now.script = False, None
        elif kind == "knowledge":
            now.knowledge = Knowledge.from_json(row["text"])
        elif kind == "over":
            now.over = True

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

    Args:
        log_base: Folder of all jobs' folders.
        prefix: Prefix of the job's folders.
        job: The job's arguments.

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
        if records.job == job and not records.progress.over:
            return str(folder), records
        records.close()
    return None

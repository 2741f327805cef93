"""The ledger's file: its tables, opening it, and setting a damaged one aside."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "energy.db"
VERSION = 1
DAMAGED = "damaged"
"""Part of the name of a file that was set aside."""

AMOUNTS = (
    "active_uj INTEGER NOT NULL, idle_uj INTEGER NOT NULL, below_uj INTEGER NOT NULL, "
    "above_uj INTEGER NOT NULL, ns INTEGER NOT NULL"
)
SPAN = "first_ms INTEGER NOT NULL, last_ms INTEGER NOT NULL"
"""When it was charged first and last, from the bucket's beginning."""

TABLES = f"""
CREATE TABLE gpu (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE);
CREATE TABLE account (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL, name TEXT NOT NULL, run TEXT NOT NULL, uid INTEGER NOT NULL,
    parent INTEGER NOT NULL,              -- the user or namespace it is part of, or itself
    begin_s INTEGER NOT NULL DEFAULT 0,   -- when it first held a GPU, UTC; 0: it never did
    end_s INTEGER NOT NULL DEFAULT 0,     -- when it last ceased to
    UNIQUE (kind, name, run, uid)
);
-- To whom a GPU is allocated, or was since its position; times of CLOCK_MONOTONIC.
CREATE TABLE holding (
    id INTEGER PRIMARY KEY,
    gpu INTEGER NOT NULL, account INTEGER NOT NULL,
    weight INTEGER NOT NULL, parts INTEGER NOT NULL, -- which part it is, of how many; 0: all of it
    control_group TEXT NOT NULL,          -- the job or pod with whose control group it ends
    boot TEXT NOT NULL, begin_ns INTEGER NOT NULL, end_ns INTEGER,
    seen INTEGER NOT NULL DEFAULT 0       -- whether the control group was there once
);
-- Each microjoule once. below and above: how much less or more it may be than active + idle.
CREATE TABLE energy (
    bucket INTEGER NOT NULL, gpu INTEGER NOT NULL, account INTEGER NOT NULL,
    method INTEGER NOT NULL,
    {AMOUNTS}, {SPAN},
    PRIMARY KEY (bucket, gpu, account, method)
) WITHOUT ROWID;
-- The same by UTC day and parent, kept for longer.
CREATE TABLE day (
    day INTEGER NOT NULL, account INTEGER NOT NULL, method INTEGER NOT NULL,
    {AMOUNTS},
    PRIMARY KEY (day, account, method)
) WITHOUT ROWID;
-- The same since the ledger began, by GPU: counters that never fall.
CREATE TABLE total (
    account INTEGER NOT NULL, gpu INTEGER NOT NULL,
    {AMOUNTS},
    PRIMARY KEY (account, gpu)
) WITHOUT ROWID;
-- Of it, what is an estimate: by method.
CREATE TABLE estimate (
    account INTEGER NOT NULL, method INTEGER NOT NULL,
    {AMOUNTS},
    PRIMARY KEY (account, method)
) WITHOUT ROWID;
-- Time in which the clocks of an account's GPUs were limited, by cause: see zeus_ipc.limited.
CREATE TABLE limited (
    account INTEGER NOT NULL, bucket INTEGER NOT NULL, cause TEXT NOT NULL, ns INTEGER NOT NULL,
    PRIMARY KEY (account, bucket, cause)
) WITHOUT ROWID;
-- What the GPUs drew, as their counters have it: what the rows must add up to.
CREATE TABLE meter (
    bucket INTEGER NOT NULL, gpu INTEGER NOT NULL, uj INTEGER NOT NULL,
    PRIMARY KEY (bucket, gpu)
) WITHOUT ROWID;
-- Until when each GPU's energy is in the rows, and what its meter read there.
CREATE TABLE position (
    gpu INTEGER PRIMARY KEY, boot TEXT NOT NULL,
    t_ns INTEGER NOT NULL, energy_uj INTEGER NOT NULL, counted_uj INTEGER NOT NULL
);
-- UTC less CLOCK_MONOTONIC, as last seen in this boot.
CREATE TABLE clock (boot TEXT PRIMARY KEY, offset_ns INTEGER NOT NULL) WITHOUT ROWID;
-- Processes on GPUs that nobody holds.
CREATE TABLE process (
    id INTEGER PRIMARY KEY,
    account INTEGER NOT NULL,
    boot TEXT NOT NULL, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL,
    begin_s INTEGER NOT NULL,             -- when it started, UTC
    UNIQUE (account, boot, pid, start_ticks)
);
-- Detail of energy, never added to it: what it is by process, kept for days.
CREATE TABLE process_energy (
    bucket INTEGER NOT NULL, gpu INTEGER NOT NULL, process INTEGER NOT NULL,
    method INTEGER NOT NULL,
    {AMOUNTS}, {SPAN},
    PRIMARY KEY (bucket, gpu, process, method)
) WITHOUT ROWID;
-- The part of energy that process_energy adds up to.
CREATE TABLE divided (
    bucket INTEGER NOT NULL, gpu INTEGER NOT NULL, account INTEGER NOT NULL,
    method INTEGER NOT NULL,
    {AMOUNTS},
    PRIMARY KEY (bucket, gpu, account, method)
) WITHOUT ROWID;
-- Runs of Slurm's jobs are found by their SLUIDs, where there are any.
CREATE INDEX sluid ON account (run) WHERE run GLOB 's*';
"""


class LedgerError(Exception):
    """The ledger cannot be used; the message is one sentence that says why and what to do.

    Attributes:
        cause: The system's or SQLite's error.
    """

    def __init__(self, message: str, cause: OSError | sqlite3.Error) -> None:
        super().__init__(message)
        self.cause = cause


def open_ledger(directory: str | os.PathLike[str]) -> sqlite3.Connection:
    """Opens the ledger in a directory; creates it if needed, and sets a damaged one aside.

    Raises:
        LedgerError: It can be neither opened nor created.
    """
    path = Path(directory, FILE)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
                raise
            _set_aside(path, error)
            return _open(path)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(
            f"the energy ledger {path} cannot be used ({error}); zeusd runs without accounting "
            "until the cause is removed",
            error,
        ) from None


@contextlib.contextmanager
def open_to_read(directory: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Opens an existing ledger as it is now, whatever is written meanwhile.

    Raises:
        sqlite3.Error: It cannot be read.
    """
    path = Path(directory, FILE)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    try:
        connection.execute("PRAGMA query_only = 1")
        connection.execute("PRAGMA cache_size = -1024")
        connection.execute("BEGIN")
        yield connection
    finally:
        connection.close()


def _open(path: Path) -> sqlite3.Connection:
    # Transactions are begun and ended explicitly.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -1024")
        connection.execute("PRAGMA wal_autocheckpoint = 256")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        if version not in (0, VERSION):
            raise sqlite3.OperationalError(
                f"it has version {version} and this zeusd writes version {VERSION}"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: sqlite3.Error) -> bool:
    return "malformed" in str(error) or "not a database" in str(error)


def _set_aside(path: Path, error: sqlite3.Error) -> None:
    aside = path.with_name(f"{path.stem}.{DAMAGED}-{time.time_ns()}.db")
    os.rename(path, aside)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    log.error(
        "the energy ledger was damaged (%s); zeusd moved it to %s and started a new one",
        error,
        aside,
        extra={"event": "ledger_damaged", "path": str(aside)},
    )


def damaged(directory: str | os.PathLike[str]) -> list[str]:
    """Ledgers that were set aside, oldest first."""
    return sorted(str(path) for path in Path(directory).glob(f"*.{DAMAGED}-*.db"))

"""The SQLite file under the store, and its tables. A transaction that writes locks the file, so any
number of processes of a machine may share it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import Trial
from zeus.utils.http import retrying

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the tables below."""

BUSY_S = 30.0
"""How long a transaction waits for others."""

_PUBLIC = "the database cannot be used now; the server's log says why. Try again later"

T = TypeVar("T")

_TYPES = {"int": "INTEGER", "float": "REAL", "bool": "INTEGER", "Status": "TEXT"}


def _column(field: Field[Any]) -> str:
    kind, _, optional = str(field.type).partition(" | ")
    return f"{field.name} {_TYPES[kind]}{'' if optional else ' NOT NULL'}"


_TABLES = (
    # `spec` is JSON of CreatedJob; `seed` is an integer of any size; `trials` is the highest number
    # of one, `changes` counts theirs but for heartbeats; `family` is the same job on other GPUs;
    # `knowledge`, JSON of Knowledge, is what was known of it there at registration.
    """CREATE TABLE jobs (job_id TEXT PRIMARY KEY, spec TEXT NOT NULL, seed TEXT NOT NULL,
    created_s REAL NOT NULL, trials INTEGER NOT NULL, changes INTEGER NOT NULL,
    released INTEGER NOT NULL, family TEXT, knowledge TEXT)""",
    "CREATE INDEX jobs_family ON jobs (family)",
    # A repeated request has the same `key`, and gets the same trial.
    f"""CREATE TABLE trials (job_id TEXT NOT NULL REFERENCES jobs ON DELETE CASCADE,
    key TEXT NOT NULL, {", ".join(map(_column, fields(Trial)))},
    PRIMARY KEY (job_id, number), UNIQUE (job_id, key))""",
    "CREATE INDEX trials_job_id_end_order ON trials (job_id, end_order)",
    "CREATE INDEX trials_job_id_status ON trials (job_id, status)",
    # Of each restore from a backup: numbers of later trials are above it.
    "CREATE TABLE generations (number INTEGER PRIMARY KEY)",
    f"PRAGMA user_version = {VERSION}",
)


def path_of(name: str | Path) -> str:
    """The file of a database.

    Args:
        name: A path, or a URL: `sqlite:///bso.db`.

    Raises:
        ZeusBSOConfigError: It is neither.
    """
    kind, is_url, path = str(name).partition("://")
    if not is_url:
        path = kind
    elif kind.partition("+")[0] == "sqlite":  # ml-energy/zeus names a driver after the +
        path = path.removeprefix("/")
    else:
        path = ""
    if path in ("", ":memory:"):
        raise ZeusBSOConfigError(
            f"the database {kind!r} is not supported; use SQLite: name a file, such as bso.db or "
            "sqlite:///bso.db"
        )
    return path


class Database:
    """An open database with its tables in place. Safe for use by several threads.

    Args:
        echo: Whether statements are logged.

    Raises:
        ZeusBSOConfigError: It is not the name of a SQLite file.
        ZeusBSORuntimeError: It cannot be used, or another release or program has written it.

    Attributes:
        path: Its file.
    """

    def __init__(self, name: str | Path, *, echo: bool = False) -> None:
        self.path = path_of(name)
        self._file = Path(self.path).absolute()  # though the program may change its folder
        self._echo = echo
        self._idle: deque[sqlite3.Connection] = deque()
        folder = Path(self.path).parent
        if not folder.is_dir():
            raise ZeusBSORuntimeError(
                f"the database {self.path} cannot be used: there is no folder {folder}; make it, "
                "or name another file",
                503,
            )
        try:
            # SQLite does not wait where two processes begin at once.
            retrying(lambda error: "locked" in str(error), (0.05, 1.0), BUSY_S)(self._write_ahead)
            if self.read(_version) != VERSION:
                self.write(_create)
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, which sees one state of the database and changes nothing.

        Raises:
            ZeusBSORuntimeError: The database cannot be used (503).
        """
        return self._transaction("BEGIN", work)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, which changes all or nothing.

        Raises:
            ZeusBSORuntimeError: The database cannot be used (503), or a value is refused (422).
        """
        # Locked from the start: a reader that becomes a writer would not wait for others but fail.
        return self._transaction("BEGIN IMMEDIATE", work)

    def close(self) -> None:
        """Closes connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    def _transaction(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connected() as connection:
            connection.execute(begin)
            with connection:
                return work(connection)

    def _write_ahead(self) -> None:
        # With it, who reads and who writes do not wait for each other. It stays with the file.
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode=WAL")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = self._idle.pop() if self._idle else self._connect()
            try:
                yield connection
            finally:
                self._idle.append(connection)
        except OverflowError:
            raise ZeusBSORuntimeError(
                "a number is larger than the database can keep", 422
            ) from None
        except sqlite3.Error as error:
            said = f"the database {self.path} cannot be used: {error}"
            raise ZeusBSORuntimeError(said, 503, _PUBLIC) from None

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys=ON")
        # A trial's number is never given twice, not even when the machine falls.
        connection.execute("PRAGMA synchronous=FULL")
        if self._echo:
            connection.set_trace_callback(logger.info)
        return connection


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _create(connection: sqlite3.Connection) -> None:
    """Creates the tables; of several processes that start, one does it.

    Raises:
        ZeusBSORuntimeError: Another release, or another program, wrote the file (503).
    """
    found = _version(connection)
    if found == VERSION:
        return
    if found or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise ZeusBSORuntimeError(
            f"the database was written by another release (tables {found}, here {VERSION}), or by "
            "another program; upgrade zeusd, or name another database",
            503,
        )
    for statement in _TABLES:
        connection.execute(statement)

"""How the servers open their databases: SQLAlchemy's core, and SQLite as several threads and
processes can use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError


def sqlite_engine(url: URL, synchronous: Literal["FULL", "NORMAL"], **options: Any) -> Engine:
    """An engine for a SQLite file.

    Args:
        synchronous: What a commit survives: a crash of the machine (`FULL`), or only one of the
            process, without fsync.
        options: Of `create_engine`.
    """
    engine = create_engine(url, **options)

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        # Python's driver would begin transactions of its own.
        connection.isolation_level = None
        try:
            # With it, who reads and who writes do not wait for each other. It stays with the file.
            connection.execute("PRAGMA journal_mode=WAL")
        except BaseException:
            connection.close()
            raise
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A reader that becomes a writer would not wait for others but fail.
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def transaction(engine: Engine, *, writes: bool) -> Iterator[Connection]:
    """A transaction: all or nothing. One that only reads sees one state of the database."""
    options: dict[str, Any] = {"writes": writes}
    if not writes and engine.dialect.name != "sqlite":
        options["isolation_level"] = "REPEATABLE READ"
    with engine.connect() as connection, connection.execution_options(**options).begin():
        yield connection


def cause_of(error: Exception) -> str:
    """What the driver said, in one line, without the statement."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(cause).split())

"""The database under the store: SQLite in a file, or PostgreSQL by URL.

A transaction that writes locks the database (SQLite) or its job's row (PostgreSQL), so any number
of processes may share one. It is retried after a serialization failure or a short outage; the
function must tolerate that.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.tables import VERSION, metadata, versions
from zeus.utils.database import cause_of, sqlite_engine, transaction

logger = logging.getLogger(__name__)

_PUBLIC = "the database cannot be used now; the server's log says why. Try again later"
SHARE = 0.75
"""Share of PostgreSQL's connections that the server uses, all workers together."""

BUSY_S = 30.0
"""How long a transaction waits for others."""

_ATTEMPTS = 6
CREATE_LOCK = 0x7A657573  # any number; held while the tables of a PostgreSQL database are created
_AGAIN = ("40001", "40P01", "23505")
"""PostgreSQL's codes for conflicts with other transactions. The last: two have created the same
job; the retry finds it."""

T = TypeVar("T")


def url_of(url_or_path: str | Path) -> URL:
    """The URL of a database, with the driver that is used.

    Args:
        url_or_path: `postgresql://user@host/database`, `sqlite:///bso.db`, or a file's path.

    Raises:
        ZeusBSOConfigError: It is neither.
    """
    given = str(url_or_path)
    if "://" not in given:
        return URL.create("sqlite", database=given)
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        raise ZeusBSOConfigError(
            "the database's URL cannot be read; write it as postgresql://user:password@host/name "
            "or sqlite:///bso.db"
        ) from None
    # ml-energy/zeus names drivers for asyncio here.
    kind = url.drivername.partition("+")[0]
    if kind == "sqlite":
        return url.set(drivername="sqlite")
    if kind in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise ZeusBSOConfigError(
        f"{kind} databases are not supported; use SQLite (sqlite:///bso.db) or PostgreSQL "
        "(postgresql://user@host/name)"
    )


class Database:
    """An open database with its tables in place.

    Args:
        echo: Whether statements are logged.
        workers: Number of processes that share PostgreSQL's connections.

    Raises:
        ZeusBSOConfigError: The URL is wrong, or its driver is missing.
        ZeusBSORuntimeError: It cannot be used, or another release or program has written it.
    """

    def __init__(self, url_or_path: str | Path, *, echo: bool = False, workers: int = 1) -> None:
        self.url = url_of(url_or_path)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite and self.url.database in (None, "", ":memory:"):
            raise ZeusBSOConfigError("name a file for the SQLite database, such as bso.db")
        try:
            self._engine = (
                _sqlite(self.url, echo) if self.is_sqlite else _postgresql(self.url, echo, 1)
            )
        except NoSuchModuleError:
            raise ZeusBSOConfigError(f"{self.url.drivername} is not a known database") from None
        except ModuleNotFoundError as error:
            raise ZeusBSOConfigError(
                f"PostgreSQL needs {error.name}: pip install 'zeusd[postgresql]'"
            ) from None
        try:
            if not self.is_sqlite:
                allowed = self._attempt(lambda: self._connected(False, _connections))
                self._engine.dispose()
                self._engine = _postgresql(
                    self.url, echo, max(1, int(SHARE * allowed) // max(1, workers))
                )
            if self._attempt(lambda: self._connected(False, _version)) != VERSION:
                self._attempt(lambda: self._connected(True, _create))
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """Which it is, without its password."""
        if self.is_sqlite:
            return str(self.url.database)
        return self.url.set(drivername="postgresql").render_as_string(hide_password=True)

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, which sees one state of the database and changes nothing.

        Raises:
            ZeusBSORuntimeError: The database cannot be used (503).
        """
        return self._attempt(lambda: self._connected(False, work))

    def write(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, which changes all or nothing. It may be run more than once.

        Raises:
            ZeusBSORuntimeError: The database cannot be used (503), or a value is refused (422).
        """
        return self._attempt(lambda: self._connected(True, work))

    def close(self) -> None:
        """Closes connections that nobody uses."""
        self._engine.dispose()

    def _connected(self, writes: bool, work: Callable[[Connection], T]) -> T:
        with transaction(self._engine, writes=writes) as connection:
            return work(connection)

    def _attempt(self, work: Callable[[], T]) -> T:
        attempt = 0
        while True:
            attempt += 1
            try:
                return work()
            except (OverflowError, DataError):
                raise ZeusBSORuntimeError(
                    "a number is larger than the database can keep", 422
                ) from None
            except (DBAPIError, PoolTimeout) as error:
                if attempt >= _ATTEMPTS or not self._may_pass(error):
                    raise ZeusBSORuntimeError(
                        f"the database {self.name} cannot be used: {cause_of(error)}",
                        503,
                        _PUBLIC,
                    ) from None
                logger.debug("attempt %d failed: %s", attempt, cause_of(error))
                time.sleep(random.uniform(0.5, 1) * 0.05 * 2**attempt)

    def _may_pass(self, error: Exception) -> bool:
        if self.is_sqlite:
            return "locked" in cause_of(error)
        if not isinstance(error, DBAPIError):
            return False
        return error.connection_invalidated or getattr(error.orig, "sqlstate", "") in _AGAIN


def _sqlite(url: URL, echo: bool) -> Engine:
    assert url.database is not None
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise ZeusBSORuntimeError(
            f"the database {url.database} cannot be used: there is no folder {folder}; make it, or "
            "name another file",
            503,
        )
    # A trial's number is never given twice, not even when the machine falls.
    return sqlite_engine(
        url,
        "FULL",
        echo=echo,
        connect_args={"timeout": BUSY_S},
        pool_timeout=BUSY_S,
        max_overflow=30,
    )


def _postgresql(url: URL, echo: bool, connections: int) -> Engine:
    # Who finds none free waits here: PostgreSQL would refuse one too many.
    return create_engine(
        url,
        echo=echo,
        pool_pre_ping=True,
        pool_timeout=BUSY_S,
        pool_size=connections,
        max_overflow=0,
        connect_args={"connect_timeout": 10},
    )


def _connections(connection: Connection) -> int:
    """Connections available to users other than superusers."""
    names = ("max_connections", "superuser_reserved_connections")
    most, reserved = (int(connection.execute(text(f"SHOW {name}")).scalar_one()) for name in names)
    return most - reserved


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(versions.name):
        return None
    return connection.execute(select(versions.c.version_num)).scalar()


def _create(connection: Connection) -> None:
    """Creates the tables; of several processes that start, one does it.

    Raises:
        ZeusBSORuntimeError: Another release, or another program, wrote the database (503).
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": CREATE_LOCK})
    version = _version(connection)
    if version == VERSION:
        return
    # A database of PostgreSQL may have others' tables, such as those of its extensions.
    elsewhere = connection.dialect.name == "sqlite" and inspect(connection).get_table_names()
    if version is not None or elsewhere:
        raise ZeusBSORuntimeError(
            f"the database was written by another release (tables {version or 'unknown'}, here "
            f"{VERSION}), or by another program; upgrade zeusd, or name another database",
            503,
        )
    metadata.create_all(connection)
    connection.execute(insert(versions).values(version_num=VERSION))

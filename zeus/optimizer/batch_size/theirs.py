"""Reads jobs and trials from a database of ml-energy/zeus's batch size server.

Source: its tables `Job`, `BatchSize` and `Trial`, the same from its first release with a server to
0.16. Its other data, arms and a generator's state, follow from the trials here. Its times are local
times of the machine that wrote them, and are read as this machine's.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from zeus.optimizer.batch_size.common import CreatedJob
from zeus.optimizer.batch_size.database import path_of
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import Status, Trial
from zeus_ipc.wire import explain

_STATUS: dict[str, Status] = {"Dispatched": "running", "Succeeded": "ok", "Failed": "failed"}

_DRIVERS = {"mysql": "pymysql", "mariadb": "pymysql", "postgresql": "psycopg"}
"""Packages that read other databases than SQLite, by the kind in a URL."""


def read(url_or_path: str) -> list[tuple[CreatedJob, list[Trial]]]:
    """Returns all jobs, each with its trials by number. It changes nothing.

    Raises:
        ZeusBSOConfigError: The URL is wrong, or its driver is missing.
        ZeusBSORuntimeError: It cannot be read, or is not such a database.
    """
    # The part after a + is a driver for asyncio.
    kind = url_or_path.partition("://")[0].partition("+")[0]
    driver = _driver(kind)
    name = url_or_path if driver is sqlite3 else f"{kind} database {urlsplit(url_or_path).path}"
    quote = "`" if driver.__name__ == "pymysql" else '"'
    try:
        with closing(_connect(driver, url_or_path)) as connection:
            cursor = connection.cursor()
            jobs, sizes, trials = (
                _rows(cursor, quote + table + quote) for table in ("Job", "BatchSize", "Trial")
            )
    except driver.Error as error:
        raise ZeusBSORuntimeError(
            f"{name} cannot be read as a database of ml-energy/zeus's batch size server: {error}"
        ) from None
    found = []
    for job in sorted(jobs, key=lambda row: str(row["job_id"])):
        of_job = [row["batch_size"] for row in sizes if row["job_id"] == job["job_id"]]
        runs = [_trial(row) for row in trials if row["job_id"] == job["job_id"]]
        found.append((_spec(job, of_job, name), sorted(runs, key=lambda run: run.number)))
    return found


def _driver(kind: str) -> Any:
    """Python's interface to databases of this kind."""
    try:
        return import_module(_DRIVERS[kind]) if kind in _DRIVERS else sqlite3
    except ModuleNotFoundError as error:
        raise ZeusBSOConfigError(f"{kind} needs {error.name}: pip install {error.name}") from None


def _connect(driver: Any, url_or_path: str) -> Any:
    if driver is sqlite3:
        path = path_of(url_or_path)
        if not Path(path).is_file():
            raise ZeusBSOConfigError(f"there is no database {path}; name its file or its URL")
        return sqlite3.connect(path)
    try:
        url = urlsplit(url_or_path)
        given = {
            "host": url.hostname or "localhost",
            "port": url.port,
            "user": unquote(url.username or ""),
            "password": unquote(url.password or ""),
            "database" if driver.__name__ == "pymysql" else "dbname": url.path.removeprefix("/"),
        }
    except ValueError:
        raise ZeusBSOConfigError(
            "the database's URL cannot be read; write it as mysql://user:password@host/name"
        ) from None
    return driver.connect(**{name: value for name, value in given.items() if value})


def _rows(cursor: Any, table: str) -> list[dict[str, Any]]:
    cursor.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _spec(row: dict[str, Any], sizes: list[int], name: str) -> CreatedJob:
    known = {field: row[field] for field in CreatedJob.model_fields if field in row}
    try:
        return CreatedJob.model_validate({**known, "batch_sizes": sizes, "policy": "pruning-gts"})
    except ValidationError as error:
        raise ZeusBSORuntimeError(
            f"job {row['job_id']} of {name} cannot be taken over: {explain(error.errors()[0])}"
        ) from None


def _trial(row: dict[str, Any]) -> Trial:
    began_s = _seconds(row["start_timestamp"])
    ended_s = None if row["end_timestamp"] is None else _seconds(row["end_timestamp"])
    status = _STATUS[row["status"]]
    return Trial(
        number=row["trial_number"],
        batch_size=row["batch_size"],
        began_s=began_s,
        heard_s=began_s if ended_s is None else ended_s,
        status=status,
        ended_s=None if status == "running" else (ended_s or began_s),
        converged=bool(row["converged"]) and status == "ok",
        time=row["time"] or 0.0,
        energy=row["energy"] or 0.0,
    )


def _seconds(stamp: datetime | str) -> float:
    """Converts a naive local time to s since 1970."""
    return (datetime.fromisoformat(stamp) if isinstance(stamp, str) else stamp).timestamp()

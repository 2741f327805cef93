"""Reads jobs and trials from a database of ml-energy/zeus's batch size server.

Source: its tables `Job`, `BatchSize` and `Trial`, the same from its first release with a server to
0.16. Its other data, arms and a generator's state, follow from the trials here. Its times are local
times of the machine that wrote them, and are read as this machine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, MetaData, Row, create_engine, make_url, select
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from zeus.optimizer.batch_size.common import CreatedJob
from zeus.optimizer.batch_size.database import url_of
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.trials import Status, Trial
from zeus_common.text import explain

_TABLES = ("Job", "BatchSize", "Trial")
_STATUS: dict[str, Status] = {"Dispatched": "running", "Succeeded": "ok", "Failed": "failed"}
_MYSQL = "mysql+pymysql"


def read(url_or_path: str) -> list[tuple[CreatedJob, list[Trial]]]:
    """Returns all jobs, each with its trials by number. It changes nothing.

    Raises:
        ZeusBSOConfigError: The URL is wrong, or its driver is missing.
        ZeusBSORuntimeError: It cannot be read, or is not such a database.
    """
    url = _url(url_or_path)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise ZeusBSOConfigError(f"there is no database {url.database}; name its file or its URL")
    name = url.render_as_string(hide_password=True)
    try:
        engine = create_engine(url)
    except ModuleNotFoundError as error:
        raise ZeusBSOConfigError(
            f"{url.get_backend_name()} needs {error.name}: pip install {error.name}"
        ) from None
    try:
        with engine.connect() as connection:
            return _read(connection, name)
    except SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or error)
        raise ZeusBSORuntimeError(f"{name} cannot be read: {said}") from None
    finally:
        engine.dispose()


def _url(url_or_path: str) -> Any:
    if not url_or_path.startswith(("mysql:", "mysql+", "mariadb:", "mariadb+")):
        return url_of(url_or_path)
    try:
        return make_url(url_or_path).set(drivername=_MYSQL)
    except (ArgumentError, ValueError):
        raise ZeusBSOConfigError(
            "the database's URL cannot be read; write it as mysql://user:password@host/name"
        ) from None


def _read(connection: Connection, name: str) -> list[tuple[CreatedJob, list[Trial]]]:
    metadata = MetaData()
    metadata.reflect(connection)
    # MySQL may keep names in lower case.
    tables = {name.lower(): table for name, table in metadata.tables.items()}
    missing = [one for one in _TABLES if one.lower() not in tables]
    if missing:
        raise ZeusBSORuntimeError(
            f"{name} is not a database of ml-energy/zeus's batch size server: it has no table "
            f"{missing[0]}"
        )
    job, size, trial = (tables[one.lower()] for one in _TABLES)
    jobs = []
    for row in connection.execute(select(job).order_by(job.c.job_id)):
        sizes = [
            one.batch_size
            for one in connection.execute(select(size).where(size.c.job_id == row.job_id))
        ]
        of_job = select(trial).where(trial.c.job_id == row.job_id).order_by(trial.c.trial_number)
        spec = _spec(row, sizes, name)
        jobs.append((spec, [*_trials(connection.execute(of_job))]))
    return jobs


def _spec(row: Row[Any], sizes: list[int], name: str) -> CreatedJob:
    columns = dict(row._mapping)
    known = {field: columns[field] for field in CreatedJob.model_fields if field in columns}
    try:
        return CreatedJob.model_validate({**known, "batch_sizes": sizes, "policy": "pruning-gts"})
    except ValidationError as error:
        raise ZeusBSORuntimeError(
            f"job {row.job_id} of {name} cannot be taken over: {explain(error.errors()[0])}"
        ) from None


def _trials(rows: Any) -> Iterator[Trial]:
    for row in rows:
        began_s = _seconds(row.start_timestamp)
        ended_s = None if row.end_timestamp is None else _seconds(row.end_timestamp)
        status = _STATUS[getattr(row.status, "value", row.status)]
        yield Trial(
            number=row.trial_number,
            batch_size=row.batch_size,
            began_s=began_s,
            heard_s=began_s if ended_s is None else ended_s,
            status=status,
            ended_s=None if status == "running" else (ended_s or began_s),
            converged=bool(row.converged) and status == "ok",
            time=row.time or 0.0,
            energy=row.energy or 0.0,
        )


def _seconds(stamp: datetime | str) -> float:
    """Converts a naive local time to s since 1970."""
    return (datetime.fromisoformat(stamp) if isinstance(stamp, str) else stamp).timestamp()

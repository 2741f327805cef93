"""The tables of jobs and trials."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from zeus.optimizer.batch_size.trials import Trial

VERSION = "0001"
"""Of the tables below."""

metadata = MetaData()

# By Alembic's names, so that it can migrate these tables once they change.
versions = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(400), primary_key=True),
    Column("spec", Text, nullable=False),  # JSON of CreatedJob
    Column("seed", Text, nullable=False),  # an integer of any size
    Column("created_s", Double, nullable=False),
    # Counters. Locking this row reserves the next number.
    Column("trials", BigInteger, nullable=False),
    Column("changes", BigInteger, nullable=False),  # of its trials, but for heartbeats
    Column("released", BigInteger, nullable=False),
    Column("family", String(400)),  # the same job on other GPUs
    Column("knowledge", Text),  # JSON of Knowledge: what was known of it there at registration
    Index("jobs_family", "family"),
)

_TYPES: dict[str, Any] = {"int": BigInteger, "float": Double, "bool": Boolean, "Status": String(16)}


def _column(field: Field[Any]) -> Column[Any]:
    kind, _, optional = str(field.type).partition(" | ")
    return Column(
        field.name,
        _TYPES[kind],
        nullable=bool(optional),
        primary_key=field.name == "number",
        autoincrement=False,
        index=field.name == "status",
    )


trials = Table(
    "trials",
    metadata,
    Column("job_id", String(400), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("key", String(200), nullable=False),  # a repeated request gets the same trial
    *map(_column, fields(Trial)),
    UniqueConstraint("job_id", "key", name="trials_job_id_key"),
    Index("trials_job_id_end_order", "job_id", "end_order"),
)

generations = Table(
    "generations",
    metadata,
    # Of each restore from a backup: numbers of later trials are above it.
    Column("number", BigInteger, primary_key=True, autoincrement=False),
)

"""The tables of jobs and trials."""

from __future__ import annotations

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

trials = Table(
    "trials",
    metadata,
    Column("job_id", String(400), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("key", String(200), nullable=False),  # a repeated request gets the same trial
    Column("batch_size", BigInteger, nullable=False),
    Column("began_s", Double, nullable=False),
    Column("heard_s", Double, nullable=False),
    Column("lease_s", Double),
    Column("cost_bound", Double),
    Column("status", String(16), nullable=False, index=True),
    Column("ended_s", Double),
    Column("end_order", BigInteger),
    Column("converged", Boolean, nullable=False),
    Column("stopped_by_cost", Boolean, nullable=False),
    Column("epochs", BigInteger, nullable=False),
    Column("time", Double, nullable=False),
    Column("energy", Double, nullable=False),
    Column("overhead_time", Double, nullable=False),
    Column("overhead_energy", Double, nullable=False),
    Column("metric", Double),
    UniqueConstraint("job_id", "key", name="trials_job_id_key"),
    Index("trials_job_id_end_order", "job_id", "end_order"),
)

generations = Table(
    "generations",
    metadata,
    # Of each restore from a backup: numbers of later trials are above it.
    Column("number", BigInteger, primary_key=True, autoincrement=False),
)

"""The tables of jobs and trials. `migrations` creates them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

VERSION = "0001"
"""The newest migration."""

metadata = MetaData()


def _job_id() -> ForeignKey:
    return ForeignKey("jobs.job_id", ondelete="CASCADE")


jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(400), primary_key=True),
    Column("spec", Text, nullable=False),  # JSON of CreatedJob
    Column("seed", Text, nullable=False),  # an integer of any size
    Column("created_s", Double, nullable=False),
    # Counters. Locking this row reserves the next number.
    Column("trials", BigInteger, nullable=False),
    Column("events", BigInteger, nullable=False),
    Column("released", BigInteger, nullable=False),
    Column("family", String(400)),  # the same job on other GPUs
    Column("knowledge", Text),  # JSON of Knowledge: what was known of it there at registration
    Index("jobs_family", "family"),
)

trials = Table(
    "trials",
    metadata,
    Column("job_id", String(400), _job_id(), primary_key=True),
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

events = Table(
    "events",
    metadata,
    Column("job_id", String(400), _job_id(), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("trial_number", BigInteger),
    Column("at_s", Double, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("body", Text, nullable=False),  # JSON
    ForeignKeyConstraint(
        ["job_id", "trial_number"],
        ["trials.job_id", "trials.number"],
        name="events_trial",
        ondelete="CASCADE",
    ),
)

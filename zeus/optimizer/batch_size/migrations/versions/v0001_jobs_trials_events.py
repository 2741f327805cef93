"""Jobs, their trials, and what happened to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(400), primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("seed", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("trials", sa.BigInteger, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
        sa.Column("released", sa.BigInteger, nullable=False),
        sa.Column("family", sa.String(400)),
        sa.Column("knowledge", sa.Text),
    )
    op.create_index("jobs_family", "jobs", ["family"])
    op.create_table(
        "trials",
        sa.Column(
            "job_id",
            sa.String(400),
            sa.ForeignKey("jobs.job_id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("batch_size", sa.BigInteger, nullable=False),
        sa.Column("began_s", sa.Double, nullable=False),
        sa.Column("heard_s", sa.Double, nullable=False),
        sa.Column("lease_s", sa.Double),
        sa.Column("cost_bound", sa.Double),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("ended_s", sa.Double),
        sa.Column("end_order", sa.BigInteger),
        sa.Column("converged", sa.Boolean, nullable=False),
        sa.Column("stopped_by_cost", sa.Boolean, nullable=False),
        sa.Column("epochs", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("energy", sa.Double, nullable=False),
        sa.Column("overhead_time", sa.Double, nullable=False),
        sa.Column("overhead_energy", sa.Double, nullable=False),
        sa.Column("metric", sa.Double),
        sa.UniqueConstraint("job_id", "key", name="trials_job_id_key"),
    )
    op.create_index("ix_trials_status", "trials", ["status"])
    op.create_index("trials_job_id_end_order", "trials", ["job_id", "end_order"])
    op.create_table(
        "generations",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    )
    op.create_table(
        "events",
        sa.Column(
            "job_id",
            sa.String(400),
            sa.ForeignKey("jobs.job_id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("trial_number", sa.BigInteger),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"],
            ["trials.job_id", "trials.number"],
            name="events_trial",
            ondelete="CASCADE",
        ),
    )

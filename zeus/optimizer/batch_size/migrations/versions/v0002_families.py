"""Families of jobs: the same job on other GPUs, and knowledge from there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    """Adds columns for families, and an index for changed trials."""
    op.add_column("jobs", sa.Column("family", sa.String(400)))
    op.add_column("jobs", sa.Column("knowledge", sa.Text))
    op.create_index("jobs_family", "jobs", ["family"])
    op.create_index("trials_job_id_end_order", "trials", ["job_id", "end_order"])

"""Trials with their own eta, and their measurements of power limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    """Adds these columns of trials."""
    op.add_column("trials", sa.Column("eta_knob", sa.Double))
    op.add_column("trials", sa.Column("limits", sa.JSON(none_as_null=True)))

"""What Alembic runs: always on the connection, and in the transaction, of `database.upgrade`."""

from __future__ import annotations

from alembic import context

from zeus.optimizer.batch_size.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters a table by recreating it
)
with context.begin_transaction():
    context.run_migrations()

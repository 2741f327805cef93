"""Changes of the tables from release to release; Alembic's, applied when a store is opened."""

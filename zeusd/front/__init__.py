"""The unprivileged process that speaks ZeroMQ, and may die of it."""

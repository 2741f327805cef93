"""Finds the batch size of recurring jobs across their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.optimizer.batch_size.client import BatchSizeOptimizer as BatchSizeOptimizer
    from zeus.optimizer.batch_size.common import JobSpec as JobSpec

__all__ = ["BatchSizeOptimizer", "JobSpec"]

# The server does not need what the client imports, and vice versa.
__getattr__ = lazily(__name__, {"BatchSizeOptimizer": "client", "JobSpec": "common"})

"""The batch size of jobs that recur, found across their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.optimizer.batch_size.client import BatchSizeOptimizer as BatchSizeOptimizer
    from zeus.optimizer.batch_size.common import JobSpec as JobSpec

__all__ = ["BatchSizeOptimizer", "JobSpec"]

# The server does without what the client imports, and the other way round.
__getattr__ = lazily(__name__, {"BatchSizeOptimizer": "client", "JobSpec": "common"})

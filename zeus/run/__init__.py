"""Recurring jobs: each run with a batch size chosen by a policy, and the power limit that it
finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.run.dataloader import ZeusDataLoader as ZeusDataLoader
    from zeus.run.exceptions import (
        ZeusCostThresholdExceededError as ZeusCostThresholdExceededError,
    )
    from zeus.run.files import read_history as read_history
    from zeus.run.master import ZeusMaster as ZeusMaster

__all__ = ["ZeusCostThresholdExceededError", "ZeusDataLoader", "ZeusMaster", "read_history"]

# The loader needs PyTorch; the master and the history do not.
__getattr__ = lazily(
    __name__,
    {
        "ZeusCostThresholdExceededError": "exceptions",
        "ZeusDataLoader": "dataloader",
        "ZeusMaster": "master",
        "read_history": "files",
    },
)

"""Checkpoints in one format, for one GPU, data parallel and sharded training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def save(path: Path | None, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes a checkpoint to resume from at `epoch`. All ranks call it; rank 0 writes."""
    if path is None:
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=whole)
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.new")  # a job killed meanwhile keeps the old file
        torch.save({"epoch": epoch, "model": model_state, "optimizer": optimizer_state}, aside)
        os.replace(aside, path)


def load(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Reads a checkpoint, if there is a path. Returns the epoch to resume with."""
    if path is None:
        return 0
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    epoch: int = state["epoch"]
    return epoch

"""The processes that torchrun starts, one for each GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from options import fail


def place() -> tuple[int, int, int]:
    """Returns this process's rank, the world size, and the local rank, which is its GPU."""
    try:
        rank, world_size, local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
    except KeyError:
        fail("start it with torchrun: torchrun --nnodes 1 --nproc_per_node gpu SCRIPT DATA_DIR")
    return rank, world_size, local_rank


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initializes torch.distributed: over NCCL if it trains on GPUs, else over gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()

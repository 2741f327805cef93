"""What is asked of the training framework. None is ever imported here: a program that has not
imported its framework has nothing running on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from zeus.compat import old_names

Framework = Literal["torch", "jax", "cupy"]


def synchronize(framework: Framework, gpu_indices: Sequence[int]) -> bool:
    """Waits until the GPUs have done what the framework has launched. Returns whether there was
    something to wait for: a device that this process uses.

    Only devices that the process uses are touched: waiting on another would create a context on
    it. Nothing happens where the framework is not imported or runs on no GPU.
    """
    module = sys.modules.get(framework)
    if module is None:
        return False
    waited = False
    if framework == "torch":
        if not module.cuda.is_available() or not module.cuda.is_initialized():
            return False
        current = module.cuda.current_device()
        for index in gpu_indices:
            if index == current or module.cuda.memory_reserved(index):
                module.cuda.synchronize(index)
                waited = True
    elif framework == "jax":
        for array in module.live_arrays():
            array.block_until_ready()
            waited = True
    else:
        for index in gpu_indices:
            if index == module.cuda.runtime.getDevice():
                module.cuda.Device(index).synchronize()
                waited = True
    return waited


def _distributed() -> Any:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def initialized() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return _distributed() is not None


def world_size() -> int:
    """Processes that train together; 1 where torch.distributed is not initialised."""
    distributed = _distributed()
    return 1 if distributed is None else int(distributed.get_world_size())


def alone() -> bool:
    """Whether this process trains by itself, and is not about to meet others."""
    return world_size() == 1 and os.environ.get("WORLD_SIZE", "1") == "1"


def rank() -> int:
    """This process's number among them."""
    distributed = _distributed()
    return 0 if distributed is None else int(distributed.get_rank())


_last_work: Any = None
"""The last reduction, kept on purpose. A thread of Gloo's may drop the last reference to one after
it is done, and needs Python's lock for that; a program that meanwhile destroys its process group
and then its model holds the lock and waits for that thread without end, see
https://github.com/pytorch/pytorch/issues/56297.
"""


def all_reduce(values: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
    """Combines the values of all processes, position by position, in double precision.

    Args:
        values: This process's. They are returned where torch.distributed is not initialised.
        operation: How.
    """
    global _last_work
    distributed = _distributed()
    if distributed is None:
        return list(values)
    torch = sys.modules["torch"]
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    reduce = distributed.ReduceOp.SUM if operation == "sum" else distributed.ReduceOp.MAX
    _last_work = distributed.all_reduce(tensor, op=reduce, async_op=True)
    _last_work.wait()
    return [float(value) for value in tensor.tolist()]


def store(timeout: timedelta) -> Any:
    """The key-value store that the processes have met through; None where there is none.

    Args:
        timeout: How long one call to it may take, where torch is new enough to set it apart.
    """
    distributed = _distributed()
    if distributed is None:
        return None
    try:
        found = distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    if hasattr(found, "clone"):
        # A connection of its own: neither its calls nor its timeout are training's.
        found = found.clone()
        found.set_timeout(timeout)
    return found


def prefixed(prefix: str, store: Any) -> Any:
    """A part of a store in which all keys begin with a prefix."""
    return sys.modules["torch"].distributed.PrefixStore(prefix, store)


__getattr__ = old_names(__name__)

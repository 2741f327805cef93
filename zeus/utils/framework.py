"""Queries to the training framework. It is never imported here: a program that has not imported its
framework runs nothing on it.
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
    """Waits until the GPUs have done what the framework has launched. Returns whether this process
    uses a device.

    Only devices that the process uses are touched: waiting on another would create a context on it.
    Does nothing if the framework is not imported or uses no GPU.
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
    """Whether this process trains alone, and will not join others."""
    return world_size() == 1 and os.environ.get("WORLD_SIZE", "1") == "1"


def rank() -> int:
    """This process's number among them."""
    distributed = _distributed()
    return 0 if distributed is None else int(distributed.get_rank())


_last_work: Any = None
"""The last reduction, kept on purpose. A thread of Gloo may drop the last reference to one when it
is done, and needs the GIL for that; a program that meanwhile destroys its process group and then
its model deadlocks, as it holds the GIL and waits for that thread, see
https://github.com/pytorch/pytorch/issues/56297.
"""


def all_reduce(values: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
    """Combines the values of all processes, position by position, in double precision.

    Args:
        values: This process's. Returned as they are if torch.distributed is not initialised.

    Raises:
        ValueError: The operation is another.
    """
    global _last_work
    if operation not in ("sum", "max"):
        raise ValueError(f'operation must be "sum" or "max", not {operation!r}')
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
    """Returns the key-value store of the process group; None if there is none.

    Args:
        timeout: Timeout of one call, if torch is new enough to set it separately.
    """
    distributed = _distributed()
    if distributed is None:
        return None
    try:
        found = distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    if hasattr(found, "clone"):
        # A separate connection: its calls and timeout do not affect training.
        found = found.clone()
        found.set_timeout(timeout)
    return found


def prefixed(prefix: str, store: Any) -> Any:
    """Returns a view of a store in which all keys have a prefix."""
    return sys.modules["torch"].distributed.PrefixStore(prefix, store)


__getattr__ = old_names(__name__)

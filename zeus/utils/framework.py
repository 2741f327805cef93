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

_TIMEOUT = timedelta(seconds=10)
"""Of one call of the store, if torch is new enough to set it separately."""


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


class RanksUnreachable(Exception):
    """The processes that train together do not reach each other: one sentence that says why."""


class Notes:
    """Notes that the processes that train together leave for each other: the one way in which ranks
    agree. They are in the key-value store of the process group, so they need no collective: a
    process that lags, is gone, or makes no steps blocks no other, and any backend will do.

    Every call raises RanksUnreachable if the store does not answer.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, note: bytes) -> None:
        """Leaves a note."""
        self._call("set", key, note)

    def get(self, key: str) -> bytes | None:
        """A note, if there is one. Does not wait for it."""
        return bytes(self._call("get", key)) if self._call("check", [key]) else None

    def add(self, key: str, amount: int) -> int:
        """Counts; returns the sum."""
        return int(self._call("add", key, amount))

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # as torch's own errors are
            raise RanksUnreachable(
                f"the store of torch.distributed does not answer ({error}); the ranks need it"
            ) from None


def notes(prefix: str) -> Notes | None:
    """The notes of the process group whose keys have a prefix; None if it has no store."""
    distributed = _distributed()
    if distributed is None:
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    if store is None:
        return None
    if hasattr(store, "clone"):
        # A separate connection: its calls and timeout do not affect training.
        store = store.clone()
        store.set_timeout(_TIMEOUT)
    return Notes(distributed.PrefixStore(prefix, store))


__getattr__ = old_names(__name__)

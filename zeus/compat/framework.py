"""ml-energy/zeus's functions of training frameworks: availability, and reductions over ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Literal

from zeus.utils import framework
from zeus.utils.framework import Framework, synchronize


def torch_is_available(ensure_available: bool = False, ensure_cuda: bool = True) -> bool:
    """Whether PyTorch can be imported. It is imported.

    Raises:
        RuntimeError: See the arguments.
    """
    if not _imports("torch", ensure_available):
        return False
    if ensure_cuda and not sys.modules["torch"].cuda.is_available():
        raise RuntimeError(
            "PyTorch has no CUDA GPU here; install a PyTorch with CUDA, or check nvidia-smi"
        )
    return True


def jax_is_available(ensure_available: bool = False, ensure_cuda: bool = True) -> bool:
    """Whether JAX can be imported. See `torch_is_available`."""
    if not _imports("jax", ensure_available):
        return False
    if ensure_cuda and not any(one.platform == "gpu" for one in sys.modules["jax"].devices()):
        raise RuntimeError("JAX has no GPU here; install jax[cuda12], or check nvidia-smi")
    return True


def cupy_is_available(ensure_available: bool = False) -> bool:
    """Whether CuPy can be imported. See `torch_is_available`."""
    return _imports("cupy", ensure_available)


def _imports(name: str, ensure: bool) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if ensure:
            raise RuntimeError(f"{name} cannot be imported ({error}); install it") from error
        return False
    return True


def sync_execution(gpu_devices: Sequence[int], sync_with: Framework = "torch") -> None:
    """Wait until GPUs have done what a framework has launched."""
    synchronize(sync_with, gpu_devices)


def cuda_sync(device: int | None = None) -> None:
    """Wait until a GPU has done what PyTorch has launched; None: the current one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


def is_distributed() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return framework.initialized()


def get_rank() -> int:
    """This process's rank; 0 where torch.distributed is not initialised."""
    return framework.rank()


def get_world_size() -> int:
    """Number of processes; 1 where torch.distributed is not initialised."""
    return framework.world_size()


def all_reduce(object: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
    """Combine the values of all ranks of torch.distributed, position by position.

    Args:
        object: This rank's values. They are returned where torch.distributed is not initialised.

    Raises:
        ValueError: The operation is another.
    """
    if operation not in ("sum", "max"):
        raise ValueError(f'operation must be "sum" or "max", not {operation!r}')
    return framework.all_reduce(object, operation)

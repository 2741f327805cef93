"""Which training frameworks there are, and waiting for them, by ml-energy/zeus's names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from zeus.utils.framework import Framework, synchronize


def torch_is_available(ensure_available: bool = False, ensure_cuda: bool = True) -> bool:
    """Whether PyTorch can be imported. It is imported.

    Args:
        ensure_available: Raise if it cannot be.
        ensure_cuda: Raise if it has no GPU.

    Raises:
        RuntimeError: See the arguments.
    """
    available = _imports("torch", ensure_available)
    if available and ensure_cuda and not sys.modules["torch"].cuda.is_available():
        raise RuntimeError(
            "PyTorch has no CUDA GPU here; install a PyTorch with CUDA, or check nvidia-smi"
        )
    return available


def jax_is_available(ensure_available: bool = False, ensure_cuda: bool = True) -> bool:
    """Whether JAX can be imported. See `torch_is_available`."""
    available = _imports("jax", ensure_available)
    if (
        available
        and ensure_cuda
        and "gpu" not in {d.platform for d in sys.modules["jax"].devices()}
    ):
        raise RuntimeError("JAX has no GPU here; install jax[cuda12], or check nvidia-smi")
    return available


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
    """Waits until GPUs have done what a framework has launched."""
    synchronize(sync_with, gpu_devices)


def cuda_sync(device: int | None = None) -> None:
    """Waits until a GPU has done what PyTorch has launched; None: the current one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)

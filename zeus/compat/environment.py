"""Environment variables as values, and GPU indices as CUDA and NVML count them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def get_env(name: str, valtype: Callable[[str], T], default: T | None = None) -> T:
    """Read an environment variable.

    Raises:
        ValueError: The variable is not set and there is no default, or its text is not a valid
            value.
    """
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"The environment variable {name} is not set; set it")
        return default
    if valtype is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"The environment variable {name} must be true or false, not {text!r}")
        return text.lower() == "true"  # type: ignore[return-value]  # T is bool here
    try:
        return valtype(text)
    except ValueError:
        kind = getattr(valtype, "__name__", str(valtype))
        raise ValueError(
            f"The environment variable {name} must be of type {kind}, not {text!r}"
        ) from None


def resolve_gpu_indices(
    requested_gpu_indices: list[int] | None,
) -> tuple[list[int], list[int]]:
    """GPU indices as CUDA counts them, and the same GPUs' indices as NVML counts them.

    Raises:
        ValueError: The list is empty, or one of them names no GPU.
        ZeusGPUInitError: The GPUs cannot be reached.
    """
    from zeus import _node
    from zeus.device import get_gpus
    from zeus.monitor.devices import check_indices

    if requested_gpu_indices is not None and not requested_gpu_indices:
        raise ValueError("requested_gpu_indices must be None, or name a GPU")
    gpus = get_gpus()
    indices = check_indices(requested_gpu_indices, gpus)
    order = [gpu.uuid for gpu in _node.get_client().node().gpus]
    return indices, [order.index(gpus[index].uuid) for index in indices]

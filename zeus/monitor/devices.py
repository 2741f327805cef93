"""Which GPUs and CPUs a monitor measures."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from zeus import _node
from zeus.device import EmptyGPUs, get_gpus
from zeus.exceptions import ZeusArgumentError, ZeusGPUInitError, from_ipc
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from zeus.device import GPUs
    from zeus_ipc.client import Client
    from zeus_ipc.replies import CpuInfo

_NO_DRIVER = {9, 12}
"""NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: there are no GPUs to reach."""

_WARNING_LEVEL = 3
"""Makes the warning name the line that creates the monitor."""


def resolve_gpus(gpu_indices: Sequence[int] | None) -> tuple[GPUs, list[int], Client | None]:
    """Returns the GPUs of this process, the indices to measure, and the connection to their node.
    On a node without GPUs, warns and measures none; without a zeusd either, there is no connection.

    Raises:
        ValueError: An index is not valid, names no GPU, or names one twice.
        ZeusGPUInitError: There are GPUs, but they cannot be reached.
    """
    if gpu_indices is not None:
        check_types("gpu_indices", gpu_indices)
    try:
        gpus, client = get_gpus(), _node.get_client()
    except ZeusGPUInitError as error:
        if error.nvml_code not in _NO_DRIVER:
            raise
        gpus, client = EmptyGPUs(error.message[:1].upper() + error.message[1:]), None
    hidden = client is not None and client.node().gpus  # by CUDA_VISIBLE_DEVICES: a mistake
    if gpu_indices is None and not len(gpus) and not hidden:
        warnings.warn(f"No GPU is measured: {gpus.reason}", stacklevel=_WARNING_LEVEL)
        return gpus, [], client
    return gpus, check_indices(gpu_indices, gpus), client


def check_indices(indices: Sequence[int] | None, gpus: GPUs) -> list[int]:
    """Returns the given GPU indices, or all.

    Raises:
        ValueError: One is not valid, names no GPU, or names one twice; or there are no GPUs.
    """
    if indices is None:
        indices = range(len(gpus))
        if not indices:
            _ = gpus[0]  # says why there are none
    check_types("gpu_indices", indices)
    for index in indices:
        if not 0 <= index < len(gpus):
            _ = gpus[0]
            raise ValueError(
                f"There is no GPU {index}: this process sees {len(gpus)}, counted from 0 after "
                "CUDA_VISIBLE_DEVICES"
            )
    if len(set(indices)) != len(indices):
        raise ValueError(f"gpu_indices names a GPU twice: {list(indices)}")
    for note in gpus.covered(indices):
        warnings.warn(note, stacklevel=_WARNING_LEVEL + 1)
    return [*map(int, indices)]


def check_types(name: str, indices: object) -> None:
    """Check that indices are whole numbers in a list.

    Raises:
        ZeusArgumentError: They are not; the message says what to give instead.
    """
    if isinstance(indices, int):
        raise ZeusArgumentError(f"{name} must be a list: give {name}=[{indices}]")
    if type(indices).__name__ == "device":
        number = getattr(indices, "index", None)
        raise ZeusArgumentError(
            f"{name} must be a list of indices, not a torch.device: give {name}="
            f"[{'torch.cuda.current_device()' if number is None else number}]"
        )
    if isinstance(indices, str) or not isinstance(indices, Sequence):
        raise ZeusArgumentError(f"{name} must be a list of indices such as [0, 1], not {indices!r}")
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise ZeusArgumentError(
                f"{name} must be whole numbers such as [0, 1]; {index!r} is {_kind(index)}"
            )


def _kind(index: object) -> str:
    if isinstance(index, str):
        return f"text{f': give {int(index)}' if index.isdecimal() else ''}"
    if type(index).__name__ == "device":
        number = getattr(index, "index", None)
        return f"a torch.device: give {'its index' if number is None else number}"
    return f"of type {type(index).__name__}"


def resolve_cpus(cpu_indices: Sequence[int] | None, client: Client | None) -> list[CpuInfo]:
    """Returns the CPU packages to measure that can be measured; warns about the others.

    Raises:
        ValueError: An index is not valid.
        ZeusBaseGPUError: zeusd does not answer.
    """
    if cpu_indices is not None:
        check_types("cpu_indices", cpu_indices)
        if not cpu_indices:
            return []
    try:
        cpus = [] if client is None else client.node().cpus
    except ZeusIpcError as error:
        raise from_ipc(error) from error
    if cpu_indices is None:
        return cpus
    known = {cpu.index: cpu for cpu in cpus}
    asked = list(dict.fromkeys(cpu_indices))
    missing = [index for index in asked if index not in known]
    if missing:
        warnings.warn(
            f"The energy of CPU {', '.join(map(str, missing))} cannot be measured here (CPUs that "
            f"can be: {', '.join(map(str, known)) or 'none'}), so it is left out. It takes a zeusd "
            "whose kernel offers powercap, or root without one; pass cpu_indices=[] to measure "
            "GPUs only.",
            stacklevel=_WARNING_LEVEL,
        )
    return [known[index] for index in asked if index in known]

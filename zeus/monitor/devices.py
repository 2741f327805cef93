"""Which GPUs and CPUs a monitor measures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from zeus import _node
from zeus.device import EmptyGPUs, get_gpus
from zeus.exceptions import (
    ZeusArgumentError,
    ZeusGPUInitError,
    ZeusGPUNotSupportedError,
    from_ipc,
)
from zeus.utils.warn import warn
from zeus_ipc.errors import ErrorCode, SeveralGpusFailed, ZeusIpcError

if TYPE_CHECKING:
    from zeus.device import GPUs
    from zeus_ipc.client import Client
    from zeus_ipc.replies import CpuInfo

_NO_DRIVER = {9, 12}
"""NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: there are no GPUs to reach."""


def resolve_gpus(gpu_indices: Sequence[int] | None) -> tuple[GPUs, list[int], Client | None]:
    """Returns the GPUs of this process, the indices to measure, and the connection to their node,
    which samples them from now on. If no indices are given, warns about what is not measured: GPUs
    without a sensor, or all where there is none. Without a driver and zeusd, there is no
    connection.

    Raises:
        ValueError: An index is not valid, names no GPU, or names one twice.
        ZeusGPUInitError: There are GPUs, but they cannot be reached.
        ZeusBaseGPUError: A GPU that the indices name has no sensor, or one cannot be read.
    """
    if gpu_indices is not None:
        check_types("gpu_indices", gpu_indices)
    try:
        gpus, client = get_gpus(), _node.get_client()
    except ZeusGPUInitError as error:
        if error.nvml_code not in _NO_DRIVER:
            raise
        gpus, client = EmptyGPUs(error.message[:1].upper() + error.message[1:]), None
    if gpu_indices is None and not len(gpus):
        warn(f"No GPU is measured: {gpus.reason}")
        return gpus, [], client
    indices = check_indices(gpu_indices, gpus)
    if client is None or not indices:
        return gpus, indices, client
    try:
        client.windows(list(dict.fromkeys(gpus[index].uuid for index in indices)))
    except ZeusIpcError as error:
        indices = _with_sensors(indices, gpus, error, are_given=gpu_indices is not None)
    if gpu_indices is None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        for sentence in gpus.unusable:
            warn(f"{sentence}; the energy of the others is measured.")
    return gpus, indices, client


def _with_sensors(
    indices: list[int], gpus: GPUs, error: ZeusIpcError, *, are_given: bool
) -> list[int]:
    """Selects the GPUs that have a sensor, and warns about the others, such as a display card.

    Raises:
        ZeusBaseGPUError: The error has another cause, or the user gave the indices.
    """
    errors = (
        error.errors if isinstance(error, SeveralGpusFailed) else {gpus[indices[0]].uuid: error}
    )
    failed = [index for index in indices if gpus[index].uuid in errors]
    other = any(fault.code != ErrorCode.NOT_SUPPORTED for fault in errors.values())
    if other or any(gpus[index].info.has_sensor for index in failed):
        raise from_ipc(error) from error
    measurable = [index for index in indices if index not in failed]
    names = ", ".join(f"GPU {index} ({gpus[index].get_name()})" for index in failed)
    sentence = (
        f"The energy of {names} is not measured: no sensor reports its energy or power. Give "
        f"gpu_indices={measurable} to measure {'only the others' if measurable else 'none'}."
    )
    if are_given:
        raise ZeusGPUNotSupportedError(sentence)
    warn(sentence)
    return measurable


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
            listed = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise ValueError(
                f"There is no GPU {index}: this process sees {len(gpus)} GPU"
                f"{'s' * (len(gpus) != 1)} (counted from 0)"
                f"{'' if listed is None else f', as CUDA_VISIBLE_DEVICES is {listed!r}'}"
                f"{''.join(f'; {one}' for one in gpus.unusable)}"
            )
    if len(set(indices)) != len(indices):
        raise ValueError(f"gpu_indices names a GPU twice: {list(indices)}")
    for note in gpus.covered(indices):
        warn(note)
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
        warn(
            f"The energy of CPU {', '.join(map(str, missing))} cannot be measured here (CPUs that "
            f"can be: {', '.join(map(str, known)) or 'none'}), so it is left out. It takes a zeusd "
            "whose kernel offers powercap, or root without one; pass cpu_indices=[] to measure "
            "GPUs only."
        )
    return [known[index] for index in asked if index in known]

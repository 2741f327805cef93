"""The GPU section of `zeus.show_env`."""

from __future__ import annotations

import os
import threading
import warnings
from typing import TYPE_CHECKING

from zeus.show_env.daemon import Zeusd
from zeus.show_env.packages import Row, unexpected

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

DRIVER_TIMEOUT_S = 5.0
"""Time limit for listing the GPUs; without persistence mode the driver starts each first."""


def find(zeusd: Zeusd) -> tuple[list[GpuInfo], list[Row]]:
    """The node's GPUs by NVML index, and lines about problems. Never raises."""
    if zeusd.info is not None:
        if zeusd.info.gpus:
            return zeusd.info.gpus, []
        hint = "load its NVIDIA driver" if zeusd.info.driver_version is None else "see nvidia-smi"
        return [], [("GPU", f"none: zeusd finds none on this node; {hint}")]
    if zeusd.wanted:
        return [], [("GPU", "not known while zeusd does not answer: zeus would raise that error")]
    found: list[GpuInfo] = []
    notes: list[Row] = []

    def look() -> None:
        try:
            _look(found, notes)
        except Exception as error:  # noqa: BLE001 - told as a line
            notes.append(("GPU", f"not known: {unexpected(error)}"))

    # A stuck driver blocks its caller.
    thread = threading.Thread(target=look, name="nvml", daemon=True)
    thread.start()
    thread.join(DRIVER_TIMEOUT_S)
    if thread.is_alive():
        late = f"the driver did not respond within {DRIVER_TIMEOUT_S:g} s; see dmesg and nvidia-smi"
        return list(found), [*notes, ("GPU", late)]
    if not found and not notes:
        notes.append(("GPU", "none: the driver finds none on this node; see nvidia-smi"))
    return found, notes


def _look(found: list[GpuInfo], notes: list[Row]) -> None:
    """Queries the driver, as a program without zeusd would."""
    from zeusd.devices.nvml.backend import NvmlBackend
    from zeusd.devices.port import DeviceError
    from zeusd.runtime.devices import inspect_gpu

    nvml = NvmlBackend()
    try:
        nvml.init()
    except DeviceError as error:
        notes.append(("GPU", f"none: {error}; install or load the NVIDIA driver, see nvidia-smi"))
        return
    try:
        for index in range(nvml.device_count()):
            try:
                found.append(inspect_gpu(nvml, index)[0].info)
            except DeviceError as error:
                notes.append((f"NVML {index}", f"cannot be used: {error}; see dmesg, or reset it"))
    finally:
        nvml.shutdown()


def cuda() -> list[Row]:
    """The environment variables that decide which GPUs a framework sees."""

    def value(name: str, absent: str) -> Row:
        text = os.environ.get(name)
        return name, f"not set: {absent}" if text is None else repr(text)

    return [
        value("CUDA_VISIBLE_DEVICES", "all GPUs are seen"),
        value("CUDA_DEVICE_ORDER", "CUDA counts fastest first, which is NVML's order if all match"),
    ]


def mapping(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """Each GPU's NVML index and its index in `zeus`, which is the framework's."""
    from zeus.device.visible import visible_gpus
    from zeus.exceptions import ZeusBaseError

    if not gpus:
        return []
    simulated = zeusd.info is not None and zeusd.info.simulated is not None
    rows: list[Row] = []
    unseen = "hidden"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            seen = visible_gpus(gpus, os.environ, simulated=simulated)
            if not seen:
                rows.append(("zeus", "sees none; change or unset CUDA_VISIBLE_DEVICES"))
        except ZeusBaseError as error:
            seen, unseen = [], "?"
            rows.append(("zeus", f"cannot tell GPUs apart: {error.message}"))
    rows += [("note", str(one.message)) for one in warned]
    for gpu in gpus:
        indices = [str(index) for index, one in enumerate(seen) if one.uuid == gpu.uuid]
        name = f"NVML {gpu.index} -> " + (f"zeus {', '.join(indices)}" if indices else unseen)
        text = f"{gpu.name}  {gpu.uuid}  {gpu.pci_address}"
        if gpu.mig_enabled:
            parts = len(gpu.runtime_indices)
            split = f"{parts} partitions: they" if parts > 1 else "MIG is on: its instances"
            text += f"  {split} cannot be measured separately"
        rows.append((name, text))
    return rows

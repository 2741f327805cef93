"""The GPU and CPU sections of `zeus.show_env`."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from zeus.show_env.daemon import Zeusd
from zeus.show_env.packages import Row, unexpected

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

POWERCAP = "/sys/class/powercap"

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


def cpus(zeusd: Zeusd) -> list[Row]:
    """The CPUs that zeusd measures."""
    if zeusd.info is None:
        return [("through zeusd", "none, as none answers")]
    if not zeusd.info.cpus:
        return [("through zeusd", "none: it reads no counter of powercap on this node")]
    return [
        (f"CPU {cpu.index}", f"{cpu.name}{' and its memory' if cpu.dram else ''}, through zeusd")
        for cpu in zeusd.info.cpus
    ]


def zones(zeusd: Zeusd) -> list[Row]:
    """The RAPL counters, and whether this process may read them."""
    root = Path(POWERCAP)
    found = {
        path.name: path
        for pattern in ("intel-rapl:*/intel-rapl:*:*", "intel-rapl:*")
        for path in root.glob(pattern)
    }
    if not found:
        hint = "virtual machines have none, and elsewhere: modprobe intel_rapl_msr"
        return [("RAPL", f"none under {root}; {hint}")]
    helped = zeusd.info is not None and bool(zeusd.info.cpus)
    return [(str(path), _zone(path, helped)) for _, path in sorted(found.items())]


def _zone(path: Path, helped: bool) -> str:
    try:
        name = (path / "name").read_text().strip()
    except OSError:
        name = "without a name"
    try:
        int((path / "energy_uj").read_text())
    except PermissionError:
        hint = "zeusd reads it for you" if helped else "run zeusd to read it for you"
        return f"{name}: not readable, only root may; {hint}"
    except (OSError, ValueError) as error:
        return f"{name}: not readable: {error}; it cannot be measured"
    return f"{name}: readable"

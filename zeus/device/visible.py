"""The GPUs that the framework sees, in its order, by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER,
and on AMD GPUs by ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES.

Rules of the CUDA programming guide: the list names devices by index or by the beginning of a UUID;
the first invalid entry, such as -1, ends it; a device named twice makes CUDA see none. Indices
count in the order of CUDA_DEVICE_ORDER, whose default, FASTEST_FIRST, is NVML's (PCI) order only if
all GPUs are alike.

ROCm's runtime filters by ROCR_VISIBLE_DEVICES first; HIP counts the remaining devices, and reads
CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is not set (AMD, "GPU isolation techniques"). It counts
partitions, in the order of the kernel's topology, which zeusd knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from zeus.exceptions import ZeusGPUInitError
from zeus.utils.warn import warn

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

DRIVER = Path("/proc/driver/nvidia/gpus")
"""The driver's own list: a folder for each GPU, by PCI address, that names its device file."""

DEVICES = Path("/dev")


def within_reach(
    gpus: Sequence[GpuInfo], driver: Path = DRIVER, devices: Path = DEVICES
) -> list[GpuInfo]:
    """The GPUs whose device file this process may open, in the order given.

    zeusd reports all GPUs of the node. A container has the device files of some, a batch job's
    control group allows it to open some, and CUDA counts only those. Returns all if this is
    not known, or if none may be opened: then the process does not compute but only monitors.
    """
    minors = _minors(driver)
    reachable = []
    for gpu in gpus:
        minor = minors.get(_address(gpu.pci_address))
        if minor is not None and _opens(devices / f"nvidia{minor}"):
            reachable.append(gpu)
    return reachable or list(gpus)


def _minors(driver: Path) -> dict[tuple[int, str], int]:
    """Number of each GPU's device file, by PCI address."""
    minors = {}
    with contextlib.suppress(OSError):
        for folder in driver.iterdir():
            with contextlib.suppress(OSError, ValueError):
                for line in (folder / "information").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name.strip() == "Device Minor":
                        minors[_address(folder.name)] = int(value)
    return minors


def _address(text: str) -> tuple[int, str]:
    """A PCI address: NVML writes its domain with eight digits, the kernel with four."""
    domain, _, rest = text.lower().partition(":")
    return int(domain, 16), rest


def _opens(path: Path) -> bool:
    """Whether this process may open a device file, by mode and control group, which the kernel
    checks for access(2) as for open(2). Opening the file would start an unused GPU.
    """
    return os.access(path, os.R_OK | os.W_OK)


VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
)
"""The environment variables that decide."""

_Device: TypeAlias = "tuple[GpuInfo, int]"
"""A GPU, and the number of the device, which differs between partitions of one GPU."""

_AMD_UUID = re.compile(r"GPU-([0-9a-f]{16}(-|$)|AMD-)")

_warned = False


def is_amd(uuid: str) -> bool:
    """Whether a GPU is one of AMD's."""
    return _AMD_UUID.match(uuid) is not None


def visible_gpus(
    gpus: Sequence[GpuInfo], env: Mapping[str, str], simulated: bool = False
) -> list[GpuInfo]:
    """The GPUs that a framework sees, by its own index, among those that this process may open.

    A partitioned AMD GPU occurs once for each visible partition.

    Args:
        gpus: The node's GPUs in NVML order.
        env: The process's environment.
        simulated: The node is simulated: without CUDA, the order is NVML's.

    Raises:
        ZeusGPUInitError: The list names MIG instances, its indices are ambiguous on this node, or
            PyTorch computes on GPUs of another vendor.
    """
    amd = bool(gpus) and all(is_amd(gpu.uuid) for gpu in gpus)
    if gpus and not simulated:
        _check_vendor(amd)
    if amd:
        return _visible_to_hip(gpus, env)
    entries = _entries(env, "CUDA_VISIBLE_DEVICES")
    for entry in entries or ():
        if entry.upper().startswith("MIG-"):
            raise ZeusGPUInitError(
                f"CUDA_VISIBLE_DEVICES names the MIG instance {entry}, but power, energy and "
                "clocks belong to whole GPUs; measure from a process that sees the whole GPU (name "
                "it as GPU-<uuid>), or turn MIG off"
            )
    by_index = entries is None or any(entry.lstrip("-").isdecimal() for entry in entries)
    ordered = list(gpus) if simulated else within_reach(gpus)
    if by_index and not simulated and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        ordered = _cuda_order(ordered, explicit=entries is not None)
    return [gpu for gpu, _ in _chosen(entries, [(gpu, gpu.index) for gpu in ordered])]


def _check_vendor(amd: bool) -> None:
    """Checks that PyTorch, if this process uses it, computes on the GPUs of the managed vendor.

    Raises:
        ZeusGPUInitError: It does not: zeus would set limits of idle GPUs and read their energy.
    """
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if torch is None or version is None:
        return
    if getattr(version, "hip", None) and not amd:
        raise ZeusGPUInitError(
            "this process's PyTorch is for AMD's GPUs, and NVIDIA's are managed on this node; ask "
            "the administrator to set library under [amd] in zeusd.toml"
        )
    if amd and getattr(version, "cuda", None) and torch.cuda.is_initialized():
        raise ZeusGPUInitError(
            "this process computes on NVIDIA's GPUs, and AMD's are managed on this node; ask the "
            "administrator to remove library under [amd] in zeusd.toml"
        )


def _visible_to_hip(gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> list[GpuInfo]:
    """The AMD GPUs that HIP sees. A partitioned GPU occurs once for each partition."""
    numbered = {number: gpu for gpu in gpus for number in gpu.runtime_indices}
    devices = [(numbered[number], number) for number in sorted(numbered)]
    if not all(gpu.runtime_indices for gpu in gpus):
        divided = [str(gpu.index) for gpu in gpus if gpu.mig_enabled]
        if divided:
            raise ZeusGPUInitError(
                f"GPU {divided[0]} is partitioned, and how HIP counts its partitions is not known; "
                "install ROCm 6.3 or later, or set its compute partition to SPX"
            )
        devices = [(gpu, gpu.index) for gpu in gpus]  # by PCI address
    left = _chosen(_entries(env, "ROCR_VISIBLE_DEVICES"), devices)
    hip = _entries(env, "HIP_VISIBLE_DEVICES")
    chosen = _chosen(hip if hip is not None else _entries(env, "CUDA_VISIBLE_DEVICES"), left)
    return [gpu for gpu, _ in chosen]


def _entries(env: Mapping[str, str], name: str) -> list[str] | None:
    text = env.get(name)
    return None if text is None else [entry.strip() for entry in text.split(",")]


def _chosen(entries: Sequence[str] | None, ordered: Sequence[_Device]) -> list[_Device]:
    """The devices that a list names; all if there is no list."""
    if entries is None:
        return list(ordered)
    chosen: list[_Device] = []
    for entry in entries:
        device = _find(entry, ordered)
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
    return chosen


def _find(entry: str, ordered: Sequence[_Device]) -> _Device | None:
    if entry.isdecimal():
        index = int(entry)
        return ordered[index] if index < len(ordered) else None
    if entry.startswith("GPU-"):
        matching = [device for device in ordered if device[0].uuid.startswith(entry)]
        if len(matching) > 1 and all(device[0] is matching[0][0] for device in matching):
            raise ZeusGPUInitError(
                f"{entry} is partitioned, so that its UUID does not say which partition is meant; "
                "name partitions by HIP's index"
            )
        return matching[0] if len(matching) == 1 else None
    return None


def _cuda_order(gpus: list[GpuInfo], explicit: bool) -> list[GpuInfo]:
    """CUDA's order without CUDA_DEVICE_ORDER."""
    if len({gpu.name for gpu in gpus}) <= 1:
        return gpus
    known = _torch_order(gpus)
    if known is not None and not explicit:
        return known
    remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES"
    if explicit:
        raise ZeusGPUInitError(
            "this node has GPUs of several models, and CUDA counts them fastest first, in an order "
            f"that cannot be told from here; {remedy}"
        )
    global _warned
    if not _warned:
        _warned = True
        warn(
            "This node has GPUs of several models, so GPU indices here (PCI order) may differ from "
            f"the framework's (fastest first); {remedy}."
        )
    return gpus


def _torch_order(gpus: list[GpuInfo]) -> list[GpuInfo] | None:
    """PyTorch's order, if it uses CUDA in this process and reports UUIDs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    by_uuid = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in gpus}
    ordered = []
    for index in range(torch.cuda.device_count()):
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        if uuid not in by_uuid:
            return None
        ordered.append(by_uuid[uuid])
    return ordered

"""Finds the GPUs that this process may use at all, before CUDA_VISIBLE_DEVICES selects among them.

zeusd reports all GPUs of the node. A container has the device files of some, a batch job's control
group allows it to open some, and CUDA counts only those.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

DRIVER = Path("/proc/driver/nvidia/gpus")
"""The driver's own list: a folder for each GPU, by PCI address, that names its device file."""

DEVICES = Path("/dev")


def within_reach(
    gpus: Sequence[GpuInfo], driver: Path = DRIVER, devices: Path = DEVICES
) -> list[GpuInfo]:
    """The GPUs whose device file this process may open, in the order given.

    Returns all if this is not known, or if none may be opened: then the process does not compute
    but only monitors.
    """
    minors = _minors(driver)
    found = []
    for gpu in gpus:
        minor = minors.get(_address(gpu.pci_address))
        if minor is not None and _opens(devices / f"nvidia{minor}"):
            found.append(gpu)
    return found or list(gpus)


def _minors(driver: Path) -> dict[tuple[int, str], int]:
    """Number of each GPU's device file, by PCI address."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in driver.iterdir():
            with contextlib.suppress(OSError, ValueError):
                for line in (folder / "information").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name.strip() == "Device Minor":
                        found[_address(folder.name)] = int(value)
    return found


def _address(text: str) -> tuple[int, str]:
    """A PCI address: NVML writes its domain with eight digits, the kernel with four."""
    domain, _, rest = text.lower().partition(":")
    return int(domain, 16), rest


def _opens(path: Path) -> bool:
    """Whether this process may open a device file, by mode and control group, which the kernel
    checks for access(2) as for open(2). Opening the file would start an unused GPU.
    """
    return os.access(path, os.R_OK | os.W_OK)

"""Chooses the backend by the vendor whose GPUs this machine has."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeusd.devices.port import Backend, DeviceError
from zeusd.identity import DRIVER_MODULE

log = logging.getLogger(__name__)

SYSFS = "/sys"

NVIDIA = ("0x10de", ("0x03",))
AMD = ("0x1002", ("0x0380", "0x1200"))
"""PCI vendors, and the first digits of their GPUs' PCI class. AMD's display chips, which many
servers have, do not count."""


_BORROWED = [name for name in vars(Backend) if name[0] != "_" and name not in ("init", "shutdown")]
"""Methods of the vendor's backend, which `FoundBackend` has as its own: the sampler calls them all
the time."""


@dataclass(frozen=True, slots=True)
class Options:
    """The vendors' part of the configuration.

    Attributes:
        nvidia_library: The libnvidia-ml to load; None: libnvidia-ml.so.1.
        nvidia_module: Directory of NVIDIA's kernel module.
        amd_library: The libamd_smi to load; None: the first one found.
        sysfs: Where sysfs is mounted.
    """

    nvidia_library: str | None = None
    nvidia_module: str = DRIVER_MODULE
    amd_library: str | None = None
    sysfs: str = SYSFS


class FoundBackend:
    """Implements `zeusd.devices.port.Backend` with the backend of the vendor whose GPUs are
    present.

    The choice is made at each first `init`, because a driver may be loaded later. A library in the
    configuration decides; otherwise the GPUs on the PCI bus; without GPUs it is NVIDIA.

    Args:
        options: The vendors' configuration.

    Attributes:
        driver: The journal's entry on how to reach the driver.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._guard = threading.Lock()
        self._inits = 0
        self._warned = False
        self.driver: dict[str, Any] = {}
        self._backends: dict[str, Backend] = {}
        self._backend: Backend = self._choose("nvidia")

    def init(self) -> None:
        """Opens the library of the vendor whose GPUs are on the bus."""
        with self._guard:
            if self._inits == 0:
                self._backend = self._choose(self._vendor())
            try:
                self._backend.init()
            except DeviceError as error:
                if self._nothing_there():
                    raise DeviceError(
                        error.outcome,
                        error.call,
                        f"{error.text}; there is no AMD Instinct GPU either",
                        error.code,
                    ) from None
                raise
            self._inits += 1

    def shutdown(self) -> None:
        """Closes it."""
        with self._guard:
            self._backend.shutdown()
            self._inits = max(0, self._inits - 1)

    def _nothing_there(self) -> bool:
        options = self._options
        if options.nvidia_library is not None or options.amd_library is not None:
            return False
        return not (has_gpu(options.sysfs, NVIDIA) or has_gpu(options.sysfs, AMD))

    def _vendor(self) -> str:
        options = self._options
        if options.nvidia_library is not None:
            return "nvidia"
        if options.amd_library is not None:
            return "amd"
        if amd_only(options.sysfs):
            return "amd"
        if has_gpu(options.sysfs, AMD) and not self._warned:
            self._warned = True
            log.warning(
                "this node has NVIDIA and AMD GPUs; zeusd manages NVIDIA's and leaves AMD's "
                "alone; to manage AMD's instead, set library under [amd]",
                extra={"event": "two_vendors"},
            )
        return "nvidia"

    def _choose(self, vendor: str) -> Backend:
        options = self._options
        if vendor not in self._backends:
            self._backends[vendor] = _open(vendor, options)
        amd = vendor == "amd"
        self.driver.update(
            vendor=vendor,
            library=options.amd_library if amd else options.nvidia_library,
            module=f"{options.sysfs}/module/amdgpu" if amd else options.nvidia_module,
            sysfs=options.sysfs,
            simulated=False,
        )
        backend = self._backends[vendor]
        for name in _BORROWED:
            setattr(self, name, getattr(backend, name))
        return backend


def _open(vendor: str, options: Options) -> Backend:
    if vendor == "amd":
        from zeusd.devices.amd.backend import AmdBackend

        return AmdBackend(options.amd_library, options.sysfs)
    from zeusd.devices.nvml.backend import NvmlBackend

    return NvmlBackend(options.nvidia_library, options.sysfs)


def amd_only(sysfs: str) -> bool:
    """Whether there are GPUs of AMD's on the PCI bus, and none of NVIDIA's."""
    return has_gpu(sysfs, AMD) and not has_gpu(sysfs, NVIDIA)


def has_gpu(sysfs: str, kind: tuple[str, tuple[str, ...]]) -> bool:
    """Whether the bus has a GPU of this vendor and of one of these PCI classes."""
    vendor, classes = kind
    for device in Path(sysfs, "bus/pci/devices").glob("*"):
        try:
            if (device / "vendor").read_text().strip() == vendor and (
                (device / "class").read_text().startswith(classes)
            ):
                return True
        except OSError:
            continue
    return False

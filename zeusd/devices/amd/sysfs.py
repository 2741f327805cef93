"""Reads a GPU's folder in sysfs: identity, memory, and whether the GPU is still there."""

from __future__ import annotations

import os
from pathlib import Path

from zeusd.devices.port import driver_text

ROOT = "/sys"


def address(bdf: int, digits: int) -> str:
    """PCI address, such as `0000:07:00.0`, of the library's bit field.

    Partitions of a GPU share all but the last digit, which is the first partition's.

    Args:
        bdf: Function in bits 0 to 2, device 3 to 7, bus 8 to 15, domain from 16 on.
        digits: Digits of the domain.
    """
    return f"{bdf >> 16:0{digits}X}:{bdf >> 8 & 0xFF:02X}:{bdf >> 3 & 0x1F:02X}.0"


class Card:
    """One PCI device.

    Args:
        root: Where sysfs is mounted.
        bdf: Its address as the library packs it.
    """

    def __init__(self, root: str, bdf: int) -> None:
        self._folder = Path(root, "bus/pci/devices", address(bdf, 4).lower())

    @property
    def there(self) -> bool:
        """Whether the device is on the bus."""
        return self._folder.exists()

    def unique_id(self) -> str | None:
        """The chip's 16 hexadecimal digits; None: the driver has none."""
        text = self._read("unique_id")
        if text is None:
            return None
        try:
            return f"{int(text, 16):016x}"
        except ValueError:
            return None

    def memory_bytes(self, which: str) -> int | None:
        """Device memory: `total` or `used`."""
        text = self._read(f"mem_info_vram_{which}")
        return int(text) if text is not None and text.isdecimal() else None

    def render_node(self) -> str | None:
        """The GPU's first device file for computing; None: there is none."""
        nodes = sorted((self._folder / "drm").glob("renderD*"))
        return f"/dev/dri/{nodes[0].name}" if nodes else None

    def vbios(self) -> str | None:
        """Version of its firmware; None: the driver does not say."""
        return self._read("vbios_version")

    def partition(self) -> str | None:
        """Compute partition mode, such as `SPX`; None: the GPU has none."""
        return self._read("current_compute_partition")

    def _read(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text().strip() or None
        except (OSError, ValueError):
            return None


def driver_version(root: str) -> str:
    """Version of the amdgpu module, or of the kernel if the driver is part of it."""
    try:
        return driver_text(Path(root, "module/amdgpu/version").read_bytes())
    except OSError:
        return os.uname().release


def driver_loaded(root: str) -> bool:
    """Whether the amdgpu module is loaded, or built into the kernel."""
    return Path(root, "module/amdgpu").exists()

"""A simulated node: GPUs that exist only in this process and replay measurements."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeusd.devices.simulated.clock import VirtualClock
    from zeusd.devices.simulated.device_socket import DeviceServer
    from zeusd.devices.simulated.node import SimulatedBackend
    from zeusd.devices.simulated.work import Work

__all__ = ["DeviceServer", "SimulatedBackend", "VirtualClock", "Work"]

_MODULES = {
    "VirtualClock": "clock",
    "DeviceServer": "device_socket",
    "SimulatedBackend": "node",
    "Work": "work",
}


def __getattr__(name: str) -> Any:
    """Imports a module on first use, so that the device table does not load the others'
    packages."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

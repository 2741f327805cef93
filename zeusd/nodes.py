"""Opens the devices: real or simulated. Nothing else asks which of the two it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeusd.devices.port import Backend

if TYPE_CHECKING:
    from zeusd.devices.simulated.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Node:
    """An opened node.

    Attributes:
        nvml: Its devices.
        device_socket: Where work is put on simulated devices; None on real ones.
        close: Frees what was opened.
        clock: Simulated time, where it is not the system's.
    """

    nvml: Backend
    device_socket: str | None
    close: Callable[[], None]
    clock: VirtualClock | None = None


def real_node(library: str | None = None) -> Node:
    """The GPUs of this machine, through nvidia-ml-py."""
    from zeusd.devices.nvml.backend import NvmlBackend

    return Node(NvmlBackend(library), None, lambda: None)


def simulated_node(spec: str, device_socket: str | None) -> Node:
    """GPUs that exist only in this process.

    Args:
        spec: Such as `4xv100-pcie`.
        device_socket: Path of the socket on which other processes put work on them, or None.

    Raises:
        ValueError: The spec is not one; the message names what is.
    """
    from zeusd.devices.simulated import DeviceServer, SimulatedBackend

    nvml = SimulatedBackend(spec)
    if device_socket is None:
        return Node(nvml, None, lambda: None)
    server = DeviceServer(nvml, device_socket)
    server.start()
    return Node(nvml, device_socket, server.stop)


def open_node(library: str | None, simulate: str | None, device_socket: str | None) -> Node:
    """The node the configuration asks for."""
    if simulate is not None:
        return simulated_node(simulate, device_socket)
    return real_node(library)

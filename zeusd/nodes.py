"""Opens the devices, real or simulated. The rest of zeusd does not distinguish them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from zeusd.devices.port import Backend
from zeusd.devices.vendors import FoundBackend, Options
from zeusd.identity import driver_id

if TYPE_CHECKING:
    from zeusd.devices.simulated.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """An opened node.

    Attributes:
        device_socket: Socket through which work is put on simulated devices; None on real ones.
        clock: Simulated time; None: the system's.
        driver: The journal's entry on how to reach the driver; set when the devices are first
            initialised.
    """

    nvml: Backend
    device_socket: str | None
    close: Callable[[], None]
    clock: VirtualClock | None = None
    driver: dict[str, Any] = field(default_factory=lambda: {"simulated": True})

    @property
    def simulated(self) -> bool:
        """Whether its GPUs exist only in this process."""
        return bool(self.driver.get("simulated"))

    def driver_id(self) -> str:
        """Identifies the present load of the driver."""
        return "simulated" if self.simulated else driver_id(self.driver["module"])


def real_node(library: str | None = None, options: Options | None = None) -> OpenedNode:
    """The GPUs of this machine."""
    backend = FoundBackend(options or Options(nvidia_library=library))
    return OpenedNode(cast("Backend", backend), None, lambda: None, driver=backend.driver)


def simulated_node(spec: str, device_socket: str | None) -> OpenedNode:
    """GPUs that exist only in this process.

    Raises:
        ValueError: The spec is not valid; the message says what is.
    """
    from zeusd.devices.simulated import DeviceServer, SimulatedBackend

    nvml = SimulatedBackend(spec)
    if device_socket is None:
        return OpenedNode(nvml, None, lambda: None)
    server = DeviceServer(nvml, device_socket)
    server.start()
    return OpenedNode(nvml, device_socket, server.stop)


def open_node(options: Options, simulate: str | None, device_socket: str | None) -> OpenedNode:
    """Opens the node that the configuration names."""
    if simulate is not None:
        return simulated_node(simulate, device_socket)
    return real_node(options=options)

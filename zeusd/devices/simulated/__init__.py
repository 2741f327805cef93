"""A node of GPUs that exist only in this process, as faithful as measured data allows."""

from zeusd.devices.simulated.clock import VirtualClock
from zeusd.devices.simulated.device_socket import DeviceServer
from zeusd.devices.simulated.node import SimulatedBackend
from zeusd.devices.simulated.work import Work

__all__ = ["DeviceServer", "SimulatedBackend", "VirtualClock", "Work"]

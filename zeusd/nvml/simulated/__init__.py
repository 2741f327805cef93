"""A node of GPUs that exist only in this process, as faithful as measured data allows."""

from zeusd.nvml.simulated.clock import VirtualClock
from zeusd.nvml.simulated.device_socket import DeviceServer
from zeusd.nvml.simulated.node import SimulatedNvml
from zeusd.nvml.simulated.work import Work

__all__ = ["DeviceServer", "SimulatedNvml", "VirtualClock", "Work"]

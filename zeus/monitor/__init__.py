"""Measures the time, energy, power and temperature of any part of a program."""

from zeus.monitor.energy import Window, ZeusMonitor, receipt
from zeus.monitor.measurement import Measurement
from zeus.monitor.power import (
    CPUPowerDomain,
    GPUPowerDomain,
    PowerDomain,
    PowerMonitor,
    infer_counter_update_period,
)
from zeus.monitor.temperature import TemperatureMonitor

__all__ = [
    "CPUPowerDomain",
    "GPUPowerDomain",
    "Measurement",
    "PowerDomain",
    "PowerMonitor",
    "TemperatureMonitor",
    "Window",
    "ZeusMonitor",
    "infer_counter_update_period",
    "receipt",
]

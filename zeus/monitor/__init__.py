"""Measures the time and energy of any part of a program."""

from zeus.monitor.energy import Window, ZeusMonitor
from zeus.monitor.measurement import Measurement

__all__ = ["Measurement", "Window", "ZeusMonitor"]

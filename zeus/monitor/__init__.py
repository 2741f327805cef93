"""Measures the time and energy of any part of a program."""

from zeus.monitor.energy import Measurement, Window, ZeusMonitor

__all__ = ["Measurement", "Window", "ZeusMonitor"]

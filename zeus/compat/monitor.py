"""Attributes that `ZeusMonitor` has in ml-energy/zeus."""

from __future__ import annotations

from zeus.compat.soc import EmptySoC
from zeus.device.cpu import CPUs, EmptyCPUs, ZeusCPUInitError, get_cpus


class MonitorAttributes:
    """Sources of a monitor.

    Attributes:
        soc_is_present: Always False.
        power_monitor: Always None: GPUs without an energy counter are measured by zeusd, too.
    """

    soc_is_present = False
    power_monitor = None

    @property
    def cpus(self) -> CPUs:
        """The CPU packages of this node whose energy is measured."""
        try:
            return get_cpus()
        except ZeusCPUInitError:
            return EmptyCPUs()

    @property
    def soc(self) -> EmptySoC:
        """A node without a system-on-chip."""
        return EmptySoC()

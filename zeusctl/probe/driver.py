"""The probe's terms: questions, answers, readings, and the time.

A question is a read, under a name of its own (`Question`), that a GPU answers or refuses. Which
questions there are depends on the driver; those below have a meaning for the report.

| question | answer |
|---|---|
| `name`, `vbios_version`, `architecture`, `compute_capability`, `pci_device_id` | the product |
| `memory_mib` | device memory |
| `uuid`, `serial`, `pci_address` | the board: asked only with `--identify` |
| `chassis`, `fabric_cluster` | what it is part of: likewise |
| `platform`, `fabric` | its place in a rack; its part of an NVLink fabric |
| `performance_samples` | the driver's estimates of its power at other clocks |
| `persistence_mode`, `mig_mode`, `ecc_mode`, `compute_mode`, `power_management_mode` | modes |
| `power_limit_range_mw`, `default_power_limit_mw` | (smallest, largest); the default |
| `power_limit_mw`, `enforced_power_limit_mw` | requested by software; in force |
| `supported_clocks_mhz` | memory clock to graphics clocks |
| `gpu_clock_mhz`, `memory_clock_mhz`, `temperature_c`, `throttle_reasons` | now |
| `utilization_percent`, `memory_used_mib` | now |
| `compute_processes`, `graphics_processes` | (pid, memory in bytes or None) of each |
| `power_usage_mw`, `power_instant_mw`, `power_average_mw`, `module_power_instant_mw`, |  |
| `module_power_average_mw`, `memory_power_average_mw` | power sensors |
| `energy_counter_mj`, `energy_field_mj` | the energy counter, by its call and by its field |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zeus_ipc.errors import ErrorCode
from zeusctl.exits import CommandError

SENSORS = (
    *("power_instant_mw", "power_average_mw", "power_usage_mw"),
    *("module_power_instant_mw", "module_power_average_mw", "memory_power_average_mw"),
    *("energy_counter_mj", "energy_field_mj"),
)
"""Questions that read a sensor."""

IDENTITY = ("uuid", "serial", "pci_address", "chassis", "fabric_cluster")
"""Questions whose answers identify a board."""


class CallError(Exception):
    """A call failed: the driver's code, and what it means."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        self.text = text


class NoDriverError(CommandError):
    """There is nothing to probe; the message says why, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.NOT_SUPPORTED)


class Question(NamedTuple):
    """A read that a GPU may answer: the driver's name for it, and the call."""

    call: str
    ask: Callable[[], Any]


class ProbeReading(NamedTuple):
    """One reading of a sensor.

    Attributes:
        t_ns: Midway through the call, on the probe's clock.
        value: A `CallError` where it failed.
    """

    t_ns: int
    value: int | CallError


class Clock(NamedTuple):
    """The probe's time: `time.monotonic_ns` and `time.sleep`, or a simulated node's."""

    now_ns: Callable[[], int]
    sleep: Callable[[float], None]

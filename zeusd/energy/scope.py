"""Finds out whether a superchip's energy counter counts its GPU or the whole module.

NVML does not say, and boards of one product differ (Grace Hopper, energy field 83). So the counter
is compared with both powers, and it counts the one that it agrees with if it disagrees with the
other. Until then the GPU's energy is integrated from its power.
"""

from __future__ import annotations

from enum import Enum

from zeusd.devices.port import SensorValues

TEST_NS = 5_000_000_000
"""Time over which the counter is compared for one verdict."""

GAP_NS = 2_000_000_000
"""Longest pause between readings; after a longer one, the comparison starts again."""

AGREES = 0.10
"""Largest deviation of the counter from a power that it counts."""


class Scope(str, Enum):
    """What an energy counter counts."""

    GPU = "gpu"
    """The GPU with its memory."""
    MODULE = "module"
    """The whole superchip."""
    UNKNOWN = "unknown"
    """Not known: still comparing, or it agrees with neither power or with both."""


class ScopeTest:
    """Compares a counter with the GPU's and the module's power.

    Attributes:
        verdict: What the counter counts. It is valid until the counter is reset.
    """

    def __init__(self) -> None:
        self.verdict = Scope.GPU
        self._superchip = False
        self._last: SensorValues | None = None
        self._begin: SensorValues | None = None
        self._gpu_pj = self._module_pj = 0.0

    def observe(self, sensors: SensorValues) -> None:
        """Processes a reading. Counters of GPUs that report no module power count the GPU."""
        if sensors.module_power_mw is None and not self._superchip:
            return
        if not self._superchip:
            self._superchip, self.verdict = True, Scope.UNKNOWN
        last, self._last = self._last, sensors
        if last is None or self._broken(last, sensors):
            if last is not None and _counted(sensors) < _counted(last):
                self.verdict = Scope.UNKNOWN
            self._restart(sensors)
            return
        elapsed_ns = sensors.t_ns - last.t_ns
        self._gpu_pj += _mean(last.power_instant_mw, sensors.power_instant_mw) * elapsed_ns
        self._module_pj += _mean(last.module_power_mw, sensors.module_power_mw) * elapsed_ns
        begin = self._begin
        assert begin is not None
        if sensors.t_ns - begin.t_ns >= TEST_NS:
            if self.verdict is Scope.UNKNOWN:
                counted_mj = _counted(sensors) - _counted(begin)
                self.verdict = _verdict(counted_mj, self._gpu_pj / 1e9, self._module_pj / 1e9)
            self._restart(sensors)

    def _restart(self, sensors: SensorValues) -> None:
        self._begin = sensors
        self._gpu_pj = self._module_pj = 0.0

    @staticmethod
    def _broken(last: SensorValues, sensors: SensorValues) -> bool:
        """Whether two readings cannot be compared, or the counter was reset between them."""
        if None in (sensors.energy_mj, last.energy_mj, sensors.module_power_mw):
            return True
        return sensors.t_ns - last.t_ns > GAP_NS or _counted(sensors) < _counted(last)


def _counted(sensors: SensorValues) -> int:
    return sensors.energy_mj or 0


def _mean(one: int | None, other: int | None) -> float:
    """Mean of two powers; a missing one is 0, which no counter agrees with."""
    return ((one or 0) + (other or 0)) / 2


def _verdict(counted_mj: float, gpu_mj: float, module_mj: float) -> Scope:
    gpu = abs(counted_mj - gpu_mj) <= AGREES * gpu_mj
    module = abs(counted_mj - module_mj) <= AGREES * module_mj
    if gpu == module:
        return Scope.UNKNOWN
    return Scope.GPU if gpu else Scope.MODULE

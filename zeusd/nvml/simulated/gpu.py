"""One simulated GPU: its settings, its true power over time, and its sensors."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from zeusd.nvml.simulated.devices import DeviceModel
from zeusd.nvml.simulated.physics import OperatingPoint, Relaxation
from zeusd.nvml.simulated.sensors import PowerSensor
from zeusd.nvml.simulated.spec import GpuSpec

if TYPE_CHECKING:
    from zeusd.nvml.simulated.node import Work

AMBIENT_C = 25.0
HOT_C = 83.0
THERMAL_TAU_S = 45.0

REASON_IDLE, REASON_LOCKED, REASON_POWER_CAP = 0x1, 0x2, 0x4
"""nvmlClocksEventReasons."""


class SimulatedGpu:
    """State of one GPU. Not thread-safe: the node's lock guards it.

    Args:
        spec: What it is.
        now_s: When the driver is loaded.
        boot: Number of this load, so that phases differ from the last one's.
    """

    def __init__(self, spec: GpuSpec, now_s: float, boot: int) -> None:
        self.spec = spec
        self.model: DeviceModel = spec.model
        self.chance = random.Random(f"{spec.seed}:{spec.index}:{boot}")
        low, default, high = self.model.power_limits_w
        self.limit_min_mw = round(low * 1000)
        self.limit_default_mw = round(default * 1000)
        self.limit_max_mw = round(high * 1000)
        self.limit_mw = self.limit_default_mw
        self.board_limit_mw: int | None = None
        self.gpu_lock_mhz: tuple[int, int] | None = None
        self.memory_lock_mhz: tuple[int, int] | None = None
        self.persistence = False
        self.contexts = 0
        self.work: Work | None = None
        self.point = self._idle_point()
        gain = 1.0 + self.spec.gain_sigma * random.Random(f"gain:{spec.seed}:{spec.index}").gauss(
            0, 1
        )
        # (start, energy until then, power from then on), oldest first.
        self._power: deque[tuple[float, float, Relaxation]] = deque()
        idle_w = self.point.power_w
        self._power.append((now_s - 10.0, 0.0, Relaxation(now_s - 10.0, idle_w, idle_w, 0.0)))
        self._temperature = Relaxation(now_s, 35.0, self._steady_c(idle_w), THERMAL_TAU_S)
        self.sensor = PowerSensor(self.model.sensor, self.true_energy_j, now_s, gain, self.chance)

    @property
    def enforced_limit_mw(self) -> int:
        """The smaller of what software and the board's controller ask for."""
        if self.board_limit_mw is None:
            return self.limit_mw
        return min(self.limit_mw, self.board_limit_mw)

    def true_energy_j(self, t_s: float) -> float:
        """Energy drawn until a time at most as old as the sensor still needs."""
        for start_s, before_j, power in reversed(self._power):
            if t_s >= start_s:
                return before_j + power.integral(t_s)
        start_s, before_j, power = self._power[0]
        return before_j + power.start * (t_s - start_s)

    def true_power_w(self, t_s: float) -> float:
        """Power drawn at a time that is not before the last change."""
        return self._power[-1][2].value(t_s)

    def steady_point(self) -> OperatingPoint:
        """Where power and clock go with the present settings and work."""
        if self.work is None or not self.work.active:
            return self._idle_point()
        lock = self.gpu_lock_mhz[1] if self.gpu_lock_mhz is not None else None
        return self.work.workload.point(
            self.model, self.work.rank(self), self.enforced_limit_mw / 1000, lock
        )

    def retarget(self, t_s: float, tau_s: float, power_w: float | None = None) -> None:
        """Settings or work changed: power moves to where it belongs.

        Args:
            t_s: When.
            tau_s: Time constant of the move; 0: at once.
            power_w: Where to; None: where the present settings and work take it.
        """
        self.sensor.update(t_s)
        self.point = self.steady_point()
        target_w = self.point.power_w if power_w is None else power_w
        move = Relaxation(t_s, self.true_power_w(t_s), target_w, tau_s)
        self._power.append((t_s, self.true_energy_j(t_s), move))
        while len(self._power) > 1 and self._power[1][0] < self.sensor.needs_since_s:
            self._power.popleft()
        self._temperature = Relaxation(
            t_s, self._temperature.value(t_s), self._steady_c(target_w), THERMAL_TAU_S
        )

    def temperature_c(self, t_s: float) -> float:
        """Temperature of the chip."""
        return self._temperature.value(t_s)

    def reasons(self) -> int:
        """nvmlClocksEventReasons."""
        if self.work is None or not self.work.active:
            return REASON_IDLE
        reasons = REASON_POWER_CAP if self.point.capped else 0
        if self.gpu_lock_mhz is not None:
            reasons |= REASON_LOCKED
        return reasons

    def _idle_point(self) -> OperatingPoint:
        unused_w, context_w = self.model.idle_w
        watts = context_w if self.contexts else unused_w
        return OperatingPoint(0.0, watts, self.model.idle_clock_mhz, capped=False)

    def _steady_c(self, watts: float) -> float:
        return AMBIENT_C + (HOT_C - AMBIENT_C) * watts / self.model.power_limits_w[2]

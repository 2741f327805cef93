"""NVML's power sensor and energy counter, as functions of a GPU's true power.

True power is averaged over a window that ends at each tick, scaled by the board's gain, quantised,
and, where the sensor dithers, moved by a milliwatt or more so that no two ticks read the same. The
counter adds the window's mean times the tick, or, if it counts everything, the true energy. Hopper
counts everything, some milliseconds late, and measures power when it is read; of GA100, it is not
known. Ticks are computed when the sensor is read.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from zeusd.devices.simulated.models import Sensor

AVERAGE_TICKS = 10
"""POWER_AVERAGE is the mean of the last second: ten ticks of 100 ms."""

_CATCH_UP_TICKS = 64
"""Longest pause whose ticks are computed one by one; older ones are merged, with their true
energy."""


class PowerSensor:
    """The sensor of one GPU.

    Args:
        sensor: How it samples.
        energy_at: True energy (J) until a time (s), for any time since the last reading.
        start_s: When the driver was loaded.
        gain: Ratio of reading to true power.
        chance: Random source of phase and noise.
        counter_mj: Start value of the energy counter.
        counts_all: Whether the counter also counts what falls outside the windows.
    """

    def __init__(
        self,
        sensor: Sensor,
        energy_at: Callable[[float], float],
        start_s: float,
        gain: float,
        chance: random.Random,
        counter_mj: float,
        counts_all: bool = False,
    ) -> None:
        self._sensor = sensor
        self._energy_at = energy_at
        self._gain = gain
        self._chance = chance
        self._tick_s = sensor.tick_ms / 1000
        self._window_s = sensor.window_ms / 1000
        self._last_tick_s = start_s - chance.random() * self._tick_s
        self._on_read = sensor.counter_lag_ms is not None
        self._counts_all = counts_all or self._on_read
        self._lag_s = chance.uniform(*sensor.counter_lag_ms or (0, 0)) / 1000
        self._read_s = -math.inf
        # One tick earlier: the first tick below is part of the average.
        self._counted_j = energy_at(self._last_tick_s - self._tick_s - self._lag_s)
        self._counter_mj = 0.0
        self._instant_mw = 0
        self._ticks_mw: deque[int] = deque(maxlen=AVERAGE_TICKS)
        self._tick(self._last_tick_s)
        self._counter_mj = counter_mj

    @property
    def last_tick_s(self) -> float:
        """When the readings last changed."""
        return self._last_tick_s

    @property
    def needs_since_s(self) -> float:
        """Oldest time whose true energy may still be needed."""
        return self._last_tick_s - max(self._window_s, self._lag_s)

    def energy_mj(self, now_s: float) -> int:
        """The counter's reading."""
        self.update(now_s)
        return int(self._counter_mj)

    def instant_mw(self, now_s: float) -> int:
        """POWER_INSTANT."""
        self.update(now_s)
        if self._on_read and now_s - self._read_s >= self._tick_s:
            self._read_s = now_s
            self._show(self._mean_mw(now_s))
        return self._instant_mw

    def average_mw(self, now_s: float) -> int:
        """POWER_AVERAGE."""
        self.update(now_s)
        return round(sum(self._ticks_mw) / len(self._ticks_mw))

    def update(self, now_s: float) -> None:
        """Computes the ticks until now."""
        due = int((now_s - self._last_tick_s) / self._tick_s + 1e-9)
        if due > _CATCH_UP_TICKS:
            start_s = self._last_tick_s
            self._last_tick_s += (due - _CATCH_UP_TICKS) * self._tick_s
            counted_j = self._energy_at(self._last_tick_s - self._lag_s)
            true_j = counted_j - self._energy_at(start_s - self._lag_s)
            self._counter_mj += self._gain * true_j * 1000
            self._counted_j = counted_j
            due = _CATCH_UP_TICKS
        for _ in range(due):
            self._last_tick_s += self._tick_s
            self._tick(self._last_tick_s)

    def _tick(self, t_s: float) -> None:
        until_j = self._energy_at(t_s - self._lag_s)
        counted_mj = self._gain * (until_j - self._counted_j) * 1000
        self._counted_j = until_j
        if self._on_read:
            self._counter_mj += counted_mj
            self._ticks_mw.append(round(counted_mj / self._tick_s))
            return
        mean_mw = self._mean_mw(t_s)
        self._counter_mj += counted_mj if self._counts_all else mean_mw * self._tick_s
        self._show(mean_mw)
        self._ticks_mw.append(self._instant_mw)

    def _mean_mw(self, t_s: float) -> float:
        """Power over the window that ends at a time."""
        mean_j = self._energy_at(t_s) - self._energy_at(t_s - self._window_s)
        return self._gain * mean_j / self._window_s * 1000

    def _show(self, mean_mw: float) -> None:
        quantum = self._sensor.quantum_mw
        reading = round(mean_mw / quantum) * quantum
        if self._sensor.dither:
            reading += self._chance.choice((-2, -1, 1, 2))
            if reading == self._instant_mw:
                reading += 1
        self._instant_mw = max(0, reading)

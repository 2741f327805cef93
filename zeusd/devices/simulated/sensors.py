"""NVML's power sensor and energy counter, as functions of a GPU's true power.

True power is averaged over a window that ends at each tick, scaled by the board's gain, quantised,
and, where the sensor dithers, moved by a milliwatt or more so that no two ticks read the same. The
counter adds the window's mean times the tick, or, if it counts everything, the true energy. Hopper
counts everything, some milliseconds late, and measures power when it is read; of GA100, it is not
known. Hopper's driver also keeps the mean power of each 20 ms, give or take some: what is between
the times of two samples, 2.5 ms earlier. Ticks are computed when the sensor is read.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from zeusd.devices.simulated.models import SensorModel

SAMPLES = 119
"""Number of samples that the driver keeps."""

SAMPLES_LAG_S, SAMPLES_ERROR_S = 0.0025, 0.0015
"""Age of what a sample shows, and its standard deviation (docs/reference/hardware/hopper.md)."""

SAMPLES_JITTER_S, SAMPLES_MISSED = 0.0012, 0.015
"""Standard deviation of a sample's time, and share of the samples that are missing: the next one
covers more."""

SAMPLES_APPEAR_S = (0.0004, 0.0037)
"""Time from a sample's end until it can be read."""

_CATCH_UP_TICKS = 64
"""Longest pause whose ticks are computed one by one; older ones are merged, with their true
energy."""


class SimulatedSensor:
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
        sensor: SensorModel,
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
        # POWER_AVERAGE is the mean of the last second: ten ticks of 100 ms.
        self._ticks_mw: deque[int] = deque(maxlen=10)
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        self._apart_s = math.inf if sensor.samples_ms is None else sensor.samples_ms / 1000
        first_s = self._last_tick_s - SAMPLES * (sensor.samples_ms or math.inf) / 1000
        self._sampled_s = self._due_s = self._sample_s = self._appears_s = first_s
        self._shown_s = first_s - SAMPLES_LAG_S
        self._tick(self._last_tick_s)
        self._counter_mj = counter_mj

    @property
    def last_tick_s(self) -> float:
        """When the readings last changed."""
        return self._last_tick_s

    @property
    def needs_since_s(self) -> float:
        """Oldest time whose true energy may still be needed."""
        since_s = self._last_tick_s - max(self._window_s, self._lag_s)
        return min(since_s, self._shown_s) if self._samples else since_s

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

    def samples(self, now_s: float, since_ns: int) -> list[tuple[int, int]]:
        """The driver's samples after a time: end, ns, and mean power, mW."""
        self.update(now_s)
        return [sample for sample in self._samples if sample[0] > since_ns]

    def _sample(self, now_s: float) -> None:
        """Computes the samples until now."""
        missed = int((now_s - self._due_s) / self._apart_s) - SAMPLES
        if missed > 0:  # nobody can read them any more
            self._due_s += missed * self._apart_s
            self._sampled_s = self._sample_s = self._appears_s = self._due_s
            self._shown_s = self._due_s - SAMPLES_LAG_S
        while self._appears_s <= now_s:
            end_s = max(self._sample_s, self._sampled_s + self._apart_s / 4)
            shows_s = end_s - self._chance.gauss(SAMPLES_LAG_S, SAMPLES_ERROR_S)
            shows_s = max(shows_s, self._shown_s + self._apart_s / 4)
            grown_j = self._energy_at(shows_s) - self._energy_at(self._shown_s)
            power_mw = self._gain * grown_j / (shows_s - self._shown_s) * 1000
            self._shown_s = shows_s
            self._samples.append((round(end_s * 1e9), round(power_mw)))
            self._sampled_s = end_s
            self._due_s += self._apart_s * (2 if self._chance.random() < SAMPLES_MISSED else 1)
            jitter_s = self._chance.gauss(0, SAMPLES_JITTER_S)
            most_s = self._apart_s / 3
            self._sample_s = self._due_s + max(-most_s, min(jitter_s, most_s))
            self._appears_s = self._sample_s + self._chance.uniform(*SAMPLES_APPEAR_S)

    def update(self, now_s: float) -> None:
        """Computes the ticks until now."""
        if self._apart_s < math.inf:
            self._sample(now_s)
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

"""Power and speed as functions of clock and power limit, and their change over time.

The steady state of a GPU with relative clock x = f / f_max (four parameters per GPU, four per
workload; fitted to measured tables it reproduces energy to about 3 %):

    v(x)    = max(vmin, 1 - (1 - vmin) * (1 - x) / (1 - knee))    relative voltage
    T(x)    = T0 * ((1 - k) + k / x)                              time; k: clock-sensitive share
    Pavg(x) = Ps + D * v(x)^2 * T0 / T(x)                         average power
    Ppk(x)  = Ps + b * (Pavg(x) - Ps)                             power while busy; b: burstiness

The highest clock on the grid whose busy power fits under the limit is taken; if none does, the
lowest, and power may exceed the limit, as it does on hardware. After a change power and speed relax
exponentially, so energy and progress have closed forms and nothing is ever stepped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeusd.devices.simulated.models import DeviceModel

LIMIT_TAU_S = 0.040
"""Time constant of the power-capping controller."""

CLOCK_TAU_S = 0.015
"""Time constant with which a new locked clock is reached."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A steady state.

    Attributes:
        rate: Units of work per second.
        power_w: Average power.
        clock_mhz: Graphics clock.
        capped: Whether the power limit holds the clock down.
    """

    rate: float
    power_w: float
    clock_mhz: int
    capped: bool


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A workload of the model.

    Attributes:
        unit_s: T0, seconds per unit at full clock.
        k: Share of the time that scales with the clock.
        power_w: Pavg(1), average power at full clock.
        burst: b, busy power over average power above static.
    """

    unit_s: float
    k: float
    power_w: float
    burst: float = 1.0


def slowdown(k: float, x: float) -> float:
    """T(x) / T0."""
    return (1 - k) + k / x


def power_w(device: DeviceModel, load: ModelLoad, x: float, burst: bool = False) -> float:
    """Average power at relative clock x, or, with `burst`, power while busy."""
    v = max(device.vmin, 1 - (1 - device.vmin) * (1 - x) / (1 - device.knee))
    dynamic = (load.power_w - device.static_w) * v * v / slowdown(load.k, x)
    return device.static_w + dynamic * (load.burst if burst else 1.0)


def settle(
    device: DeviceModel, load: ModelLoad, limit_w: float, clock_max_mhz: int | None
) -> OperatingPoint:
    """The steady state under a power limit and, if given, a highest locked clock."""
    top = device.clocks_mhz[0]
    allowed = [mhz for mhz in device.clocks_mhz if clock_max_mhz is None or mhz <= clock_max_mhz]
    allowed = allowed or [device.clocks_mhz[-1]]
    low, high = 0, len(allowed) - 1  # busy power falls along the descending grid
    while low < high:
        middle = (low + high) // 2
        if power_w(device, load, allowed[middle] / top, burst=True) <= limit_w:
            high = middle
        else:
            low = middle + 1
    x = allowed[low] / top
    return OperatingPoint(
        rate=1 / (load.unit_s * slowdown(load.k, x)),
        power_w=power_w(device, load, x),
        clock_mhz=allowed[low],
        capped=low > 0 or power_w(device, load, x, burst=True) > limit_w,
    )


class Relaxation:
    """A quantity that moves exponentially from one value to another, and its integral.

    Args:
        t0_s: When it starts.
        start: Value then.
        end: Value it approaches.
        tau_s: Time constant; 0: at once.
    """

    __slots__ = ("end", "start", "t0_s", "tau_s")

    def __init__(self, t0_s: float, start: float, end: float, tau_s: float) -> None:
        self.t0_s = t0_s
        self.start = start if tau_s > 0 else end
        self.end = end
        self.tau_s = tau_s

    def value(self, t_s: float) -> float:
        """The value at a time."""
        if self.start == self.end:
            return self.end
        return self.end + (self.start - self.end) * math.exp(-(t_s - self.t0_s) / self.tau_s)

    def integral(self, t_s: float) -> float:
        """The integral from the start to a time."""
        elapsed = t_s - self.t0_s
        if self.start == self.end:
            return self.end * elapsed
        decay = 1 - math.exp(-elapsed / self.tau_s)
        return self.end * elapsed + (self.start - self.end) * self.tau_s * decay

    def when(self, amount: float) -> float:
        """When the integral reaches an amount; infinity if it never does. For values >= 0."""
        if amount <= 0:
            return self.t0_s
        if self.start == self.end:
            return self.t0_s + amount / self.end if self.end > 0 else math.inf
        if self.end <= 0 and self.start * self.tau_s <= amount:
            return math.inf
        slowest = min(self.start, self.end)
        low, high = 0.0, amount / slowest if slowest > 0 else 1.0
        while self.integral(self.t0_s + high) < amount:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            if self.integral(self.t0_s + middle) < amount:
                low = middle
            else:
                high = middle
        return self.t0_s + high

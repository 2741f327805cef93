"""How much of the time before each update a power sensor sees, from known bursts of load.

The reading of an update is taken for the mean of power over a window that ends some lag before it.
Where load switches between two levels, that mean is a straight line in the share of the window that
was under load; the window and lag that leave the least unexplained are the sensor's.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MS = 1e6

MOST_UPDATES = 240
"""Updates that are fitted; more are thinned out."""

FEWEST_UPDATES = 12
CONTRAST = 5.0
"""The load must move the reading by so many times what it leaves unexplained."""

LONGEST_WINDOW_MS = 2000.0
_SHORTEST_WINDOW_MS = 1.0
_GRID = 24
_LONGEST_LAG_MS = 60.0
_EARLIEST_MS = -5.0
"""An update may be dated before it was, by the time between two readings."""

_ROUNDS = 7


@dataclass(frozen=True)
class VisibleWindow:
    """What a reading is the mean of.

    Attributes:
        window_ms: Length of the window.
        window_uncertainty_ms: Two standard deviations of it.
        lag_ms: Time from the end of the window to the update; may be a little below 0, as updates
            are dated only so well.
        low_w: Power without load.
        high_w: Power under load.
        unexplained_w: Standard deviation of what the window does not explain.
        updates: Updates fitted.
    """

    window_ms: float
    window_uncertainty_ms: float
    lag_ms: float
    low_w: float
    high_w: float
    unexplained_w: float
    updates: int

    def share(self, period_ms: float) -> float:
        """Share of an update period that the sensor sees, at most 1."""
        return min(1.0, self.window_ms / period_ms)


@dataclass(frozen=True)
class _Fit:
    squares: float
    low: float
    high: float


class Bursts:
    """When a load ran.

    Args:
        bursts: Start and end of each (ns), ascending and apart.
    """

    def __init__(self, bursts: Sequence[tuple[int, int]]) -> None:
        self._edges: list[int] = []
        self._loaded: list[int] = []
        total = 0
        for start_ns, end_ns in bursts:
            self._edges += [start_ns, end_ns]
            self._loaded += [total, total + end_ns - start_ns]
            total += end_ns - start_ns

    def loaded_ns(self, t_ns: float) -> float:
        """Time under load until an instant."""
        number = bisect.bisect_right(self._edges, t_ns) - 1
        if number < 0:
            return 0.0
        running = t_ns - self._edges[number] if number % 2 == 0 else 0.0
        return self._loaded[number] + running

    def share(self, begin_ns: float, end_ns: float) -> float:
        """Share of an interval that was under load."""
        return (self.loaded_ns(end_ns) - self.loaded_ns(begin_ns)) / (end_ns - begin_ns)


def find_window(
    updates: Sequence[tuple[float, float]],
    bursts: Sequence[tuple[int, int]],
    stamp_ms: float = 0.0,
) -> VisibleWindow | None:
    """The window of a sensor, or None where the load does not show in its readings.

    Args:
        updates: Time (ns) of each update and power (W) that it shows.
        bursts: Start and end of each burst of load (ns).
        stamp_ms: How far off the time of an update may be.
    """
    if len(updates) < FEWEST_UPDATES or not bursts:
        return None
    step = max(1, len(updates) // MOST_UPDATES)
    fitted = updates[::step]
    load = Bursts(bursts)

    def fit(window_ms: float, lag_ms: float) -> _Fit:
        return _fit(fitted, load, window_ms * MS, lag_ms * MS)

    low, high = math.log(_SHORTEST_WINDOW_MS), math.log(LONGEST_WINDOW_MS)
    windows = [math.exp(low + (high - low) * n / _GRID) for n in range(_GRID + 1)]
    lags = [_LONGEST_LAG_MS * n / 6 for n in range(7)]
    _, window, lag = min((fit(one, lag).squares, one, lag) for one in windows for lag in lags)
    ratio, step_ms = math.exp((high - low) / _GRID), _LONGEST_LAG_MS / 6
    for _ in range(_ROUNDS):
        windows = [window * ratio ** (n / 2) for n in range(-2, 3)]
        lags = [max(_EARLIEST_MS, lag + step_ms * n / 2) for n in range(-2, 3)]
        _, window, lag = min((fit(one, lag).squares, one, lag) for one in windows for lag in lags)
        ratio, step_ms = ratio**0.5, step_ms / 2
    best = fit(window, lag)
    freedom = len(fitted) - 4
    spread = math.sqrt(best.squares / freedom)
    if best.high - best.low <= CONTRAST * spread:
        return None
    limit = best.squares * (1 + 4 / freedom) + 1e-9
    return VisibleWindow(
        window_ms=window,
        window_uncertainty_ms=math.hypot(
            stamp_ms, _reach(lambda one: fit(one, lag).squares <= limit, window)
        ),
        lag_ms=lag,
        low_w=best.low,
        high_w=best.high,
        unexplained_w=spread,
        updates=len(fitted),
    )


def _reach(fits: Callable[[float], bool], window: float) -> float:
    """How far from `window` another one still fits."""
    far, near = window, 0.0
    for _ in range(20):
        middle = (near + far) / 2
        if fits(window + middle) or fits(max(window - middle, 0.1)):
            near = middle
        else:
            far = middle
    return far


def _fit(
    updates: Sequence[tuple[float, float]], load: Bursts, window_ns: float, lag_ns: float
) -> _Fit:
    """The straight line from share under load to power, and the squares that it leaves."""
    count = len(updates)
    x = [load.share(t_ns - lag_ns - window_ns, t_ns - lag_ns) for t_ns, _ in updates]
    x_mean = sum(x) / count
    y_mean = sum(power for _, power in updates) / count
    spread = sum((one - x_mean) ** 2 for one in x)
    common = sum(
        (one - x_mean) * (power - y_mean) for one, (_, power) in zip(x, updates, strict=True)
    )
    slope = common / spread if spread > 0 else 0.0
    low = y_mean - slope * x_mean
    squares = sum(
        (power - low - slope * one) ** 2 for one, (_, power) in zip(x, updates, strict=True)
    )
    return _Fit(squares, low, low + slope)

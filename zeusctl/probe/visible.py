"""How much of the time before each update a power sensor sees, from known bursts of load.

The model: a reading is the mean of power over a window that ends some lag before the update. While
load switches between two levels, that mean is linear in the share of the window that was under
load. The sensor's window and lag are those with the smallest residual.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MS = 1e6

MOST_UPDATES = 240
"""Number of updates to fit; more are thinned out."""

COARSE = 3
"""The first, coarse search uses every third of them."""

FEWEST_UPDATES = 36
CONTRAST = 5.0
"""The load must move the reading by this multiple of the residual."""

LONGEST_WINDOW_MS = 2000.0
_SHORTEST_WINDOW_MS = 1.0
_GRID = 24
_LONGEST_LAG_MS = 60.0
_EARLIEST_MS = -5.0
"""The time of an update may be too early by the time between two readings."""

_ROUNDS = 7


@dataclass(frozen=True)
class VisibleWindow:
    """The window over which a reading is the mean.

    Attributes:
        window_ms: Length of the window.
        window_uncertainty_ms: Two standard deviations of it.
        lag_ms: Time from the end of the window to the update; may be a little below 0, within the
            accuracy of the updates' times.
        low_w: Power without load.
        high_w: Power under load.
        unexplained_w: Standard deviation of the residual.
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
        """The share of an update period that the sensor sees, at most 1."""
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
    """Returns the window of a sensor; None if its readings do not show the load.

    Args:
        updates: Time (ns) of each update and power (W) that it shows.
        bursts: Start and end of each burst of load (ns).
        stamp_ms: Uncertainty of an update's time.
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
    coarse = fitted[::COARSE]
    _, window, lag = min(
        (_fit(coarse, load, one * MS, lag * MS).squares, one, lag)
        for one in windows
        for lag in lags
    )
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
    """Returns how far from `window` another one still fits."""
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
    """Fits power to the share under load, linearly; returns the line and the squared residuals."""
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

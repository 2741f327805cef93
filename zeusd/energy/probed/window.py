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
from operator import mul

from zeus_common.units import MS

_GRID = 24
_LONGEST_LAG_MS = 60.0


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
        # Time under load until each edge, the edge, whether the load runs.
        self._since: list[tuple[int, int, int]] = [(0, 0, 0)]
        total = 0
        for start_ns, end_ns in bursts:
            self._edges += [start_ns, end_ns]
            self._since += [(total, start_ns, 1), (total + end_ns - start_ns, end_ns, 0)]
            total += end_ns - start_ns

    def loaded_ns(self, times_ns: Sequence[float]) -> list[float]:
        """Time under load until each instant."""
        loads_ns = []
        for t_ns in times_ns:
            total, edge_ns, runs = self._since[bisect.bisect_right(self._edges, t_ns)]
            loads_ns.append(total + runs * (t_ns - edge_ns))
        return loads_ns


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
    if len(updates) < 36 or not bursts:
        return None
    # Number of updates to fit; more are thinned out.
    step = max(1, len(updates) // 240)
    load = Bursts(bursts)
    fitted = _Updates(updates[::step], load)
    fit = fitted.fit

    low, high = math.log(1.0), math.log(2000.0)
    windows = [math.exp(low + (high - low) * n / _GRID) for n in range(_GRID + 1)]
    lags = [_LONGEST_LAG_MS * n / 6 for n in range(7)]
    # The first, coarse search uses every third of them.
    coarse = _Updates(updates[:: step * 3], load).fit
    _, window, lag = min(
        (coarse(window, lag).squares, window, lag) for window in windows for lag in lags
    )
    ratio, step_ms = math.exp((high - low) / _GRID), _LONGEST_LAG_MS / 6
    for _ in range(7):
        windows = [window * ratio ** (n / 2) for n in range(-2, 3)]
        # The time of an update may be too early by the time between two readings.
        lags = [max(-5.0, lag + step_ms * n / 2) for n in range(-2, 3)]
        _, window, lag = min(
            (fit(window, lag).squares, window, lag) for window in windows for lag in lags
        )
        ratio, step_ms = ratio**0.5, step_ms / 2
    best = fit(window, lag)
    freedom = fitted.count - 4
    spread = math.sqrt(best.squares / freedom)
    # The load must move the reading by this multiple of the residual.
    if best.high - best.low <= 5.0 * spread:
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
        updates=fitted.count,
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


class _Updates:
    """Updates to which the power under load is fitted.

    Args:
        updates: Time (ns) of each and power (W) that it shows.
        load: When the load ran.
    """

    def __init__(self, updates: Sequence[tuple[float, float]], load: Bursts) -> None:
        self.count = len(updates)
        self._load = load
        self._times_ns = [t_ns for t_ns, _ in updates]
        self._mean = sum(power for _, power in updates) / self.count
        self._above = [power - self._mean for _, power in updates]
        self._ends: dict[float, tuple[list[float], list[float]]] = {}

    def fit(self, window_ms: float, lag_ms: float) -> _Fit:
        """Fits power to the share under load, linearly."""
        if lag_ms not in self._ends:
            ends_ns = [t_ns - lag_ms * MS for t_ns in self._times_ns]
            self._ends[lag_ms] = ends_ns, self._load.loaded_ns(ends_ns)
        ends_ns, until_ns = self._ends[lag_ms]
        window_ns = window_ms * MS
        before_ns = self._load.loaded_ns([t_ns - window_ns for t_ns in ends_ns])
        x = [(end - begin) / window_ns for begin, end in zip(before_ns, until_ns, strict=True)]
        x_mean = sum(x) / self.count
        beyond = [one - x_mean for one in x]
        spread = sum(map(mul, beyond, beyond))
        slope = sum(map(mul, beyond, self._above)) / spread if spread > 0 else 0.0
        left = [y - slope * one for one, y in zip(beyond, self._above, strict=True)]
        low = self._mean - slope * x_mean
        return _Fit(sum(map(mul, left, left)), low, low + slope)

"""All that readings say about the sensors and calls of one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from zeusd.energy.probed.counter import find_resolution, window_errors
from zeusd.energy.probed.period import UpdatePeriod, date, find_period
from zeusd.energy.probed.report import COUNTERS, POWERS, Latency, Loaded, ProbedSensor
from zeusd.energy.probed.series import ReadingSeries
from zeusd.energy.probed.window import VisibleWindow, find_window


def describe(
    together: ReadingSeries, begin_ns: int, alone: ReadingSeries, loaded: ReadingSeries
) -> ProbedSensor:
    """Describes one sensor.

    Args:
        together: Its readings while all GPUs were read.
        begin_ns: Zero of their phase.
        alone: Those while only this GPU was.
        loaded: Those under load.
    """
    values, every = together.values, together.values + alone.values + loaded.values
    gaps = sorted(b - a for a, b in itertools.pairwise(together.t_ns)) or [0]
    return ProbedSensor(
        readings=len(values),
        failures={str(code): count for code, count in together.failures.items()},
        reading_gap_ms=gaps[len(gaps) // 2] / 1e6,
        longest_gap_ms=gaps[-1] / 1e6,
        first=values[0],
        last=values[-1],
        smallest=min(every),
        largest=max(every),
        mean=sum(values) / len(values),
        resolution=find_resolution(every),
        alone=_period(alone),
        together=find_period(together.changes(), begin_ns),
        under_load=_period(loaded),
    )


def describe_load(
    name: str, sampled: Mapping[str, ReadingSeries], bursts: Sequence[tuple[int, int]]
) -> Loaded:
    """Describes what known bursts of load show.

    Args:
        name: The load.
        sampled: Readings meanwhile, by sensor.
        bursts: Start and end of each burst (ns).
    """
    windows: dict[str, VisibleWindow] = {}
    for sensor, series in sampled.items():
        widths = sorted(change.width_ns for change in series.changes()) or [0]
        window = find_window(_powers(sensor, series), bursts, widths[len(widths) // 2] / 2e6)
        if window is not None:
            windows[sensor] = window
    power = next((windows[one] for one in POWERS if one in windows), None)
    counter = next((sampled[one] for one in COUNTERS if one in sampled), None)
    errors = [] if power is None or counter is None else window_errors(counter, bursts, power)
    return Loaded(name, len(bursts), windows, errors)


def summarize(durations_ns: Sequence[int]) -> Latency | None:
    """Median, 99th percentile (the nearest rank) and maximum; None without calls."""
    if not durations_ns:
        return None
    ordered = sorted(durations_ns)

    def rank(share: float) -> float:
        return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] / 1000

    return Latency(rank(0.5), rank(0.99), ordered[-1] / 1000, len(ordered))


def _period(series: ReadingSeries) -> UpdatePeriod | None:
    return find_period(series.changes(), series.t_ns[0] if series.t_ns else 0)


def _powers(name: str, series: ReadingSeries) -> list[tuple[float, float]]:
    """Returns the power of each update, W; for a counter, the mean since the last update."""
    begin_ns = series.t_ns[0] if series.t_ns else 0
    period = _period(series)
    period_ns = (period.period_ms if period else 100.0) * 1e6
    # An update in an interval longer than this share of the period says nothing about the window:
    # the machine was busy.
    dated = [
        (date(change, period, begin_ns), change.value, change.width_ns <= 0.25 * period_ns)
        for change in series.changes()
    ]
    if not name.startswith("energy"):
        return [(t_ns, value / 1000) for t_ns, value, good in dated if good]
    return [
        (later_ns, (later - earlier) * 1e6 / (later_ns - earlier_ns))
        for (earlier_ns, earlier, first), (later_ns, later, second) in itertools.pairwise(dated)
        if first and second and 0 < later_ns - earlier_ns < 1.5 * period_ns
    ]

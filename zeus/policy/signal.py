"""Prices and carbon intensities over time, and the `eta_knob` that follows from them. Pure.

The rule: with a signal that stands at r times the mean of its day, the odds of `eta_knob` are r
times the usual odds, `eta / (1 - eta) = r * eta_knob / (1 - eta_knob)`.

The reason: at a mean price a job counts `eta_knob * energy + (1 - eta_knob) * max_power * time`. A
joule at r times the price costs r times as much, and a second is worth what it was. So a run that
minimizes its cost with this eta minimizes `r * eta_knob * energy + (1 - eta_knob) * max_power *
time`, as the two differ by a constant; and where every run does that, so does their sum over the
day. It is the usual scalarization of a bill and a delay with weights that follow the price; 0 and 1
stay what they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import inf, isfinite

DAY_S = 86_400.0
HOUR_S = 3_600.0


class Signal:
    """Values that each hold until the next one.

    Args:
        points: Times, s since 1970, and values, such as a price per kWh or gCO2eq/kWh.
        period_s: The values repeat after so many seconds; None: they do not, and the last one holds
            as long as the one before it (an hour where it is the only one).

    Raises:
        ValueError: There is no value, one is no finite number, two have the same time, or they
            last longer than the period.
    """

    def __init__(
        self, points: Iterable[tuple[float, float]], *, period_s: float | None = None
    ) -> None:
        found = sorted(points)
        self._times = [time for time, _ in found]
        self._values = [value for _, value in found]
        if not found:
            raise ValueError("a signal needs at least one value")
        if not all(isfinite(number) for point in found for number in point):
            raise ValueError("the times and values of a signal must be finite numbers")
        if any(one == other for one, other in pairwise(self._times)):
            raise ValueError("a signal has two values for the same time; keep one of them")
        lasts = self._times[-1] - self._times[0]
        if period_s is not None and lasts >= period_s:
            raise ValueError(f"a signal that repeats after {period_s:g} s cannot last {lasts:g} s")
        self._period = period_s
        step = self._times[-1] - self._times[-2] if len(found) > 1 else HOUR_S
        self._end = self._times[0] + period_s if period_s is not None else self._times[-1] + step

    def at(self, time_s: float) -> float | None:
        """The value at a time, s since 1970; None where it is not known."""
        return self._piece(time_s)[1]

    def mean(self, begin_s: float, end_s: float) -> float | None:
        """The mean from one time to another, s since 1970, over the times at which it is known;
        None where it never is.
        """
        total = seconds = 0.0
        now = begin_s
        while now < end_s:
            until, value = self._piece(now)
            until = min(until, end_s)
            if until <= now:  # a step too short for the precision of a float
                break
            if value is not None:
                total += value * (until - now)
                seconds += until - now
            now = until
        return total / seconds if seconds else None

    def relative(self, begin_s: float, end_s: float) -> float | None:
        """The mean of a run over the mean of its day: 1 is usual. Never negative.

        The day is the 24 hours before the run, or the first 24 hours that are known. Where their
        mean is not positive there is nothing to compare with, and the answer is 1.

        Args:
            begin_s: When the run begins, s since 1970.
            end_s: When it is expected to end; `begin_s` where that is not known.

        Returns:
            None where the value at the beginning is not known.
        """
        value = self.at(begin_s)
        if value is None:
            return None
        if end_s > begin_s:
            value = self.mean(begin_s, end_s)
        day_s = begin_s - DAY_S
        if self._period is None:
            day_s = max(day_s, self._times[0])
        usual = self.mean(day_s, day_s + DAY_S)
        if value is None or usual is None or usual <= 0:
            return 1.0
        return max(0.0, value / usual)

    def _piece(self, time_s: float) -> tuple[float, float | None]:
        """Until when a time's value holds, and the value."""
        offset = 0.0
        if self._period is not None:
            offset = (time_s - self._times[0]) // self._period * self._period
        at = bisect_right(self._times, time_s - offset) - 1
        if at < 0:
            return self._times[0], None
        if time_s - offset >= self._end:
            return inf, None
        following = self._times[at + 1] if at + 1 < len(self._times) else self._end
        return following + offset, self._values[at]


def eta_of(eta_knob: float, relative: float) -> float:
    """The `eta_knob` of a run, by the rule at the top of this module.

    Args:
        eta_knob: The usual one: 1 counts energy only, 0 time only.
        relative: `Signal.relative`.
    """
    if eta_knob == 1:
        return 1.0
    energy = relative * eta_knob
    return energy / (energy + 1 - eta_knob)

"""Signals that `eta_knob` may follow, from a CSV file or a provider of prices or intensities.

    time,price
    2026-11-23T00:00+01:00,0.21
    2026-11-23T01:00+01:00,0.19

Each value holds until the next. Times of day (`00:00,0.21`) are of every day. A time without an
offset is local. A line of names may come first.
"""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable
from datetime import datetime, time, timedelta, timezone
from pathlib import Path

from zeus.monitor.carbon import CarbonIntensityProvider, Intensity
from zeus.monitor.price import ElectricityPriceProvider, Price
from zeus.monitor.rates import Rate
from zeus.policy.signal import DAY_S, Signal
from zeus.policy.trade_off import Relative

log = logging.getLogger(__name__)

SignalSource = str | Path | CarbonIntensityProvider | ElectricityPriceProvider | Relative
"""A CSV file, a provider, or what has a `relative` like `zeus.policy.signal.Signal`."""

_HOURS = 24


class FollowedSignal:
    """A signal that is fetched each time that it is asked for.

    Where it cannot be, one warning says so, and what was fetched last counts.

    Args:
        fetch: Fetches it as of a time, s since 1970.
    """

    def __init__(self, fetch: Callable[[float], Signal]) -> None:
        self._fetch = fetch
        self._last: Signal | None = None
        self._warned = False

    def relative(self, begin_s: float, end_s: float) -> float | None:
        """See `zeus.policy.signal.Signal.relative`."""
        try:
            self._last = self._fetch(begin_s)
            self._warned = False
        except Exception as error:  # a provider of one's own may raise any
            log.info("a signal was not fetched", exc_info=True)
            if not self._warned:
                self._warned = True
                warnings.warn(f"The signal cannot be fetched: {error}.", stacklevel=2)
        return None if self._last is None else self._last.relative(begin_s, end_s)


def signal_of(source: SignalSource) -> Relative:
    """A signal to follow.

    Raises:
        ValueError: A file is no signal; it says where.
        OSError: A file cannot be read.
    """
    if isinstance(source, (str, Path)):
        read_signal(source)
        return FollowedSignal(lambda now_s: read_signal(source))
    if isinstance(source, CarbonIntensityProvider):
        return _of_rate(Intensity(source))
    if isinstance(source, ElectricityPriceProvider):
        return _of_rate(Price(source))
    return source


def read_signal(path: str | Path) -> Signal:
    """Reads a CSV file.

    Raises:
        ValueError: It is no signal; the message says where.
        OSError: It cannot be read.
    """
    points: list[tuple[float, float]] = []
    of_day: set[bool] = set()
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if not row:
                continue
            try:
                begin_s, daily = _time(row[0].strip())
                points.append((begin_s, float(row[1])))
                of_day.add(daily)
            except (ValueError, IndexError):
                if number == 1:
                    continue
                raise ValueError(
                    f"{path}, line {number} must be a time and a value, such as "
                    f"2026-11-23T08:00,0.21 or 08:00,0.21, not {','.join(row)!r}"
                ) from None
    if len(of_day) > 1:
        raise ValueError(f"{path} has both dates and times of day; give one of them")
    try:
        return Signal(points, period_s=DAY_S if of_day == {True} else None)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _time(text: str) -> tuple[float, bool]:
    """Seconds since 1970, and whether it is a time of every day."""
    try:
        of_day = time.fromisoformat(text)
    except ValueError:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp(), False
    return datetime.combine(datetime.now(of_day.tzinfo).date(), of_day).timestamp(), True


def _of_rate(rate: Rate) -> FollowedSignal:
    return FollowedSignal(lambda now_s: _fetched(rate, now_s))


def _fetched(rate: Rate, now_s: float) -> Signal:
    """The day before and the day after, hour by hour. Carbon intensities stay as they are now."""
    rate.fetch()
    hour = datetime.fromtimestamp(now_s, timezone.utc).replace(minute=0, second=0, microsecond=0)
    hours = [hour + timedelta(hours=n) for n in range(-_HOURS, _HOURS + 1)]
    known = [(begin.timestamp(), rate.at(begin)) for begin in hours]
    return Signal([(begin, value) for begin, value in known if value is not None])

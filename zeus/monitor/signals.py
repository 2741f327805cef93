"""Signals that `eta_knob` may follow, from a CSV file or a provider of prices or intensities.

    time,price
    2026-11-23T00:00+01:00,0.21
    2026-11-23T01:00+01:00,0.19

Each value holds until the next. Times of day (`00:00,0.21`) are of every day. A time without an
offset is local. A line of names may come first. As text, providers are
`electricitymaps:LATITUDE,LONGITUDE` and `openei:LATITUDE,LONGITUDE,LABEL`.
"""

from __future__ import annotations

import logging
import time as clock
from collections.abc import Callable
from datetime import datetime, time, timedelta, timezone
from math import inf, isfinite
from pathlib import Path

from zeus.monitor.carbon import CarbonIntensityProvider, ElectrictyMapsClient, Intensity
from zeus.monitor.price import ElectricityPriceProvider, OpenEIClient, Price
from zeus.monitor.rates import Rate
from zeus.policy.signal import DAY_S, Signal
from zeus.policy.trade_off import Relative
from zeus.utils.warn import warn

log = logging.getLogger(__name__)

SignalSource = str | Path | CarbonIntensityProvider | ElectricityPriceProvider | Relative
"""A CSV file, a provider, the text of either, or any object with
`zeus.policy.signal.Signal.relative`."""

_HOURS = 24


class FollowedSignal:
    """A signal that is fetched on request. If it cannot be fetched, one warning says so, and the
    last one is used.

    Args:
        fetch: Fetches it as of a time, s since 1970.
        every_s: Validity of a fetched signal, s; infinite: the owner calls `fetch`.
    """

    def __init__(self, fetch: Callable[[float], Signal], every_s: float = 0.0) -> None:
        self._fetch = fetch
        self._every_s = every_s
        self._next_s = 0.0 if isfinite(every_s) else inf
        self._last: Signal | None = None
        self._warned = False

    def relative(self, begin_s: float, end_s: float) -> float | None:
        """Returns its mean over this time relative to its day's mean, see `Signal.relative`; None
        if unknown.
        """
        if clock.monotonic() >= self._next_s:
            self._next_s = clock.monotonic() + self._every_s
            self.fetch(begin_s)
        last = self._last
        return None if last is None else last.relative(begin_s, end_s)

    def fetch(self, begin_s: float) -> None:
        """Fetches it as of a time, s since 1970. Never raises."""
        try:
            self._last = self._fetch(begin_s)
            self._warned = False
        except Exception as error:  # a user's provider may raise anything
            log.info("a signal was not fetched", exc_info=True)
            if not self._warned:
                self._warned = True
                warn(f"The signal cannot be fetched: {error}.")


def signal_of(source: SignalSource, every_s: float = 0.0) -> Relative:
    """Creates a signal to follow.

    Raises:
        ValueError: A file cannot be read or is not a signal, or the text of a provider is wrong;
            the message says where.
    """
    if isinstance(source, str):
        source = _provider(source) or source
    if isinstance(source, (str, Path)):
        path = source
        read_signal(path)
        return FollowedSignal(lambda now_s: read_signal(path), every_s)
    if isinstance(source, CarbonIntensityProvider):
        rate: Rate = Intensity(source)
    elif isinstance(source, ElectricityPriceProvider):
        rate = Price(source)
    else:
        return source
    return FollowedSignal(lambda now_s: _fetched(rate, now_s), every_s)


def _provider(text: str) -> CarbonIntensityProvider | ElectricityPriceProvider | None:
    """Returns the provider that a text names; None if it is a path."""
    kind, _, rest = text.partition(":")
    if kind not in ("electricitymaps", "openei"):
        return None
    try:
        latitude, longitude, *label = rest.split(",")
        place = float(latitude), float(longitude)
        if kind == "electricitymaps" and not label:
            return ElectrictyMapsClient(place)
        if kind == "openei" and len(label) == 1:
            return OpenEIClient(place, label[0])
    except ValueError:
        pass
    raise ValueError(
        "a provider is electricitymaps:LATITUDE,LONGITUDE or openei:LATITUDE,LONGITUDE,LABEL, not "
        f"{text}"
    )


def read_signal(path: str | Path) -> Signal:
    """Reads a CSV file.

    Raises:
        ValueError: It cannot be read, or is not a signal; the message says where.
    """
    from zeus_ipc.tables import rows

    points: list[tuple[float, float]] = []
    of_day: set[bool] = set()
    width = 2
    for number, row in enumerate(rows(path), start=1):
        if not any(row):
            continue
        try:
            begin_s, daily = _time(row[0].strip())
            if len(row) != width or "_" in row[1]:  # 0,21 is not 0, nor 1_0 ten
                raise ValueError
            points.append((begin_s, float(row[1])))
            of_day.add(daily)
        except (ValueError, IndexError):
            if number == 1 and not row[0].strip()[:1].isdigit():  # names
                width = len(row)
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
    """Returns seconds since 1970, and whether it is a time of every day."""
    try:
        of_day = time.fromisoformat(text)
    except ValueError:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp(), False
    return datetime.combine(datetime.now(of_day.tzinfo).date(), of_day).timestamp(), True


def _fetched(rate: Rate, now_s: float) -> Signal:
    """Returns the day before and the day after, hour by hour; assumes that carbon intensities stay
    as they are.
    """
    rate.fetch()
    hour = datetime.fromtimestamp(now_s, timezone.utc).replace(minute=0, second=0, microsecond=0)
    hours = [hour + timedelta(hours=n) for n in range(-_HOURS, _HOURS + 1)]
    known = [(begin.timestamp(), rate.at(begin)) for begin in hours]
    return Signal([(begin, value) for begin, value in known if value is not None])

"""Parses operators' input: `80kW`, `5kW/min`, `17:00`."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_POWER = re.compile(r"([0-9]*\.?[0-9]+) ?([kM]?)W?", re.ASCII)
_RAMP = re.compile(r"(.+)/ ?(s|min|h)", re.ASCII)
_FACTORS = {"": 1, "k": 1000, "M": 1_000_000}
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def power_mw(text: str) -> int:
    """Parses a power, such as `80kW`, `80000` or `0.08 MW`; returns mW.

    Raises:
        ValueError: It is none of that.
    """
    found = _POWER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a power; write 80kW or 80000")
    return round(float(found[1]) * _FACTORS[found[2]] * 1000)


def ramp_mw_per_s(text: str) -> int:
    """Parses a ramp, such as `5kW/min`; returns mW per second.

    Raises:
        ValueError: It is none.
    """
    found = _RAMP.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a ramp; write 5kW/min")
    rate = power_mw(found[1]) // _SECONDS[found[2]]
    if rate <= 0:
        raise ValueError(f"{text!r} is not a ramp: it is 0; leave it out to change at once")
    return rate


def time_s(text: str, now_s: float) -> float:
    """Parses `17:00`, the next one in local time, or `2026-11-23T17:00[+01:00]`; returns s since
    1970.

    Raises:
        ValueError: It is none of that.
    """
    now = datetime.fromtimestamp(now_s)
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text, re.ASCII):
            hour, minute, second = (*map(int, text.split(":")), 0)[:3]
            at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            at += timedelta(days=at <= now)
        else:
            at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write 17:00 or 2026-11-23T17:00") from None
    return at.timestamp()

"""Parses operators' input: `80kW`, `5kW/min`, `17:00`."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_POWER = re.compile(r"([0-9]{0,12}\.?[0-9]{1,12}) ?([kM]?)W?", re.ASCII)
_RAMP = re.compile(r"(.+)/ ?(s|min|h)", re.ASCII)
_FACTORS = {"": 1, "k": 1000, "M": 1_000_000}
MAX_MW = 10**12
"""Largest power: 1 GW."""
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def power_mw(text: str) -> int:
    """Parses a power, such as `80kW`, `80000` or `0.08 MW`; returns mW.

    Raises:
        ValueError: It is none of that.
    """
    match = _POWER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a power; write 80kW or 80000")
    return round(float(match[1]) * _FACTORS[match[2]] * 1000)


def ramp_mw_per_s(text: str) -> int:
    """Parses a ramp, such as `5kW/min`; returns mW per second.

    Raises:
        ValueError: It is none.
    """
    match = _RAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a ramp; write 5kW/min")
    rate = power_mw(match[1]) // _SECONDS[match[2]]
    if rate <= 0:
        raise ValueError(f"{text!r} is not a ramp: it is 0; omit it to change at once")
    return rate


def _of_number(parse: Callable[[str], int], per: float) -> BeforeValidator:
    """Parses text, or a number in W."""

    def parsed(value: Any) -> int:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{value!r:.60} is not a power; write 80kW or 80000")
        if not 0 <= value <= MAX_MW / 1000:
            raise ValueError(f"{value!r:.40} W is not possible; give 0 W to 1 GW")
        return round(1000 * value / per)

    return BeforeValidator(parsed)


Power = Annotated[int, _of_number(power_mw, 1), Field(le=MAX_MW)]
"""A power in mW, given in W or as text, such as `80kW`."""
Ramp = Annotated[int, _of_number(ramp_mw_per_s, 60)]
"""A ramp in mW per second, given in W per minute or as text, such as `5kW/min`."""


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

"""How the runs of a job trade energy against time, where that follows a signal or a deadline. Pure.

`zeus.policy.recurrence` chooses by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from typing import Protocol

from zeus.policy.interface import Forecast, ProfileOf

ETAS = tuple(tenths / 10 for tenths in range(11))
"""Where a deadline decides, one of these chooses the power limit."""


class Relative(Protocol):
    """What `zeus.policy.signal.Signal.relative` has; other sources may ask someone first."""

    def relative(self, begin_s: float, end_s: float) -> float | None:
        """The signal during a run over its mean; None where it is not known."""


@dataclass(frozen=True)
class TradeOff:
    """How the runs of a job trade energy against time.

    Attributes:
        eta_knob: The usual one: 1 counts energy only, 0 time only.
        signal: Moves it (`zeus.policy.signal`); None for none.
        done_by: Each recurrence is to be done at this time of day, with the least energy. Local
            time where it has no offset. None for no deadline.
        on_time: Probability with which that is to be so.

    Raises:
        ValueError: It has both a signal and a deadline, or a number is out of range.
    """

    eta_knob: float
    signal: Relative | None = None
    done_by: time | None = None
    on_time: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.eta_knob <= 1:
            raise ValueError(f"eta_knob must be between 0 and 1, not {self.eta_knob:g}")
        if not 0 < self.on_time < 1:
            raise ValueError(f"on_time must be between 0 and 1, not {self.on_time:g}")
        if self.signal is not None and self.done_by is not None:
            raise ValueError(
                "give a signal or a deadline, not both: with a deadline, the least energy is "
                "chosen at any price"
            )


def options(forecasts: Sequence[Forecast], profile_of: ProfileOf) -> list[Forecast]:
    """Batch sizes, each with all `ETAS` where its power limits are measured.

    Args:
        forecasts: Of the policy, under one eta.
    """
    found = []
    for one in forecasts:
        profile = profile_of(one.batch_size)
        if profile is None:
            # Its run measures power limits, and judges them by energy.
            found.append(replace(one, eta_knob=1.0))
            continue
        for eta in ETAS:
            energy, time = profile.change(one.eta_knob, eta)
            found.append(
                replace(
                    one,
                    eta_knob=eta,
                    energy=one.energy * energy,
                    log_time=one.log_time + math.log(time),
                    log_most_time=one.log_most_time + math.log(time),
                )
            )
    return found


def least_energy(
    found: Sequence[Forecast], within_s: float, on_time: float
) -> tuple[Forecast, bool]:
    """The option of least energy that is done in time, else the fastest.

    Args:
        within_s: Time that is left, s.
        on_time: Probability with which it is to be done by then.

    Returns:
        The option, and whether it is that probable.
    """
    in_time = [one for one in found if one.done_within(within_s) >= on_time]
    if in_time:
        return min(in_time, key=lambda one: (one.energy, one.log_time)), True
    return fastest(found), False


def fastest(found: Sequence[Forecast]) -> Forecast:
    """The option of the shortest expected time, where a run that misses takes another."""
    return min(found, key=lambda one: one.log_time - math.log(max(one.reach, 1e-9)))


def time_of_day(text: str) -> time:
    """A deadline, such as `08:00` or `08:00+01:00`.

    Raises:
        ValueError: It is none.
    """
    try:
        return time.fromisoformat(text)
    except ValueError:
        raise ValueError(f"done_by must be a time of day such as 08:00, not {text!r}") from None


def next_deadline(done_by: time, began_s: float) -> float:
    """The first such time of day after a recurrence began; both in s since 1970."""
    began = datetime.fromtimestamp(began_s, done_by.tzinfo)
    due = datetime.combine(began.date(), done_by)
    # A local time of day is the same on the next day, also where that day has another length.
    while due.timestamp() <= began_s:
        due += timedelta(days=1)
    return due.timestamp()

"""Events from outside: a JSON file, or the same over HTTP.

    {"events": [{"name": "evening", "limit": "80kW", "start": "2026-11-23T17:00:00+01:00",
                 "end": "2026-11-23T20:00:00+01:00", "ramp": "5kW/min"}]}

A time without an offset is local. `limit` and `ramp` may be numbers: W, and W per minute.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable
from http.client import HTTPException

from pydantic import BaseModel, ValidationError

from zeus_common.text import sentence
from zeus_fleet.messages import Budget, LimitEvent
from zeus_fleet.quantities import Power, Ramp, time_s
from zeus_fleet.schedule import scheduled
from zeus_ipc.parsing import MAX_BYTES, Malformed, parse, read_file

TIMEOUT_S = 10.0


def fetch(source: str) -> bytes:
    """The present contents of a source.

    Args:
        source: A path, or an address that starts with http:// or https://.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too large, or no regular file.
    """
    if not source.startswith(("http://", "https://")):
        return read_file(source)
    try:
        with urllib.request.urlopen(source, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_BYTES + 1)  # of which `parse` refuses the last
    except HTTPException as error:  # such as an answer that is cut off
        raise OSError(repr(error)) from None
    return data


def events_from(data: bytes, now_s: float) -> tuple[LimitEvent, ...]:
    """The events of a signal.

    Raises:
        ValueError: It is not valid; the message says why.
    """
    try:
        rows = _Signal.model_validate(parse(data)).events
    except ValidationError as error:
        raise ValueError(f"the signal is not as documented: {sentence(error)}") from None
    except Malformed as error:
        raise ValueError(f"the signal is not as documented: {error}") from None
    return tuple(
        LimitEvent(row.name, row.limit, time_s(row.start, now_s), time_s(row.end, now_s), row.ramp)
        for row in rows
    )


class _SignalEvent(BaseModel):
    """An event of a signal."""

    name: str
    limit: Power
    start: str
    end: str
    ramp: Ramp = 0


class _Signal(BaseModel):
    """The events of a source."""

    events: list[_SignalEvent]


def merged(budget: Budget, label: str, events: Iterable[LimitEvent], now_s: float) -> Budget:
    """The budget with a source's present events instead of its previous ones.

    Args:
        budget: The present one.
        label: The source's prefix of its events' names.
        events: Its present events. Those that have ended are left out.
        now_s: The time.

    Raises:
        ValueError: An event is not valid.
    """
    known = {event.name for event in budget.events}
    others = [event for event in budget.events if not event.name.startswith(f"{label}/")]
    theirs = [
        LimitEvent(
            f"{label}/{event.name}",
            event.limit_mw,
            event.start_s,
            event.end_s,
            event.ramp_mw_per_s,
        )
        for event in events
        if event.end_s > now_s or f"{label}/{event.name}" in known
    ]
    if {*others, *theirs} == {*budget.events}:
        return budget
    return scheduled(budget, [*others, *theirs], now_s)

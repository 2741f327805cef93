"""Records of a budget's use, a report of promised and delivered reductions, and a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from zeus_common.tables import Amount, Seconds, read_lines
from zeus_fleet.view import FleetView


@dataclass(frozen=True)
class Record:
    """A record of one instant. Power in W."""

    at_s: Seconds
    limit_w: Amount
    standing_w: Amount
    granted_w: Amount
    held_w: Amount
    drawn_w: Amount
    busy_gpus: int
    lost_gpus: Amount

    @classmethod
    def of(cls, view: FleetView) -> Record:
        """The record of a view."""
        site = view.site
        watts = (site.limit_w, view.standing_w, site.granted_w, site.held_w, site.drawn_w)
        return cls(round(view.at_s, 3), *watts, view.busy_gpus, round(view.lost_gpus, 4))

    def line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def read(path: Path) -> list[Record]:
    """Records of a file, sorted by time. The last line may be truncated.

    Raises:
        ValueError: A line is not a record, or there is none.
    """
    records = [one for _, one in read_lines(path, Record)]
    if not records:
        raise ValueError(f"{path} has no records; write some with zeus-fleet watch --record")
    return sorted(records, key=lambda one: one.at_s)


@dataclass(frozen=True)
class EventReport:
    """The promised and delivered reduction of an event.

    Attributes:
        start_s: Start of the lower limit, s since 1970.
        end_s: End of the lower limit.
        standing_w: The limit before.
        limit_w: The lowest limit.
        promised_kwh: Standing limit minus limit, integrated over the event.
        before_w: Mean power drawn in the 15 minutes before; None: not known.
        drawn_w: Mean power drawn during the event.
        delivered_kwh: Power drawn before minus power drawn, integrated over the event; None as for
            `before_w`.
        most_held_w: The largest sum of limits.
        above_s: Time for which the sum of limits was above the limit.
        most_above_w: Largest excess.
        lost_gpu_h: Progress that jobs lost because of limits, in hours of one GPU at full speed.
        busy_gpu_h: Hours of GPUs of jobs.
        unknown_s: Time without records.
    """

    start_s: float
    end_s: float
    standing_w: float
    limit_w: float
    promised_kwh: float
    before_w: float | None
    drawn_w: float
    delivered_kwh: float | None
    most_held_w: float
    above_s: float
    most_above_w: float
    lost_gpu_h: float
    busy_gpu_h: float
    unknown_s: float


def reports(records: Sequence[Record]) -> list[EventReport]:
    """One delivery for each interval with a limit below the standing one."""
    events = []
    first: int | None = None
    for index, one in enumerate(records):
        lower = one.limit_w < one.standing_w
        if lower and first is None:
            first = index
        elif not lower and first is not None:
            events.append(_report(records, first, index))
            first = None
    if first is not None and first < len(records) - 1:
        events.append(_report(records, first, len(records) - 1))
    return events


def _report(records: Sequence[Record], first: int, last: int) -> EventReport:
    inside = records[first : last + 1]
    start_s, end_s = inside[0].at_s, inside[-1].at_s
    # Length of the reference interval before an event.
    before = [one for one in records[:first] if one.at_s >= start_s - 900.0]
    before_w = sum(one.drawn_w for one in before) / len(before) if before else None
    known_s = above_s = unknown_s = 0.0
    promised = drawn = lost = busy = 0.0
    for one, after in pairwise(inside):
        seconds = after.at_s - one.at_s
        # Longest time without a record that is interpolated.
        if seconds > 60.0:
            unknown_s += seconds
            continue
        known_s += seconds
        promised += seconds * (one.standing_w - one.limit_w)
        drawn += seconds * one.drawn_w
        lost += seconds * one.lost_gpus
        busy += seconds * one.busy_gpus
        above_s += seconds * (one.held_w > one.limit_w)
    held = inside[:-1] or inside
    delivered = None if before_w is None else (before_w * known_s - drawn) / 3.6e6
    return EventReport(
        start_s,
        end_s,
        inside[0].standing_w,
        min(one.limit_w for one in held),
        promised / 3.6e6,
        before_w,
        drawn / known_s if known_s else 0.0,
        delivered,
        max(one.held_w for one in held),
        above_s,
        max(0.0, *(one.held_w - one.limit_w for one in held)),
        lost / 3600,
        busy / 3600,
        unknown_s,
    )


WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 34, 40

LINES: tuple[tuple[str, str, Callable[[Record], float]], ...] = (
    ("standing limit", "#98a2b3", lambda one: one.standing_w),
    ("limit", "#d9480f", lambda one: one.limit_w),
    ("sum of GPUs' limits", "#1668c7", lambda one: one.held_w),
    ("drawn", "#22804a", lambda one: one.drawn_w),
)


def svg(records: Sequence[Record]) -> str:
    """The chart of limit, sum of limits and power drawn over time.

    Raises:
        ValueError: There are fewer than two records.
    """
    if len(records) < 2:
        raise ValueError("a chart needs two records or more")
    some = records[:: max(1, len(records) // 1500)]
    start, end = some[0].at_s, some[-1].at_s
    top = 1.05 * max(max(value(one) for one in some) for _, _, value in LINES) or 1.0

    def x(at_s: float) -> float:
        return LEFT + (at_s - start) / max(end - start, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y(watts: float) -> float:
        return HEIGHT - BOTTOM - watts / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="none">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    step = 10 ** math.floor(math.log10(top))
    step = next(one for one in (step / 5, step / 2, step, 2 * step) if top / one <= 8)
    for number in range(int(top / step) + 1):
        height = y(number * step)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#dfe3ea"/>')
        text = f"{number * step / 1000:g} kW"
        parts.append(_text(LEFT - 8, height + 4, text, "end"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        at_s = start + share * (end - start)
        clock = f"{datetime.fromtimestamp(at_s):%H:%M:%S}"
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        parts.append(_text(x(at_s), HEIGHT - 14, clock, anchor))
    for index, (name, color, value) in enumerate(LINES):
        points = [f"M{x(some[0].at_s):.1f} {y(value(some[0])):.1f}"]
        points += [f"H{x(one.at_s):.1f}V{y(value(one)):.1f}" for one in some[1:]]
        parts.append(f'<path d="{"".join(points)}" stroke="{color}" stroke-width="1.8"/>')
        at = LEFT + index * 190
        parts.append(f'<path d="M{at} 16h22" stroke="{color}" stroke-width="3"/>')
        parts.append(_text(at + 28, 20, name, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#5d6675">{text}</text>'

"""Limit, sum of limits and power drawn over time, as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime

from zeus_fleet.records import Record

WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 34, 40
MOST_POINTS = 1500

LINES: tuple[tuple[str, str, Callable[[Record], float]], ...] = (
    ("standing limit", "#98a2b3", lambda one: one.standing_w),
    ("limit", "#d9480f", lambda one: one.limit_w),
    ("sum of GPUs' limits", "#1668c7", lambda one: one.held_w),
    ("drawn", "#22804a", lambda one: one.drawn_w),
)


def svg(records: Sequence[Record]) -> str:
    """The chart.

    Raises:
        ValueError: There are fewer than two records.
    """
    if len(records) < 2:
        raise ValueError("a chart needs two records or more")
    some = records[:: max(1, len(records) // MOST_POINTS)]
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

"""Time series as lines of blocks, and shares as bars."""

from __future__ import annotations

from collections.abc import Sequence

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], lowest: float, highest: float) -> str:
    """Draws values as a line of blocks, blank where there is none."""
    span = max(1e-9, highest - lowest)
    steps = len(LEVELS) - 1
    return "".join(
        " " if value is None else LEVELS[min(steps, max(0, round((value - lowest) / span * steps)))]
        for value in values
    )


def resample(
    points: Sequence[tuple[float, float]], begin: float, end: float, width: int
) -> list[float | None]:
    """Returns the mean of each of `width` spans of time; a span without a value repeats the one
    before.

    Args:
        points: Times and values, in order.
        begin: Where the first span begins.
        end: Where the last one ends.
        width: How many.
    """
    each = (end - begin) / width
    found: list[float | None] = []
    position = 0
    last: float | None = None
    for number in range(width):
        until = begin + (number + 1) * each
        inside = []
        while position < len(points) and points[position][0] <= until:
            if points[position][0] > begin + number * each:
                inside.append(points[position][1])
            else:
                last = points[position][1]
            position += 1
        if inside:
            last = sum(inside) / len(inside)
        found.append(last)
    return found


def bar(share: float | None, width: int, mark: float | None = None) -> str:
    """Draws a share from 0 to 1 as a bar; `|` is the mark."""
    if share is None:
        return "-" * width
    filled = min(width, max(0, round(share * width)))
    cells = ["━"] * filled + ["─"] * (width - filled)
    if mark is not None:
        cells[min(width - 1, max(0, round(mark * width) - 1))] = "|"
    return "".join(cells)

"""Values, times, tables, and series as lines of blocks, as text. No table library: importing one
would double the start time.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone

import click

LEVELS = "▁▂▃▄▅▆▇█"

WRAPPED = 24
"""Least width of a table's last column before other columns are dropped for it."""

REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
"""Bits of nvmlClocksEventReasons (nvml.h of driver R615)."""

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def use_color() -> bool:
    """Whether to color standard output: it is a terminal, and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def style(text: str, fg: str | None = None, bold: bool = False) -> str:
    """Colors text if standard output takes color."""
    return click.style(text, fg=fg, bold=bold or None) if use_color() else text


def named_reasons(bits: int) -> dict[int, str]:
    """Names of all bits that are known, and of those that are set: of a newer driver, numbers."""
    places = [1 << place for place in range(bits.bit_length())]
    return {bit: hex(bit) for bit in places if bits & bit} | REASONS


def reasons(bits: int | None) -> list[str]:
    """Names of a GPU's throttle reasons; idleness is not one."""
    names = named_reasons(bits or 0).items()
    return [name for bit, name in sorted(names) if (bits or 0) & bit and bit != 0x1]


def indices(text: str) -> list[int] | None:
    """Parses `0,2-3`; None: it is something else."""
    numbers: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        some = () if span is None else range(int(span[1]), int(span[2] or span[1]) + 1)
        if not some:
            return None
        numbers += some
    return numbers


def parse_duration(text: str) -> float:
    """Parses `30s`, `10m`, `1.5h`, `2d` or a number of seconds.

    Raises:
        ValueError: It is none of these.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *(ms|s|min|m|h|d)?", text.strip())
    found_s = float(match[1]) * _UNITS_S[match[2] or "s"] if match else 0.0
    if not 0 < found_s <= 1e9:  # 31 years
        raise ValueError(f"{text!r} is not a duration; write 30s, 10m, 2h or 1d")
    return found_s


def wall_time(t_ns: int, now_ns: int, now: datetime | None = None) -> datetime:
    """The local time of an instant of CLOCK_MONOTONIC."""
    here = datetime.now(timezone.utc) if now is None else now
    return datetime.fromtimestamp(here.timestamp() - (now_ns - t_ns) / 1_000_000_000).astimezone()


def screen_width() -> int:
    """Columns of the terminal; 0: standard output is none, so that nothing need fit."""
    if not sys.stdout.isatty():
        return 0
    import shutil  # it imports every compression

    return shutil.get_terminal_size().columns


def fitting(
    header: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[int], room: int
) -> tuple[list[int], list[int], list[str]]:
    """Chooses a table's columns.

    Args:
        spare: Positions of columns that may be dropped, the first one first; before them go those
            without content.
        room: Characters of a line; 0: any number.

    Returns:
        Positions of the columns to show, the widths of all, and names of those with content that
        have no room.
    """
    last = len(header) - 1
    widths = [
        max([len(name), *(_width(row[position]) for row in rows)])
        for position, name in enumerate(header)
    ]
    shown = [*range(len(header))]
    blank = [one for one in shown if all(row[one] in ("", "-") for row in rows)]
    dropped = []
    for position in [*blank, *(one for one in spare if one not in blank)]:
        wrapped = min(widths[last], max(len(header[last]), WRAPPED))
        least = sum((wrapped if one == last else widths[one]) + 2 for one in shown) - 2
        if room and least > room:
            shown.remove(position)
            dropped += [header[position]] if position not in blank else []
    return shown, widths, dropped


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
    width: int | None = None,
) -> list[str]:
    """Lines of aligned columns, which fit the terminal: columns without content and spare ones are
    dropped, and the last one is wrapped, or set below the others.

    Args:
        right: Positions of columns that are aligned to the right.
        spare: As for `fitting`.
        width: Characters of a line; 0: any number; None: the terminal's.
    """
    room = screen_width() if width is None else width
    shown, widths, dropped = fitting(header, rows, spare, room)
    last = shown[-1]
    indent = sum(widths[one] + 2 for one in shown if one != last)
    below = 0 < room < indent + min(widths[last], WRAPPED)
    lines = []
    for row in [[style(name, bold=True) for name in header], *rows]:
        cells = []
        for position in shown:
            blanks = " " * (widths[position] - _width(row[position]))
            cells.append(blanks + row[position] if position in right else row[position] + blanks)
        line = "  ".join(cells).rstrip()
        if not room or (_width(line) <= room and not below):
            lines.append(line)
            continue
        begun = "  ".join(cells[:-1])
        start = 4 if below else indent
        parts = textwrap.wrap(plain(row[last]), max(room - start, WRAPPED)) or [""]
        lines += [begun.rstrip()] if below else [f"{begun}  {parts.pop(0)}"]
        lines += [" " * start + part for part in parts if part]
    if dropped:
        lines.append(style(f"(no room for {', '.join(dropped)})", fg="bright_black"))
    return lines


def plain(cell: str) -> str:
    """A cell without its color."""
    return _ESCAPE.sub("", cell)


def _width(cell: str) -> int:
    return len(plain(cell))


def shorten(text: str, width: int) -> str:
    """Shortens a text to `width` characters, and marks that it did."""
    return text if len(text) <= width else text[: width - 1] + "…"


def style_of_share(share: float | None) -> str:
    """Returns the color of a utilization: it changes at 85 % and at 97 %."""
    if share is None:
        return "dim"
    return "red" if share > 0.97 else "yellow" if share > 0.85 else "green" if share > 0 else ""


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
    """
    each = (end - begin) / width
    values: list[float | None] = []
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
        values.append(last)
    return values


def bar(share: float | None, width: int, mark: float | None = None) -> str:
    """Draws a share from 0 to 1 as a bar; `|` is the mark."""
    if share is None:
        return "-" * width
    filled = min(width, max(0, round(share * width)))
    cells = ["━"] * filled + ["─"] * (width - filled)
    if mark is not None:
        cells[min(width - 1, max(0, round(mark * width) - 1))] = "|"
    return "".join(cells)

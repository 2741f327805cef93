"""Energy of the files that the program `zeus_monitor` of ml-energy/zeus 0.1 to 0.8 writes.

Header `Time,Power`; then UTC time and milliwatts, such as `2022-07-13 02:07:36.708783111,32402`.
"""

from __future__ import annotations

import csv
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

_NANOSECONDS = 9


def energy(logfile: str | Path, start: float | None = None, end: float | None = None) -> float:
    """Energy, J, between two times.

    Raises:
        ValueError: The file has fewer than two samples there, or is another kind of file.
    """
    seconds, joules = _integrate(logfile, start, end)
    del seconds
    return joules


def avg_power(logfile: str | Path, start: float | None = None, end: float | None = None) -> float:
    """Mean power, W, between two times. See `energy`."""
    seconds, joules = _integrate(logfile, start, end)
    return joules / seconds


def _integrate(logfile: str | Path, start: float | None, end: float | None) -> tuple[float, float]:
    samples = _samples(Path(logfile))
    if samples:
        first, last = samples[0][0], samples[-1][0]
        if start is not None:
            from_s = start + (first if start >= 0 else last)
            samples = [one for one in samples if one[0] >= from_s]
        if end is not None:
            until_s = end + (first if end >= 0 else last)
            samples = [one for one in samples if one[0] <= until_s]
    if len(samples) < 2:
        raise ValueError(f"{logfile} has fewer than two samples in that time; give it more time")
    joules = sum(
        (after_s - before_s) * (before_w + after_w) / 2
        for (before_s, before_w), (after_s, after_w) in pairwise(samples)
    )
    return samples[-1][0] - samples[0][0], joules


def _samples(logfile: Path) -> list[tuple[float, float]]:
    lines = logfile.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0].strip() != "Time,Power":
        raise ValueError(f"{logfile} is not a file of zeus_monitor: its header is not Time,Power")
    return [
        (_unix_s(when), float(milliwatts) / 1000) for when, milliwatts in csv.reader(lines[1:-1])
    ]


def _unix_s(text: str) -> float:
    whole, _, fraction = text.partition(".")
    when = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    return when.timestamp() + int(fraction.ljust(_NANOSECONDS, "0")[:_NANOSECONDS] or 0) / 1e9

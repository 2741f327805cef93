"""Energy of the files that the program `zeus_monitor` of ml-energy/zeus 0.1 to 0.8 writes.

Header `Time,Power`; then UTC time and milliwatts, such as `2022-07-13 02:07:36.708783111,32402`.
"""

from __future__ import annotations

import csv
import math
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path


def energy(logfile: str | Path, start: float | None = None, end: float | None = None) -> float:
    """Energy, J, between two times.

    Args:
        start: Seconds after the first sample; negative: before the last. None: the first.
        end: The same; None: the last.

    Raises:
        ValueError: The file has fewer than two samples there, or is another kind of file.
    """
    samples = _samples(Path(logfile), start, end)
    return sum(
        (after_s - before_s) * (before_w + after_w) / 2
        for (before_s, before_w), (after_s, after_w) in pairwise(samples)
    )


def avg_power(logfile: str | Path, start: float | None = None, end: float | None = None) -> float:
    """Mean power, W, between two times. See `energy`."""
    samples = _samples(Path(logfile), start, end)
    return energy(logfile, start, end) / (samples[-1][0] - samples[0][0])


def _samples(logfile: Path, start: float | None, end: float | None) -> list[tuple[float, float]]:
    lines = logfile.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0].strip() != "Time,Power":
        raise ValueError(f"{logfile} is not a file of zeus_monitor: its header is not Time,Power")
    # The last line may be cut off.
    samples = [(_unix_s(when), float(mw) / 1000) for when, mw in csv.reader(lines[1:-1])]
    if samples:
        first_s, last_s = samples[0][0], samples[-1][0]
        since_s = first_s if start is None else start + (first_s if start >= 0 else last_s)
        until_s = math.inf if end is None else end + (first_s if end >= 0 else last_s)
        samples = [sample for sample in samples if since_s <= sample[0] <= until_s]
    if len(samples) < 2:
        raise ValueError(f"{logfile} has fewer than two samples in that time; give it more time")
    return samples


def _unix_s(text: str) -> float:
    whole, _, fraction = text.partition(".")
    when = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    return when.timestamp() + float(f"0.{fraction or 0}")

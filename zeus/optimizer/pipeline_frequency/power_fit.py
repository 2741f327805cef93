"""Computes the power of each kind of instruction from readings that cover several. Pure.

A power sensor updates every 20 to 100 ms and measures all or part of each tick; an instruction may
be shorter. Each reading is the mean over a known mixture of kinds, so many readings determine the
power of each kind by least squares.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

WAITING, OUTSIDE = "", "-"
"""Kinds of time that belong to no instruction: between two of an iteration, between iterations."""

UNLIKE = "?"
"""Kind of an instruction that took over `LONG` times as long as others of its kind: it is not known
what the GPU did in that time. The host may have noticed its end late, or other work ran."""

LONG = 2.0


class Span(NamedTuple):
    """A time span of one kind, ns."""

    begin_ns: int
    end_ns: int
    kind: str


class Power(NamedTuple):
    """Mean power and its standard deviation, W."""

    watts: float
    deviation_w: float


def fill(iterations: Sequence[Sequence[Span]]) -> list[Span]:
    """Consecutive iterations, with the time between their instructions."""
    spans: list[Span] = []
    for iteration in iterations:
        for n, span in enumerate(iteration):
            if spans and spans[-1].end_ns < span.begin_ns:
                kind = WAITING if n else OUTSIDE
                spans.append(Span(spans[-1].end_ns, span.begin_ns, kind))
            spans.append(span)
    return spans


def set_apart(iterations: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Iterations in which spans that are too long for their kind are `UNLIKE`."""
    lengths: dict[str, list[int]] = {}
    for span in itertools.chain.from_iterable(iterations):
        lengths.setdefault(span.kind, []).append(span.end_ns - span.begin_ns)
    longest = {kind: LONG * statistics.median(seconds) for kind, seconds in lengths.items()}
    return [
        [
            span._replace(kind=UNLIKE) if span.end_ns - span.begin_ns > longest[span.kind] else span
            for span in iteration
        ]
        for iteration in iterations
    ]


def mixtures(
    spans: Sequence[Span], readings: Sequence[tuple[int, int]], window_ns: int | None
) -> list[tuple[dict[str, float], float]]:
    """The shares of the kinds in each reading, and its power, W; without readings that cover
    `UNLIKE`.
    """
    if not spans or len(readings) < 2:
        return []
    periods = sorted(later[0] - earlier[0] for earlier, later in itertools.pairwise(readings))
    period_ns = periods[len(periods) // 2]
    begins = [span.begin_ns for span in spans]
    mixed = []
    for earlier, (t_ns, power_mw) in itertools.pairwise(readings):
        seen_ns = t_ns - earlier[0]
        if seen_ns > 1.5 * period_ns:  # a tick was missed
            seen_ns = period_ns
        if window_ns is not None:
            seen_ns = min(window_ns, seen_ns)
        from_ns = t_ns - seen_ns
        if seen_ns <= 0 or from_ns < begins[0] or t_ns > spans[-1].end_ns:
            continue
        shares: dict[str, float] = {}
        for place in range(bisect.bisect_right(begins, from_ns) - 1, len(spans)):
            span = spans[place]
            if span.begin_ns >= t_ns:
                break
            inside_ns = min(span.end_ns, t_ns) - max(span.begin_ns, from_ns)
            if inside_ns > 0:
                shares[span.kind] = shares.get(span.kind, 0.0) + inside_ns / seen_ns
        if UNLIKE not in shares:
            mixed.append((shares, power_mw / 1000))
    return mixed


def fit(seen: Sequence[tuple[dict[str, float], float]]) -> dict[str, Power]:
    """The power of each separable kind, with its error from noise."""
    rows = list(seen)
    result: dict[str, Power] = {}
    for _ in range(2):
        result, deviations = _solve(rows)
        if not result:
            break
        # Readings this many standard deviations off are outliers, and excluded.
        kept = [row for row, deviation in zip(rows, deviations, strict=True) if deviation <= 5.0]
        if len(kept) == len(rows) or len(kept) < len(rows) * 0.8:
            break
        rows = kept
    return result


def _solve(
    rows: Sequence[tuple[dict[str, float], float]],
) -> tuple[dict[str, Power], list[float]]:
    """Solves least squares; also returns each row's residual in standard deviations."""
    import numpy as np  # only needed for profiling

    kinds = sorted({kind for shares, _ in rows for kind in shares})
    seen = np.array([[shares.get(kind, 0.0) for kind in kinds] for shares, _ in rows])
    watts = np.array([power for _, power in rows])
    if not kinds or not rows:
        return {}, []
    # Smallest share of readings for a kind to be separable.
    known = seen.sum(axis=0) > 0.02 * len(rows)
    pure = ~seen[:, ~known].any(axis=1)
    usable = pure if pure.any() else np.ones(len(rows), dtype=bool)
    matrix = seen[usable][:, known]
    if not known.any() or len(matrix) <= matrix.shape[1]:
        return {}, []
    # Kinds whose mixture is the same in every reading, up to this (`rcond`), are not separable.
    powers, _, rank, _ = np.linalg.lstsq(matrix, watts[usable], rcond=1e-5)
    if rank < matrix.shape[1]:
        return {}, []
    off = np.abs(watts - seen[:, known] @ powers)
    # Smallest relative error of a reading, from timestamps of ticks and noise.
    least_w = 0.01 * float(watts[usable].mean())
    spread_w = math.sqrt(float(off @ off) / max(1, len(rows) - matrix.shape[1]))
    variances = np.linalg.inv(matrix.T @ matrix).diagonal()
    deviations = max(spread_w, least_w) * np.sqrt(np.maximum(variances, 0.0))
    separable = (kind for kind, one in zip(kinds, known, strict=True) if one)
    result = {
        kind: Power(float(power), float(deviation))
        for kind, power, deviation in zip(separable, powers, deviations, strict=True)
    }
    # Standard deviation of a normal distribution whose median absolute deviation is 1.
    scale_w = max(float(np.sort(off)[len(off) // 2]) * 1.4826, least_w)
    return result, [float(one) for one in off / scale_w]

"""Divides a sum by one level for all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul, neg


def level(
    total: int,
    lows: Sequence[int],
    highs: Sequence[int],
    counts: Sequence[int] | None = None,
) -> list[int]:
    """Gives each the same level, clipped to its own range, such that the whole sum is used.

    Args:
        total: The sum. The lows are given even if they exceed it.
        lows: The minimum of each.
        highs: The maximum of each, at least its low.
        counts: The number of each, which all get the same; 1 if not given.

    Returns:
        The share of each. The sum is `total` minus rounding, unless the lows exceed it or the highs
        do not reach it.
    """
    if counts is None:
        counts = [1] * len(lows)
    if total >= sum(map(mul, highs, counts)):
        return list(highs)
    spare = total - sum(map(mul, lows, counts))
    if spare <= 0 or not lows:
        return list(lows)
    rises = [*zip(lows, counts, strict=True), *zip(highs, map(neg, counts), strict=True)]
    rises.sort()
    height, rising = rises[0][0], 0
    for bound, change in rises:
        if rising * (bound - height) > spare:
            break
        spare -= rising * (bound - height)
        height, rising = bound, rising + change
    height += spare // rising if rising else 0
    return [min(max(low, height), high) for low, high in zip(lows, highs, strict=True)]


def level_by_want(
    total: int, lows: Sequence[int], wants: Sequence[int], highs: Sequence[int]
) -> list[int]:
    """Like `level`, up to each one's demand; the rest raises all towards their highs."""
    rows = zip(lows, wants, highs, strict=True)
    wanted = [min(max(low, want), high) for low, want, high in rows]
    if total < sum(wanted):
        return level(total, lows, wanted)
    return level(total, wanted, highs)

"""Sharing a sum by one level for all."""

from __future__ import annotations

from collections.abc import Sequence


def level(total: int, lows: Sequence[int], highs: Sequence[int]) -> list[int]:
    """Gives each the same level, clipped to its own range, so that all is handed out.

    Args:
        total: What there is. The lows are given even if they exceed it.
        lows: The least for each.
        highs: The most for each, at least its low.

    Returns:
        Shares. They sum up to `total` less rounding, unless all lows exceed it or all highs do not
        reach it.
    """
    spare = total - sum(lows)
    if spare <= 0 or not lows:
        return list(lows)
    rises = sorted([(low, 1) for low in lows] + [(high, -1) for high in highs])
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
    """As `level`, up to what each wants; what is left then raises all towards their highs."""
    wanted = [min(max(low, want), high) for low, want, high in zip(lows, wants, highs, strict=True)]
    if total < sum(wanted):
        return level(total, lows, wanted)
    return level(total, wanted, highs)

"""Policies that divide power: limits per GPU of each job, for a total. Pure; power in mW.

A policy is `policy(jobs, total_mw)` and returns one limit per job, for each of its GPUs. The sum of
all is within the total, unless the minimum limits are above it. `benchmarks/fleet.py` compares the
policies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul, neg

from zeus_fleet import profiles
from zeus_fleet.profiles import ProgressProfile

FLOOR = 0.9
"""Water-filling gives each job at least this share of its progress under `busy`."""


@dataclass(frozen=True)
class JobGroup:
    """GPUs of one kind with the same work; all get the same limit.

    Attributes:
        gpus: Number of GPUs.
        low_mw: Their minimum limit.
        high_mw: Their maximum limit.
        busy: Whether they compute.
        profile: Progress by limit; None: not known.
        kind: Product name of the GPUs.
        needs_mw: The limit that its latency objective needs; None: it has none. No policy goes
            below it for other jobs. From `ClockStatus.needed_w` of `zeus.serving`.
    """

    gpus: int
    low_mw: int
    high_mw: int
    busy: bool = True
    profile: ProgressProfile | None = None
    kind: str = ""
    needs_mw: int | None = None


JobPolicy = Callable[..., list[int]]
"""`policy(jobs, total_mw)`: the limit of each job's GPUs."""


def keeps_latency(policy: JobPolicy) -> JobPolicy:
    """A policy that first gives jobs with a latency objective the limit that they need.

    If there is not enough for all of them, they share by one level, and others get their minimum.
    `latency_share` is the largest share of the power above the minimum limits that they may claim.
    """

    @functools.wraps(policy)
    def kept(
        jobs: Sequence[JobGroup],
        total_mw: int,
        *more: float,
        latency_share: float = 1.0,
        **options: float,
    ) -> list[int]:
        lows = [job.low_mw for job in jobs]
        needs = [_clipped(job, job.needs_mw or 0) if job.busy else job.low_mw for job in jobs]
        if needs == lows:
            return policy(jobs, total_mw, *more, **options)
        least = _sum(jobs, lows)
        claimed = least + int(latency_share * max(0, total_mw - least))
        lows = level(claimed, lows, needs, [job.gpus for job in jobs])
        bound = [replace(job, low_mw=low) for job, low in zip(jobs, lows, strict=True)]
        return policy(bound, total_mw, *more, **options)

    return kept


@keeps_latency
def uniform(jobs: Sequence[JobGroup], total_mw: int) -> list[int]:
    """The same limit for all GPUs, including idle ones. Needs no information."""
    return _level(jobs, total_mw, [job.low_mw for job in jobs])


@keeps_latency
def busy(jobs: Sequence[JobGroup], total_mw: int) -> list[int]:
    """The same limit for all busy GPUs; idle ones at their minimum."""
    return _level(jobs, total_mw, [job.low_mw for job in jobs], idle=False)


@keeps_latency
def max_min(jobs: Sequence[JobGroup], total_mw: int) -> list[int]:
    """The limits with the highest progress that all busy jobs can have at the same time."""
    curves = _curves(jobs)
    if curves is None:
        return busy(jobs, total_mw)

    def needed(progress: float) -> list[int]:
        return [
            _clipped(job, curve.limit_for(progress)) if job.busy else job.low_mw
            for job, curve in zip(jobs, curves, strict=True)
        ]

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _sum(jobs, needed(middle)) <= total_mw else (low, middle)
    return _level(jobs, total_mw, needed(low), idle=False)


@keeps_latency
def water_filling(jobs: Sequence[JobGroup], total_mw: int, floor: float = FLOOR) -> list[int]:
    """Gives power to the jobs where it adds the most progress per GPU, above a floor for each job.

    A job with an unknown profile counts with the mean of the known ones, of the same kind of GPU if
    there are any. Without any profile it equals `busy`. Greedy on the upper concave envelopes.

    Args:
        jobs: All jobs, including idle GPUs.
        total_mw: The total power.
        floor: Minimum progress of each job, as a share of its progress under `busy`.
    """
    fair = busy(jobs, total_mw)
    curves = _curves(jobs)
    if curves is None:
        return fair
    limits, segments = [], []
    for index, (job, curve, limit) in enumerate(zip(jobs, curves, fair, strict=True)):
        least = _clipped(job, curve.limit_for(floor * curve.at(limit)))
        limits.append(min(limit, least) if job.busy else job.low_mw)
        if job.busy and limits[-1] < job.high_mw:
            for slope, width in curve.segments(limits[-1], job.high_mw):
                segments.append((slope, index, width))
    left = total_mw - _sum(jobs, limits)
    for slope, index, width in sorted(segments, key=lambda one: (-one[0], one[1])):
        more = min(width, left // jobs[index].gpus)
        if slope <= 0 or more <= 0:
            continue
        limits[index] += more
        left -= more * jobs[index].gpus
    return _level(jobs, total_mw, limits, idle=False)


POLICIES: dict[str, JobPolicy] = {
    "uniform": uniform,
    "busy": busy,
    "max-min": max_min,
    "water-filling": water_filling,
}
"""Policies by name; the last one is the default."""


# ------------------------------------------------------------------------------------- internals


def _curves(jobs: Sequence[JobGroup]) -> list[ProgressProfile] | None:
    """The profile of each job, or the mean of its kind of GPU, or of all; None: none is known."""
    known = [job for job in jobs if job.busy and job.profile is not None]
    mean = profiles.mean(job.profile for job in known if job.profile is not None)
    if mean is None:
        return None
    by_kind = {
        kind: profiles.mean(job.profile for job in known if job.profile and job.kind == kind)
        for kind in {job.kind for job in known}
    }
    return [job.profile or by_kind.get(job.kind) or mean for job in jobs]


def _sum(jobs: Sequence[JobGroup], limits_mw: Sequence[int]) -> int:
    return sum(job.gpus * limit for job, limit in zip(jobs, limits_mw, strict=True))


def _clipped(job: JobGroup, limit_mw: int) -> int:
    return min(max(job.low_mw, limit_mw), job.high_mw)


def _level(
    jobs: Sequence[JobGroup], total_mw: int, lows: Sequence[int], *, idle: bool = True
) -> list[int]:
    """At least these limits, plus equal shares of the rest."""
    highs = [job.high_mw if job.busy or idle else low for job, low in zip(jobs, lows, strict=True)]
    return level(total_mw, lows, highs, [job.gpus for job in jobs])


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

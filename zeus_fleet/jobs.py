"""Targets of nodes by the jobs that run on them, for an allocator's policy. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zeus_fleet.allocator import NodeDemand
from zeus_fleet.messages import NodeWork
from zeus_fleet.policies import JobGroup, JobPolicy, water_filling
from zeus_fleet.profiles import ProgressProfile

TURN_S = 600.0
"""Longest time for which a job may measure with its highest limit."""


@dataclass(frozen=True)
class _Placed:
    """A job, or a part of one, and its GPUs."""

    name: str
    job: JobGroup
    works: tuple[tuple[str, NodeWork], ...]
    measuring: bool


class ByJobs:
    """A policy of an allocator that divides power by the jobs' profiles.

    GPUs without a job are idle and get their minimum. While a job measures, it gets its highest
    limit, as far as there is power above the minimum limits; one job at a time. The other jobs
    provide that power, not the reserve, which may be needed at the same time.

    A turn ends after `TURN_S`. The job's next turn can begin only after it has stopped asking.

    Args:
        policy: Shares a sum among jobs.
        clock: Returns seconds since any instant.

    Attributes:
        limits_mw: How each node's target divides among its GPUs, from the last call. A GPU that is
            left out gets its minimum.
        lent_to: The job that measures; None: none.
        waiting: Jobs that wait for their turn to measure.
    """

    def __init__(
        self, policy: JobPolicy = water_filling, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._until_s = 0.0
        self._had_turn: set[str] = set()
        self.limits_mw: dict[str, dict[int, int]] = {}
        self.lent_to: str | None = None
        self.waiting: tuple[str, ...] = ()

    def __call__(self, claims: Mapping[str, NodeDemand], total_mw: int) -> Mapping[str, int]:
        """The target of each node."""
        placed = _placed(claims)
        targets = {node: claim.floor_mw for node, claim in claims.items()}
        self.limits_mw = {node: {} for node in claims}
        busy = sum(one.job.gpus * one.job.low_mw for one in placed)
        left_mw = total_mw - (sum(targets.values()) - busy)
        self._turn({one.name for one in placed if one.measuring})
        measures = [one for one in placed if one.measuring and one.name == self.lent_to]
        others = [one for one in placed if one not in measures]
        spare = max(0, left_mw - busy)
        for measure in measures:
            job = measure.job
            limit = min(job.high_mw, job.low_mw + spare // job.gpus)
            self._give(measure, limit, targets)
            spare -= job.gpus * (limit - job.low_mw)
            left_mw -= job.gpus * limit
        limits = self.policy([other.job for other in others], left_mw)
        for one, limit in zip(others, limits, strict=True):
            self._give(one, limit, targets)
        return targets

    def _turn(self, asking: set[str]) -> None:
        now_s = self._clock()
        self._had_turn &= asking
        left = asking - self._had_turn
        if self.lent_to not in left or now_s >= self._until_s:
            if self.lent_to in left:
                self._had_turn.add(self.lent_to)
                left.discard(self.lent_to)
            self.lent_to = min(left, default=None)
            self._until_s = now_s + TURN_S
        self.waiting = tuple(sorted(left - {self.lent_to}))

    def _give(self, one: _Placed, limit_mw: int, targets: dict[str, int]) -> None:
        for node, work in one.works:
            limit = min(max(work.min_mw, limit_mw), work.max_mw)
            targets[node] += len(work.gpus) * (limit - work.min_mw)
            self.limits_mw[node].update(dict.fromkeys(work.gpus, limit))


def _placed(claims: Mapping[str, NodeDemand]) -> list[_Placed]:
    """The jobs. Parts of a job on another kind of GPU, or with another profile, count
    separately."""
    by_job: dict[tuple[str, str, ProgressProfile | None, bool], list[tuple[str, NodeWork]]] = {}
    for node, claim in claims.items():
        for work in claim.works if _can_be(claim) else ():
            key = (work.job, work.kind, work.profile, work.measuring)
            by_job.setdefault(key, []).append((node, work))
    placed = []
    for (name, kind, profile, measuring), works in by_job.items():
        low = max(work.min_mw for _, work in works)
        high = max(low, *(work.max_mw for _, work in works))
        gpus = sum(len(work.gpus) for _, work in works)
        needs = max((work.needs_mw for _, work in works if work.needs_mw is not None), default=None)
        job = JobGroup(gpus, low, high, profile=profile, kind=kind, needs_mw=needs)
        placed.append(_Placed(name, job, tuple(works), measuring))
    return placed


def _can_be(claim: NodeDemand) -> bool:
    """Whether a node's jobs are consistent with its GPUs; otherwise its report is wrong."""
    gpus = [gpu for work in claim.works for gpu in work.gpus]
    least = sum(len(work.gpus) * work.min_mw for work in claim.works)
    most = sum(len(work.gpus) * work.max_mw for work in claim.works)
    ordered = all(0 < work.min_mw <= work.max_mw for work in claim.works)
    unique = len(set(gpus)) == len(gpus)
    return ordered and unique and least <= claim.floor_mw and most <= claim.capacity_mw

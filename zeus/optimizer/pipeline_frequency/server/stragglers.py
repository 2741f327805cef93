"""Detects straggling data-parallel pipelines, and chooses each pipeline's plan. Pure.

Pipelines wait for each other at the end of an iteration, when they reduce gradients. A straggler (a
hot GPU, a slow node) makes the others wait with blocking power, so they may as well run a slower
plan. A rank reports the time of its own instructions, without that wait.

The rules:

1. A rank's pace is the median of its last `window` iterations, each divided by the predicted time
   of the plan in force. A pipeline's pace is that of its slowest rank.
2. Effects that plans do not include (communication, a loaded host) delay all pipelines equally. So
   a pipeline's slowdown is its pace divided by the smallest of all paces.
3. A pipeline becomes a straggler when its slowdown is above `1 + enter` after each of `patience`
   iterations in a row, and ceases to be one when it is below `1 + leave` as often. Between the two
   nothing changes, which prevents oscillation.
4. A straggler's slowdown is the smallest of those `patience` values, because the others must not
   become slower than it. It decreases after as many values below `1 - down` times it, because
   training is slower until then; it increases only after `up_patience` values above `1 + up` times
   it, because that saves little and noise must not cause it.
5. After a change of plans everything is measured again, from the iteration in which all ranks have
   them.
6. An iteration counts when every rank has reported it; until then nothing is decided.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from zeus.optimizer.pipeline_frequency.plans import Frontier

PENDING = 4096
"""Most iterations that are kept while some rank has not reported them."""

FAR = 1000.0
"""A time this many times the plan's, or so much less than it, is no measurement of this plan."""


def near(ratio: float) -> bool:
    """Whether a ratio of measured to predicted time is one of the plan in force."""
    return 1 / FAR < ratio < FAR


class StragglerWatch:
    """Computes the slowdown of each pipeline.

    Args:
        pipelines: The ranks of each pipeline.
        slowdowns: Earlier decisions, as after a restart of the server.

    Attributes:
        slowdowns: Of each pipeline; 1: not a straggler.
        paces: Last ratio of measured to predicted time of each pipeline; empty before the first.
    """

    window = 5
    patience = 5
    up_patience = 20
    enter = 0.05
    leave = 0.025
    up = 0.03
    down = 0.01

    def __init__(
        self, pipelines: Sequence[Sequence[int]], slowdowns: Sequence[float] | None = None
    ) -> None:
        self._pipelines = tuple(tuple(ranks) for ranks in pipelines)
        self._ranks = {rank for ranks in self._pipelines for rank in ranks}
        if slowdowns is None or len(slowdowns) != len(self._pipelines):
            slowdowns = [1.0] * len(self._pipelines)
        self.slowdowns = tuple(slowdowns)
        self.paces: tuple[float, ...] = ()
        self.restart()

    def restart(self, after: int = -1) -> None:
        """Discards measurements when plans change: only iterations beyond `after` count."""
        self._after = after
        self._pending: dict[int, dict[int, float]] = {}
        # Filled when an iteration counts: when all ranks restart, each of them resets this.
        self._ratios = defaultdict[int, deque[float]](lambda: deque(maxlen=self.window))
        self._recent = defaultdict[int, deque[float]](lambda: deque(maxlen=self.up_patience))

    def observe(self, rank: int, iteration: int, ratio: float) -> bool:
        """Adds a rank's ratio of measured to predicted time.

        Returns:
            Whether `slowdowns` has changed.
        """
        known = rank in self._ranks and len(self._pipelines) > 1
        if iteration <= self._after or not known or not near(ratio):
            return False
        reported = self._pending.setdefault(iteration, {})
        reported[rank] = ratio
        if len(reported) < len(self._ranks):
            if len(self._pending) > PENDING:
                del self._pending[min(self._pending)]
            return False
        # Ranks report in order: missing reports of earlier iterations will not arrive.
        self._after = iteration
        self._pending = {i: them for i, them in self._pending.items() if i > iteration}
        for who, value in reported.items():
            self._ratios[who].append(value)
        if any(len(ratios) < self.window for ratios in self._ratios.values()):
            return False
        return self._decide()

    def _decide(self) -> bool:
        self.paces = tuple(
            max(median(self._ratios[rank]) for rank in ranks) for ranks in self._pipelines
        )
        before, least = self.slowdowns, min(self.paces)
        for pipeline, pace in enumerate(self.paces):
            self._recent[pipeline].append(pace / least)
        self.slowdowns = tuple(
            self._judge(known, list(self._recent[pipeline]))
            for pipeline, known in enumerate(before)
        )
        return self.slowdowns != before

    def _judge(self, known: float, slowdowns: Sequence[float]) -> float:
        recent = slowdowns[-self.patience :]
        if len(recent) < self.patience:
            return known
        lowest, highest = min(recent), max(recent)
        if known == 1.0:
            return lowest if lowest > 1 + self.enter else 1.0
        if highest < 1 + self.leave:
            return 1.0
        if highest < known * (1 - self.down):
            return max(lowest, 1 + self.leave)
        lowest = min(slowdowns)
        risen = len(slowdowns) == self.up_patience and lowest > known * (1 + self.up)
        return lowest if risen else known


def plans_for(frontier: Frontier, base: int, slowdowns: Sequence[float]) -> list[int]:
    """Index of each pipeline's plan if some are stragglers.

    The common time is at least the straggler's shortest time and the time of the chosen plan
    `base`. Each pipeline gets the plan with the least energy within that time, considering its own
    slowdown; for a straggler this is often the fastest plan.
    """
    if all(slowdown == 1.0 for slowdown in slowdowns):
        return [base] * len(slowdowns)
    wanted_s = frontier.plans[base].time_s
    latest_s = max(slowdowns) * frontier.plans[frontier.fastest()].time_s
    return [
        base
        if slowdown == 1.0 and latest_s <= wanted_s
        else frontier.by_straggler(max(latest_s, wanted_s) / slowdown)
        for slowdown in slowdowns
    ]

"""Detects instructions whose times have drifted from the plan's, and gives the new times. Pure.

A GPU that gets hot, or a profile of other conditions, makes a stage slower than planned; the plan
then slows down stages that others wait for, or misses savings. Ranks report the times of each kind
of instruction; if one stage deviates from the others, the job is planned again from its profile
with these times.

The rules:

1. In some iterations a rank reports the shortest time of each kind of instruction and setting,
   which did not wait for anything. Divided by the profile's time it is a pace; the median of the
   last `window` counts.
2. Ranks that share a stage wait for the slowest of them. Of data-parallel replicas the fastest
   counts: a single slow one is a straggler (`stragglers`).
3. If all instructions are slower by the same factor, the plan does not change, so the spread
   counts: the largest pace divided by the smallest. A job is planned again when that is above
   `1 + enter` in `patience` iterations in a row, from the profile with times and energies
   multiplied by the paces. Then the spread is small again.
4. If it does not become small, because the measurements do not correspond to the profile, each
   further plan waits twice as many iterations. A pace beyond `most` is not a drift, and causes no
   decision.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from zeus.optimizer.pipeline_frequency.common import RankInfo
from zeus.optimizer.pipeline_frequency.plans import PlanningProblem
from zeus.optimizer.pipeline_frequency.profile import Setting
from zeus.optimizer.pipeline_frequency.server.stragglers import near

Kind = tuple[int, str]
"""A stage, and the name of an instruction."""


class DriftWatch:
    """Tracks how much longer instructions take than planned."""

    window = 5
    patience = 3
    enter = 0.03
    rest = 200
    most = 2.0

    def __init__(self) -> None:
        self._rest = 0
        self.restart(None, ())

    def restart(self, problem: PlanningProblem | None, ranks: Iterable[RankInfo]) -> None:
        """Starts over with the problem of a frontier; None: no comparison is possible."""
        kinds = problem.profile if problem is not None else []
        chunked = any(kind.chunk for kind in kinds)
        self._planned: dict[tuple[int, str, Setting], float] = {
            (kind.stage, kind.instruction, one.frequency): one.time_s
            for kind in ([] if chunked else kinds)
            for one in kind.options
        }
        self._ranks = {rank.rank: rank for rank in ranks}
        self.paces: dict[Kind, float] = {}
        """The last values; empty before the first."""
        self.plans_changed()

    def plans_changed(self) -> None:
        """Discards earlier values because other settings are in force."""
        self._seen: dict[tuple[int, str], deque[float]] = {}
        self._newest: dict[int, int] = {}
        self._decided = self._since = -1
        self._departed = 0

    def observe(
        self, rank: int, iteration: int, times: Iterable[tuple[str, Setting, float]]
    ) -> None:
        """Adds a rank's times of one iteration: instruction, setting and shortest time, s."""
        info = self._ranks.get(rank)
        if info is None:
            return
        paces: dict[str, float] = {}
        for name, setting, time_s in times:
            planned_s = self._planned.get((info.pp_rank, name, setting))
            if planned_s and near(time_s / planned_s):
                paces[name] = min(time_s / planned_s, paces.get(name, math.inf))
        for name, pace in paces.items():
            seen = self._seen.setdefault((rank, name), deque(maxlen=self.window))
            seen.append(pace)
            self._newest[rank] = iteration

    def decide(self) -> dict[Kind, float] | None:
        """Factors for the times after a drift; None: there is none."""
        iteration = min(self._newest.values(), default=-1)
        if len(self._newest) < len(self._ranks) or iteration <= self._decided:
            return None
        if any(len(seen) < self.window for seen in self._seen.values()):
            return None
        self._decided = iteration
        self._since = iteration if self._since < 0 else self._since
        self.paces = self._measure()
        least, largest = min(self.paces.values()), max(self.paces.values())
        if largest > self.most or least < 1 / self.most:
            self._departed = 0
            return None
        self._departed = self._departed + 1 if largest / least > 1 + self.enter else 0
        if self._departed < self.patience or iteration - self._since < self._rest:
            return None
        self._rest = 2 * self._rest or self.rest
        return dict(self.paces)

    def _measure(self) -> dict[Kind, float]:
        replicas: dict[Kind, dict[int, float]] = {}
        for (rank, name), seen in self._seen.items():
            info = self._ranks[rank]
            of_replica = replicas.setdefault((info.pp_rank, name), {})
            pace = median(seen)
            of_replica[info.dp_rank] = max(pace, of_replica.get(info.dp_rank, 0.0))
        return {kind: min(paces.values()) for kind, paces in replicas.items()}


def scaled(problem: PlanningProblem, paces: Mapping[Kind, float]) -> PlanningProblem:
    """A planning problem with the measured times. Power is assumed to be unchanged."""
    kinds = []
    for kind in problem.profile:
        pace = paces.get((kind.stage, kind.instruction), 1.0)
        options = [
            replace(one, time_s=pace * one.time_s, energy_j=pace * one.energy_j)
            for one in kind.options
        ]
        kinds.append(replace(kind, options=options))
    return problem.model_copy(update={"profile": kinds})


def in_words(paces: Mapping[Kind, float]) -> str:
    """`stage 2: forward 1.06, backward 1.05`, for the stages that deviate."""
    least = min(paces.values())
    stages: dict[int, list[str]] = {}
    for (stage, name), pace in sorted(paces.items()):
        if pace / least > 1 + DriftWatch.enter / 2:
            stages.setdefault(stage, []).append(f"{name} {pace:.3f}")
    return "; ".join(f"stage {stage}: {', '.join(words)}" for stage, words in stages.items())

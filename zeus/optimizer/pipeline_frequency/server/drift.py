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
from dataclasses import dataclass
from statistics import median
from typing import Any

from zeus.optimizer.pipeline_frequency.common import RankInfo
from zeus.optimizer.pipeline_frequency.plans import Setting
from zeus.optimizer.pipeline_frequency.server.stragglers import near

Kind = tuple[int, str]
"""A stage, and the name of an instruction."""


@dataclass(frozen=True)
class DriftRules:
    """Thresholds of a drift; see the module."""

    window: int = 5
    patience: int = 3
    enter: float = 0.03
    rest: int = 200
    most: float = 2.0


class DriftWatch:
    """Tracks how much longer instructions take than planned."""

    def __init__(self, rules: DriftRules | None = None) -> None:
        self._rules = rules or DriftRules()
        self._rest = 0
        self._planned: dict[tuple[int, str, Setting], float] = {}
        self._ranks: dict[int, RankInfo] = {}
        self.paces: dict[Kind, float] = {}
        """The last values; empty before the first."""
        self._seen: dict[tuple[int, str], deque[float]] = {}
        self._newest: dict[int, int] = {}
        self._decided = self._since = -1
        self._departed = 0

    def restart(self, problem: Mapping[str, Any] | None, ranks: Iterable[RankInfo]) -> None:
        """Starts over with the problem of a frontier; None: no comparison is possible."""
        rows = problem["profile"] if problem is not None else []
        chunked = any(chunk for _, _, chunk, _ in rows)
        self._planned = {
            (stage, name, setting): time_s
            for stage, name, _, options in ([] if chunked else rows)
            for setting, time_s, _ in options
        }
        self._ranks = {rank.rank: rank for rank in ranks}
        self.paces = {}
        self._forget()

    def plans_changed(self) -> None:
        """Discards earlier values because other settings are in force."""
        self._forget()

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
            seen = self._seen.setdefault((rank, name), deque(maxlen=self._rules.window))
            seen.append(pace)
            self._newest[rank] = iteration

    def decide(self) -> dict[Kind, float] | None:
        """Factors for the times after a drift; None: there is none."""
        iteration = min(self._newest.values(), default=-1)
        if len(self._newest) < len(self._ranks) or iteration <= self._decided:
            return None
        if any(len(seen) < self._rules.window for seen in self._seen.values()):
            return None
        self._decided = iteration
        self._since = iteration if self._since < 0 else self._since
        self.paces = self._measure()
        least, largest = min(self.paces.values()), max(self.paces.values())
        if largest > self._rules.most or least < 1 / self._rules.most:
            self._departed = 0
            return None
        self._departed = self._departed + 1 if largest / least > 1 + self._rules.enter else 0
        if self._departed < self._rules.patience or iteration - self._since < self._rest:
            return None
        self._rest = 2 * self._rest or self._rules.rest
        return dict(self.paces)

    def _measure(self) -> dict[Kind, float]:
        replicas: dict[Kind, dict[int, float]] = {}
        for (rank, name), seen in self._seen.items():
            info = self._ranks[rank]
            of_replica = replicas.setdefault((info.pp_rank, name), {})
            pace = median(seen)
            of_replica[info.dp_rank] = max(pace, of_replica.get(info.dp_rank, 0.0))
        return {kind: min(paces.values()) for kind, paces in replicas.items()}

    def _forget(self) -> None:
        self._seen, self._newest = {}, {}
        self._decided = self._since = -1
        self._departed = 0


def scaled(problem: Mapping[str, Any], paces: Mapping[Kind, float]) -> dict[str, Any]:
    """A planning problem with the measured times. Power is assumed to be unchanged."""
    rows = []
    for stage, name, chunk, options in problem["profile"]:
        pace = paces.get((stage, name), 1.0)
        rows.append(
            [stage, name, chunk, [[setting, pace * t, pace * e] for setting, t, e in options]]
        )
    return {**problem, "profile": rows}


def in_words(paces: Mapping[Kind, float]) -> str:
    """`stage 2: forward 1.06, backward 1.05`, for the stages that deviate."""
    least = min(paces.values())
    stages: dict[int, list[str]] = {}
    for (stage, name), pace in sorted(paces.items()):
        if pace / least > 1 + DriftRules.enter / 2:
            stages.setdefault(stage, []).append(f"{name} {pace:.3f}")
    return "; ".join(f"stage {stage}: {', '.join(found)}" for stage, found in stages.items())
